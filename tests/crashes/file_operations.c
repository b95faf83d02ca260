// Takes the place of the C library's file operations (LD_PRELOAD), to see what
// a process that is killed at any moment would leave.
//
// Once `watch` was called, each operation that changes something below a folder
// has that folder copied before and after it, and in the middle of each write.
// A lock lets one operation happen at a time, of all processes that share the
// folder of copies, so that each copy is what was there at one moment. Copies
// are numbered in that order.
//
// A fault is "<what> <operation> <part of the path>", as "kill rename .index":
// the first such operation kills its process, or fails, if <what> is "fail", as
// on a full disk.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static volatile int watching;
static char folder[PATH_MAX], copies[PATH_MAX], copy[PATH_MAX + 16];
static char fault[16], fault_operation[16], fault_path[256];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int lock = -1;
// Its own operations are nobody else's.
static __thread int inside;

void watch(const char* a_folder, const char* a_copies, const char* a_fault) {
  inside = 1;
  watching = 0;
  if (lock >= 0) close(lock);
  fault[0] = 0;
  if (a_folder[0]) {
    if (!realpath(a_folder, folder) || !realpath(a_copies, copies)) abort();
    sscanf(a_fault, "%15s %15s %255s", fault, fault_operation, fault_path);
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/lock", copies);
    lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (lock < 0) abort();
    watching = 1;
  }
  inside = 0;
}

static int copy_one(const char* path, const struct stat* status, int type,
                    struct FTW* where) {
  (void)status, (void)where;
  char to[2 * PATH_MAX + 16], buffer[1 << 16];
  snprintf(to, sizeof to, "%s%s", copy, path + strlen(folder));
  if (type == FTW_D) return mkdir(to, 0755);
  int in = open(path, O_RDONLY), out = open(to, O_WRONLY | O_CREAT, 0644);
  if (in < 0 || out < 0) abort();
  for (ssize_t size; (size = read(in, buffer, sizeof buffer)) > 0;)
    if (write(out, buffer, size) != size) abort();
  close(in);
  close(out);
  return 0;
}

// Copies the folder; the lock's file has the number of copies.
static void copy_folder(const char* operation, const char* path) {
  long number = 0;
  if (pread(lock, &number, sizeof number, 0) < 0) abort();
  ++number;
  if (pwrite(lock, &number, sizeof number, 0) != sizeof number) abort();
  snprintf(copy, sizeof copy, "%s/%06ld", copies, number);
  if (nftw(folder, copy_one, 16, FTW_PHYS)) abort();
  char log[PATH_MAX + 16], line[PATH_MAX + 64];
  snprintf(log, sizeof log, "%s/log", copies);
  int file = open(log, O_WRONLY | O_CREAT | O_APPEND, 0644);
  int size = snprintf(line, sizeof line, "%06ld %d %s %s\n", number,
                      (int)getpid(), operation, path + strlen(folder));
  if (write(file, line, size) != size) abort();
  close(file);
}

// Says whether an operation is to be watched, and what comes before it then;
// -1: it has to fail.
static int begin(const char* operation, const char* path) {
  if (!watching || inside || !path) return 0;
  size_t size = strlen(folder);
  if (strncmp(path, folder, size) || (path[size] && path[size] != '/'))
    return 0;
  pthread_mutex_lock(&mutex);
  inside = 1;
  while (flock(lock, LOCK_EX) && errno == EINTR) {
  }
  copy_folder(operation, path);
  if (!strcmp(operation, fault_operation) &&
      strstr(path + strlen(folder), fault_path)) {
    if (!strcmp(fault, "kill")) kill(getpid(), SIGKILL);
    if (!strcmp(fault, "fail")) {
      flock(lock, LOCK_UN);
      inside = 0;
      pthread_mutex_unlock(&mutex);
      errno = ENOSPC;
      return -1;
    }
  }
  return 1;
}

static void end(const char* operation, const char* path) {
  int error = errno;
  copy_folder(operation, path);
  flock(lock, LOCK_UN);
  inside = 0;
  pthread_mutex_unlock(&mutex);
  errno = error;
}

static const char* path_of(int descriptor, char* path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t size = readlink(link, path, PATH_MAX - 1);
  if (size < 0) return NULL;
  path[size] = 0;
  return path;
}

static const char* path_at(int descriptor, const char* name, char* path) {
  if (name[0] == '/') return name;
  if (descriptor == AT_FDCWD) {
    if (!getcwd(path, PATH_MAX)) return NULL;
  } else if (!path_of(descriptor, path)) {
    return NULL;
  }
  size_t size = strlen(path);
  snprintf(path + size, PATH_MAX - size, "/%s", name);
  return path;
}

