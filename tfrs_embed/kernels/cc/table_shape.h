// The shape and type of a table's tensor.

#ifndef TFRS_EMBED_KERNELS_CC_TABLE_SHAPE_H_
#define TFRS_EMBED_KERNELS_CC_TABLE_SHAPE_H_

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "rows.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

namespace tfrs_embed {

// Stands for the dim of a slot that has one number for each row: it is a vector.
constexpr int64_t kByRow = -1;

struct TableShape {
  int64_t rows = 0;
  int64_t dim = 0;
  int32_t type = kFloat32;  // TfrsType
};

// Finds the type of a table's rows, or of vectors. Returns whether it is one.
inline bool ReadType(tensorflow::DataType dtype, int32_t* type) {
  switch (dtype) {
    case tensorflow::DT_FLOAT: *type = kFloat32; return true;
    case tensorflow::DT_BFLOAT16: *type = kBfloat16; return true;
    case tensorflow::DT_HALF: *type = kFloat16; return true;
    default: return false;
  }
}

// The most rows and columns of a table. A tensor of no numbers may have more;
// sums and products of sizes would overflow.
constexpr int64_t kMostRows = int64_t{1} << 48;
constexpr int64_t kMostColumns = std::numeric_limits<int32_t>::max();

// Reads the shape of a table whose rows are of a type, or fails.
inline absl::Status ReadShapeOf(const tensorflow::Tensor& table, int32_t type,
                                TableShape* shape) {
  *shape = {table.dim_size(0), table.dim_size(1), type};
  if (shape->rows <= kMostRows && shape->dim <= kMostColumns) {
    return absl::OkStatus();
  }
  return tensorflow::errors::InvalidArgument(
      "A table must have at most ", kMostRows, " rows and ", kMostColumns,
      " columns, got ", table.shape().DebugString());
}

// Reads the shape and type of a table, or fails if the tensor can't be one.
inline absl::Status ReadShape(const tensorflow::Tensor& table,
                              TableShape* shape) {
  int32_t type;
  if (table.dims() != 2 || !ReadType(table.dtype(), &type)) {
    return tensorflow::errors::InvalidArgument(
        "A table must be float32, bfloat16 or float16 of rank 2, got ",
        tensorflow::DataTypeString(table.dtype()), " ",
        table.shape().DebugString());
  }
  return ReadShapeOf(table, type, shape);
}

// The same for a table that is looked up, whose rows may be integers: int8, or
// two of four bits in a byte. Then `dim` is a row's bytes.
inline absl::Status ReadStoredShape(const tensorflow::Tensor& table,
                                    TableShape* shape) {
  const bool small = table.dtype() == tensorflow::DT_UINT8;
  if (table.dims() != 2 || !(small || table.dtype() == tensorflow::DT_INT8)) {
    return ReadShape(table, shape);
  }
  return ReadShapeOf(table, small ? kInt4 : kInt8, shape);
}

// The same for a table, a slot, which may have one number for each row, or
// marks.
inline absl::Status ReadSlotShape(const tensorflow::Tensor& slot,
                                  TableShape* shape) {
  if (slot.dims() == 1 && slot.dtype() == tensorflow::DT_UINT8) {
    *shape = {slot.dim_size(0), kByRow, kMarks};
    return absl::OkStatus();
  }
  if (slot.dims() != 1 || slot.dtype() != tensorflow::DT_FLOAT) {
    return ReadShape(slot, shape);
  }
  *shape = {slot.dim_size(0), kByRow};
  return absl::OkStatus();
}

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_TABLE_SHAPE_H_
