// Keys as messages to the shards that hold their rows, and back.
//
// A message is the number of each table's keys, then these, then padding.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "input_checks.h"
#include "op.h"

namespace tfrs_embed {

namespace {

// The sum of a message's numbers of keys; false: they are not for its capacity.
bool SumOfCounts(const int64_t* counts, int64_t tables, int64_t capacity,
                 int64_t* sum) {
  *sum = 0;
  for (int64_t t = 0; t < tables; ++t) {
    if (counts[t] < 0 || counts[t] > capacity - *sum) return false;
    *sum += counts[t];
  }
  return true;
}

// Checks that places in messages to or from shards are numbers of 32 bits.
absl::Status CheckPlaces(int64_t world, int64_t capacity) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (world == 0 || capacity <= kMost / world) return absl::OkStatus();
  return InvalidArgument(world, " messages of ", capacity,
                         " keys are more than ", kMost, " keys.");
}

class WriteKeysOp : public OpKernel {
 public:
  explicit WriteKeysOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& counts_in = ctx->input(1);
    OP_REQUIRES(ctx, counts_in.dims() == 2 && counts_in.dim_size(1) > 0,
                InvalidArgument("counts of shape ",
                                counts_in.shape().DebugString()));
    int64_t u;
    const int64_t* keys;
    OP_REQUIRES_OK(ctx, ReadVector(ctx, "keys", &u, &keys));
    const int64_t world = counts_in.dim_size(0);
    const int64_t tables = counts_in.dim_size(1);
    const int64_t* counts = counts_in.flat<int64_t>().data();
    int32_t room;
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "capacity", &room));
    const int64_t capacity = room;
    OP_REQUIRES(ctx, capacity >= 0, InvalidArgument("capacity < 0"));
    OP_REQUIRES_OK(ctx, CheckPlaces(world, capacity));
    std::vector<int64_t> sizes(world);
    int64_t total = 0;
    for (int64_t r = 0; r < world; ++r) {
      OP_REQUIRES(ctx,
                  SumOfCounts(counts + r * tables, tables, capacity, &sizes[r]),
                  InvalidArgument("keys for shard ", r,
                                  ", whose message has room for ", capacity));
      total += sizes[r];
    }
    OP_REQUIRES(ctx, total == u,
                InvalidArgument(u, " keys, of which the shards have ", total));
    Tensor *message_out, *position_out;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({world, tables + capacity}),
                                  &message_out));
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(1, TensorShape({u}), &position_out));
    int64_t* message = message_out->flat<int64_t>().data();
    int32_t* position = position_out->flat<int32_t>().data();
    int64_t first = 0;
    for (int64_t r = 0; r < world; ++r) {
      const int64_t n = sizes[r];
      message = std::copy_n(counts + r * tables, tables, message);
      message = std::copy_n(keys + first, n, message);
      message = std::fill_n(message, capacity - n, 0);
      for (int64_t i = 0; i < n; ++i) position[first + i] = r * capacity + i;
      first += n;
    }
  }
};

class ReadKeysOp : public OpKernel {
 public:
  explicit ReadKeysOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tables", &tables_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& input = ctx->input(0);
    OP_REQUIRES(ctx, input.dims() == 2 && input.dim_size(1) >= tables_,
                InvalidArgument("messages of shape ",
                                input.shape().DebugString()));
    const int64_t world = input.dim_size(0);
    const int64_t capacity = input.dim_size(1) - tables_;
    OP_REQUIRES_OK(ctx, CheckPlaces(world, capacity));
    const int64_t* message = input.flat<int64_t>().data();
    int64_t total = 0;
    for (int64_t r = 0; r < world; ++r) {
      int64_t n;
      OP_REQUIRES(ctx,
                  SumOfCounts(message + r * (tables_ + capacity), tables_,
                              capacity, &n),
                  InvalidArgument("too many keys in a message of ", capacity));
      total += n;
    }
    Tensor *keys_out, *table_out, *places_out;
    const TensorShape all({world * capacity});
    const TensorShape told_apart({tables_ > 1 ? world * capacity : 0});
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, all, &keys_out));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, told_apart, &table_out));
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(2, TensorShape({total}), &places_out));
    int64_t* keys = keys_out->flat<int64_t>().data();
    int32_t* table = table_out->flat<int32_t>().data();
    int32_t* places = places_out->flat<int32_t>().data();
    for (int64_t r = 0; r < world; ++r) {
      const int64_t first = r * capacity;
      int64_t n = 0;
      for (int64_t t = 0; t < tables_; ++t) {
        if (tables_ > 1) std::fill_n(table + first + n, message[t], t);
        n += message[t];
      }
      if (tables_ > 1) std::fill_n(table + first + n, capacity - n, 0);
      std::copy_n(message + tables_, capacity, keys + first);
      for (int64_t i = 0; i < n; ++i) *places++ = first + i;
      message += tables_ + capacity;
    }
  }

 private:
  int64_t tables_;
};

}  // namespace

REGISTER_OP("TfrsEmbedWriteKeys")
    .Input("keys: int64")
    .Input("counts: int64")
    .Input("capacity: int32")
    .Output("message: int64")
    .Output("position: int32")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle counts;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &counts));
      c->set_output(0, c->Matrix(c->Dim(counts, 0), c->kUnknownDim));
      c->set_output(1, c->Vector(c->NumElements(c->input(0))));
      return absl::OkStatus();
    });

REGISTER_OP("TfrsEmbedReadKeys")
    .Input("message: int64")
    .Attr("tables: int >= 1")
    .Output("keys: int64")
    .Output("table_of: int32")
    .Output("places: int32")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 3; ++i) c->set_output(i, c->Vector(c->kUnknownDim));
      return absl::OkStatus();
    });

TFRS_KERNEL("TfrsEmbedWriteKeys", WriteKeysOp);
TFRS_KERNEL("TfrsEmbedReadKeys", ReadKeysOp);

}  // namespace tfrs_embed
