// The shape of a table's tensor.

#ifndef TFRS_EMBED_KERNELS_CC_TABLE_SHAPE_H_
#define TFRS_EMBED_KERNELS_CC_TABLE_SHAPE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

namespace tfrs_embed {

struct TableShape {
  int64_t rows = 0;
  int64_t dim = 0;
};

// Reads the shape of a table, or fails if the tensor can't be one.
inline absl::Status ReadShape(const tensorflow::Tensor& table,
                              TableShape* shape) {
  if (table.dims() != 2 || table.dtype() != tensorflow::DT_FLOAT) {
    return tensorflow::errors::InvalidArgument(
        "A table must be float32 of rank 2, got ",
        tensorflow::DataTypeString(table.dtype()), " ",
        table.shape().DebugString());
  }
  *shape = {table.dim_size(0), table.dim_size(1)};
  return absl::OkStatus();
}

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_TABLE_SHAPE_H_
