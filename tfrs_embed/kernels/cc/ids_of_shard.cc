// Of bags in a matrix, the ids whose rows are on one shard of their table.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "input_checks.h"
#include "op.h"
#include "threads.h"

namespace tfrs_embed {

namespace {

// The shard and row of an id, where there is a power of two of shards: a
// division takes longer than all the rest.
struct ByShift {
  uint64_t mask;
  int shift;
  uint64_t Shard(uint64_t id) const { return id & mask; }
  uint64_t Row(uint64_t id) const { return id >> shift; }
};

struct ByDivision {
  int32_t world;
  int32_t Shard(int32_t id) const { return id % world; }
  int32_t Row(int32_t id) const { return id / world; }
};

// A feature's columns of a matrix.
struct BagColumns {
  const float* ids;
  const float* weights;  // Null: none.
  int64_t stride;        // Of a row.
  int64_t bag_size;
};

int32_t IdAt(const float* ids, int64_t i) {
  int32_t id;
  std::memcpy(&id, ids + i, sizeof(id));
  return id;
}

// A negative id is none.
template <typename Split>
bool IsOf(int32_t id, const Split& split, uint64_t shard) {
  return (id >= 0) & (static_cast<uint64_t>(split.Shard(id)) == shard);
}

// Writes how many ids of each bag are on the shard to counts[bag].
template <typename Split>
void CountIds(const BagColumns& columns, const Split& split, uint64_t shard,
           int64_t begin, int64_t end, int32_t* counts) {
  for (int64_t bag = begin; bag < end; ++bag) {
    const float* ids = columns.ids + bag * columns.stride;
    int32_t count = 0;
    for (int64_t i = 0; i < columns.bag_size; ++i) {
      count += IsOf(IdAt(ids, i), split, shard);
    }
    counts[bag] = count;
  }
}

// Writes the rows, and the weights, of the ids that are on the shard.
template <typename Split>
void FillIds(const BagColumns& columns, const Split& split, uint64_t shard,
             int64_t begin, int64_t end, const int32_t* splits, int64_t* rows,
             float* weights) {
  // No processor foresees which ids are of this shard. So all are written, each
  // over the one before it if that isn't: here, where that harms no other bag.
  constexpr int64_t kBlock = 32;
  int64_t row[kBlock];
  float weight[kBlock];
  for (int64_t bag = begin; bag < end; ++bag) {
    const float* ids = columns.ids + bag * columns.stride;
    int64_t at = splits[bag];
    for (int64_t first = 0; first < columns.bag_size; first += kBlock) {
      const int64_t last = std::min(first + kBlock, columns.bag_size);
      int64_t found = 0;
      for (int64_t i = first; i < last; ++i) {
        const int32_t id = IdAt(ids, i);
        row[found] = split.Row(id);
        if (weights) {
          weight[found] = columns.weights[bag * columns.stride + i];
        }
        found += IsOf(id, split, shard);
      }
      std::copy_n(row, found, rows + at);
      if (weights) std::copy_n(weight, found, weights + at);
      at += found;
    }
  }
}

// The outputs of the operation.
struct ShardOutputs {
  OpOutputList rows, splits, weights;
  int next_weights = 0;
};

template <typename Split>
absl::Status Select(OpKernelContext* ctx, const BagColumns& columns, int64_t count,
                    const Split& split, uint64_t shard, int feature,
                    ShardOutputs* outputs) {
  Tensor *splits_out, *rows_out, *weights_out = nullptr;
  TF_RETURN_IF_ERROR(outputs->splits.allocate(
      feature, TensorShape({count + 1}), &splits_out));
  int32_t* splits = splits_out->flat<int32_t>().data();
  splits[0] = 0;
  const int64_t cost = 10 + 4 * columns.bag_size;
  ParallelFor(ctx, count, cost, [&](int64_t begin, int64_t end) {
    CountIds(columns, split, shard, begin, end, splits + 1);
  });
  for (int64_t bag = 0; bag < count; ++bag) splits[bag + 1] += splits[bag];
  TF_RETURN_IF_ERROR(outputs->rows.allocate(
      feature, TensorShape({splits[count]}), &rows_out));
  if (columns.weights) {
    TF_RETURN_IF_ERROR(outputs->weights.allocate(
        outputs->next_weights++, TensorShape({splits[count]}), &weights_out));
  }
  int64_t* rows = rows_out->flat<int64_t>().data();
  float* weights = weights_out ? weights_out->flat<float>().data() : nullptr;
  ParallelFor(ctx, count, cost, [&](int64_t begin, int64_t end) {
    FillIds(columns, split, shard, begin, end, splits, rows, weights);
  });
  return absl::OkStatus();
}

class IdsOfShardOp : public OpKernel {
 public:
  explicit IdsOfShardOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int m, num_weighted;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("M", &m));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("W", &num_weighted));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("world", &world_));
    const auto each_feature = [&](const char* name, auto* values) {
      return GetEach(ctx, name, m, "feature", values);
    };
    OP_REQUIRES_OK(ctx, each_feature("bag_sizes", &bag_sizes_));
    OP_REQUIRES_OK(ctx, each_feature("weighted", &weighted_));
    OP_REQUIRES_OK(ctx, each_feature("shards", &shards_));
    int found = 0;
    for (int f = 0; f < m; ++f) {
      OP_REQUIRES(ctx, shards_[f] >= 0 && shards_[f] < world_,
                  InvalidArgument("shard ", shards_[f], " of ", world_));
      OP_REQUIRES(ctx, bag_sizes_[f] > 0 && bag_sizes_[f] < 1 << 30,
                  InvalidArgument("bag_sizes: ", bag_sizes_[f]));
      width_ += bag_sizes_[f] * (weighted_[f] ? 2 : 1);
      found += weighted_[f];
    }
    OP_REQUIRES(ctx, found == num_weighted,
                InvalidArgument(found, " weighted features for W = ",
                                num_weighted));
    while (shift_ < 62 && int64_t{1} << shift_ < world_) ++shift_;
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& matrix = ctx->input(0);
    OP_REQUIRES(ctx, matrix.dims() == 2 && matrix.dim_size(1) == width_,
                InvalidArgument("a matrix of shape ",
                                matrix.shape().DebugString(), " for ", width_,
                                " columns"));
    OP_REQUIRES(ctx,
                matrix.NumElements() < std::numeric_limits<int32_t>::max(),
                InvalidArgument(matrix.NumElements(), " words are too many"));
    ShardOutputs outputs;
    OP_REQUIRES_OK(ctx, ctx->output_list("rows", &outputs.rows));
    OP_REQUIRES_OK(ctx, ctx->output_list("splits", &outputs.splits));
    OP_REQUIRES_OK(ctx, ctx->output_list("weights", &outputs.weights));
    const float* first = matrix.flat<float>().data();
    for (size_t f = 0; f < bag_sizes_.size(); ++f) {
      const int64_t size = bag_sizes_[f];
      BagColumns columns = {first, nullptr, width_, size};
      first += size;
      if (weighted_[f]) {
        columns.weights = first;
        first += size;
      }
      const ByShift by_shift = {static_cast<uint64_t>(world_ - 1), shift_};
      const ByDivision by_division = {world_};
      const auto select = [&](const auto& split) {
        return Select(ctx, columns, matrix.dim_size(0), split, shards_[f], f,
                      &outputs);
      };
      OP_REQUIRES_OK(ctx, int64_t{1} << shift_ == world_ ? select(by_shift)
                                                         : select(by_division));
    }
  }

 private:
  std::vector<int64_t> bag_sizes_, shards_;
  std::vector<bool> weighted_;
  int world_;  // Ids of 32 bits have no more shards.
  int64_t width_ = 0;
  int shift_ = 0;
};

}  // namespace

REGISTER_OP("TfrsEmbedIdsOfShard")
    .Input("matrix: float")
    .Output("rows: M * int64")
    .Output("splits: M * int32")
    .Output("weights: W * float")
    .Attr("M: int >= 1")
    .Attr("W: int >= 0")
    .Attr("bag_sizes: list(int)")
    .Attr("weighted: list(bool)")
    .Attr("world: int >= 1")
    .Attr("shards: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) {
        c->set_output(i, c->Vector(c->kUnknownDim));
      }
      return absl::OkStatus();
    });

TFRS_KERNEL("TfrsEmbedIdsOfShard", IdsOfShardOp);

}  // namespace tfrs_embed
