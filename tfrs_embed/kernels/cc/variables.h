// The variables that an operation uses: found, locked, and ready to be read or
// written row by row.

#ifndef TFRS_EMBED_KERNELS_CC_VARIABLES_H_
#define TFRS_EMBED_KERNELS_CC_VARIABLES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "huge_pages.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/kernels/training_op_helpers.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/refcount.h"
#include "buckets.h"

namespace tfrs_embed {

// There may be thousands, each in a few places of memory that no cache has any
// more in the next step. So the next ones are asked for early.
class Variables {
 public:
  // What a kernel remembers of its variables from call to call.
  class Known {
   private:
    friend class Variables;
    // Who holds a variable's lock may wait for the second only: who holds the
    // first may wait for variables.
    tensorflow::mutex mutex_, data_mutex_;
    std::vector<const tensorflow::ResourceBase*> here_;  // On its device.
    std::vector<tensorflow::mutex*> mutexes_;  // Theirs, if sorted_.
    bool sorted_ = false;
    std::vector<const void*> data_;  // Had large pages made for it.
  };

  explicit Variables(Known* known) : known_(known) {}
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;

  // Finds those at places among all handles of an input, or all if there are
  // no places.
  absl::Status Find(tensorflow::OpKernelContext* ctx, const char* name,
                    const std::vector<int>& places) {
    tensorflow::OpInputList inputs;
    TF_RETURN_IF_ERROR(ctx->input_list(name, &inputs));
    std::vector<const Handle*> all;
    for (const tensorflow::Tensor& input : inputs) {
      const auto handles = input.flat<Handle>();
      for (int64_t i = 0; i < handles.size(); ++i) all.push_back(&handles(i));
    }
    std::vector<const Handle*> handles;
    for (const int place : places) {
      if (place < 0 || static_cast<size_t>(place) >= all.size()) {
        return tensorflow::errors::InvalidArgument(
            name, ": place ", place, " of ", all.size(), " handles");
      }
      handles.push_back(all[place]);
    }
    if (places.empty()) handles = std::move(all);

    const size_t n = handles.size();
    tensorflow::mutex_lock lock(known_->mutex_);
    bool others = !known_->sorted_ || known_->here_.size() != n;
    known_->sorted_ = false;
    known_->here_.resize(n, nullptr);
    variables_.reserve(n);
    for (size_t i = 0; i < n; ++i) {
      if (i + 2 * kAhead < n) {
        __builtin_prefetch(&handles[i + 2 * kAhead]->resource());
      }
      if (i + kAhead < n) {
        const auto* next = handles[i + kAhead]->resource().get();
        __builtin_prefetch(next);
        __builtin_prefetch(reinterpret_cast<const char*>(next) + kLine);
      }
      tensorflow::Var* variable;
      TF_RETURN_IF_ERROR(
          Find(ctx, *handles[i], &known_->here_[i], &others, &variable));
      if (!variable->is_initialized) {
        return tensorflow::errors::FailedPrecondition(
            "A table's variable is not initialized.");
      }
      // From now on reading the whole variable copies it, so that writing
      // some rows doesn't have to.
      TF_RETURN_IF_ERROR(
          (tensorflow::EnsureSparseVariableAccess<Eigen::ThreadPoolDevice,
                                                  float>(ctx, variable)));
      variables_.push_back(variable);
    }
    if (others) {
      auto& mutexes = known_->mutexes_;
      mutexes.clear();
      for (auto* variable : variables_) mutexes.push_back(variable->mu());
      // One order for all operations.
      std::sort(mutexes.begin(), mutexes.end());
      mutexes.erase(std::unique(mutexes.begin(), mutexes.end()),
                    mutexes.end());
    }
    known_->sorted_ = true;
    mutexes_ = known_->mutexes_;
    return absl::OkStatus();
  }

  // These lock them until the end of this object, and look where rows are.
  absl::Status LockToRead() {
    shared_ = true;
    for (auto* mutex : mutexes_) mutex->lock_shared();
    return Open();
  }

  absl::Status LockToWrite() {
    for (auto* mutex : mutexes_) mutex->lock();
    return Open();
  }

  ~Variables() {
    if (!locked_) return;
    for (auto* mutex : mutexes_) {
      if (shared_) {
        mutex->unlock_shared();
      } else {
        mutex->unlock();
      }
    }
  }

  size_t size() const { return variables_.size(); }
  // By variable; only of those that are locked.
  const std::vector<TableShape>& shapes() const { return shapes_; }
  const std::vector<float*>& rows() const { return rows_; }

 private:
  using Handle = tensorflow::ResourceHandle;

  // So many variables take about as long as memory does to answer.
  static constexpr size_t kAhead = 8;
  static constexpr size_t kLine = 64;

  absl::Status Find(tensorflow::OpKernelContext* ctx, const Handle& handle,
                    const tensorflow::ResourceBase** here, bool* other,
                    tensorflow::Var** variable) {
    static const uint64_t type =
        tensorflow::TypeIndex::Make<tensorflow::Var>().hash_code();
    tensorflow::ResourceBase* resource = handle.resource().get();
    // Such a handle, which the operation's input keeps, keeps the variable.
    if (resource && resource == *here && handle.hash_code() == type) {
      *variable = static_cast<tensorflow::Var*>(resource);
      return absl::OkStatus();
    }
    tensorflow::core::RefCountPtr<tensorflow::Var> found;
    TF_RETURN_IF_ERROR(tensorflow::LookupResource(ctx, handle, &found));
    *variable = found.get();
    *here = resource;
    *other = true;
    if (!resource) kept_.push_back(std::move(found));
    return absl::OkStatus();
  }

  absl::Status Open() {
    locked_ = true;
    const size_t n = variables_.size();
    shapes_.reserve(n);
    rows_.reserve(n);
    tensorflow::mutex_lock lock(known_->data_mutex_);
    known_->data_.resize(n, nullptr);
    std::vector<Memory> others;
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) {
        __builtin_prefetch(
            tensorflow::DMAHelper::buffer(variables_[i + kAhead]->tensor()));
      }
      const tensorflow::Tensor& tensor = *variables_[i]->tensor();
      shapes_.emplace_back();
      TF_RETURN_IF_ERROR(ShapeOf(tensor, &shapes_.back()));
      rows_.push_back(static_cast<float*>(tensor.data()));
      if (known_->data_[i] != rows_.back()) {
        known_->data_[i] = rows_.back();
        const auto begin = reinterpret_cast<uintptr_t>(rows_.back());
        others.push_back({begin, begin + tensor.TotalBytes()});
      }
    }
    if (!others.empty()) UseHugePages(std::move(others));
    return absl::OkStatus();
  }

  Known* known_;
  std::vector<tensorflow::Var*> variables_;
  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> kept_;
  std::vector<tensorflow::mutex*> mutexes_;
  std::vector<TableShape> shapes_;
  std::vector<float*> rows_;
  bool locked_ = false, shared_ = false;
};

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_VARIABLES_H_
