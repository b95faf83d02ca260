// Lookups of features in tables: in variables, or in rows that are an input.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "feature_inputs.h"
#include "id_checks.h"
#include "input_checks.h"
#include "lookups.h"
#include "loops.h"
#include "op.h"
#include "rows.h"
#include "table_shape.h"
#include "tensorflow/core/util/overflow.h"
#include "threads.h"
#include "variables.h"

namespace tfrs_embed {

using tensorflow::PartialTensorShape;

namespace {

// The shape of a feature's vectors: the given one, or else [count, dim]. An
// unknown dimension of the given shape follows from the others.
absl::Status VectorShape(const Feature& feature, int64_t dim,
                         const PartialTensorShape* given, TensorShape* shape) {
  TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape({feature.count, dim}, shape));
  if (given == nullptr) return absl::OkStatus();
  int64_t known = 1;  // Negative if the product is too large.
  for (int i = 0; i < given->dims(); ++i) {
    const int64_t size = given->dim_size(i);
    if (size >= 0) known = tensorflow::MultiplyWithoutOverflow(known, size);
  }
  const int64_t all = shape->num_elements();
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

// The type of an operation's vectors, and their shapes; none: [count, dim].
struct Vectors {
  tensorflow::DataType dtype = tensorflow::DT_FLOAT;
  std::vector<PartialTensorShape> shapes;

  // Reads the shapes of an operation's attribute.
  absl::Status ReadShapes(OpKernelConstruction* ctx, size_t features) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("shapes", &shapes));
    if (!shapes.empty() && shapes.size() != features) {
      return InvalidArgument("shapes must have an entry for each feature, or "
                             "none.");
    }
    return absl::OkStatus();
  }
};

// Allocates the features' vectors and describes the lookups that fill them.
// Adds up their cost.
absl::Status MakeLookups(OpKernelContext* ctx,
                         const std::vector<Feature>& features,
                         const Tables& tables, const Vectors& vectors,
                         std::vector<TfrsLookup>* lookups, int64_t* cost) {
  OpOutputList outputs;
  TF_RETURN_IF_ERROR(ctx->output_list("vectors", &outputs));
  lookups->resize(features.size());
  for (size_t f = 0; f < features.size(); ++f) {
    const Feature& feature = features[f];
    const TableShape& table = tables.shapes[feature.table];
    TensorShape shape;
    TF_RETURN_IF_ERROR(VectorShape(
        feature, table.dim, vectors.shapes.empty() ? nullptr : &vectors.shapes[f],
        &shape));
    Tensor* out;
    TF_RETURN_IF_ERROR(outputs.allocate(f, shape, &out));
    (*lookups)[f] =
        MakeLookup(feature, tables, vectors.dtype, out->data(), table.dim);
    *cost += LookupCost(feature, table.dim);
    // Threads share the ids, so no thread would write these vectors.
    if (feature.n == 0 && out->TotalBytes() > 0) {
      std::memset(out->data(), 0, out->TotalBytes());
    }
  }
  return absl::OkStatus();
}

// Runs the features' lookups of a cost. Ids must be below their feature's limit.
absl::Status RunLookups(OpKernelContext* ctx,
                        const std::vector<Feature>& features,
                        const std::vector<TfrsLookup>& lookups, int64_t cost,
                        const std::vector<int64_t>& limits,
                        const std::vector<std::string>& names) {
  const AllIds ids(features);
  if (ids.total() == 0) return absl::OkStatus();
  const TfrsLoops& loops = Loops();
  std::atomic<bool> bad{false};
  ParallelFor(
      ctx, ids.total(), cost / ids.total(), [&](int64_t begin, int64_t end) {
        ids.Each(begin, end, [&](size_t f, int64_t i, int64_t stop) {
          const Feature& feature = features[f];
          const int64_t last =
              stop == feature.n ? feature.count : feature.BagFrom(stop);
          const int64_t first = feature.BagFrom(i);
          if (BagsInside(feature, first, last, limits[f])) {
            loops.lookup(&lookups[f], first, last, /*prefetched=*/false);
          } else {
            bad = true;
          }
        });
      });
  return bad ? OutOfRange(features, limits, names) : absl::OkStatus();
}

absl::Status LookupFeatures(OpKernelContext* ctx,
                            const std::vector<Feature>& features,
                            const Tables& tables, const Vectors& vectors,
                            const IdLimits& id_limits) {
  std::vector<int64_t> limits;
  TF_RETURN_IF_ERROR(id_limits.Of(features, tables.shapes, &limits));
  std::vector<TfrsLookup> lookups;
  int64_t cost = 0;
  TF_RETURN_IF_ERROR(
      MakeLookups(ctx, features, tables, vectors, &lookups, &cost));
  return RunLookups(ctx, features, lookups, cost, limits, id_limits.names);
}

// Looks features up in variables.
class LookupOp : public OpKernel {
 public:
  explicit LookupOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, layout_.Read(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &vectors_.dtype));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("places", &places_));
    OP_REQUIRES_OK(ctx, vectors_.ReadShapes(ctx, layout_.table_of.size()));
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
    OP_REQUIRES_OK(ctx,
                   LookupFeatures(ctx, features, tables, vectors_, limits_));
  }

 private:
  FeatureLayout layout_;
  IntegerRows integers_;
  IdLimits limits_;
  std::vector<int> places_;
  Vectors vectors_;
  Variables::Cache cache_;
};