// An operation on a path: its result, or `failed`.
#define WATCHED(operation, path, failed, type, call) \
  do {                                               \
    char buffer_[PATH_MAX];                          \
    const char* path_ = NULL;                        \
    int error_ = errno;                              \
    if (watching && !inside) path_ = (path);         \
    errno = error_;                                  \
    int watched_ = begin(operation, path_);          \
    if (watched_ < 0) return failed;                 \
    type result_ = (call);                           \
    if (watched_) end(operation, path_);             \
    return result_;                                  \
  } while (0)
#define AT(name) path_at(AT_FDCWD, name, buffer_)
#define OF(descriptor) path_of(descriptor, buffer_)

FILE* fopen(const char* path, const char* mode) {
  if (mode[0] == 'r' && !strchr(mode, '+')) return REAL(fopen)(path, mode);
  WATCHED("fopen", AT(path), NULL, FILE*, REAL(fopen)(path, mode));
}

FILE* fopen64(const char* path, const char* mode) { return fopen(path, mode); }

#define MODE(flags)                              \
  mode_t mode = 0;                               \
  if ((flags) & (O_CREAT | __O_TMPFILE)) {       \
    va_list arguments;                           \
    va_start(arguments, flags);                  \
    mode = va_arg(arguments, mode_t);            \
    va_end(arguments);                           \
  }
#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))

int openat(int at, const char* path, int flags, ...) {
  MODE(flags)
  if (!WRITES(flags)) return REAL(openat)(at, path, flags, mode);
  WATCHED("open", path_at(at, path, buffer_), -1, int,
          REAL(openat)(at, path, flags, mode));
}

int openat64(int at, const char* path, int flags, ...) {
  MODE(flags)
  return openat(at, path, flags, mode);
}

int open(const char* path, int flags, ...) {
  MODE(flags)
  return openat(AT_FDCWD, path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  MODE(flags)
  return openat(AT_FDCWD, path, flags, mode);
}

// Half of it, a copy, and the rest.
static size_t fwrite_halves(const char* data, size_t size, size_t count,
                            FILE* file, const char* path) {
  size_t total = size * count, half = total / 2;
  size_t done = REAL(fwrite)(data, 1, half, file);
  fflush(file);
  copy_folder("fwrite", path);
  done += REAL(fwrite)(data + half, 1, total - half, file);
  fflush(file);
  return size ? done / size : 0;
}

size_t fwrite(const void* data, size_t size, size_t count, FILE* file) {
  if (!watching || inside) return REAL(fwrite)(data, size, count, file);
  char buffer[PATH_MAX];
  const char* path = path_of(fileno(file), buffer);
  int watched = begin("fwrite", path);
  if (watched < 0) return 0;
  if (!watched) return REAL(fwrite)(data, size, count, file);
  size_t done = fwrite_halves(data, size, count, file, path);
  end("fwrite", path);
  return done;
}

ssize_t write(int file, const void* data, size_t size) {
  // A part of it may be written at a time.
  size_t part = watching && !inside && size > 1 ? size / 2 : size;
  char buffer[PATH_MAX];
  const char* path = part < size ? path_of(file, buffer) : NULL;
  if (!path || strncmp(path, folder, strlen(folder))) part = size;
  WATCHED("write", OF(file), -1, ssize_t, REAL(write)(file, data, part));
}

ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
  WATCHED("write", OF(file), -1, ssize_t,
          REAL(pwrite)(file, data, size, offset));
}

ssize_t pwrite64(int file, const void* data, size_t size, off_t offset) {
  return pwrite(file, data, size, offset);
}

int fclose(FILE* file) {
  WATCHED("close", OF(fileno(file)), EOF, int, REAL(fclose)(file));
}

int close(int file) {
  WATCHED("close", OF(file), -1, int, REAL(close)(file));
}

int renameat2(int from, const char* old, int to, const char* new,
              unsigned flags) {
  WATCHED("rename", path_at(to, new, buffer_), -1, int,
          REAL(renameat2)(from, old, to, new, flags));
}

int renameat(int from, const char* old, int to, const char* new) {
  return renameat2(from, old, to, new, 0);
}

int rename(const char* old, const char* new) {
  return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0);
}

int unlinkat(int at, const char* path, int flags) {
  WATCHED("unlink", path_at(at, path, buffer_), -1, int,
          REAL(unlinkat)(at, path, flags));
}

int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }

int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int at, const char* path, mode_t mode) {
  WATCHED("mkdir", path_at(at, path, buffer_), -1, int,
          REAL(mkdirat)(at, path, mode));
}

int mkdir(const char* path, mode_t mode) {
  return mkdirat(AT_FDCWD, path, mode);
}

int ftruncate(int file, off_t size) {
  WATCHED("truncate", OF(file), -1, int, REAL(ftruncate)(file, size));
}

int ftruncate64(int file, off_t size) { return ftruncate(file, size); }

int truncate(const char* path, off_t size) {
  WATCHED("truncate", AT(path), -1, int, REAL(truncate)(path, size));
}
