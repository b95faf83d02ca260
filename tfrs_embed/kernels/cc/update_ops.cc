// Sums of gradients by row: into new rows, or into variables by a rule.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "buckets.h"
#include "feature_inputs.h"
#include "input_checks.h"
#include "loops.h"
#include "op.h"
#include "rows.h"
#include "table_shape.h"
#include "threads.h"
#include "variables.h"

namespace tfrs_embed {

namespace {

// Reads the features' gradients, all of one type. Feature f has dim columns of a
// matrix with a row for each bag, from column columns[f] on (null: 0). A
// gradient of one feature alone may have any shape with as many values.
absl::Status ReadGradients(OpKernelContext* ctx,
                           const std::vector<TableShape>& tables,
                           const std::vector<int>& gradient_of,
                           const int32_t* columns,
                           std::vector<Feature>* features) {
  OpInputList gradients;
  TF_RETURN_IF_ERROR(ctx->input_list("gradients", &gradients));
  for (size_t f = 0; f < features->size(); ++f) {
    Feature& feature = (*features)[f];
    const int64_t dim = tables[feature.table].dim;
    const int g = gradient_of[f];
    if (g < 0 || g >= gradients.size()) {
      return InvalidArgument("feature ", f, ": gradient ", g, " of ",
                             gradients.size());
    }
    const Tensor& gradient = gradients[g];
    const int64_t column = columns ? columns[f] : 0;
    const bool alone =
        column == 0 && gradient.NumElements() == feature.count * dim;
    const bool among = gradient.dims() == 2 &&
                       gradient.dim_size(0) == feature.count && column >= 0 &&
                       dim <= gradient.dim_size(1) - column;
    if (!alone && !among) {
      return InvalidArgument("feature ", f, ": a gradient of shape ",
                             gradient.shape().DebugString(), " at column ",
                             column, " for ", feature.count, " bags of dim ",
                             dim);
    }
    int32_t type;
    if (!ReadType(gradient.dtype(), &type)) {
      return InvalidArgument("gradients of ",
                             tensorflow::DataTypeString(gradient.dtype()));
    }
    const int64_t size = tfrs_size(type);
    feature.gradient =
        static_cast<const char*>(gradient.data()) + column * size;
    feature.stride = (alone ? dim : gradient.dim_size(1)) * size;
  }
  return absl::OkStatus();
}

// Sums gradients by row, into new rows, rounded to the nearest of their type.
class SumGradientsByRowOp : public OpKernel {
 public:
  explicit SumGradientsByRowOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, layout_.Read(ctx));
    int dim;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim));
    OP_REQUIRES(ctx, dim >= 0, InvalidArgument("dim: ", dim));
    dim_ = dim;
    tensorflow::DataType dtype;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype));
    OP_REQUIRES(ctx, ReadType(dtype, &type_), InvalidArgument("T"));
  }

  void Compute(OpKernelContext* ctx) override {
    int32_t rows;
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "num_rows", &rows));
    OP_REQUIRES(ctx, rows >= 0, InvalidArgument("num_rows < 0"));
    const std::vector<TableShape> shapes = {{rows, dim_, type_}};
    std::vector<Feature> features;
    OP_REQUIRES_OK(ctx, ReadFeatures(ctx, layout_, 1, &features));
    std::vector<int> gradient_of(features.size());
    std::iota(gradient_of.begin(), gradient_of.end(), 0);
    OP_REQUIRES_OK(
        ctx, ReadGradients(ctx, shapes, gradient_of, nullptr, &features));
    TensorShape shape;
    OP_REQUIRES_OK(ctx, TensorShape::BuildTensorShape({rows, dim_}, &shape));
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &out));
    Buckets buckets;
    OP_REQUIRES_OK(ctx, buckets.Sort(ctx, features, shapes));
    char* const sums = static_cast<char*>(out->data());
    const int64_t row = dim_ * tfrs_size(type_);
    ParallelFor(ctx, rows, dim_, [&](int64_t begin, int64_t end) {
      std::memset(sums + begin * row, 0, (end - begin) * row);
    });
    TfrsTable table = {};
    table.parameters = sums;
    table.dim = dim_;
    table.type = type_;
    table.rule = kSum;
    OP_REQUIRES_OK(ctx, buckets.Update(ctx, Loops(), {table}));
  }

 private:
  FeatureLayout layout_;
  int64_t dim_;
  int32_t type_;  // TfrsType
};

