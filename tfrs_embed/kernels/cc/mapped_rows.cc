// A table's rows in a file, as a tensor whose memory is the file: nothing is
// read before it is used, and processes share what was read.
//
// The file's size is checked once. One that is cut off later ends the process
// with SIGBUS where its rows are used: so files must be replaced, not changed.
//
// A variable that is assigned the tensor keeps this memory, also where an
// update then writes some of its rows.

#include "mapped_rows.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "input_checks.h"
#include "op.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/refcount.h"
#include "tensorflow/core/platform/tstring.h"
#include "tensorflow/core/util/overflow.h"

namespace tfrs_embed {

namespace {

class Mapping : public tensorflow::TensorBuffer {
 public:
  Mapping(void* data, size_t size) : TensorBuffer(data), size_(size) {}
  ~Mapping() override { munmap(data(), size_); }

  size_t size() const override { return size_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(
      tensorflow::AllocationDescription* description) const override {
    description->set_requested_bytes(size_);
    description->set_allocator_name("TfrsEmbedMappedRows");
  }

 private:
  const size_t size_;
};

// Whether an open file isn't a folder, a device or a pipe.
bool IsRegular(int file) {
  struct stat about;
#if defined(__linux__)
  // The library's fstat would need a newer one than the wheels do.
  const int64_t failed = syscall(SYS_fstat, file, &about);
#else
  const int64_t failed = fstat(file, &about);
#endif
  return failed == 0 && S_ISREG(about.st_mode);
}

absl::Status CheckSize(const std::string& path, int64_t found, int64_t wanted,
                       const TensorShape& shape, tensorflow::DataType dtype) {
  if (found == wanted) return absl::OkStatus();
  return InvalidArgument("The table's file ", path, " has ", found,
                         " bytes, not the ", wanted, " of ",
                         tensorflow::DataTypeString(dtype), " ",
                         shape.DebugString(), ".");
}

class MappedRowsOp : public OpKernel {
 public:
  explicit MappedRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shape", &shape_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shared", &shared_));
    size_ = tensorflow::MultiplyWithoutOverflow(
        shape_.num_elements(), tensorflow::DataTypeSize(dtype_));
    OP_REQUIRES(ctx, size_ >= 0 && shape_.dims() > 0,
                InvalidArgument("No file has rows of the shape ",
                                shape_.DebugString(), "."));
  }

  void Compute(OpKernelContext* ctx) override {
    tensorflow::tstring given;
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "path", &given));
    const std::string path = given;
    OP_REQUIRES(ctx, path.find('\0') == std::string::npos,
                InvalidArgument("path must be without the character 0."));
    // Files of other file systems than the machine's have no memory to map.
    if (!shared_ && path.find("://") != std::string::npos) {
      OP_REQUIRES_OK(ctx, Read(ctx, path));
      return;
    }
    // Links to what is only read are followed: caches of downloaded models have
    // links as files. A file that is written to was made just before: a link in
    // its place is somebody else's. A pipe isn't waited for.
    const int access = shared_ ? O_RDWR | O_NOFOLLOW : O_RDONLY;
    const int file =
        open(path.c_str(), access | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    absl::Status status = file < 0 ? Failed(path) : Map(ctx, path, file);
    if (file >= 0) close(file);  // The mapping stays.
    OP_REQUIRES_OK(ctx, status);
  }

 private:
  static absl::Status Failed(const std::string& path) {
    return tensorflow::errors::IOError("The table's file " + path, errno);
  }

  absl::Status Map(OpKernelContext* ctx, const std::string& path, int file) {
    if (!IsRegular(file)) {
      return InvalidArgument("The table's file ", path, " is no regular file.");
    }
    const int64_t found = lseek(file, 0, SEEK_END);
    if (found < 0) return Failed(path);
    TF_RETURN_IF_ERROR(CheckSize(path, found, size_, shape_, dtype_));
    if (size_ == 0) {
      ctx->set_output(0, Tensor(dtype_, shape_));
      return absl::OkStatus();
    }
    // Private pages are copied when they are first written. No memory is
    // reserved for that: a table may be larger than the machine's memory.
    int flags = shared_ ? MAP_SHARED : MAP_PRIVATE;
#if defined(MAP_NORESERVE)
    flags |= MAP_NORESERVE;
#endif
    void* data = mmap(nullptr, size_, PROT_READ | PROT_WRITE, flags, file, 0);
    if (data == MAP_FAILED) return Failed(path);
    madvise(data, size_, MADV_RANDOM);  // Pages beside a row's are not read.
#if defined(MADV_DONTFORK)
    // A fork would change its parent's table.
    if (shared_) madvise(data, size_, MADV_DONTFORK);
#endif
    tensorflow::core::RefCountPtr<tensorflow::TensorBuffer> buffer(
        new Mapping(data, size_));
    ctx->set_output(0, Tensor(dtype_, shape_, std::move(buffer)));
    return absl::OkStatus();
  }

  absl::Status Read(OpKernelContext* ctx, const std::string& path) {
    tensorflow::uint64 found;
    TF_RETURN_IF_ERROR(ctx->env()->GetFileSize(path, &found));
    TF_RETURN_IF_ERROR(CheckSize(path, found, size_, shape_, dtype_));
    Tensor* rows;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape_, &rows));
    if (size_ == 0) return absl::OkStatus();
    std::unique_ptr<tensorflow::RandomAccessFile> file;
    TF_RETURN_IF_ERROR(ctx->env()->NewRandomAccessFile(path, &file));
    absl::string_view content;
    char* data = static_cast<char*>(rows->data());
    TF_RETURN_IF_ERROR(file->Read(0, size_, &content, data));
    if (content.data() != data) std::memcpy(data, content.data(), size_);
    return absl::OkStatus();
  }

  tensorflow::DataType dtype_;
  TensorShape shape_;
  bool shared_;
  int64_t size_;
};

}  // namespace

bool IsMapped(const Tensor& tensor) {
  const auto* buffer = tensorflow::DMAHelper::buffer(&tensor);
  return dynamic_cast<const Mapping*>(buffer) != nullptr;
}

REGISTER_OP("TfrsEmbedMappedRows")
    .Input("path: string")
    .Output("rows: T")
    .Attr("T: numbertype")
    .Attr("shape: shape")
    .Attr("shared: bool = false")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ExplicitShape);

TFRS_KERNEL("TfrsEmbedMappedRows", MappedRowsOp);

}  // namespace tfrs_embed
