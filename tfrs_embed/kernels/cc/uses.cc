#include "uses.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>

#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/platform/errors.h"

namespace tfrs_embed {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

// A bucket's uses and what groups them stay in the first caches.
constexpr int64_t kUsesPerBucket = 512;
// A thread sorts at least so many ids; fewer cost more to hand over.
constexpr int64_t kIdsPerThread = 8192;

// The logarithm of the number of buckets for n uses.
int BucketBits(int64_t n) {
  int bits = 0;
  while (bits < 20 && (n >> bits) > kUsesPerBucket) ++bits;
  return bits;
}

int64_t BucketOf(int64_t row, int bits) {
  return tfrs_hash(row) >> 1 >> (63 - bits);
}

// Memory of the step, without a check of its own.
absl::Status Allocate(OpKernelContext* ctx, int64_t bytes, Tensor* memory) {
  return ctx->allocate_temp(tensorflow::DT_UINT8, TensorShape({bytes}),
                            memory);
}

}  // namespace

void ParallelFor(OpKernelContext* ctx, int64_t total, int64_t cost,
                 std::function<void(int64_t, int64_t)> fn) {
  ctx->device()->tensorflow_cpu_worker_threads()->workers->ParallelFor(
      total, cost, std::move(fn));
}

absl::Status Buckets::Sort(OpKernelContext* ctx,
                           const std::vector<Feature>& features,
                           const std::vector<Rows>& tables) {
  // Where each feature's ids begin among all, and each table's buckets.
  std::vector<int64_t> starts(features.size() + 1, 0);
  std::vector<int64_t> uses_of(tables.size(), 0);
  bool factors = false;
  for (size_t f = 0; f < features.size(); ++f) {
    starts[f + 1] = starts[f] + features[f].n;
    uses_of[features[f].table] += features[f].n;
    factors |= features[f].weights != nullptr || features[f].scale != nullptr;
  }
  const int64_t n = starts.back();
  std::vector<int> bits(tables.size());
  std::vector<int64_t> first_bucket(tables.size() + 1, 0);
  for (size_t t = 0; t < tables.size(); ++t) {
    bits[t] = BucketBits(uses_of[t]);
    first_bucket[t + 1] = first_bucket[t] + (int64_t{1} << bits[t]);
  }
  const int64_t num_buckets = first_bucket.back();

  const int threads =
      ctx->device()->tensorflow_cpu_worker_threads()->num_threads;
  const int64_t parts =
      std::max<int64_t>(1, std::min<int64_t>(threads, n / kIdsPerThread));
  std::vector<int64_t> places(parts * num_buckets, 0);
  std::atomic<int64_t> bad{std::numeric_limits<int64_t>::max()};
  auto each = [&](int64_t part, auto&& visit) {
    const int64_t begin = n * part / parts, end = n * (part + 1) / parts;
    size_t f = std::upper_bound(starts.begin(), starts.end(), begin) -
               starts.begin() - 1;
    for (int64_t i = begin; i < end;) {
      while (starts[f + 1] <= i) ++f;
      const int64_t stop = std::min(end, starts[f + 1]);
      visit(features[f], i - starts[f], stop - starts[f], starts[f]);
      i = stop;
    }
  };
  auto in_parts = [&](std::function<void(int64_t)> run) {
    if (parts == 1) return run(0);
    ParallelFor(ctx, parts, 1 << 20, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) run(part);
    });
  };
  in_parts([&](int64_t part) {
    int64_t* counts = places.data() + part * num_buckets;
    each(part, [&](const Feature& feature, int64_t begin, int64_t end,
                   int64_t start) {
      const uint64_t rows = tables[feature.table].rows;
      const int b = bits[feature.table];
      int64_t* mine = counts + first_bucket[feature.table];
      for (int64_t i = begin; i < end; ++i) {
        const int64_t id = feature.id(i);
        if (static_cast<uint64_t>(id) < rows) {
          ++mine[BucketOf(id, b)];
        } else {
          int64_t before = bad.load();
          while (start + i < before &&
                 !bad.compare_exchange_weak(before, start + i)) {
          }
          return;
        }
      }
    });
  });
  if (bad.load() < n) {
    const size_t f = std::upper_bound(starts.begin(), starts.end(),
                                      bad.load()) -
                     starts.begin() - 1;
    const Feature& feature = features[f];
    return tensorflow::errors::InvalidArgument(
        "feature ", f, ": id ", feature.id(bad.load() - starts[f]),
        " is out of range; the table has ", tables[feature.table].rows,
        " rows.");
  }

  // A part's uses of a bucket come after those of the parts before it.
  buckets_.clear();
  largest_ = 0;
  int64_t place = 0;
  size_t table = 0;
  for (int64_t b = 0; b < num_buckets; ++b) {
    while (first_bucket[table + 1] <= b) ++table;
    const int64_t begin = place;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t count = places[part * num_buckets + b];
      places[part * num_buckets + b] = place;
      place += count;
    }
    if (place > begin) {
      buckets_.push_back({static_cast<int>(table), begin, place});
      largest_ = std::max(largest_, place - begin);
    }
  }
  total_ = place;
  TF_RETURN_IF_ERROR(Allocate(ctx, total_ * sizeof(TfrsUse), &memory_));
  uses_ = reinterpret_cast<TfrsUse*>(memory_.flat<uint8_t>().data());
  factors_ = nullptr;
  if (factors) {
    TF_RETURN_IF_ERROR(Allocate(ctx, total_ * sizeof(float), &coefficients_));
    factors_ = reinterpret_cast<float*>(coefficients_.flat<uint8_t>().data());
  }
  in_parts([&](int64_t part) {
    int64_t* at = places.data() + part * num_buckets;
    each(part, [&](const Feature& feature, int64_t begin, int64_t end,
                   int64_t) {
      const int64_t dim = tables[feature.table].dim;
      const int b = bits[feature.table];
      int64_t* mine = at + first_bucket[feature.table];
      for (int64_t i = begin; i < end; ++i) {
        const int64_t id = feature.id(i);
        const int64_t to = mine[BucketOf(id, b)]++;
        const int64_t bag = feature.bag            ? feature.bag[i]
                            : feature.per_bag == 1 ? i
                                                   : i / feature.per_bag;
        uses_[to] = {id, feature.gradient + bag * dim};
        if (factors) {
          factors_[to] = (feature.weights ? feature.weights[i] : 1.0f) *
                         (feature.scale ? feature.scale[bag] : 1.0f);
        }
      }
    });
  });
  return absl::OkStatus();
}

