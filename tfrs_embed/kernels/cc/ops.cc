// The operations: lookups of rows and sums into rows. See rows.h for the loops.

#define EIGEN_USE_THREADS  // For what training_op_helpers.h copies.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "rows.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/tstring.h"
#include "buckets.h"
#include "variables.h"

namespace tfrs_embed {

using tensorflow::DEVICE_CPU;
using tensorflow::DT_BFLOAT16;
using tensorflow::DT_FLOAT;
using tensorflow::DT_HALF;
using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;

namespace {

const TfrsLoops& Loops() {
  static const TfrsLoops* loops = tfrs_loops(std::getenv("TFRS_EMBED_LOOPS"));
  return *loops;
}

// Which inputs each feature has, and the table that it is looked up in.
struct FeatureLayout {
  std::vector<int> table_of;
  std::vector<bool> has_bag, has_weights, has_scale;
  std::vector<bool> splits;  // Whose bags are given as splits; empty: none.
  std::vector<int64_t> per_bag;  // Of features without bags; empty: 1.

  explicit FeatureLayout(OpKernelConstruction* ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table_of", &table_of));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("has_bag", &has_bag));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("has_weights", &has_weights));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("has_scale", &has_scale));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("per_bag", &per_bag));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("splits", &splits));
    if (splits.empty()) splits.assign(table_of.size(), false);
    OP_REQUIRES(ctx, splits.size() == table_of.size(),
                InvalidArgument("splits must have an entry for each feature, "
                                "or none."));
    if (per_bag.empty()) per_bag.assign(table_of.size(), 1);
    OP_REQUIRES(ctx,
                per_bag.size() == table_of.size() &&
                    *std::min_element(per_bag.begin(), per_bag.end()) > 0,
                InvalidArgument("per_bag must have a positive entry for each "
                                "feature, or none."));
    OP_REQUIRES(ctx,
                has_bag.size() == table_of.size() &&
                    has_weights.size() == table_of.size() &&
                    has_scale.size() == table_of.size(),
                InvalidArgument("table_of, has_bag, has_weights and has_scale "
                                "must have an entry for each feature."));
  }
};

// Whether values rise or stay.
bool Ascending(const int32_t* values, int64_t n) {
  int32_t falls = 0;
  for (int64_t i = 1; i < n; ++i) falls |= values[i] < values[i - 1];
  return !falls;
}

// Reads where a feature's bags begin and end.
absl::Status ReadSplits(const Tensor& input, Feature* feature) {
  const int32_t* splits = input.flat<int32_t>().data();
  if (input.NumElements() != feature->count + 1) {
    return InvalidArgument(input.NumElements(), " splits for ", feature->count,
                           " bags");
  }
  if (splits[0] != 0 || splits[feature->count] != feature->n) {
    return InvalidArgument("splits ", splits[0], " to ",
                           splits[feature->count], " for ", feature->n,
                           " ids");
  }
  if (!Ascending(splits, feature->count + 1)) {
    return InvalidArgument("the splits aren't ascending");
  }
  feature->splits = splits;
  return absl::OkStatus();
}

// Reads the bag of each id, and finds where they begin and end.
absl::Status ReadBags(const Tensor& input, Feature* feature) {
  const int32_t* bags = input.flat<int32_t>().data();
  const int64_t n = feature->n;
  if (input.NumElements() != n) {
    return InvalidArgument(input.NumElements(), " bags for ", n, " ids");
  }
  // Ascending, so that the first and the last bound the others.
  if (n > 0 && (bags[0] < 0 || bags[n - 1] >= feature->count)) {
    return InvalidArgument("bags ", bags[0], " to ", bags[n - 1], " of ",
                           feature->count);
  }
  if (!Ascending(bags, n)) {
    return InvalidArgument("the bags aren't ascending");
  }
  if (n > std::numeric_limits<int32_t>::max()) {
    return InvalidArgument(n, " ids are too many");
  }
  feature->memory.reset(new int32_t[feature->count + 1]);
  int32_t* splits = feature->memory.get();
  int64_t bag = 0;
  for (int64_t i = 0; i < n; ++i) {
    while (bag <= bags[i]) splits[bag++] = i;
  }
  while (bag <= feature->count) splits[bag++] = n;
  feature->splits = splits;
  return absl::OkStatus();
}

// Reads the features' inputs, and checks all that memory safety depends on.
absl::Status ReadFeatures(OpKernelContext* ctx, const FeatureLayout& layout,
                          int num_tables, std::vector<Feature>* features) {
  OpInputList ids, bags, weights, scales;
  const Tensor* counts;
  TF_RETURN_IF_ERROR(ctx->input_list("ids", &ids));
  TF_RETURN_IF_ERROR(ctx->input_list("bags", &bags));
  TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights));
  TF_RETURN_IF_ERROR(ctx->input_list("scales", &scales));
  TF_RETURN_IF_ERROR(ctx->input("counts", &counts));
  const int m = layout.table_of.size();
  auto number = [](const std::vector<bool>& has) {
    return std::count(has.begin(), has.end(), true);
  };
  if (ids.size() != m || counts->NumElements() != m ||
      bags.size() != number(layout.has_bag) ||
      weights.size() != number(layout.has_weights) ||
      scales.size() != number(layout.has_scale)) {
    return InvalidArgument("The inputs don't fit table_of, has_bag, ",
                           "has_weights and has_scale.");
  }
  features->resize(m);
  int bag = 0, weight = 0, scale = 0;
  for (int f = 0; f < m; ++f) {
    Feature& feature = (*features)[f];
    feature.table = layout.table_of[f];
    if (feature.table < 0 || feature.table >= num_tables) {
      return InvalidArgument("feature ", f, ": table ", feature.table,
                             " of ", num_tables);
    }
    feature.n = ids[f].NumElements();
    feature.count = counts->flat<int32_t>()(f);
    if (feature.count < 0) {
      return InvalidArgument("feature ", f, ": ", feature.count, " bags");
    }
    feature.wide = ids[f].dtype() == tensorflow::DT_INT64;
    feature.ids = ids[f].data();
    if (layout.has_bag[f]) {
      const Tensor& input = bags[bag++];
      const absl::Status status = layout.splits[f]
                                      ? ReadSplits(input, &feature)
                                      : ReadBags(input, &feature);
      if (!status.ok()) {
        return InvalidArgument("feature ", f, ": ", status.message());
      }
    } else if (feature.n != feature.count * layout.per_bag[f]) {
      return InvalidArgument("feature ", f, ": ", feature.n, " ids for ",
                             feature.count, " bags of ", layout.per_bag[f]);
    }
    feature.per_bag = layout.per_bag[f];
    if (layout.has_weights[f]) {
      const Tensor& input = weights[weight++];
      if (input.NumElements() != feature.n) {
        return InvalidArgument("feature ", f, ": ", input.NumElements(),
                               " weights for ", feature.n, " ids");
      }
      feature.weights = input.flat<float>().data();
    }
    if (layout.has_scale[f]) {
      const Tensor& input = scales[scale++];
      if (input.NumElements() != feature.count) {
        return InvalidArgument("feature ", f, ": ", input.NumElements(),
                               " scales for ", feature.count, " bags");
      }
      feature.scale = input.flat<float>().data();
    }
  }
  return absl::OkStatus();
}

