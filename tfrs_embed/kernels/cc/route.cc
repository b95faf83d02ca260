// Unique keys, sorted by the shard that holds their rows.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "input_checks.h"
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

// Keys, and which table each is of; null: all are of one.
struct Keys {
  const int64_t* key;
  const int32_t* table;

  bool Same(int64_t i, int64_t j) const {
    return table == nullptr || table[i] == table[j];
  }

  uint64_t Hash(int64_t i) const {
    constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
    const uint64_t of_table = table == nullptr ? 0 : table[i] * kOdd;
    return tfrs_hash(key[i] ^ of_table);
  }
};

// Numbers n keys, equal ones of a table alike, by their first occurrence:
// index[i] is the number of key i, and first[index[i]] the first such key.
// Returns how many there are. `slots` is memory for 2^bits slots, twice as many
// as keys or more.
int32_t FindUnique(const Keys& keys, int64_t n, int bits, Slot* slots,
                   int32_t* first, int32_t* index) {
  const int64_t mask = (int64_t{1} << bits) - 1;
  std::memset(slots, 0xFF, (mask + 1) * sizeof(Slot));
  auto home = [&](int64_t i) { return keys.Hash(i) >> (64 - bits); };
  int32_t u = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kSlotsAhead < n) {
      __builtin_prefetch(slots + home(i + kSlotsAhead), 1);
    }
    const int64_t key = keys.key[i];
    int64_t at = home(i);
    while (slots[at].number >= 0 &&
           (slots[at].key != key || !keys.Same(first[slots[at].number], i))) {
      at = (at + 1) & mask;
    }
    if (slots[at].number < 0) {
      slots[at] = {key, u};
      first[u++] = i;
    }
    index[i] = slots[at].number;
  }
  return u;
}

// The owner and row of each unique key, sorted by owner, then by table.
struct Routes {
  int64_t* row;
  int32_t* owner;
  int64_t* counts;  // [world, tables]: keys.
};

// Sorts u unique keys by their shard and table. Writes where each one went to
// `places`.
void SortByShard(const Keys& keys, const int32_t* first, int32_t u,
                 int64_t world, int64_t tables, const Routes& routes,
                 int32_t* places) {
  // The remainder of floor division, for negative keys too.
  auto shard_of = [=](int64_t key) {
    const int64_t rest = key % world;
    return rest < 0 ? rest + world : rest;
  };
  auto pile_of = [&](int64_t shard, int64_t i) {
    return keys.table == nullptr ? shard : shard * tables + keys.table[i];
  };
  std::vector<int64_t> next(world * tables, 0);
  for (int32_t k = 0; k < u; ++k) {
    const int64_t i = first[k];
    ++next[pile_of(shard_of(keys.key[i]), i)];
  }
  std::copy(next.begin(), next.end(), routes.counts);
  int64_t begin = 0;
  for (int64_t& each : next) begin += std::exchange(each, begin);
  for (int32_t k = 0; k < u; ++k) {
    const int64_t key = keys.key[first[k]];
    const int64_t shard = shard_of(key);
    const int64_t place = next[pile_of(shard, first[k])]++;
    places[k] = place;
    // Rounded down; C++ rounds towards zero.
    routes.row[place] = key / world - (key % world < 0);
    routes.owner[place] = shard;
  }
}

// Reads the numbers of shards and of tables. Each pair of them has a count.
template <typename Context>
absl::Status ReadSizes(Context* ctx, int64_t* world, int64_t* tables) {
  constexpr int64_t kMostCounts = int64_t{1} << 26;
  TF_RETURN_IF_ERROR(ctx->GetAttr("world", world));
  TF_RETURN_IF_ERROR(ctx->GetAttr("tables", tables));
  if (*world > 0 && *tables > 0 && *tables <= kMostCounts / *world) {
    return absl::OkStatus();
  }
  return InvalidArgument("world ", *world, " times tables ", *tables,
                         " must be in [1, ", kMostCounts, "]");
}

class RouteOp : public OpKernel {
 public:
  explicit RouteOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadSizes(ctx, &world_, &tables_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& input = ctx->input(0);
    const int64_t n = input.NumElements();
    OP_REQUIRES(ctx, n < int64_t{1} << 30,
                InvalidArgument(
                    "At most 2^30 - 1 keys can be routed at once, got ", n));
    Keys keys = {input.flat<int64_t>().data(), nullptr};
    if (tables_ > 1) {
      OP_REQUIRES_OK(ctx,
                     ReadTableOf(ctx->input(1), n, tables_, &keys.table));
    }
    Tensor *index_out, *row_out, *owner_out, *counts_out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({n}), &index_out));
    int32_t* index = index_out->flat<int32_t>().data();

    int bits = 4;
    while ((int64_t{1} << bits) < 2 * n) ++bits;
    const int64_t bytes = sizeof(Slot) << bits;
    Tensor slots_memory, firsts_memory;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_temp(tensorflow::DT_UINT8,
                                      TensorShape({bytes}), &slots_memory));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT32,
                                           TensorShape({n}), &firsts_memory));
    void* slots = slots_memory.flat<uint8_t>().data();
    int32_t* first = firsts_memory.flat<int32_t>().data();
    const int32_t u =
        FindUnique(keys, n, bits, static_cast<Slot*>(slots), first, index);

    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({u}), &row_out));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({u}), &owner_out));
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(
                            3, TensorShape({world_, tables_}), &counts_out));
    const Routes routes = {row_out->flat<int64_t>().data(),
                           owner_out->flat<int32_t>().data(),
                           counts_out->flat<int64_t>().data()};
    if (world_ * tables_ == 1) {
      for (int32_t k = 0; k < u; ++k) routes.row[k] = keys.key[first[k]];
      std::fill_n(routes.owner, u, 0);
      routes.counts[0] = u;
      return;
    }
    // The hash table isn't needed any more: its memory takes the places.
    int32_t* places = static_cast<int32_t*>(slots);
    SortByShard(keys, first, u, world_, tables_, routes, places);
    for (int64_t i = 0; i < n; ++i) index[i] = places[index[i]];
  }

 private:
  int64_t world_, tables_;
};

}  // namespace

REGISTER_OP("TfrsEmbedRoute")
    .Input("keys: int64")
    .Input("table_of: int32")
    .Output("index: int32")
    .Output("row: int64")
    .Output("owner: int32")
    .Output("counts: int64")
    .Attr("world: int >= 1")
    .Attr("tables: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      int64_t world, tables;
      TF_RETURN_IF_ERROR(ReadSizes(c, &world, &tables));
      c->set_output(0, c->Vector(c->NumElements(c->input(0))));
      c->set_output(1, c->Vector(c->kUnknownDim));
      c->set_output(2, c->Vector(c->kUnknownDim));
      c->set_output(3, c->Matrix(world, tables));
      return absl::OkStatus();
    });

TFRS_KERNEL("TfrsEmbedRoute", RouteOp);

}  // namespace tfrs_embed
