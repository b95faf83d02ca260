// What the files of operations have in common: TensorFlow's names, and how a
// kernel is registered.

#ifndef TFRS_EMBED_KERNELS_CC_OP_H_
#define TFRS_EMBED_KERNELS_CC_OP_H_

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

namespace tfrs_embed {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Registers an operation's kernel, which is for CPUs.
#define TFRS_KERNEL(op, kernel) \
  REGISTER_KERNEL_BUILDER(Name(op).Device(tensorflow::DEVICE_CPU), kernel)

// Reads an attribute that is a list with an entry for each of n tables, or
// features, as `of` calls them.
template <typename Value>
absl::Status GetEach(OpKernelConstruction* ctx, const char* name, size_t n,
                     const char* of, std::vector<Value>* values) {
  TF_RETURN_IF_ERROR(ctx->GetAttr(name, values));
  if (values->size() == n) return absl::OkStatus();
  return InvalidArgument(name, " must have an entry for each ", of, ".");
}

// Finds the value of an input that has one.
template <typename Value>
absl::Status ReadScalar(const Tensor& input, const char* name,
                        const Value** value) {
  if (input.NumElements() != 1) {
    return InvalidArgument(name, " must be a scalar, got shape ",
                           input.shape().DebugString());
  }
  *value = input.flat<Value>().data();
  return absl::OkStatus();
}

inline absl::Status CheckVector(const Tensor& input, const char* name) {
  if (input.dims() == 1) return absl::OkStatus();
  return InvalidArgument(name, " must be a vector, got shape ",
                         input.shape().DebugString());
}

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_OP_H_