absl::Status Buckets::Update(OpKernelContext* ctx, const TfrsLoops& loops,
                             const std::vector<TfrsTable>& tables) const {
  if (total_ == 0) return absl::OkStatus();
  uint32_t heads = 16;
  while (heads < 2 * largest_) heads *= 2;
  int64_t dim = 0;
  for (const TfrsTable& table : tables) dim = std::max(dim, table.dim);
  const int64_t words = heads + 3 * largest_ + dim;
  const int64_t cost =
      total_ / static_cast<int64_t>(buckets_.size()) * (100 + 8 * dim);
  ParallelFor(ctx, buckets_.size(), cost, [&](int64_t begin, int64_t end) {
    // Not a vector, which would fill all of it for the largest bucket's sake.
    std::unique_ptr<uint32_t[]> room(new uint32_t[words]);
    TfrsGroups groups;
    groups.heads = room.get();
    groups.next = groups.heads + heads;
    groups.first = groups.next + largest_;
    groups.last = groups.first + largest_;
    groups.sum = reinterpret_cast<float*>(groups.last + largest_);
    for (int64_t b = begin; b < end; ++b) {
      const Span& bucket = buckets_[b];
      const int64_t n = bucket.end - bucket.begin;
      uint32_t size = 16;
      while (size < 2 * n) size *= 2;
      loops.update(&tables[bucket.table], uses_ + bucket.begin,
                   factors_ ? factors_ + bucket.begin : nullptr, n, size - 1,
                   &groups);
    }
  });
  return absl::OkStatus();
}

}  // namespace tfrs_embed