// Updates the variables of tables and their slots by a rule.
class UpdateOp : public OpKernel {
 public:
  explicit UpdateOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, layout_.Read(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("places", &places_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rules", &rules_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("settings", &settings_));
    OP_REQUIRES(ctx, settings_.size() == kSettings * rules_.size(),
                InvalidArgument("settings must have ", kSettings,
                                " entries for each table."));
    for (int rule : rules_) {
      OP_REQUIRES(ctx, rule > kSum && rule < kRules,
                  InvalidArgument("rules: ", rule));
    }
    const auto each_table = [&](const char* name, auto* values) {
      return GetEach(ctx, name, rules_.size(), "table", values);
    };
    OP_REQUIRES_OK(ctx, each_table("stochastic", &stochastic_));
    OP_REQUIRES_OK(ctx, each_table("seeds", &seeds_));
    OP_REQUIRES_OK(ctx, each_table("first_rows", &first_rows_));
    OP_REQUIRES_OK(ctx, each_table("row_strides", &row_strides_));
    OP_REQUIRES_OK(ctx, each_table("first_columns", &first_columns_));
    OP_REQUIRES_OK(ctx, each_table("clip_lows", &clip_lows_));
    OP_REQUIRES_OK(ctx, each_table("clip_highs", &clip_highs_));
    OP_REQUIRES_OK(ctx, each_table("row_norms", &row_norms_));
    OP_REQUIRES_OK(ctx, each_table("max_norms", &max_norms_));
    OP_REQUIRES_OK(ctx, each_table("marked", &marked_));
    tensorflow::DataType gradients;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &gradients));
    OP_REQUIRES(ctx, ReadType(gradients, &gradients_), InvalidArgument("T"));
    OP_REQUIRES_OK(ctx, GetEach(ctx, "gradient_of", layout_.table_of.size(),
                                "feature", &gradient_of_));
    // Exports of earlier releases have no spans.
    OP_REQUIRES_OK(ctx, ctx->GetAttr("spans", &spans_));
    if (spans_.empty()) spans_.assign(layout_.table_of.size(), 1);
    OP_REQUIRES(ctx, spans_.size() == layout_.table_of.size(),
                InvalidArgument("spans must have an entry for each feature."));
    for (size_t f = 0; f < spans_.size(); ++f) {
      const int64_t end = int64_t{layout_.table_of[f]} + spans_[f];
      const bool fits = end <= static_cast<int64_t>(rules_.size());
      OP_REQUIRES(ctx, spans_[f] == 1 || (spans_[f] > 1 && fits),
                  InvalidArgument("spans: ", spans_[f]));
    }
    OP_REQUIRES(
        ctx, std::is_sorted(layout_.table_of.begin(), layout_.table_of.end()),
        InvalidArgument("table_of must be ascending."));
  }

  void Compute(OpKernelContext* ctx) override {
    Variables variables(&cache_);
    OP_REQUIRES_OK(ctx, variables.Find(ctx, "states", places_));
    OP_REQUIRES_OK(ctx, variables.LockToWrite());
    std::vector<TfrsTable> tables;
    std::vector<TableShape> shapes;
    OP_REQUIRES_OK(ctx, ReadTables(ctx, variables, &tables, &shapes));
    std::vector<Feature> features;
    OP_REQUIRES_OK(ctx, ReadFeatures(ctx, layout_, tables.size(), &features));
    const Tensor* columns;
    OP_REQUIRES_OK(ctx, ctx->input("columns", &columns));
    OP_REQUIRES(
        ctx, columns->NumElements() == static_cast<int64_t>(features.size()),
        InvalidArgument("columns must have an entry for each feature."));
    OP_REQUIRES_OK(ctx, ReadGradients(ctx, shapes, gradient_of_,
                                      columns->flat<int32_t>().data(),
                                      &features));
    std::vector<std::vector<int64_t>> rows(features.size());
    OP_REQUIRES_OK(ctx, SplitJoint(shapes, &rows, &features));
    Buckets buckets;
    OP_REQUIRES_OK(ctx, buckets.Sort(ctx, features, shapes));
    OP_REQUIRES_OK(ctx, buckets.Update(ctx, Loops(), tables));
  }

 private:
  static constexpr int kSettings = 6;

  // Splits features whose ids number the rows of several tables, and sorts all by
  // table. `rows` is memory for each feature's ids.
  absl::Status SplitJoint(const std::vector<TableShape>& shapes,
                          std::vector<std::vector<int64_t>>* rows,
                          std::vector<Feature>* features) const {
    const auto joint = [](int span) { return span > 1; };
    if (std::none_of(spans_.begin(), spans_.end(), joint)) {
      return absl::OkStatus();
    }
    std::vector<Feature> split;
    for (size_t f = 0; f < spans_.size(); ++f) {
      if (joint(spans_[f])) {
        TF_RETURN_IF_ERROR(SplitByTable((*features)[f], spans_[f], shapes,
                                        &(*rows)[f], &split));
      } else {
        split.push_back(std::move((*features)[f]));
      }
    }
    std::stable_sort(split.begin(), split.end(),
                     [](const Feature& a, const Feature& b) {
                       return a.table < b.table;
                     });
    *features = std::move(split);
    return absl::OkStatus();
  }

  // Gives each table its rule, rate and settings, and in the tables' order as
  // many of the variables as the rule updates.
  absl::Status ReadTables(OpKernelContext* ctx, const Variables& variables,
                          std::vector<TfrsTable>* tables,
                          std::vector<TableShape>* shapes) const {
    const Tensor* rates;
    TF_RETURN_IF_ERROR(ctx->input("rates", &rates));
    const int num_tables = rules_.size();
    TF_RETURN_IF_ERROR(
        CheckNumber(rates->NumElements(), "rates", num_tables, "tables"));
    const Tensor* decays;
    TF_RETURN_IF_ERROR(ctx->input("decays", &decays));
    const bool decaying = decays->NumElements() > 0;
    if (decaying) {
      TF_RETURN_IF_ERROR(
          CheckNumber(decays->NumElements(), "decays", num_tables, "tables"));
    }
    int64_t step;
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "step", &step));
    const uint64_t number = step;
    uint8_t mark;
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "mark", &mark));
    tables->resize(num_tables);
    shapes->resize(num_tables);
    size_t v = 0;
    for (int t = 0; t < num_tables; ++t) {
      TfrsTable& table = (*tables)[t];
      TableShape& table_shape = (*shapes)[t];
      table = {};
      table.rule = rules_[t];
      table.gradients = gradients_;
      table.rate = rates->flat<float>()(t);
      std::copy_n(settings_.begin() + kSettings * t, kSettings,
                  table.settings);
      if (table.rule == kRowWiseAdam) {
        // 1 - beta^t of update t, by 1 - beta: beta in float32 has few of its
        // digits.
        for (int moment = 0; moment < 2; ++moment) {
          const double rest = table.settings[2 * moment + 1];
          table.unbias[moment] =
              -1 / std::expm1((step + 1.0) * std::log1p(-rest));
        }
      }
      table.clip_low = clip_lows_[t];
      table.clip_high = clip_highs_[t];
      table.row_norm = row_norms_[t];
      table.clips = table.clip_low > -INFINITY || table.clip_high < INFINITY ||
                    table.row_norm < INFINITY;
      table.max_norm = max_norms_[t];
      if (decaying) table.decay = decays->flat<float>()(t);
      const int states = tfrs_states(rules_[t]);
      for (int k = 0; k < states; ++k, ++v) {
        if (v >= variables.size()) {
          return InvalidArgument("states: too few variables");
        }
        const TableShape& shape = variables.shapes()[v];
        if (k == 0) table_shape = shape;
        if (table_shape.dim == kByRow) {
          return InvalidArgument("table ", t, " must be of rank 2");
        }
        const int64_t dim =
            k > 0 && tfrs_by_row(rules_[t], k - 1) ? kByRow : table_shape.dim;
        if (shape.rows != table_shape.rows || shape.dim != dim) {
          return InvalidArgument("table ", t, ": a slot's shape differs");
        }
        if (k > 0 && shape.type != kFloat32) {
          return InvalidArgument("table ", t, ": a slot must be float32");
        }
        if (k == 0) {
          table.parameters = variables.values()[v];
        } else {
          table.slots[k - 1] = static_cast<float*>(variables.values()[v]);
        }
      }
      if (marked_[t]) {
        if (v >= variables.size() || variables.shapes()[v].type != kMarks ||
            variables.shapes()[v].rows != table_shape.rows) {
          return InvalidArgument("table ", t, ": its marks' shape differs");
        }
        table.marks = static_cast<uint8_t*>(variables.values()[v++]);
        table.mark = mark;
      }
      table.dim = table_shape.dim;
      table.type = table_shape.type;
      if (table.decay != 0 && table.type != kFloat32) {
        return InvalidArgument("table ", t, ": only rows of float32 can decay");
      }
      if (table.max_norm > 0 && table.type != kFloat32) {
        return InvalidArgument("table ", t,
                               ": only rows of float32 can have a max_norm");
      }
      const uint64_t seed = seeds_[t];
      table.rounding = {stochastic_[t], tfrs_mix(tfrs_mix(seed) ^ number),
                        first_rows_[t], row_strides_[t], first_columns_[t]};
    }
    if (v != variables.size()) {
      return InvalidArgument("states: too many variables");
    }
    return absl::OkStatus();
  }

  FeatureLayout layout_;
  std::vector<int> places_, rules_, gradient_of_;
  // The number of tables whose rows a feature's ids number; see SplitByTable.
  std::vector<int> spans_;
  int32_t gradients_;  // TfrsType
  std::vector<bool> stochastic_, marked_;
  std::vector<int64_t> seeds_, first_rows_, row_strides_, first_columns_;
  std::vector<float> settings_, clip_lows_, clip_highs_, row_norms_,
      max_norms_;
  Variables::Cache cache_;
};

}  // namespace

