// A feature's lookup, for the operations that do lookups.

#ifndef TFRS_EMBED_KERNELS_CC_LOOKUPS_H_
#define TFRS_EMBED_KERNELS_CC_LOOKUPS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "feature_inputs.h"
#include "input_checks.h"
#include "op.h"
#include "rows.h"
#include "table_shape.h"
#include "tensorflow/core/framework/types.h"
#include "variables.h"

namespace tfrs_embed {

// The tables of an operation's lookups.
struct Tables {
  std::vector<void*> values;
  std::vector<TableShape> shapes;
  // The rows' factors of the tables whose rows are integers; else null.
  std::vector<const float*> factors;
};

// Fails if the rows of a table's tensor aren't those of `dim` columns.
inline absl::Status CheckDim(size_t t, const TableShape& table, int64_t dim) {
  const bool halves = table.type == kInt4;
  if (dim >= 0 && (halves ? (dim + 1) / 2 : dim) == table.dim) {
    return absl::OkStatus();
  }
  return InvalidArgument("table ", t, " has rows of ", table.dim,
                         halves ? " bytes, which isn't half of dim "
                                : " columns, which isn't dim ",
                         dim);
}

// The attributes that say where the factors of integer rows are, and how wide
// rows of four bits are.
struct IntegerRows {
  std::vector<int> dims;      // By feature.
  std::vector<int> scale_of;  // By table: the place of its factors, or -1.

  absl::Status Read(OpKernelConstruction* ctx, size_t features) {
    TF_RETURN_IF_ERROR(GetEach(ctx, "dims", features, "feature", &dims));
    return ctx->GetAttr("scale_of", &scale_of);
  }

  // Describes the tables of locked variables.
  absl::Status Open(const Variables& variables,
                    const std::vector<Feature>& features,
                    Tables* tables) const {
    const auto& shapes = variables.shapes();
    *tables = {variables.values(), shapes, {}};
    tables->factors.resize(shapes.size());
    for (size_t f = 0; f < features.size(); ++f) {
      const size_t t = features[f].table;
      TF_RETURN_IF_ERROR(CheckDim(t, shapes[t], dims[f]));
      if (shapes[t].type != kInt8 && shapes[t].type != kInt4) continue;
      if (tables->factors[t] && tables->shapes[t].dim != dims[f]) {
        return InvalidArgument("table ", t, " has rows of dim ",
                               tables->shapes[t].dim, " and of ", dims[f]);
      }
      const int64_t s = t < scale_of.size() ? scale_of[t] : -1;
      if (s < 0 || s >= static_cast<int64_t>(shapes.size()) ||
          shapes[s].type != kFloat32 || shapes[s].dim != 1 ||
          shapes[s].rows != shapes[t].rows) {
        return InvalidArgument("table ", t, " has rows of integers, without a "
                               "factor for each row");
      }
      tables->factors[t] = static_cast<const float*>(variables.values()[s]);
      tables->shapes[t].dim = dims[f];
    }
    return absl::OkStatus();
  }
};

// A feature's lookup, which writes vectors of a type to rows that are `stride`
// columns apart.
inline TfrsLookup MakeLookup(const Feature& feature, const Tables& tables,
                             tensorflow::DataType dtype, void* out,
                             int64_t stride) {
  const TableShape& shape = tables.shapes[feature.table];
  int32_t output = kFloat32;
  ReadType(dtype, &output);
  return {feature, tables.values[feature.table], shape.type, shape.dim, out,
          stride,  output, tables.factors[feature.table]};
}

// The cost of a feature's lookup, in the unit of ParallelFor.
inline int64_t LookupCost(const Feature& feature, int64_t dim) {
  return feature.n * (40 + 2 * dim);
}

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_LOOKUPS_H_
