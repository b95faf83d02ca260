// Lookups of features into the columns of one matrix, beside other columns.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "feature_inputs.h"
#include "id_checks.h"
#include "lookups.h"
#include "loops.h"
#include "op.h"
#include "rows.h"
#include "table_shape.h"
#include "tensorflow/core/util/overflow.h"
#include "threads.h"
#include "variables.h"

namespace tfrs_embed {

namespace {

// The parts of the matrix: groups of columns from left to right.
struct Columns {
  struct Lookup : TfrsLookup {
    int feature;
    int64_t first;  // Of the columns.
  };
  struct Copy {
    const char* from;
    int64_t first, columns;
  };
  std::vector<Lookup> lookups;
  std::vector<Copy> copies;
  int64_t width = 0;
  int64_t cost = 0;  // Of all rows, in the unit of ParallelFor.
};

// Copies rows [begin, end) of the parts that are copies into a matrix whose
// values have `size` bytes.
void CopyRows(const Columns& columns, char* matrix, int64_t size,
              int64_t begin, int64_t end) {
  for (const Columns::Copy& copy : columns.copies) {
    const int64_t bytes = copy.columns * size;
    char* to = matrix + (begin * columns.width + copy.first) * size;
    for (int64_t row = begin; row < end; ++row, to += columns.width * size) {
      std::memcpy(to, copy.from + row * bytes, bytes);
    }
  }
}

// Looks up rows [begin, end) of the parts that are lookups. Returns whether all
// ids were in their tables; skips the lookups where they were not.
bool LookupRows(const std::vector<Feature>& features,
                const std::vector<int64_t>& limits,
                const std::vector<Columns::Lookup>& lookups, int64_t begin,
                int64_t end) {
  const TfrsLoops& loops = Loops();
  // Each lookup's first rows are prefetched before the one before it is done.
  auto prefetch = [&](const Columns::Lookup& lookup) {
    const int f = lookup.feature;
    const bool inside = BagsInside(features[f], begin, end, limits[f]);
    if (inside) loops.prefetch(&lookup, begin, end);
    return inside;
  };
  bool good = true;
  bool inside = prefetch(lookups[0]);
  for (size_t k = 0; k < lookups.size(); ++k) {
    const bool next = k + 1 < lookups.size() && prefetch(lookups[k + 1]);
    if (inside) loops.lookup(&lookups[k], begin, end, /*prefetched=*/true);
    good &= inside;
    inside = next;
  }
  return good;
}

class LookupConcatOp : public OpKernel {
 public:
  explicit LookupConcatOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, layout_.Read(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("places", &places_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("order", &order_));
    OP_REQUIRES_OK(ctx, integers_.Read(ctx, layout_.table_of.size()));
    OP_REQUIRES_OK(ctx, limits_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    Variables variables(&cache_);
    OP_REQUIRES_OK(ctx, variables.Find(ctx, "tables", places_));
    OP_REQUIRES_OK(ctx, variables.LockToRead());
    std::vector<Feature> features;
    OP_REQUIRES_OK(
        ctx, ReadFeatures(ctx, layout_, variables.size(), &features));
    Tables tables;
    OP_REQUIRES_OK(ctx, integers_.Open(variables, features, &tables));
    std::vector<int64_t> limits;
    OP_REQUIRES_OK(ctx, limits_.Of(features, tables.shapes, &limits));
    Columns columns;
    OP_REQUIRES_OK(ctx, ReadColumns(ctx, features, tables, &columns));
    const int64_t count = features[0].count;
    TensorShape matrix_shape;
    OP_REQUIRES_OK(ctx, TensorShape::BuildTensorShape({count, columns.width},
                                                      &matrix_shape));
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, matrix_shape, &out));
    if (out->NumElements() == 0) return;
    const int64_t size = tensorflow::DataTypeSize(dtype_);
    char* matrix = static_cast<char*>(out->data());
    for (Columns::Lookup& lookup : columns.lookups) {
      lookup.out = matrix + lookup.first * size;
      lookup.stride = columns.width;
    }
    // A thread fills one block of rows after the other, so that the block stays
    // in the caches until all of its columns are filled. Every thread gets at
    // least a few rows.
    const int64_t threads = NumThreads(ctx);
    const int64_t rows = std::min(
        kMostRows, std::max(kLeastRows, (count + threads - 1) / threads));
    const int64_t blocks = (count + rows - 1) / rows;
    std::atomic<bool> bad{false};
    ParallelFor(
        ctx, blocks, columns.cost / blocks, [&](int64_t first, int64_t last) {
          for (int64_t block = first; block < last; ++block) {
            const int64_t begin = count * block / blocks;
            const int64_t end = count * (block + 1) / blocks;
            CopyRows(columns, matrix, size, begin, end);
            if (!LookupRows(features, limits, columns.lookups, begin, end)) {
              bad = true;
            }
          }
        });
    if (bad) ctx->SetStatus(OutOfRange(features, limits, limits_.names));
  }