// Reads the features' gradients: dim columns of a matrix's `count` rows, from
// the column that `columns` says; with dim columns the matrix may have any
// shape of as many values.
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
                       column + dim <= gradient.dim_size(1);
    if (!alone && !among) {
      return InvalidArgument("feature ", f, ": a gradient of shape ",
                             gradient.shape().DebugString(), " at column ",
                             column, " for ", feature.count, " bags of dim ",
                             dim);
    }
    feature.gradient = gradient.flat<float>().data() + column;
    feature.stride = alone ? dim : gradient.dim_size(1);
  }
  return absl::OkStatus();
}

int OutputOf(tensorflow::DataType dtype) {
  return dtype == DT_FLOAT ? kFloat32
         : dtype == DT_BFLOAT16 ? kBfloat16
                                : kFloat16;
}

// The shape of a feature's vectors: what is given, if it is, else [count, dim].
// A dimension that isn't known follows from the others.
absl::Status OutputShape(const Feature& feature, int64_t dim,
                         const tensorflow::PartialTensorShape* given,
                         TensorShape* shape) {
  *shape = TensorShape({feature.count, dim});
  if (given == nullptr) return absl::OkStatus();
  int64_t known = 1;
  for (int i = 0; i < given->dims(); ++i) {
    if (given->dim_size(i) >= 0) known *= given->dim_size(i);
  }
  const int64_t all = feature.count * dim;
  TensorShape wanted;
  for (int i = 0; i < given->dims(); ++i) {
    const int64_t size = given->dim_size(i);
    TF_RETURN_IF_ERROR(wanted.AddDimWithStatus(
        size >= 0 ? size : known > 0 ? all / known : 0));
  }
  if (wanted.num_elements() != all || wanted.dims() == 0 ||
      wanted.dim_size(wanted.dims() - 1) != dim) {
    return InvalidArgument("vectors of shape ", given->DebugString(), " for ",
                           feature.count, " bags of dim ", dim);
  }
  *shape = wanted;
  return absl::OkStatus();
}

