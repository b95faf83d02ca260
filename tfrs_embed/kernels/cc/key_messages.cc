// Keys as messages to the shards that hold their rows, and back.
//
// A message is a number of keys, then these, then padding.

#include <algorithm>
#include <cstdint>

#include "op.h"

namespace tfrs_embed {

namespace {

class WriteKeysOp : public OpKernel {
 public:
  explicit WriteKeysOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const int64_t u = ctx->input(0).NumElements();
    const int64_t world = ctx->input(1).NumElements();
    const int64_t* keys = ctx->input(0).flat<int64_t>().data();
    const int64_t* counts = ctx->input(1).flat<int64_t>().data();
    OP_REQUIRES(ctx, ctx->input(2).NumElements() == 1,
                InvalidArgument("capacity must be a scalar"));
    const int64_t capacity = ctx->input(2).flat<int32_t>()(0);
    OP_REQUIRES(ctx, capacity >= 0, InvalidArgument("capacity < 0"));
    int64_t total = 0;
    for (int64_t r = 0; r < world; ++r) {
      OP_REQUIRES(ctx, counts[r] >= 0 && counts[r] <= capacity,
                  InvalidArgument(counts[r], " keys for shard ", r,
                                  ", whose message has room for ", capacity));
      total += counts[r];
    }
    OP_REQUIRES(ctx, total == u,
                InvalidArgument(u, " keys, of which the shards have ", total));
    Tensor *message_out, *position_out;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({world, capacity + 1}),
                                  &message_out));
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(1, TensorShape({u}), &position_out));
    int64_t* message = message_out->flat<int64_t>().data();
    int32_t* position = position_out->flat<int32_t>().data();
    int64_t first = 0;
    for (int64_t r = 0; r < world; ++r, message += capacity + 1) {
      const int64_t n = counts[r];
      message[0] = n;
      std::copy_n(keys + first, n, message + 1);
      std::fill_n(message + 1 + n, capacity - n, 0);
      for (int64_t i = 0; i < n; ++i) position[first + i] = r * capacity + i;
      first += n;
    }
  }
};

class ReadKeysOp : public OpKernel {
 public:
  explicit ReadKeysOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& input = ctx->input(0);
    OP_REQUIRES(ctx, input.dims() == 2 && input.dim_size(1) > 0,
                InvalidArgument("messages of shape ",
                                input.shape().DebugString()));
    const int64_t world = input.dim_size(0);
    const int64_t capacity = input.dim_size(1) - 1;
    const int64_t* message = input.flat<int64_t>().data();
    int64_t total = 0;
    for (int64_t r = 0; r < world; ++r) {
      const int64_t n = message[r * (capacity + 1)];
      OP_REQUIRES(ctx, n >= 0 && n <= capacity,
                  InvalidArgument(n, " keys in a message of ", capacity));
      total += n;
    }
    Tensor *keys_out, *mask_out, *places_out;
    const TensorShape all({world * capacity});
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, all, &keys_out));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, all, &mask_out));
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(2, TensorShape({total}), &places_out));
    int64_t* keys = keys_out->flat<int64_t>().data();
    bool* mask = mask_out->flat<bool>().data();
    int32_t* places = places_out->flat<int32_t>().data();
    for (int64_t r = 0; r < world; ++r) {
      const int64_t n = message[0];
      const int64_t first = r * capacity;
      std::copy_n(message + 1, capacity, keys + first);
      std::fill_n(mask + first, n, true);
      std::fill_n(mask + first + n, capacity - n, false);
      for (int64_t i = 0; i < n; ++i) *places++ = first + i;
      message += capacity + 1;
    }
  }
};

}  // namespace

REGISTER_OP("TfrsEmbedWriteKeys")
    .Input("keys: int64")
    .Input("counts: int64")
    .Input("capacity: int32")
    .Output("message: int64")
    .Output("position: int32")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(c->NumElements(c->input(1)), c->kUnknownDim));
      c->set_output(1, c->Vector(c->NumElements(c->input(0))));
      return absl::OkStatus();
    });

REGISTER_OP("TfrsEmbedReadKeys")
    .Input("message: int64")
    .Output("keys: int64")
    .Output("mask: bool")
    .Output("places: int32")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 3; ++i) c->set_output(i, c->Vector(c->kUnknownDim));
      return absl::OkStatus();
    });

TFRS_KERNEL("TfrsEmbedWriteKeys", WriteKeysOp);
TFRS_KERNEL("TfrsEmbedReadKeys", ReadKeysOp);

}  // namespace tfrs_embed
