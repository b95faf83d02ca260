// A feature's lookup, for the operations that do lookups.

#ifndef TFRS_EMBED_KERNELS_CC_LOOKUPS_H_
#define TFRS_EMBED_KERNELS_CC_LOOKUPS_H_

#include <cstdint>

#include "feature_inputs.h"
#include "rows.h"
#include "table_shape.h"
#include "tensorflow/core/framework/types.h"

namespace tfrs_embed {

// A feature's lookup in a table, which writes vectors of a type to rows that
// are `stride` columns apart.
inline TfrsLookup MakeLookup(const Feature& feature, const void* table,
                             const TableShape& shape,
                             tensorflow::DataType dtype, void* out,
                             int64_t stride) {
  int32_t output = kFloat32;
  ReadType(dtype, &output);
  return {feature, table, shape.type, shape.dim, out, stride, output};
}

// The cost of a feature's lookup, in the unit of ParallelFor.
inline int64_t LookupCost(const Feature& feature, int64_t dim) {
  return feature.n * (40 + 2 * dim);
}

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_LOOKUPS_H_
