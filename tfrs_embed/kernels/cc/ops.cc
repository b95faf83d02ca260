// The operations: lookups of rows and sums into rows. See rows.h for the loops.

#define EIGEN_USE_THREADS  // For what training_op_helpers.h copies.

#include <algorithm>
#include <chrono>//T
#include <memory>
#include <string>
#include <vector>

#include "huge_pages.h"
#include "rows.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/kernels/training_op_helpers.h"
#include "tensorflow/core/platform/errors.h"
#include "uses.h"

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
using tensorflow::Var;
using tensorflow::core::RefCountPtr;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;

using CPUDevice = Eigen::ThreadPoolDevice;

namespace {

const TfrsLoops& Loops() {
  static const TfrsLoops* loops = tfrs_loops(std::getenv("TFRS_EMBED_LOOPS"));
  return *loops;
}

// Which inputs each feature has, and the table that it is looked up in.
struct Layout {
  std::vector<int> table_of;
  std::vector<bool> has_bag, has_weights, has_scale;
  std::vector<int64_t> per_bag;  // Of features without bags; empty: 1.

  explicit Layout(OpKernelConstruction* ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table_of", &table_of));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("has_bag", &has_bag));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("has_weights", &has_weights));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("has_scale", &has_scale));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("per_bag", &per_bag));
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

// Reads the features' inputs, and checks all that memory safety depends on.
absl::Status ReadFeatures(OpKernelContext* ctx, const Layout& layout,
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
      const int32_t* values = input.flat<int32_t>().data();
      if (input.NumElements() != feature.n) {
        return InvalidArgument("feature ", f, ": ", input.NumElements(),
                               " bags for ", feature.n, " ids");
      }
      // Ascending, so that the first and the last bound the others.
      if (feature.n > 0 &&
          (values[0] < 0 || values[feature.n - 1] >= feature.count)) {
        return InvalidArgument("feature ", f, ": bags ", values[0], " to ",
                               values[feature.n - 1], " of ", feature.count);
      }
      int32_t falls = 0;
      for (int64_t i = 1; i < feature.n; ++i) {
        falls |= values[i] < values[i - 1];
      }
      if (falls) {
        return InvalidArgument("feature ", f, ": the bags aren't ascending");
      }
      feature.bag = values;
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

// Reads the features' gradients, [count, dim] each.
absl::Status ReadGradients(OpKernelContext* ctx,
                           const std::vector<Rows>& tables,
                           std::vector<Feature>* features) {
  OpInputList gradients;
  TF_RETURN_IF_ERROR(ctx->input_list("gradients", &gradients));
  if (static_cast<size_t>(gradients.size()) != features->size()) {
    return InvalidArgument(gradients.size(), " gradients for ",
                           features->size(), " features");
  }
  for (size_t f = 0; f < features->size(); ++f) {
    Feature& feature = (*features)[f];
    const int64_t dim = tables[feature.table].dim;
    if (gradients[f].NumElements() != feature.count * dim) {
      return InvalidArgument(
          "feature ", f, ": a gradient of shape ",
          gradients[f].shape().DebugString(), " for ", feature.count,
          " bags of dim ", dim);
    }
    feature.gradient = gradients[f].flat<float>().data();
  }
  return absl::OkStatus();
}

// Whether all ids of a feature are in [0, rows).
bool Inside(const Feature& feature, uint64_t rows) {
  uint64_t largest = 0;
  if (feature.wide) {
    auto* ids = static_cast<const uint64_t*>(feature.ids);
    for (int64_t i = 0; i < feature.n; ++i) largest = std::max(largest, ids[i]);
  } else {
    // A negative id becomes a large one.
    auto* ids = static_cast<const uint32_t*>(feature.ids);
    uint32_t narrow = 0;
    for (int64_t i = 0; i < feature.n; ++i) narrow = std::max(narrow, ids[i]);
    largest = narrow > 0x7FFFFFFF ? ~uint64_t{0} : narrow;
  }
  return feature.n == 0 || largest < rows;
}

// Fails if an id is outside of its table.
absl::Status CheckIds(const std::vector<Feature>& features,
                      const std::vector<Rows>& tables) {
  for (size_t f = 0; f < features.size(); ++f) {
    const Feature& feature = features[f];
    const uint64_t rows = tables[feature.table].rows;
    if (Inside(feature, rows)) continue;
    for (int64_t i = 0; i < feature.n; ++i) {
      if (static_cast<uint64_t>(feature.id(i)) >= rows) {
        return InvalidArgument("feature ", f, ": id ", feature.id(i),
                               " is out of range; the table has ", rows,
                               " rows.");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status ShapeOf(const Tensor& table, Rows* shape) {
  if (table.dims() != 2 || table.dtype() != DT_FLOAT) {
    return InvalidArgument("A table must be float32 of rank 2, got ",
                           tensorflow::DataTypeString(table.dtype()), " ",
                           table.shape().DebugString());
  }
  *shape = {table.dim_size(0), table.dim_size(1)};
  return absl::OkStatus();
}

int OutputOf(tensorflow::DataType dtype) {
  return dtype == DT_FLOAT ? kFloat32
         : dtype == DT_BFLOAT16 ? kBfloat16
                                : kFloat16;
}

// Looks features up in tables: parameters and shapes by table.
absl::Status LookUp(OpKernelContext* ctx, const std::vector<Feature>& features,
                    const std::vector<const float*>& parameters,
                    const std::vector<Rows>& tables,
                    tensorflow::DataType dtype) {
  TF_RETURN_IF_ERROR(CheckIds(features, tables));
  OpOutputList outputs;
  TF_RETURN_IF_ERROR(ctx->output_list("vectors", &outputs));
  std::vector<TfrsLookup> lookups(features.size());
  std::vector<int64_t> starts(features.size() + 1, 0);
  int64_t work = 0;
  for (size_t f = 0; f < features.size(); ++f) {
    const Feature& feature = features[f];
    const int64_t dim = tables[feature.table].dim;
    Tensor* out;
    TF_RETURN_IF_ERROR(
        outputs.allocate(f, TensorShape({feature.count, dim}), &out));
    lookups[f] = {parameters[feature.table], dim,
                  feature.ids,               feature.bag,
                  feature.weights,           feature.scale,
                  out->data(),               dim,
                  feature.n,                 feature.count,
                  feature.per_bag,           feature.wide,
                  OutputOf(dtype)};
    starts[f + 1] = starts[f] + feature.n;
    work += feature.n * (40 + 2 * dim);
    if (feature.n == 0 && out->TotalBytes() > 0) {
      std::memset(out->data(), 0, out->TotalBytes());
    }
  }
  const int64_t n = starts.back();
  if (n == 0) return absl::OkStatus();
  const TfrsLoops& loops = Loops();
  ParallelFor(ctx, n, work / n, [&](int64_t begin, int64_t end) {
    size_t f = std::upper_bound(starts.begin(), starts.end(), begin) -
               starts.begin() - 1;
    for (int64_t i = begin; i < end;) {
      while (starts[f + 1] <= i) ++f;
      const int64_t stop = std::min(end, starts[f + 1]);
      loops.lookup(&lookups[f], i - starts[f], stop - starts[f]);
      i = stop;
    }
  });
  return absl::OkStatus();
}

// The variables behind a list of handles, ready to be read or written row by
// row, and locked, in one order for all operations.
class Variables {
 public:
  absl::Status Find(OpKernelContext* ctx, const char* name) {
    OpInputList handles;
    TF_RETURN_IF_ERROR(ctx->input_list(name, &handles));
    for (int i = 0; i < handles.size(); ++i) {
      if (handles[i].NumElements() != 1) {
        return InvalidArgument(name, ": a handle is not a scalar");
      }
      RefCountPtr<Var> variable;
      TF_RETURN_IF_ERROR(tensorflow::LookupResource(
          ctx, handles[i].flat<tensorflow::ResourceHandle>()(0), &variable));
      if (!variable->is_initialized) {
        return tensorflow::errors::FailedPrecondition(
            "A table's variable is not initialized.");
      }
      // From now on reading the whole variable copies it, so that writing
      // some rows doesn't have to.
      TF_RETURN_IF_ERROR(
          (tensorflow::EnsureSparseVariableAccess<CPUDevice, float>(
              ctx, variable.get())));
      mutexes_.push_back(variable->mu());
      variables_.push_back(std::move(variable));
    }
    std::sort(mutexes_.begin(), mutexes_.end());
    mutexes_.erase(std::unique(mutexes_.begin(), mutexes_.end()),
                   mutexes_.end());
    return absl::OkStatus();
  }

  void LockToRead() {
    shared_ = true;
    for (auto* mutex : mutexes_) mutex->lock_shared();
    locked_ = true;
  }

  void LockToWrite() {
    for (auto* mutex : mutexes_) mutex->lock();
    locked_ = true;
  }

  ~Variables() {
    if (!locked_) return;
    for (auto* mutex : mutexes_) {
      if (shared_) {
        mutex->unlock_shared();
      } else {
        mutex->unlock();
      }
    }
  }

  int size() const { return variables_.size(); }
  const Tensor& operator[](int i) const { return *variables_[i]->tensor(); }

 private:
  std::vector<RefCountPtr<Var>> variables_;
  std::vector<tensorflow::mutex*> mutexes_;
  bool locked_ = false, shared_ = false;
};

class LookupOp : public OpKernel {
 public:
  explicit LookupOp(OpKernelConstruction* ctx) : OpKernel(ctx), layout_(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
  }

  void Compute(OpKernelContext* ctx) override {
    Variables variables;
    OP_REQUIRES_OK(ctx, variables.Find(ctx, "tables"));
    variables.LockToRead();
    std::vector<const float*> parameters(variables.size());
    std::vector<Rows> tables(variables.size());
    for (int t = 0; t < variables.size(); ++t) {
      OP_REQUIRES_OK(ctx, ShapeOf(variables[t], &tables[t]));
      parameters[t] = variables[t].flat<float>().data();
      pages_.Use(t, variables[t]);
    }
    std::vector<Feature> features;
    OP_REQUIRES_OK(ctx,
                   ReadFeatures(ctx, layout_, tables.size(), &features));
    OP_REQUIRES_OK(ctx, LookUp(ctx, features, parameters, tables, dtype_));
  }

 private:
  const Layout layout_;
  tensorflow::DataType dtype_;
  HugePages pages_;
};

class CombineOp : public OpKernel {
 public:
  explicit CombineOp(OpKernelConstruction* ctx) : OpKernel(ctx), layout_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor* rows;
    OP_REQUIRES_OK(ctx, ctx->input("rows", &rows));
    std::vector<Rows> tables(1);
    OP_REQUIRES_OK(ctx, ShapeOf(*rows, &tables[0]));
    std::vector<Feature> features;
    OP_REQUIRES_OK(ctx, ReadFeatures(ctx, layout_, 1, &features));
    OP_REQUIRES_OK(ctx, LookUp(ctx, features, {rows->flat<float>().data()},
                               tables, DT_FLOAT));
  }

 private:
  const Layout layout_;
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
    const std::vector<Rows> tables = {{size->flat<int32_t>()(0), dim_}};
    OP_REQUIRES(ctx, tables[0].rows >= 0, InvalidArgument("num_rows < 0"));
    std::vector<Feature> features;
    OP_REQUIRES_OK(ctx, ReadFeatures(ctx, layout_, 1, &features));
    OP_REQUIRES_OK(ctx, ReadGradients(ctx, tables, &features));
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
  const Layout layout_;
  int64_t dim_;
};

class UpdateOp : public OpKernel {
 public:
  explicit UpdateOp(OpKernelConstruction* ctx) : OpKernel(ctx), layout_(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rules", &rules_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("settings", &settings_));
    OP_REQUIRES(ctx, settings_.size() == kSettings * rules_.size(),
                InvalidArgument("settings must have ", kSettings,
                                " entries for each table."));
    for (int rule : rules_) {
      OP_REQUIRES(ctx, rule >= kSgd && rule <= kFtrl,
                  InvalidArgument("rules: ", rule));
    }
    OP_REQUIRES(
        ctx, std::is_sorted(layout_.table_of.begin(), layout_.table_of.end()),
        InvalidArgument("table_of must be ascending."));
  }

  void Compute(OpKernelContext* ctx) override {
    Variables variables;
    OP_REQUIRES_OK(ctx, variables.Find(ctx, "states"));
    variables.LockToWrite();
    const Tensor* rates;
    OP_REQUIRES_OK(ctx, ctx->input("rates", &rates));
    const int num_tables = rules_.size();
    OP_REQUIRES(ctx, rates->NumElements() == num_tables,
                InvalidArgument(rates->NumElements(), " rates for ",
                                num_tables, " tables"));
    std::vector<Rows> shapes(num_tables);
    std::vector<TfrsTable> tables(num_tables);
    int v = 0;
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
        Rows shape;
        OP_REQUIRES_OK(ctx, ShapeOf(variables[v], &shape));
        if (k == 0) shapes[t] = shape;
        OP_REQUIRES(ctx,
                    shape.rows == shapes[t].rows && shape.dim == shapes[t].dim,
                    InvalidArgument("table ", t, ": a slot's shape differs"));
        pages_.Use(v, variables[v]);
        table.state[k] =
            const_cast<float*>(variables[v].flat<float>().data());
      }
      table.dim = shapes[t].dim;
    }
    OP_REQUIRES(ctx, v == variables.size(),
                InvalidArgument("states: too many variables"));
    std::vector<Feature> features;
    OP_REQUIRES_OK(ctx, ReadFeatures(ctx, layout_, num_tables, &features));
    OP_REQUIRES_OK(ctx, ReadGradients(ctx, shapes, &features));
    Buckets buckets;
    auto t0=std::chrono::steady_clock::now();//T
    OP_REQUIRES_OK(ctx, buckets.Sort(ctx, features, shapes));
    auto t1=std::chrono::steady_clock::now();//T
    OP_REQUIRES_OK(ctx, buckets.Update(ctx, Loops(), tables));
    auto t2=std::chrono::steady_clock::now();//T
    if(getenv("TFRS_T"))fprintf(stderr,"TT sort %.2f update %.2f\n",std::chrono::duration<double,std::milli>(t1-t0).count(),std::chrono::duration<double,std::milli>(t2-t1).count());//T
  }

 private:
  static constexpr int kSettings = 6;
  const Layout layout_;
  std::vector<int> rules_;
  std::vector<float> settings_;
  HugePages pages_;
};

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
    for (int f = 0; f < ids.size(); ++f) {
      Feature feature;
      feature.n = ids[f].NumElements();
      feature.wide = ids[f].dtype() == tensorflow::DT_INT64;
      feature.ids = ids[f].data();
      out->flat<bool>()(f) = Inside(feature, rows_[f]);
    }
  }

 private:
  std::vector<int64_t> rows_;
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
      .Attr("per_bag: list(int) = []")

TFRS_FEATURES(REGISTER_OP("TfrsEmbedLookup").Input("tables: N * resource"))
    .Output("vectors: M * T")
    .Attr("N: int >= 1")
    .Attr("T: {float, bfloat16, half} = DT_FLOAT")
    .Attr("dims: list(int)")
    .SetIsStateful()
    .SetShapeFn(VectorShapes);

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
    .Input("gradients: M * float")
    .Attr("N: int >= 1")
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

REGISTER_OP("TfrsEmbedLoops")
    .Output("name: string")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_KERNEL_BUILDER(Name("TfrsEmbedLookup").Device(DEVICE_CPU), LookupOp);
REGISTER_KERNEL_BUILDER(Name("TfrsEmbedCombine").Device(DEVICE_CPU),
                        CombineOp);
REGISTER_KERNEL_BUILDER(Name("TfrsEmbedSpread").Device(DEVICE_CPU), SpreadOp);
REGISTER_KERNEL_BUILDER(Name("TfrsEmbedUpdate").Device(DEVICE_CPU), UpdateOp);
REGISTER_KERNEL_BUILDER(Name("TfrsEmbedInside").Device(DEVICE_CPU), InsideOp);
REGISTER_KERNEL_BUILDER(Name("TfrsEmbedLoops").Device(DEVICE_CPU), LoopsOp);

}  // namespace tfrs_embed
