// The checks of inputs and attributes that several operations make.

#ifndef TFRS_EMBED_KERNELS_CC_INPUT_CHECKS_H_
#define TFRS_EMBED_KERNELS_CC_INPUT_CHECKS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "op.h"

namespace tfrs_embed {

// Reads an attribute that is a list with an entry for each of n tables, or
// features, as `of` calls them.
template <typename Value>
absl::Status GetEach(OpKernelConstruction* ctx, const char* name, size_t n,
                     const char* of, std::vector<Value>* values) {
  TF_RETURN_IF_ERROR(ctx->GetAttr(name, values));
  if (values->size() == n) return absl::OkStatus();
  return InvalidArgument(name, " must have an entry for each ", of, ".");
}

// Finds the value of a tensor that has one.
template <typename Value>
absl::Status FindScalar(const Tensor& tensor, const char* name,
                        const Value** value) {
  if (tensor.NumElements() != 1) {
    return InvalidArgument(name, " must be a scalar, got shape ",
                           tensor.shape().DebugString());
  }
  *value = tensor.flat<Value>().data();
  return absl::OkStatus();
}

// Reads an input that is a scalar.
template <typename Value>
absl::Status ReadScalar(OpKernelContext* ctx, const char* name, Value* value) {
  const Tensor* tensor;
  const Value* found;
  TF_RETURN_IF_ERROR(ctx->input(name, &tensor));
  TF_RETURN_IF_ERROR(FindScalar(*tensor, name, &found));
  *value = *found;
  return absl::OkStatus();
}

// Finds an input that is a vector, and its values.
template <typename Value>
absl::Status ReadVector(OpKernelContext* ctx, const char* name, int64_t* n,
                        const Value** values) {
  const Tensor* tensor;
  TF_RETURN_IF_ERROR(ctx->input(name, &tensor));
  if (tensor->dims() != 1) {
    return InvalidArgument(name, " must be a vector, got shape ",
                           tensor->shape().DebugString());
  }
  *n = tensor->NumElements();
  *values = tensor->flat<Value>().data();
  return absl::OkStatus();
}

// Checks that there is one of `what` for each of the n of `of`.
inline absl::Status CheckNumber(int64_t given, const char* what, int64_t n,
                                const char* of) {
  if (given == n) return absl::OkStatus();
  return InvalidArgument(given, " ", what, " for ", n, " ", of);
}

// Reads each key's table, a number below `tables`.
inline absl::Status ReadTableOf(const Tensor& tensor, int64_t keys,
                                int64_t tables, const int32_t** table_of) {
  const int64_t given = tensor.NumElements();
  if (given != keys) {
    return InvalidArgument(keys, " keys, but tables of ", given);
  }
  *table_of = tensor.flat<int32_t>().data();
  for (int64_t i = 0; i < keys; ++i) {
    const int32_t table = (*table_of)[i];
    if (table >= 0 && table < tables) continue;
    return InvalidArgument("Table ", table, " of ", tables);
  }
  return absl::OkStatus();
}

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_INPUT_CHECKS_H_