// A feature's lookup, which writes to rows `stride` columns apart.
TfrsLookup LookupOf(const Feature& feature, const float* parameters,
                    int64_t dim, tensorflow::DataType dtype, void* out,
                    int64_t stride) {
  return {feature, parameters, dim, out, stride, OutputOf(dtype)};
}

// What a feature's lookup costs, in the unit of ParallelFor.
int64_t CostOf(const Feature& feature, int64_t dim) {
  return feature.n * (40 + 2 * dim);
}

// How many rows features' ids may be of, and what features are called in
// errors; if not given, what their tables have, and numbers.
struct Limits {
  std::vector<int64_t> rows;
  std::vector<std::string> names;

  absl::Status Read(OpKernelConstruction* ctx) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("rows", &rows));
    TF_RETURN_IF_ERROR(ctx->GetAttr("names", &names));
    if (rows.size() != names.size()) {
      return InvalidArgument(rows.size(), " rows for ", names.size(),
                             " features");
    }
    return absl::OkStatus();
  }

  // Those of features that are looked up in tables.
  absl::Status Of(const std::vector<Feature>& features,
                  const std::vector<TableShape>& tables,
                  std::vector<int64_t>* limits) const {
    *limits = RowsOf(features, tables);
    if (rows.empty()) return absl::OkStatus();
    if (rows.size() != features.size()) {
      return InvalidArgument(rows.size(), " rows for ", features.size(),
                             " features");
    }
    for (size_t f = 0; f < rows.size(); ++f) {
      (*limits)[f] = std::min((*limits)[f], rows[f]);
    }
    return absl::OkStatus();
  }
};

// Whether the ids of bags [begin, end) are in [0, rows). Asked just before they
// are looked up, so that ids are read from memory once.
bool BagsInside(const Feature& feature, int64_t begin, int64_t end,
                int64_t rows) {
  return Inside(feature, tfrs_first_id(&feature, begin),
                tfrs_first_id(&feature, end), rows);
}

