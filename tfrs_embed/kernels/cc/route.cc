// Unique keys, sorted by the shard that holds their rows.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "rows.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/errors.h"

namespace tfrs_embed {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

constexpr int64_t kKeysAhead = 8;

// A slot of the hash table that finds equal keys. The key is kept beside the
// number so that a comparison is one access to memory.
struct Slot {
  int64_t key;
  int32_t number;  // Among the unique keys; -1: empty.
};

class RouteOp : public OpKernel {
 public:
  explicit RouteOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("world", &world_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& input = ctx->input(0);
    const int64_t* keys = input.flat<int64_t>().data();
    const int64_t n = input.NumElements();
    OP_REQUIRES(ctx, n < int64_t{1} << 30,
                tensorflow::errors::InvalidArgument(
                    "At most 2^30 - 1 keys can be routed at once, got ", n));
    Tensor *index_out, *row_out, *owner_out, *counts_out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({n}), &index_out));
    int32_t* index = index_out->flat<int32_t>().data();

    int bits = 4;
    while ((int64_t{1} << bits) < 2 * n) ++bits;
    const int64_t mask = (int64_t{1} << bits) - 1;
    Tensor slots_memory, keys_memory;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_temp(
                 tensorflow::DT_UINT8,
                 TensorShape({(mask + 1) * static_cast<int64_t>(sizeof(Slot))}),
                 &slots_memory));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT64,
                                           TensorShape({n}), &keys_memory));
    Slot* slots =
        reinterpret_cast<Slot*>(slots_memory.flat<uint8_t>().data());
    std::memset(slots, 0xFF, (mask + 1) * sizeof(Slot));
    int64_t* unique = keys_memory.flat<int64_t>().data();
    auto home = [&](int64_t key) { return tfrs_hash(key) >> (64 - bits); };
    int32_t u = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (i + kKeysAhead < n) {
        __builtin_prefetch(slots + home(keys[i + kKeysAhead]), 1);
      }
      int64_t at = home(keys[i]);
      while (slots[at].number >= 0 && slots[at].key != keys[i]) {
        at = (at + 1) & mask;
      }
      if (slots[at].number < 0) {
        slots[at] = {keys[i], u};
        unique[u++] = keys[i];
      }
      index[i] = slots[at].number;
    }

    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({u}), &row_out));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({u}), &owner_out));
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(3, TensorShape({world_}), &counts_out));
    int64_t* row = row_out->flat<int64_t>().data();
    int32_t* owner = owner_out->flat<int32_t>().data();
    int64_t* counts = counts_out->flat<int64_t>().data();
    if (world_ == 1) {
      std::copy_n(unique, u, row);
      std::fill_n(owner, u, 0);
      counts[0] = u;
      return;
    }
    // The remainder and quotient of floor division, for negative keys too.
    auto shard_of = [&](int64_t key) {
      const int64_t rest = key % world_;
      return rest < 0 ? rest + world_ : rest;
    };
    std::vector<int64_t> next(world_, 0);
    for (int32_t i = 0; i < u; ++i) ++next[shard_of(unique[i])];
    std::copy_n(next.data(), world_, counts);
    int64_t begin = 0;
    for (int64_t s = 0; s < world_; ++s) {
      begin += std::exchange(next[s], begin);
    }
    // The hash table is done with: its memory takes the places.
    int32_t* places = reinterpret_cast<int32_t*>(slots);
    for (int32_t i = 0; i < u; ++i) {
      const int64_t shard = shard_of(unique[i]);
      const int64_t place = next[shard]++;
      places[i] = place;
      // Rounded down; C++ rounds towards zero.
      row[place] = unique[i] / world_ - (unique[i] % world_ < 0);
      owner[place] = shard;
    }
    for (int64_t i = 0; i < n; ++i) index[i] = places[index[i]];
  }

 private:
  int64_t world_;
};

}  // namespace

REGISTER_OP("TfrsEmbedRoute")
    .Input("keys: int64")
    .Output("index: int32")
    .Output("row: int64")
    .Output("owner: int32")
    .Output("counts: int64")
    .Attr("world: int >= 1")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      int64_t world;
      TF_RETURN_IF_ERROR(c->GetAttr("world", &world));
      c->set_output(0, c->input(0));
      c->set_output(1, c->Vector(c->kUnknownDim));
      c->set_output(2, c->Vector(c->kUnknownDim));
      c->set_output(3, c->Vector(world));
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(
    Name("TfrsEmbedRoute").Device(tensorflow::DEVICE_CPU), RouteOp);

}  // namespace tfrs_embed
