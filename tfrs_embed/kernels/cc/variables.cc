#include "variables.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "huge_pages.h"
#include "mapped_rows.h"
#include "table_shape.h"
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

namespace tfrs_embed {

using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;

namespace {

// An operation may have thousands of variables. Each is in several places of
// memory, which a step's other work has driven out of the caches, so variables
// are prefetched: this many take about as long as memory needs to answer.
constexpr size_t kAhead = 8;
constexpr size_t kLine = 64;

// Lists the handles at some places of an input; all if there are no places.
absl::Status ListHandles(OpKernelContext* ctx, const char* name,
                         const std::vector<int>& places,
                         std::vector<const ResourceHandle*>* handles) {
  tensorflow::OpInputList inputs;
  TF_RETURN_IF_ERROR(ctx->input_list(name, &inputs));
  std::vector<const ResourceHandle*> all;
  for (const tensorflow::Tensor& input : inputs) {
    const auto flat = input.flat<ResourceHandle>();
    for (int64_t i = 0; i < flat.size(); ++i) all.push_back(&flat(i));
  }
  for (const int place : places) {
    if (place < 0 || static_cast<size_t>(place) >= all.size()) {
      return tensorflow::errors::InvalidArgument(
          name, ": place ", place, " of ", all.size(), " handles");
    }
    handles->push_back(all[place]);
  }
  if (places.empty()) *handles = std::move(all);
  return absl::OkStatus();
}

void PrefetchHandle(const std::vector<const ResourceHandle*>& handles,
                    size_t i) {
  if (i + 2 * kAhead < handles.size()) {
    __builtin_prefetch(&handles[i + 2 * kAhead]->resource());
  }
  if (i + kAhead < handles.size()) {
    const auto* next = handles[i + kAhead]->resource().get();
    __builtin_prefetch(next);
    __builtin_prefetch(reinterpret_cast<const char*>(next) + kLine);
  }
}

// Makes reads of a variable copy it.
absl::Status MakeSparse(OpKernelContext* ctx, tensorflow::Var* variable) {
  using tensorflow::EnsureSparseVariableAccess;
  using Device = Eigen::ThreadPoolDevice;
  switch (variable->tensor()->dtype()) {
    case tensorflow::DT_BFLOAT16:
      return EnsureSparseVariableAccess<Device, Eigen::bfloat16>(ctx, variable);
    case tensorflow::DT_HALF:
      return EnsureSparseVariableAccess<Device, Eigen::half>(ctx, variable);
    case tensorflow::DT_UINT8:
      return EnsureSparseVariableAccess<Device, uint8_t>(ctx, variable);
    case tensorflow::DT_INT8:
      return EnsureSparseVariableAccess<Device, int8_t>(ctx, variable);
    case tensorflow::DT_FLOAT:
      return EnsureSparseVariableAccess<Device, float>(ctx, variable);
    default:
      return absl::OkStatus();  // No table, as Open finds.
  }
}

}  // namespace

absl::Status Variables::Find(OpKernelContext* ctx, const char* name,
                             const std::vector<int>& places) {
  std::vector<const Handle*> handles;
  TF_RETURN_IF_ERROR(ListHandles(ctx, name, places, &handles));
  const size_t n = handles.size();
  tensorflow::mutex_lock lock(cache_->mutex_);
  bool changed = !cache_->sorted_ || cache_->resources_.size() != n;
  cache_->sorted_ = false;
  cache_->resources_.resize(n, nullptr);
  variables_.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    PrefetchHandle(handles, i);
    tensorflow::Var* variable;
    TF_RETURN_IF_ERROR(Resolve(ctx, *handles[i], &cache_->resources_[i],
                               &changed, &variable));
    if (!variable->is_initialized) {
      return tensorflow::errors::FailedPrecondition(
          "A table's variable is not initialized.");
    }
    // From now on a read of the whole variable copies it, so that writing some
    // of its rows needs no copy.
    TF_RETURN_IF_ERROR(MakeSparse(ctx, variable));
    variables_.push_back(variable);
  }
  if (changed) SortMutexes();
  cache_->sorted_ = true;
  mutexes_ = cache_->mutexes_;
  return absl::OkStatus();
}

// Finds a handle's variable: the cached one if the handle still has that.
absl::Status Variables::Resolve(OpKernelContext* ctx, const Handle& handle,
                                const tensorflow::ResourceBase** cached,
                                bool* changed, tensorflow::Var** variable) {
  static const uint64_t type =
      tensorflow::TypeIndex::Make<tensorflow::Var>().hash_code();
  tensorflow::ResourceBase* resource = handle.resource().get();
  // The handle owns its variable, and the operation's input owns the handle.
  if (resource && resource == *cached && handle.hash_code() == type) {
    *variable = static_cast<tensorflow::Var*>(resource);
    return absl::OkStatus();
  }
  tensorflow::core::RefCountPtr<tensorflow::Var> found;
  TF_RETURN_IF_ERROR(tensorflow::LookupResource(ctx, handle, &found));
  *variable = found.get();
  *cached = resource;
  *changed = true;
  if (!resource) kept_.push_back(std::move(found));
  return absl::OkStatus();
}

// All operations lock variables in the order of their mutexes' addresses, each
// once: so they never wait for each other in a circle.
void Variables::SortMutexes() {
  auto& mutexes = cache_->mutexes_;
  mutexes.clear();
  for (auto* variable : variables_) mutexes.push_back(variable->mu());
  std::sort(mutexes.begin(), mutexes.end());
  mutexes.erase(std::unique(mutexes.begin(), mutexes.end()), mutexes.end());
}

absl::Status Variables::LockToRead() {
  shared_ = true;
  for (auto* mutex : mutexes_) mutex->lock_shared();
  return Open();
}

absl::Status Variables::LockToWrite() {
  for (auto* mutex : mutexes_) mutex->lock();
  return Open();
}

Variables::~Variables() {
  if (!locked_) return;
  for (auto* mutex : mutexes_) {
    if (shared_) {
      mutex->unlock_shared();
    } else {
      mutex->unlock();
    }
  }
}

// Reads the locked variables' shapes, and asks for huge pages for new memory.
absl::Status Variables::Open() {
  locked_ = true;
  const size_t n = variables_.size();
  shapes_.reserve(n);
  values_.reserve(n);
  tensorflow::mutex_lock lock(cache_->data_mutex_);
  cache_->data_.resize(n, nullptr);
  std::vector<Memory> added;
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      __builtin_prefetch(
          tensorflow::DMAHelper::buffer(variables_[i + kAhead]->tensor()));
    }
    const tensorflow::Tensor& tensor = *variables_[i]->tensor();
    shapes_.emplace_back();
    // Only what is written may be a slot.
    TF_RETURN_IF_ERROR(shared_ ? ReadStoredShape(tensor, &shapes_.back())
                               : ReadSlotShape(tensor, &shapes_.back()));
    values_.push_back(tensor.data());
    if (cache_->data_[i] != values_.back()) {
      cache_->data_[i] = values_.back();
      if (IsMapped(tensor)) continue;
      const auto begin = reinterpret_cast<uintptr_t>(values_.back());
      added.push_back({begin, begin + tensor.TotalBytes()});
    }
  }
  if (!added.empty()) UseHugePages(std::move(added), /*written=*/true);
  return absl::OkStatus();
}

}  // namespace tfrs_embed