// Looks features up in tables: parameters and shapes by table. `shapes` has
// those of the vectors, or is empty.
absl::Status LookUp(OpKernelContext* ctx, const std::vector<Feature>& features,
                    const std::vector<float*>& parameters,
                    const std::vector<TableShape>& tables,
                    const std::vector<tensorflow::PartialTensorShape>& shapes,
                    tensorflow::DataType dtype, const Limits& given) {
  std::vector<int64_t> limits;
  TF_RETURN_IF_ERROR(given.Of(features, tables, &limits));
  OpOutputList outputs;
  TF_RETURN_IF_ERROR(ctx->output_list("vectors", &outputs));
  std::vector<TfrsLookup> lookups(features.size());
  int64_t work = 0;
  for (size_t f = 0; f < features.size(); ++f) {
    const Feature& feature = features[f];
    const int64_t dim = tables[feature.table].dim;
    TensorShape shape;
    TF_RETURN_IF_ERROR(OutputShape(
        feature, dim, shapes.empty() ? nullptr : &shapes[f], &shape));
    Tensor* out;
    TF_RETURN_IF_ERROR(outputs.allocate(f, shape, &out));
    lookups[f] = LookupOf(feature, parameters[feature.table], dim, dtype,
                          out->data(), dim);
    work += CostOf(feature, dim);
    if (feature.n == 0 && out->TotalBytes() > 0) {
      std::memset(out->data(), 0, out->TotalBytes());
    }
  }
  const AllIds ids(features);
  if (ids.total() == 0) return absl::OkStatus();
  const TfrsLoops& loops = Loops();
  std::atomic<bool> bad{false};
  ParallelFor(
      ctx, ids.total(), work / ids.total(), [&](int64_t begin, int64_t end) {
        ids.Each(begin, end, [&](size_t f, int64_t i, int64_t stop) {
          const Feature& feature = features[f];
          const int64_t last =
              stop == feature.n ? feature.count : feature.BagFrom(stop);
          const int64_t first = feature.BagFrom(i);
          if (BagsInside(feature, first, last, limits[f])) {
            loops.lookup(&lookups[f], first, last, 0);
          } else {
            bad = true;
          }
        });
      });
  return bad ? OutOfRange(features, limits, given.names) : absl::OkStatus();
}

