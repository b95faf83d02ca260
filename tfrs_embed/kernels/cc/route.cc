// Unique keys, sorted by the shard that holds their rows.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "op.h"
#include "rows.h"

namespace tfrs_embed {

namespace {

constexpr int64_t kSlotsAhead = 8;

// A slot of the hash table that finds equal keys. The key is kept beside the
// number so that a comparison is one access to memory.
struct Slot {
  int64_t key;
  int32_t number;  // Among the unique keys; -1: empty.
};

// Numbers n keys, equal ones alike, by their first occurrence: index[i] is the
// number of keys[i], and unique[index[i]] is its key. Returns how many there
// are. `slots` is memory for 2^bits slots, twice as many as keys or more.
int32_t FindUnique(const int64_t* keys, int64_t n, int bits, Slot* slots,
                   int64_t* unique, int32_t* index) {
  const int64_t mask = (int64_t{1} << bits) - 1;
  std::memset(slots, 0xFF, (mask + 1) * sizeof(Slot));
  auto home = [=](int64_t key) { return tfrs_hash(key) >> (64 - bits); };
  int32_t u = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kSlotsAhead < n) {
      __builtin_prefetch(slots + home(keys[i + kSlotsAhead]), 1);
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
  return u;
}

// The owner and row of each unique key, sorted by owner.
struct Routes {
  int64_t* row;
  int32_t* owner;
  int64_t* counts;  // [world]: keys.
};

// Sorts u unique keys by their shard. Writes where each one went to `places`.
void SortByShard(const int64_t* unique, int32_t u, int64_t world,
                 const Routes& routes, int32_t* places) {
  // The remainder and quotient of floor division, for negative keys too.
  auto shard_of = [=](int64_t key) {
    const int64_t rest = key % world;
    return rest < 0 ? rest + world : rest;
  };
  std::vector<int64_t> next(world, 0);
  for (int32_t i = 0; i < u; ++i) ++next[shard_of(unique[i])];
  std::copy_n(next.data(), world, routes.counts);
  int64_t begin = 0;
  for (int64_t s = 0; s < world; ++s) {
    begin += std::exchange(next[s], begin);
  }
  for (int32_t i = 0; i < u; ++i) {
    const int64_t shard = shard_of(unique[i]);
    const int64_t place = next[shard]++;
    places[i] = place;
    // Rounded down; C++ rounds towards zero.
    routes.row[place] = unique[i] / world - (unique[i] % world < 0);
    routes.owner[place] = shard;
  }
}

class RouteOp : public OpKernel {
 public:
  explicit RouteOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("world", &world_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& input = ctx->input(0);
    const int64_t n = input.NumElements();
    OP_REQUIRES(ctx, n < int64_t{1} << 30,
                InvalidArgument(
                    "At most 2^30 - 1 keys can be routed at once, got ", n));
    Tensor *index_out, *row_out, *owner_out, *counts_out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({n}), &index_out));
    int32_t* index = index_out->flat<int32_t>().data();

    int bits = 4;
    while ((int64_t{1} << bits) < 2 * n) ++bits;
    const int64_t bytes = sizeof(Slot) << bits;
    Tensor slots_memory, keys_memory;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_temp(tensorflow::DT_UINT8,
                                      TensorShape({bytes}), &slots_memory));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT64,
                                           TensorShape({n}), &keys_memory));
    void* slots = slots_memory.flat<uint8_t>().data();
    int64_t* unique = keys_memory.flat<int64_t>().data();
    const int32_t u = FindUnique(input.flat<int64_t>().data(), n, bits,
                                 static_cast<Slot*>(slots), unique, index);

    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({u}), &row_out));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({u}), &owner_out));
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(3, TensorShape({world_}), &counts_out));
    const Routes routes = {row_out->flat<int64_t>().data(),
                           owner_out->flat<int32_t>().data(),
                           counts_out->flat<int64_t>().data()};
    if (world_ == 1) {
      std::copy_n(unique, u, routes.row);
      std::fill_n(routes.owner, u, 0);
      routes.counts[0] = u;
      return;
    }
    // The hash table isn't needed any more: its memory takes the places.
    int32_t* places = static_cast<int32_t*>(slots);
    SortByShard(unique, u, world_, routes, places);
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
    .SetShapeFn([](InferenceContext* c) {
      int64_t world;
      TF_RETURN_IF_ERROR(c->GetAttr("world", &world));
      c->set_output(0, c->input(0));
      c->set_output(1, c->Vector(c->kUnknownDim));
      c->set_output(2, c->Vector(c->kUnknownDim));
      c->set_output(3, c->Vector(world));
      return absl::OkStatus();
    });

TFRS_KERNEL("TfrsEmbedRoute", RouteOp);

}  // namespace tfrs_embed
