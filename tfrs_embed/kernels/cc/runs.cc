// Messages of bags: runs of their words moved as they lie in memory.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "input_checks.h"
#include "op.h"
#include "threads.h"

namespace tfrs_embed {

namespace {

// Copies runs of rows, one after the other, or each into a block of its own.
class CopyRunsOp : public OpKernel {
 public:
  explicit CopyRunsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("padded", &padded_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& values = ctx->input(0);
    const Tensor& starts = ctx->input(1);
    const Tensor& sizes = ctx->input(2);
    OP_REQUIRES(ctx, values.dims() >= 1,
                InvalidArgument("values must be rows, got a scalar"));
    OP_REQUIRES(ctx, starts.NumElements() == sizes.NumElements(),
                InvalidArgument("There are ", starts.NumElements(),
                                " starts and ", sizes.NumElements(),
                                " sizes"));
    int32_t capacity;
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "capacity", &capacity));
    const int64_t runs = sizes.NumElements();
    OP_REQUIRES(ctx, !padded_ || capacity >= 0,
                InvalidArgument("capacity is ", capacity));
    const int32_t* start = starts.flat<int32_t>().data();
    const int32_t* size = sizes.flat<int32_t>().data();
    // Where each run begins in what is returned.
    std::vector<int64_t> places(runs + 1, 0);
    for (int64_t r = 0; r < runs; ++r) {
      OP_REQUIRES(ctx,
                  start[r] >= 0 && size[r] >= 0 &&
                      int64_t{start[r]} + size[r] <= values.dim_size(0),
                  InvalidArgument("Run ", r, " has ", size[r], " rows from ",
                                  start[r], " on, of ", values.dim_size(0)));
      OP_REQUIRES(ctx, !padded_ || size[r] <= capacity,
                  InvalidArgument("Run ", r, " has ", size[r],
                                  " rows, and there is room for ", capacity));
      places[r + 1] = places[r] + (padded_ ? capacity : size[r]);
    }
    TensorShape shape = values.shape();
    OP_REQUIRES(ctx, shape.dims() < TensorShape::MaxDimensions(),
                InvalidArgument("values have ", shape.dims(), " dimensions"));
    OP_REQUIRES_OK(
        ctx, shape.SetDimWithStatus(0, padded_ ? capacity : places[runs]));
    if (padded_) OP_REQUIRES_OK(ctx, shape.InsertDimWithStatus(0, runs));
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &out));
    if (out->NumElements() == 0) return;
    const int64_t row = out->TotalBytes() / places[runs];
    const char* from = static_cast<const char*>(values.data());
    char* to = static_cast<char*>(out->data());
    constexpr int64_t kBytesPerCycle = 8;
    ParallelFor(
        ctx, places[runs], row / kBytesPerCycle + 1,
        [&](int64_t begin, int64_t end) {
          int64_t r =
              std::upper_bound(places.begin(), places.end(), begin) -
              places.begin() - 1;
          for (; begin < end; ++r) {
            const int64_t within = begin - places[r];
            const int64_t stop = std::min(end, places[r + 1]);
            const int64_t rows =
                std::min(std::max<int64_t>(size[r] - within, 0), stop - begin);
            std::memcpy(to + begin * row, from + (start[r] + within) * row,
                        rows * row);
            std::memset(to + (begin + rows) * row, 0,
                        (stop - begin - rows) * row);
            begin = stop;
          }
        });
  }

 private:
  bool padded_;
};

