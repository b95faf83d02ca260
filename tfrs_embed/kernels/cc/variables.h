// The variables that an operation reads or writes row by row.

#ifndef TFRS_EMBED_KERNELS_CC_VARIABLES_H_
#define TFRS_EMBED_KERNELS_CC_VARIABLES_H_

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "table_shape.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/refcount.h"

namespace tfrs_embed {

// Finds variables and locks them. To be used in this order: Find, one of the
// locks, then shapes and values, until the object's end.
class Variables {
 public:
  // What a kernel keeps from one call to the next.
  class Cache {
   private:
    friend class Variables;
    // Two, because of their order with the variables' locks: the first is held
    // while variables are waited for, the second while they are locked.
    tensorflow::mutex mutex_, data_mutex_;
    // Each handle's variable, if the handle itself has it.
    std::vector<const tensorflow::ResourceBase*> resources_;
    std::vector<tensorflow::mutex*> mutexes_;  // The variables', if sorted_.
    bool sorted_ = false;
    std::vector<const void*> data_;  // Memory that already has huge pages.
  };

  explicit Variables(Cache* cache) : cache_(cache) {}
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;
  ~Variables();

  // Finds the variables at some places among all handles of an input; no places
  // mean all handles.
  absl::Status Find(tensorflow::OpKernelContext* ctx, const char* name,
                    const std::vector<int>& places);

  // Lock the variables until the object's end, and read their shapes.
  absl::Status LockToRead();
  absl::Status LockToWrite();

  size_t size() const { return variables_.size(); }
  // By variable, once they are locked; to write, a vector's dim is kByRow.
  const std::vector<TableShape>& shapes() const { return shapes_; }
  const std::vector<void*>& values() const { return values_; }

 private:
  using Handle = tensorflow::ResourceHandle;

  absl::Status Resolve(tensorflow::OpKernelContext* ctx, const Handle& handle,
                       const tensorflow::ResourceBase** cached, bool* changed,
                       tensorflow::Var** variable);
  void SortMutexes();
  absl::Status Open();

  Cache* cache_;
  std::vector<tensorflow::Var*> variables_;
  // References to variables that no handle keeps.
  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> kept_;
  std::vector<tensorflow::mutex*> mutexes_;
  std::vector<TableShape> shapes_;
  std::vector<void*> values_;
  bool locked_ = false, shared_ = false;
};

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_VARIABLES_H_