// Looks features up in an input: rows that another operation has gathered.
class CombineOp : public OpKernel {
 public:
  explicit CombineOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, layout_.Read(ctx));
    OP_REQUIRES_OK(ctx, GetEach(ctx, "dims", layout_.table_of.size(), "feature",
                                &dims_));
    OP_REQUIRES_OK(ctx, vectors_.ReadShapes(ctx, layout_.table_of.size()));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor* rows;
    OP_REQUIRES_OK(ctx, ctx->input("rows", &rows));
    std::vector<TableShape> shapes(1);
    OP_REQUIRES_OK(ctx, ReadShape(*rows, &shapes[0]));
    for (const int dim : dims_) {
      OP_REQUIRES_OK(ctx, CheckDim(0, shapes[0], dim));
    }
    std::vector<Feature> features;
    OP_REQUIRES_OK(ctx, ReadFeatures(ctx, layout_, 1, &features));
    const Tables tables = {{rows->data()}, shapes, {nullptr}};
    OP_REQUIRES_OK(ctx, LookupFeatures(ctx, features, tables, vectors_, {}));
  }

 private:
  FeatureLayout layout_;
  std::vector<int> dims_;
  Vectors vectors_;
};

// Reads rows of several tables of one width, numbered one table after the other.
class ReadRowsOp : public OpKernel {
 public:
  explicit ReadRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("places", &places_));
  }

  void Compute(OpKernelContext* ctx) override {
    Variables variables(&cache_);
    OP_REQUIRES_OK(ctx, variables.Find(ctx, "tables", places_));
    OP_REQUIRES_OK(ctx, variables.LockToRead());
    const std::vector<TableShape>& shapes = variables.shapes();
    for (size_t t = 0; t < shapes.size(); ++t) {
      OP_REQUIRES(ctx, shapes[t].type <= kFloat16 && shapes[t].dim == dim_,
                  InvalidArgument("table ", t, " must have rows of dim ", dim_,
                                  ", which are no integers"));
    }
    const Tables tables = {variables.values(), shapes,
                           std::vector<const float*>(shapes.size())};
    const Tensor* numbers;
    OP_REQUIRES_OK(ctx, ctx->input("rows", &numbers));
    Feature joint;
    joint.ids = numbers->data();
    joint.n = joint.count = numbers->NumElements();
    joint.wide = 1;
    std::vector<int64_t> rows;
    std::vector<Feature> features;
    OP_REQUIRES_OK(
        ctx, SplitByTable(joint, shapes.size(), shapes, &rows, &features));
    TensorShape shape;
    OP_REQUIRES_OK(ctx, TensorShape::BuildTensorShape({joint.n, dim_}, &shape));
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &out));
    const int64_t row = dim_ * tensorflow::DataTypeSize(dtype_);
    std::vector<TfrsLookup> lookups;
    for (const Feature& feature : features) {
      const int64_t first =
          static_cast<const int64_t*>(feature.ids) - rows.data();
      lookups.push_back(MakeLookup(feature, tables, dtype_,
                                   static_cast<char*>(out->data()) + first * row,
                                   dim_));
    }
    OP_REQUIRES_OK(ctx, RunLookups(ctx, features, lookups,
                                   LookupCost(joint, dim_),
                                   RowsOf(features, shapes), {}));
  }

 private:
  tensorflow::DataType dtype_;
  int64_t dim_;
  std::vector<int> places_;
  Variables::Cache cache_;
};

// Infers the shapes that are given, or else [count, dim].
absl::Status InferVectors(InferenceContext* c) {
  std::vector<int> dims;
  TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
  std::vector<PartialTensorShape> shapes;
  TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
  const size_t features = c->num_outputs();
  if (dims.size() != features ||
      (!shapes.empty() && shapes.size() != features)) {
    return InvalidArgument("dims must have an entry for each feature; shapes "
                           "too, or none.");
  }
  for (const int dim : dims) {
    if (dim < 0) return InvalidArgument("dims: ", dim);
  }
  for (size_t f = 0; f < features; ++f) {
    ShapeHandle shape = c->Matrix(InferenceContext::kUnknownDim, dims[f]);
    if (!shapes.empty()) {
      TF_RETURN_IF_ERROR(
          c->MakeShapeFromPartialTensorShape(shapes[f], &shape));
    }
    c->set_output(f, shape);
  }
  return absl::OkStatus();
}

}  // namespace

TFRS_FEATURES(REGISTER_OP("TfrsEmbedLookup").Input("tables: N * resource"))
    .Output("vectors: M * T")
    .Attr("N: int >= 1")
    .Attr("places: list(int) = []")
    .Attr("T: {float, bfloat16, half} = DT_FLOAT")
    .Attr("dims: list(int)")
    .Attr("shapes: list(shape) = []")
    .Attr("rows: list(int) = []")
    .Attr("names: list(string) = []")
    .Attr("scale_of: list(int) = []")
    .SetIsStateful()
    .SetShapeFn(InferVectors);

TFRS_FEATURES(REGISTER_OP("TfrsEmbedCombine").Input("rows: R"))
    .Output("vectors: M * float")
    .Attr("R: {float, bfloat16, half}")
    .Attr("dims: list(int)")
    .Attr("shapes: list(shape) = []")
    .SetShapeFn(InferVectors);

REGISTER_OP("TfrsEmbedReadRows")
    .Input("tables: N * resource")
    .Input("rows: int64")
    .Output("vectors: T")
    .Attr("N: int >= 1")
    .Attr("places: list(int) = []")
    .Attr("T: {float, bfloat16, half} = DT_FLOAT")
    .Attr("dim: int >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      c->set_output(0, c->Matrix(InferenceContext::kUnknownDim, dim));
      return absl::OkStatus();
    });

TFRS_KERNEL("TfrsEmbedReadRows", ReadRowsOp);
TFRS_KERNEL("TfrsEmbedLookup", LookupOp);
TFRS_KERNEL("TfrsEmbedCombine", CombineOp);

}  // namespace tfrs_embed