// Reads bags' lengths from messages, as where the bags of each piece begin.
class ReadSplitsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& words = ctx->input(0);
    const TensorShape& shape = ctx->input(1).shape();
    // Without a world there would be any number of pieces in no memory.
    OP_REQUIRES(ctx, shape.dims() == 2 && shape.dim_size(1) > 0,
                InvalidArgument("starts must be [pieces, world], got ",
                                shape.DebugString()));
    const int32_t* inputs[4];
    for (int i = 0; i < 4; ++i) {
      OP_REQUIRES(ctx, ctx->input(i + 1).shape() == shape,
                  InvalidArgument("Input ", i + 1, " must be ",
                                  shape.DebugString(), ", got ",
                                  ctx->input(i + 1).shape().DebugString()));
      inputs[i] = ctx->input(i + 1).flat<int32_t>().data();
    }
    const auto [starts, has_lengths, counts, numbers] = inputs;
    const int64_t pieces = shape.dim_size(0), world = shape.dim_size(1);
    const int64_t known = words.NumElements();
    std::vector<int64_t> places(pieces + 1, 0);
    for (int64_t p = 0; p < pieces; ++p) {
      places[p + 1] = places[p] + 1;
      int64_t ids = 0;
      for (int64_t i = p * world; i < (p + 1) * world; ++i) {
        OP_REQUIRES(ctx,
                    counts[i] >= 0 && numbers[i] >= 0 &&
                        (!has_lengths[i] ||
                         (starts[i] >= 0 &&
                          int64_t{starts[i]} + counts[i] <= known)),
                    InvalidArgument("Source ", i % world, " has ", counts[i],
                                    " bags of ", numbers[i], " ids at ",
                                    starts[i], " of ", known));
        places[p + 1] += counts[i];
        ids += numbers[i];
      }
      OP_REQUIRES(ctx, ids <= std::numeric_limits<int32_t>::max(),
                  InvalidArgument("Piece ", p, " has ", ids, " ids"));
    }
    Tensor* out;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({places[pieces]}), &out));
    const float* lengths = words.flat<float>().data();
    int32_t* splits = out->flat<int32_t>().data();
    for (int64_t p = 0; p < pieces; ++p) {
      int32_t* next = splits + places[p];
      int32_t end = 0;
      *next++ = 0;
      for (int64_t i = p * world; i < (p + 1) * world; ++i) {
        const int32_t count = counts[i];
        int64_t rest = numbers[i];
        if (has_lengths[i]) {
          for (int32_t b = 0; b < count; ++b) {
            int32_t length;
            std::memcpy(&length, lengths + starts[i] + b, sizeof(length));
            OP_REQUIRES(ctx, length >= 0 && length <= rest,
                        InvalidArgument("Bag ", b, " of source ", i % world,
                                        " has ", length, " ids of ", rest));
            rest -= length;
            *next++ = end += length;
          }
        } else if (count > 0) {
          const int32_t length = numbers[i] / count;
          for (int32_t b = 0; b < count; ++b) *next++ = end += length;
          rest -= int64_t{length} * count;
        }
        OP_REQUIRES(ctx, rest == 0,
                    InvalidArgument("The bags of source ", i % world, " have ",
                                    rest, " ids too few"));
      }
    }
  }
};

}  // namespace

REGISTER_OP("TfrsEmbedCopyRuns")
    .Input("values: T")
    .Input("starts: int32")
    .Input("sizes: int32")
    .Input("capacity: int32")
    .Output("runs: T")
    .Attr("T: {float, bfloat16, half}")
    .Attr("padded: bool")
    .SetShapeFn([](InferenceContext* c) {
      bool padded;
      TF_RETURN_IF_ERROR(c->GetAttr("padded", &padded));
      ShapeHandle rows, rest, shape;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &rows));
      TF_RETURN_IF_ERROR(c->Subshape(rows, 1, &rest));
      ShapeHandle first = c->Vector(c->kUnknownDim);
      if (padded) {
        first = c->Matrix(c->NumElements(c->input(2)), c->kUnknownDim);
      }
      TF_RETURN_IF_ERROR(c->Concatenate(first, rest, &shape));
      c->set_output(0, shape);
      return absl::OkStatus();
    });

REGISTER_OP("TfrsEmbedReadSplits")
    .Input("words: float")
    .Input("starts: int32")
    .Input("has_lengths: int32")
    .Input("counts: int32")
    .Input("numbers: int32")
    .Output("splits: int32")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->kUnknownDim));
      return absl::OkStatus();
    });

TFRS_KERNEL("TfrsEmbedCopyRuns", CopyRunsOp);
TFRS_KERNEL("TfrsEmbedReadSplits", ReadSplitsOp);

}  // namespace tfrs_embed