 private:
  static constexpr int64_t kLeastRows = 8, kMostRows = 64;

  // Finds the matrix's parts; the lookups don't have its memory yet.
  absl::Status ReadColumns(OpKernelContext* ctx,
                           const std::vector<Feature>& features,
                           const Tables& tables, Columns* columns) const {
    OpInputList others;
    TF_RETURN_IF_ERROR(ctx->input_list("others", &others));
    const int64_t count = features[0].count;
    const int64_t m = features.size();
    for (int i : order_) {
      if (i < 0 || i >= m + others.size()) {
        return InvalidArgument("order: ", i);
      }
      int64_t width;
      if (i < m) {
        const Feature& feature = features[i];
        if (feature.count != count) {
          return InvalidArgument("feature ", i, ": ", feature.count,
                                 " bags beside ", count);
        }
        const TableShape& shape = tables.shapes[feature.table];
        columns->lookups.push_back(
            {MakeLookup(feature, tables, dtype_, nullptr, 0), i,
             columns->width});
        columns->cost += LookupCost(feature, shape.dim);
        width = shape.dim;
      } else {
        const Tensor& other = others[i - m];
        if (other.dims() != 2 || other.dim_size(0) != count) {
          return InvalidArgument("a tensor of shape ",
                                 other.shape().DebugString(), " beside ", count,
                                 " bags");
        }
        columns->copies.push_back({static_cast<const char*>(other.data()),
                                   columns->width, other.dim_size(1)});
        columns->cost += other.NumElements();
        width = other.dim_size(1);
      }
      columns->width = tensorflow::AddWithoutOverflow(columns->width, width);
      if (columns->width < 0) return InvalidArgument("too many columns");
    }
    if (columns->lookups.empty()) {
      return InvalidArgument("order: none of the features");
    }
    return absl::OkStatus();
  }

  FeatureLayout layout_;
  IntegerRows integers_;
  IdLimits limits_;
  std::vector<int> places_, order_;
  tensorflow::DataType dtype_;
  Variables::Cache cache_;
};

}  // namespace

// fuse_concat.cc makes this operation of a lookup and the concatenation of its
// vectors. Part i of the matrix is feature order[i] or, if that is M or more,
// number order[i] - M of the others.
TFRS_FEATURES(
    REGISTER_OP("TfrsEmbedLookupConcat").Input("tables: N * resource"))
    .Input("others: O * T")
    .Output("matrix: T")
    .Attr("N: int >= 1")
    .Attr("O: int >= 0")
    .Attr("places: list(int) = []")
    .Attr("T: {float, bfloat16, half} = DT_FLOAT")
    .Attr("dims: list(int)")
    .Attr("order: list(int)")
    .Attr("rows: list(int) = []")
    .Attr("names: list(string) = []")
    .Attr("scale_of: list(int) = []")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->UnknownShapeOfRank(2));
      return absl::OkStatus();
    });

TFRS_KERNEL("TfrsEmbedLookupConcat", LookupConcatOp);

}  // namespace tfrs_embed