class LookupOp : public OpKernel {
 public:
  explicit LookupOp(OpKernelConstruction* ctx) : OpKernel(ctx), layout_(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("places", &places_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shapes", &shapes_));
    OP_REQUIRES(ctx,
                shapes_.empty() || shapes_.size() == layout_.table_of.size(),
                InvalidArgument("shapes must have an entry for each feature, "
                                "or none."));
    OP_REQUIRES_OK(ctx, limits_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    Variables tables(&known_);
    OP_REQUIRES_OK(ctx, tables.Find(ctx, "tables", places_));
    OP_REQUIRES_OK(ctx, tables.LockToRead());
    std::vector<Feature> features;
    OP_REQUIRES_OK(
        ctx, ReadFeatures(ctx, layout_, tables.size(), &features));
    OP_REQUIRES_OK(ctx, LookUp(ctx, features, tables.rows(), tables.shapes(),
                               shapes_, dtype_, limits_));
  }

 private:
  const FeatureLayout layout_;
  Limits limits_;
  std::vector<int> places_;
  std::vector<tensorflow::PartialTensorShape> shapes_;
  tensorflow::DataType dtype_;
  Variables::Known known_;
};

// Looks features up into the columns of one matrix, beside other columns.
class LookupConcatOp : public OpKernel {
 public:
  explicit LookupConcatOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), layout_(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("places", &places_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("order", &order_));
    OP_REQUIRES_OK(ctx, limits_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    Variables tables(&known_);
    OP_REQUIRES_OK(ctx, tables.Find(ctx, "tables", places_));
    OP_REQUIRES_OK(ctx, tables.LockToRead());
    std::vector<Feature> features;
    OP_REQUIRES_OK(
        ctx, ReadFeatures(ctx, layout_, tables.size(), &features));
    std::vector<int64_t> limits;
    OP_REQUIRES_OK(ctx, limits_.Of(features, tables.shapes(), &limits));
    OpInputList others;
    OP_REQUIRES_OK(ctx, ctx->input_list("others", &others));
    const int64_t count = features[0].count;
    const int64_t m = features.size();
    // Where each part's columns begin.
    struct Lookup : TfrsLookup {
      int feature;
      int64_t first;
    };
    struct Copy {
      const char* from;
      int64_t first, columns;
    };
    std::vector<Lookup> lookups;
    std::vector<Copy> copies;
    int64_t width = 0, cost = 0;
    for (int i : order_) {
      OP_REQUIRES(ctx, i >= 0 && i < m + others.size(),
                  InvalidArgument("order: ", i));
      if (i < m) {
        const Feature& feature = features[i];
        const int64_t dim = tables.shapes()[feature.table].dim;
        OP_REQUIRES(ctx, feature.count == count,
                    InvalidArgument("feature ", i, ": ", feature.count,
                                    " bags beside ", count));
        const float* parameters = tables.rows()[feature.table];
        lookups.push_back(
            {LookupOf(feature, parameters, dim, dtype_, nullptr, 0), i, width});
        cost += CostOf(feature, dim);
        width += dim;
      } else {
        const Tensor& other = others[i - m];
        OP_REQUIRES(ctx, other.dims() == 2 && other.dim_size(0) == count,
                    InvalidArgument("a tensor of shape ",
                                    other.shape().DebugString(), " beside ",
                                    count, " bags"));
        copies.push_back({static_cast<const char*>(other.data()), width,
                          other.dim_size(1)});
        cost += other.NumElements();
        width += other.dim_size(1);
      }
    }
    OP_REQUIRES(ctx, !lookups.empty(),
                InvalidArgument("order: none of the features"));
    Tensor* out;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({count, width}), &out));
    if (out->NumElements() == 0) return;
    const int64_t size = tensorflow::DataTypeSize(dtype_);
    char* matrix = static_cast<char*>(out->data());
    for (Lookup& lookup : lookups) {
      lookup.out = matrix + lookup.first * size;
      lookup.stride = width;
    }
    const TfrsLoops& loops = Loops();
    const int64_t threads = NumThreads(ctx);
    // A block of rows after the other, which stays in the caches until all of
    // its columns are there; a few rows for each thread.
    const int64_t rows = std::min(
        kMostRows, std::max(kLeastRows, (count + threads - 1) / threads));
    const int64_t blocks = (count + rows - 1) / rows;
    std::atomic<bool> bad{false};
    ParallelFor(ctx, blocks, cost / blocks, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        const int64_t begin = count * block / blocks;
        const int64_t end = count * (block + 1) / blocks;
        for (const Copy& copy : copies) {
          const int64_t bytes = copy.columns * size;
          char* to = matrix + (begin * width + copy.first) * size;
          for (int64_t row = begin; row < end; ++row, to += width * size) {
            std::memcpy(to, copy.from + row * bytes, bytes);
          }
        }
        // Each is prefetched while the one before it is looked up.
        constexpr int64_t kBad = -1;
        auto prefetch = [&](const Lookup& lookup) {
          const int f = lookup.feature;
          return BagsInside(features[f], begin, end, limits[f])
                     ? loops.prefetch(&lookup, begin, end)
                     : kBad;
        };
        int64_t prefetched = prefetch(lookups[0]);
        for (size_t k = 0; k < lookups.size(); ++k) {
          const int64_t next =
              k + 1 < lookups.size() ? prefetch(lookups[k + 1]) : 0;
          if (prefetched == kBad) {
            bad = true;
          } else {
            loops.lookup(&lookups[k], begin, end, prefetched);
          }
          prefetched = next;
        }
      }
    });
    if (bad) ctx->SetStatus(OutOfRange(features, limits, limits_.names));
  }

 private:
  static constexpr int64_t kLeastRows = 8, kMostRows = 64;

  const FeatureLayout layout_;
  Limits limits_;
  std::vector<int> places_, order_;
  tensorflow::DataType dtype_;
  Variables::Known known_;
};

class CombineOp : public OpKernel {
 public:
  explicit CombineOp(OpKernelConstruction* ctx) : OpKernel(ctx), layout_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor* rows;
    OP_REQUIRES_OK(ctx, ctx->input("rows", &rows));
    std::vector<TableShape> tables(1);
    OP_REQUIRES_OK(ctx, ShapeOf(*rows, &tables[0]));
    std::vector<Feature> features;
    OP_REQUIRES_OK(ctx, ReadFeatures(ctx, layout_, 1, &features));
    float* values = const_cast<float*>(rows->flat<float>().data());
    OP_REQUIRES_OK(ctx,
                   LookUp(ctx, features, {values}, tables, {}, DT_FLOAT, {}));
  }

 private:
  const FeatureLayout layout_;
};

