#include "id_checks.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "feature_inputs.h"
#include "input_checks.h"
#include "op.h"
#include "rows.h"
#include "table_shape.h"
#include "threads.h"

namespace tfrs_embed {

namespace {

// Whether all ids are in [0, last].
template <typename T>
bool AllInside(const void* data, int64_t begin, int64_t end, T last) {
  // An id is outside if its sign bit is set, or that of last - id. Unsigned
  // numbers, because their differences are always defined.
  using U = std::make_unsigned_t<T>;
  const U* ids = static_cast<const U*>(data);
  U signs = 0;
  for (int64_t i = begin; i < end; ++i) {
    signs |= ids[i] | (static_cast<U>(last) - ids[i]);
  }
  return static_cast<T>(signs) >= 0;
}

// Reads an attribute of numbers of rows.
absl::Status ReadRows(OpKernelConstruction* ctx, std::vector<int64_t>* rows) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("rows", rows));
  for (const int64_t each : *rows) {
    if (each < 0) return InvalidArgument("rows: ", each);
  }
  return absl::OkStatus();
}

}  // namespace

bool Inside(const Feature& feature, int64_t begin, int64_t end, int64_t rows) {
  if (begin == end) return true;
  if (rows <= 0) return false;
  if (feature.wide) {
    return AllInside<int64_t>(feature.ids, begin, end, rows - 1);
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  return AllInside<int32_t>(feature.ids, begin, end,
                            std::min(rows - 1, kMost));
}

bool BagsInside(const Feature& feature, int64_t begin, int64_t end,
                int64_t rows) {
  return Inside(feature, tfrs_first_id(&feature, begin),
                tfrs_first_id(&feature, end), rows);
}

absl::Status OutOfRange(const std::vector<Feature>& features,
                        const std::vector<int64_t>& rows,
                        const std::vector<std::string>& names) {
  for (size_t f = 0; f < features.size(); ++f) {
    for (int64_t i = 0; i < features[f].n; ++i) {
      const int64_t id = features[f].id(i);
      if (id >= 0 && id < rows[f]) continue;
      return InvalidArgument(
          names.empty() ? absl::StrCat("feature ", f) : names[f], ": id ", id,
          " is out of range; the table has ", rows[f],
          " rows, valid ids are 0 to ", rows[f] - 1, ".");
    }
  }
  return tensorflow::errors::Internal("ids changed while they were read");
}

absl::Status CheckIds(OpKernelContext* ctx,
                      const std::vector<Feature>& features,
                      const std::vector<int64_t>& rows,
                      const std::vector<std::string>& names) {
  const AllIds ids(features);
  std::atomic<bool> found{false};
  ParallelFor(ctx, ids.total(), 2, [&](int64_t begin, int64_t end) {
    ids.Each(begin, end, [&](size_t f, int64_t first, int64_t last) {
      if (!Inside(features[f], first, last, rows[f])) found = true;
    });
  });
  return found ? OutOfRange(features, rows, names) : absl::OkStatus();
}

std::vector<int64_t> RowsOf(const std::vector<Feature>& features,
                            const std::vector<TableShape>& tables) {
  std::vector<int64_t> rows;
  for (const Feature& feature : features) {
    rows.push_back(tables[feature.table].rows);
  }
  return rows;
}

absl::Status IdLimits::Read(OpKernelConstruction* ctx) {
  TF_RETURN_IF_ERROR(ReadRows(ctx, &rows));
  TF_RETURN_IF_ERROR(ctx->GetAttr("names", &names));
  return CheckNumber(rows.size(), "rows", names.size(), "features");
}

absl::Status IdLimits::Of(const std::vector<Feature>& features,
                          const std::vector<TableShape>& tables,
                          std::vector<int64_t>* limits) const {
  *limits = RowsOf(features, tables);
  if (rows.empty()) return absl::OkStatus();
  TF_RETURN_IF_ERROR(
      CheckNumber(rows.size(), "rows", features.size(), "features"));
  for (size_t f = 0; f < rows.size(); ++f) {
    (*limits)[f] = std::min((*limits)[f], rows[f]);
  }
  return absl::OkStatus();
}

namespace {

// Whether all ids of each feature are in its table.
class InsideOp : public OpKernel {
 public:
  explicit InsideOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadRows(ctx, &rows_));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList ids;
    OP_REQUIRES_OK(ctx, ctx->input_list("ids", &ids));
    OP_REQUIRES_OK(ctx,
                   CheckNumber(ids.size(), "ids", rows_.size(), "tables"));
    Tensor* out;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(0, TensorShape({ids.size()}), &out));
    const std::vector<Feature> features = IdsOnly(ids);
    for (int f = 0; f < ids.size(); ++f) {
      out->flat<bool>()(f) = Inside(features[f], 0, features[f].n, rows_[f]);
    }
  }

 private:
  std::vector<int64_t> rows_;
};

// Returns each feature's ids as a vector, or fails if an id isn't in its table.
class RequireOp : public OpKernel {
 public:
  explicit RequireOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, limits_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList ids;
    OP_REQUIRES_OK(ctx, ctx->input_list("ids", &ids));
    const size_t m = ids.size();
    OP_REQUIRES_OK(ctx, CheckNumber(m, "ids", limits_.rows.size(), "tables"));
    const std::vector<Feature> features = IdsOnly(ids);
    OP_REQUIRES_OK(ctx,
                   CheckIds(ctx, features, limits_.rows, limits_.names));
    for (size_t f = 0; f < m; ++f) {
      Tensor row;
      OP_REQUIRES(ctx, row.CopyFrom(ids[f], TensorShape({features[f].n})),
                  InvalidArgument("ids of a shape that can't be"));
      ctx->set_output(f, row);
    }
  }

 private:
  IdLimits limits_;
};

}  // namespace

REGISTER_OP("TfrsEmbedInside")
    .Input("ids: M * Tids")
    .Output("inside: bool")
    .Attr("M: int >= 1")
    .Attr("Tids: {int32, int64}")
    .Attr("rows: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->num_inputs()));
      return absl::OkStatus();
    });

REGISTER_OP("TfrsEmbedRequire")
    .Input("ids: M * Tids")
    .Output("row: M * Tids")
    .Attr("M: int >= 1")
    .Attr("Tids: {int32, int64}")
    .Attr("rows: list(int)")
    .Attr("names: list(string)")
    .SetShapeFn([](InferenceContext* c) {
      for (int f = 0; f < c->num_outputs(); ++f) {
        c->set_output(f, c->Vector(c->NumElements(c->input(f))));
      }
      return absl::OkStatus();
    });

TFRS_KERNEL("TfrsEmbedInside", InsideOp);
TFRS_KERNEL("TfrsEmbedRequire", RequireOp);

}  // namespace tfrs_embed