TFRS_FEATURES(REGISTER_OP("TfrsEmbedSumGradientsByRow")
                  .Input("num_rows: int32"))
    .Input("gradients: M * float")
    .Output("rows: T")
    .Attr("T: {float, bfloat16, half} = DT_FLOAT")
    .Attr("dim: int")
    .SetShapeFn([](InferenceContext* c) {
      int dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      if (dim < 0) return InvalidArgument("dim: ", dim);
      c->set_output(0, c->Matrix(InferenceContext::kUnknownDim, dim));
      return absl::OkStatus();
    });

TFRS_FEATURES(REGISTER_OP("TfrsEmbedUpdate")
                  .Input("states: N * resource")
                  .Input("rates: float")
                  .Input("decays: float")
                  .Input("mark: uint8")
                  .Input("step: int64"))
    .Input("gradients: G * T")
    .Input("columns: int32")
    .Attr("N: int >= 1")
    .Attr("G: int >= 1")
    .Attr("T: {float, bfloat16, half} = DT_FLOAT")
    .Attr("places: list(int) = []")
    .Attr("gradient_of: list(int)")
    .Attr("spans: list(int) = []")
    .Attr("rules: list(int)")
    .Attr("settings: list(float)")
    .Attr("clip_lows: list(float)")
    .Attr("clip_highs: list(float)")
    .Attr("row_norms: list(float)")
    .Attr("max_norms: list(float)")
    .Attr("marked: list(bool)")
    .Attr("stochastic: list(bool)")
    .Attr("seeds: list(int)")
    .Attr("first_rows: list(int)")
    .Attr("row_strides: list(int)")
    .Attr("first_columns: list(int)")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

TFRS_KERNEL("TfrsEmbedSumGradientsByRow", SumGradientsByRowOp);
TFRS_KERNEL("TfrsEmbedUpdate", UpdateOp);

}  // namespace tfrs_embed