class SpreadOp : public OpKernel {
 public:
  explicit SpreadOp(OpKernelConstruction* ctx) : OpKernel(ctx), layout_(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor* size;
    OP_REQUIRES_OK(ctx, ctx->input("num_rows", &size));
    OP_REQUIRES(ctx, size->NumElements() == 1,
                InvalidArgument("num_rows must be a scalar"));
    const std::vector<TableShape> tables = {{size->flat<int32_t>()(0), dim_}};
    OP_REQUIRES(ctx, tables[0].rows >= 0, InvalidArgument("num_rows < 0"));
    std::vector<Feature> features;
    OP_REQUIRES_OK(ctx, ReadFeatures(ctx, layout_, 1, &features));
    std::vector<int> gradient_of(features.size());
    std::iota(gradient_of.begin(), gradient_of.end(), 0);
    OP_REQUIRES_OK(
        ctx, ReadGradients(ctx, tables, gradient_of, nullptr, &features));
    Tensor* out;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({tables[0].rows, dim_}),
                                  &out));
    Buckets buckets;
    OP_REQUIRES_OK(ctx, buckets.Sort(ctx, features, tables));
    float* sums = out->flat<float>().data();
    ParallelFor(ctx, tables[0].rows, dim_, [&](int64_t begin, int64_t end) {
      std::memset(sums + begin * dim_, 0,
                  (end - begin) * dim_ * sizeof(float));
    });
    TfrsTable table = {};
    table.state[0] = sums;
    table.dim = dim_;
    table.rule = kSum;
    OP_REQUIRES_OK(ctx, buckets.Update(ctx, Loops(), {table}));
  }

 private:
  const FeatureLayout layout_;
  int64_t dim_;
};

