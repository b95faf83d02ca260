#include "spill_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace tfrs_embed {

SpillFile::SpillFile(const Settings& settings)
    : settings_(settings), process_(getpid()), keys_(0, 16, 1, false) {
  for (const int64_t bytes : settings_.parts) {
    offsets_.push_back(record_);
    record_ += bytes;
  }
  buffer_.resize(record_);
  std::string path = settings_.folder + "/spill-XXXXXX";
  file_ = mkstemp(&path[0]);
  if (file_ < 0) Fail("no file can be made", errno);
  fcntl(file_, F_SETFD, FD_CLOEXEC);
  unlink(path.c_str());
#if defined(POSIX_FADV_RANDOM)
  posix_fadvise(file_, 0, 0, POSIX_FADV_RANDOM);  // Nothing beside a record.
#endif
}

SpillFile::~SpillFile() { close(file_); }

void SpillFile::Require(int64_t more) {
  const int64_t needed = next_ - 1 + std::max<int64_t>(0, more - free_.size());
  if (needed <= allocated_) return;
  CheckProcess();
  const int64_t most = settings_.max_bytes / record_;
  if (needed > most) {
    throw SpillError(
        settings_.owner + ": its spill would have rows of " +
        std::to_string(needed) + " keys in '" + settings_.folder +
        "', and has room for " + std::to_string(most) +
        ": max_bytes is " + std::to_string(settings_.max_bytes) + ".");
  }
  // At least a sixteenth more, so that it is seldom done.
  constexpr int64_t kLeast = 1 << 20;
  int64_t wanted = std::max(needed, allocated_ + allocated_ / 16 +
                                        kLeast / record_);
  wanted = std::min(wanted, most);
  const auto allocate = [&](int64_t records) {
#if defined(__linux__)
    return posix_fallocate(file_, 0, records * record_);
#else
    return ftruncate(file_, records * record_) == 0 ? 0 : errno;
#endif
  };
  int error = allocate(wanted);
  if (error == ENOSPC && wanted > needed) error = allocate(wanted = needed);
  if (error != 0) {
    Fail("no room for rows of " + std::to_string(needed) + " keys, " +
             std::to_string(needed * record_) + " bytes",
         error);
  }
  allocated_ = wanted;
}

void SpillFile::Put(const KeyRecord& key, const Memory& memory, int64_t row) {
  if (memory.values.size() != offsets_.size() || row >= memory.rows) {
    throw SpillError(settings_.owner + ": its variables have no row " +
                     std::to_string(row) + " to spill.");
  }
  for (size_t part = 0; part < offsets_.size(); ++part) {
    const int64_t bytes = settings_.parts[part];
    std::memcpy(buffer_.data() + offsets_[part],
                memory.values[part] + row * bytes, bytes);
  }
  int64_t place = Find(key.key);
  const bool known = place != 0;
  if (!known) place = NewPlace();
  try {
    Write(place, kAll, buffer_.data());
  } catch (const SpillError&) {
    if (!known) free_.push_back(place);
    throw;
  }
  ++written_;
  if (!known) {
    keys_.Insert(place, {key.key, key.frequency, key.last_used,
                         KeyRecord::kLive});
    return;
  }
  // It has come back and goes again, before its row could be found.
  KeyRecord& here = record(place);
  returning_ -= here.queued();
  here.set_queued(false);
  here.frequency = key.frequency;
  here.last_used = key.last_used;
}

void SpillFile::Return(int64_t place) {
  KeyRecord& key = record(place);
  returning_ += !key.queued();
  key.set_queued(true);
  ++returned_;
}

void SpillFile::Forget(int64_t place) {
  returning_ -= record(place).queued();
  keys_.Erase(place);
  free_.push_back(place);
}

void SpillFile::Replace(const std::vector<KeyRecord>& keys) {
  std::vector<int64_t> places;
  for (const KeyRecord& key : keys) places.push_back(Find(key.key));
  int64_t added = std::count(places.begin(), places.end(), 0);
  Require(std::max<int64_t>(0, added - keys_.size()));
  std::vector<bool> kept(next_, false);
  for (const int64_t place : places) kept[place] = true;
  free_.clear();
  for (int64_t place = next_ - 1; place > 0; --place) {
    if (!kept[place]) free_.push_back(place);
  }
  keys_ = KeyStore(keys.size(), next_, 1, false);
  returning_ = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (places[i] == 0) places[i] = NewPlace();
    KeyRecord key = keys[i];
    key.state = KeyRecord::kLive;
    keys_.Insert(places[i], key);
  }
}

void SpillFile::ReadAhead(const int64_t* places, int64_t n) const {
#if defined(POSIX_FADV_WILLNEED)
  if (process_ != getpid()) return;
  for (int64_t i = 0; i < n; ++i) {
    if (places[i] == 0) continue;
    posix_fadvise(file_, (places[i] - 1) * record_, record_,
                  POSIX_FADV_WILLNEED);
  }
#endif
}

void SpillFile::Read(int64_t place, size_t part, void* to) const {
  CheckProcess();
  size_t bytes;
  int64_t offset = Offset(place, part, &bytes);
  for (char* at = static_cast<char*>(to); bytes > 0;) {
    const ssize_t done = pread(file_, at, bytes, offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) Fail("rows can't be read", done < 0 ? errno : EIO);
    at += done;
    offset += done;
    bytes -= done;
  }
}

void SpillFile::Write(int64_t place, size_t part, const void* from) {
  CheckProcess();
  size_t bytes;
  int64_t offset = Offset(place, part, &bytes);
  for (const char* at = static_cast<const char*>(from); bytes > 0;) {
    const ssize_t done = pwrite(file_, at, bytes, offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) Fail("rows can't be written", errno);
    at += done;
    offset += done;
    bytes -= done;
  }
}

// A fork has the same file as its parent.
void SpillFile::CheckProcess() const {
  if (process_ == getpid()) return;
  throw SpillError(settings_.owner +
                   ": its spill is of the process that made the table, not of "
                   "a fork. Make the layer after the fork.");
}

int64_t SpillFile::Offset(int64_t place, size_t part, size_t* bytes) const {
  const bool all = part == kAll;
  *bytes = all ? record_ : settings_.parts[part];
  return (place - 1) * record_ + (all ? 0 : offsets_[part]);
}

int64_t SpillFile::NewPlace() {
  if (free_.empty()) return next_++;
  const int64_t place = free_.back();
  free_.pop_back();
  return place;
}

void SpillFile::Fail(const std::string& what, int error) const {
  throw SpillError(settings_.owner + ": its spill in '" + settings_.folder +
                   "': " + what + ": " + std::strerror(error) + ".");
}

}  // namespace tfrs_embed