class UpdateOp : public OpKernel {
 public:
  explicit UpdateOp(OpKernelConstruction* ctx) : OpKernel(ctx), layout_(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("places", &places_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rules", &rules_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("settings", &settings_));
    OP_REQUIRES(ctx, settings_.size() == kSettings * rules_.size(),
                InvalidArgument("settings must have ", kSettings,
                                " entries for each table."));
    for (int rule : rules_) {
      OP_REQUIRES(ctx, rule >= kSgd && rule <= kFtrl,
                  InvalidArgument("rules: ", rule));
    }
    OP_REQUIRES_OK(ctx, ctx->GetAttr("gradient_of", &gradient_of_));
    OP_REQUIRES(ctx, gradient_of_.size() == layout_.table_of.size(),
                InvalidArgument("gradient_of must have an entry for each "
                                "feature."));
    OP_REQUIRES(
        ctx, std::is_sorted(layout_.table_of.begin(), layout_.table_of.end()),
        InvalidArgument("table_of must be ascending."));
  }

  void Compute(OpKernelContext* ctx) override {
    Variables variables(&known_);
    OP_REQUIRES_OK(ctx, variables.Find(ctx, "states", places_));
    OP_REQUIRES_OK(ctx, variables.LockToWrite());
    const Tensor* rates;
    OP_REQUIRES_OK(ctx, ctx->input("rates", &rates));
    const int num_tables = rules_.size();
    OP_REQUIRES(ctx, rates->NumElements() == num_tables,
                InvalidArgument(rates->NumElements(), " rates for ",
                                num_tables, " tables"));
    std::vector<TableShape> shapes(num_tables);
    std::vector<TfrsTable> tables(num_tables);
    size_t v = 0;
    for (int t = 0; t < num_tables; ++t) {
      TfrsTable& table = tables[t];
      table = {};
      table.rule = rules_[t];
      table.rate = rates->flat<float>()(t);
      std::copy_n(settings_.begin() + kSettings * t, kSettings,
                  table.settings);
      const int states = tfrs_states(rules_[t]);
      for (int k = 0; k < states; ++k, ++v) {
        OP_REQUIRES(ctx, v < variables.size(),
                    InvalidArgument("states: too few variables"));
        const TableShape& shape = variables.shapes()[v];
        if (k == 0) shapes[t] = shape;
        OP_REQUIRES(ctx,
                    shape.rows == shapes[t].rows && shape.dim == shapes[t].dim,
                    InvalidArgument("table ", t, ": a slot's shape differs"));
        table.state[k] = variables.rows()[v];
      }
      table.dim = shapes[t].dim;
    }
    OP_REQUIRES(ctx, v == variables.size(),
                InvalidArgument("states: too many variables"));
    std::vector<Feature> features;
    OP_REQUIRES_OK(ctx, ReadFeatures(ctx, layout_, num_tables, &features));
    const Tensor* columns;
    OP_REQUIRES_OK(ctx, ctx->input("columns", &columns));
    OP_REQUIRES(
        ctx, columns->NumElements() == static_cast<int64_t>(features.size()),
        InvalidArgument("columns must have an entry for each feature."));
    OP_REQUIRES_OK(ctx, ReadGradients(ctx, shapes, gradient_of_,
                                      columns->flat<int32_t>().data(),
                                      &features));
    Buckets buckets;
    OP_REQUIRES_OK(ctx, buckets.Sort(ctx, features, shapes));
    OP_REQUIRES_OK(ctx, buckets.Update(ctx, Loops(), tables));
  }

 private:
  static constexpr int kSettings = 6;
  const FeatureLayout layout_;
  std::vector<int> places_, rules_, gradient_of_;
  std::vector<float> settings_;
  Variables::Known known_;
};

// Reads features' ids alone.
std::vector<Feature> OnlyIds(const OpInputList& ids) {
  std::vector<Feature> features(ids.size());
  for (int f = 0; f < ids.size(); ++f) {
    features[f].n = ids[f].NumElements();
    features[f].wide = ids[f].dtype() == tensorflow::DT_INT64;
    features[f].ids = ids[f].data();
  }
  return features;
}

// Whether all ids of each feature are in its table.
class InsideOp : public OpKernel {
 public:
  explicit InsideOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rows", &rows_));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList ids;
    OP_REQUIRES_OK(ctx, ctx->input_list("ids", &ids));
    OP_REQUIRES(ctx, static_cast<size_t>(ids.size()) == rows_.size(),
                InvalidArgument(ids.size(), " ids for ", rows_.size(),
                                " tables"));
    Tensor* out;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(0, TensorShape({ids.size()}), &out));
    const std::vector<Feature> features = OnlyIds(ids);
    for (int f = 0; f < ids.size(); ++f) {
      out->flat<bool>()(f) = Inside(features[f], 0, features[f].n, rows_[f]);
    }
  }

 private:
  std::vector<int64_t> rows_;
};

// Gives the ids on, in a row, if all of them are in their tables, else fails.
class RequireOp : public OpKernel {
 public:
  explicit RequireOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, limits_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList ids;
    OP_REQUIRES_OK(ctx, ctx->input_list("ids", &ids));
    const size_t m = ids.size();
    OP_REQUIRES(ctx, m == limits_.rows.size(),
                InvalidArgument(m, " ids for ", limits_.rows.size(),
                                " tables"));
    const std::vector<Feature> features = OnlyIds(ids);
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
  Limits limits_;
};

class LoopsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &out));
    out->scalar<tensorflow::tstring>()() = Loops().name;
  }
};

absl::Status VectorShapes(InferenceContext* c) {
  std::vector<int> dims;
  TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
  if (dims.size() != static_cast<size_t>(c->num_outputs())) {
    return InvalidArgument("dims must have an entry for each feature.");
  }
  for (int f = 0; f < c->num_outputs(); ++f) {
    c->set_output(f, c->Matrix(InferenceContext::kUnknownDim, dims[f]));
  }
  return absl::OkStatus();
}

}  // namespace

// What describes features, in all operations.
#define TFRS_FEATURES(op)                    \
  op.Input("ids: M * Tids")                  \
      .Input("bags: B * int32")              \
      .Input("weights: W * float")           \
      .Input("scales: S * float")            \
      .Input("counts: int32")                \
      .Attr("M: int >= 1")                   \
      .Attr("B: int >= 0")                   \
      .Attr("W: int >= 0")                   \
      .Attr("S: int >= 0")                   \
      .Attr("Tids: {int32, int64}")          \
      .Attr("table_of: list(int)")           \
      .Attr("has_bag: list(bool)")           \
      .Attr("has_weights: list(bool)")       \
      .Attr("has_scale: list(bool)")         \
      .Attr("splits: list(bool) = []")       \
      .Attr("per_bag: list(int) = []")

TFRS_FEATURES(REGISTER_OP("TfrsEmbedLookup").Input("tables: N * resource"))
    .Output("vectors: M * T")
    .Attr("N: int >= 1")
    .Attr("places: list(int) = []")
    .Attr("T: {float, bfloat16, half} = DT_FLOAT")
    .Attr("dims: list(int)")
    .Attr("shapes: list(shape) = []")
    .Attr("rows: list(int) = []")
    .Attr("names: list(string) = []")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(VectorShapes(c));
      std::vector<tensorflow::PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
      if (shapes.empty()) return absl::OkStatus();
      if (shapes.size() != static_cast<size_t>(c->num_outputs())) {
        return InvalidArgument("shapes must have an entry for each feature.");
      }
      for (int f = 0; f < c->num_outputs(); ++f) {
        tensorflow::shape_inference::ShapeHandle shape;
        TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shapes[f],
                                                              &shape));
        c->set_output(f, shape);
      }
      return absl::OkStatus();
    });

// Made by graph_pass.cc of a lookup and the concatenation of its vectors: part
// i of the matrix is feature order[i], or the others after all features.
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
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->UnknownShapeOfRank(2));
      return absl::OkStatus();
    });

TFRS_FEATURES(REGISTER_OP("TfrsEmbedCombine").Input("rows: float"))
    .Output("vectors: M * float")
    .Attr("dims: list(int)")
    .SetShapeFn(VectorShapes);

TFRS_FEATURES(REGISTER_OP("TfrsEmbedSpread").Input("num_rows: int32"))
    .Input("gradients: M * float")
    .Output("rows: float")
    .Attr("dim: int")
    .SetShapeFn([](InferenceContext* c) {
      int dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      c->set_output(0, c->Matrix(InferenceContext::kUnknownDim, dim));
      return absl::OkStatus();
    });

TFRS_FEATURES(REGISTER_OP("TfrsEmbedUpdate")
                  .Input("states: N * resource")
                  .Input("rates: float"))
    .Input("gradients: G * float")
    .Input("columns: int32")
    .Attr("N: int >= 1")
    .Attr("G: int >= 1")
    .Attr("places: list(int) = []")
    .Attr("gradient_of: list(int)")
    .Attr("rules: list(int)")
    .Attr("settings: list(float)")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

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

REGISTER_OP("TfrsEmbedLoops")
    .Output("name: string")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_KERNEL_BUILDER(Name("TfrsEmbedLookup").Device(DEVICE_CPU), LookupOp);
REGISTER_KERNEL_BUILDER(Name("TfrsEmbedLookupConcat").Device(DEVICE_CPU),
                        LookupConcatOp);
REGISTER_KERNEL_BUILDER(Name("TfrsEmbedCombine").Device(DEVICE_CPU),
                        CombineOp);
REGISTER_KERNEL_BUILDER(Name("TfrsEmbedSpread").Device(DEVICE_CPU), SpreadOp);
REGISTER_KERNEL_BUILDER(Name("TfrsEmbedUpdate").Device(DEVICE_CPU), UpdateOp);
REGISTER_KERNEL_BUILDER(Name("TfrsEmbedInside").Device(DEVICE_CPU), InsideOp);
REGISTER_KERNEL_BUILDER(Name("TfrsEmbedRequire").Device(DEVICE_CPU),
                        RequireOp);
REGISTER_KERNEL_BUILDER(Name("TfrsEmbedLoops").Device(DEVICE_CPU), LoopsOp);

}  // namespace tfrs_embed
