#include "buckets.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "rows.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"
#include "threads.h"

namespace tfrs_embed {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

// A bucket's uses and what groups them stay in the first caches.
constexpr int64_t kUsesPerBucket = 512;
// What is used so often is shared among threads, among so many at most.
constexpr int64_t kUsesPerShare = 4096;
constexpr int64_t kMostShares = 64;
// Sums of all rows of so many values stay in the second cache.
constexpr int64_t kSmallTable = 32768;
// A thread updates at least so many values.
constexpr int64_t kValuesPerThread = 8192;
// A thread sorts at least so many ids; fewer cost more to hand over.
constexpr int64_t kIdsPerThread = 8192;

// Ranges of rows are counted this much finer than buckets, to make buckets of
// about one size of them though ids crowd in some ranges.
constexpr int64_t kRangesPerBucket = 8;

// A table's rows in ranges of 2^shift.
struct Ranges {
  int shift = 0;
  int64_t first = 0;  // Among the ranges of all tables.
  int64_t count = 1;

  Ranges(int64_t rows, int64_t uses) {
    const int64_t most = uses <= kUsesPerBucket
                             ? 1
                             : kRangesPerBucket * (uses / kUsesPerBucket);
    while (shift < 62 && (rows - 1) >> shift >= most) ++shift;
    count = rows > 0 ? ((rows - 1) >> shift) + 1 : 1;
  }
};

// Whether all ids are in [0, last].
template <typename T>
bool AllInside(const void* data, int64_t begin, int64_t end, T last) {
  // As unsigned numbers, whose differences are all defined. The sign tells: of
  // the id, or of how far it is from the last.
  using U = std::make_unsigned_t<T>;
  const U* ids = static_cast<const U*>(data);
  U signs = 0;
  for (int64_t i = begin; i < end; ++i) {
    signs |= ids[i] | (static_cast<U>(last) - ids[i]);
  }
  return static_cast<T>(signs) >= 0;
}

// Memory of the step, without a check of its own.
absl::Status Allocate(OpKernelContext* ctx, int64_t bytes, Tensor* memory) {
  return ctx->allocate_temp(tensorflow::DT_UINT8, TensorShape({bytes}),
                            memory);
}

}  // namespace

absl::Status ShapeOf(const Tensor& table, TableShape* shape) {
  if (table.dims() != 2 || table.dtype() != tensorflow::DT_FLOAT) {
    return tensorflow::errors::InvalidArgument(
        "A table must be float32 of rank 2, got ",
        tensorflow::DataTypeString(table.dtype()), " ",
        table.shape().DebugString());
  }
  *shape = {table.dim_size(0), table.dim_size(1)};
  return absl::OkStatus();
}

bool Inside(const Feature& feature, int64_t begin, int64_t end, int64_t rows) {
  if (begin == end) return true;
  if (rows == 0) return false;
  if (feature.wide) {
    return AllInside<int64_t>(feature.ids, begin, end, rows - 1);
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  return AllInside<int32_t>(feature.ids, begin, end,
                            std::min(rows - 1, kMost));
}

absl::Status OutOfRange(const std::vector<Feature>& features,
                        const std::vector<int64_t>& rows,
                        const std::vector<std::string>& names) {
  for (size_t f = 0; f < features.size(); ++f) {
    for (int64_t i = 0; i < features[f].n; ++i) {
      const int64_t id = features[f].id(i);
      if (id >= 0 && id < rows[f]) continue;
      return tensorflow::errors::InvalidArgument(
          names.empty() ? absl::StrCat("feature ", f) : names[f], ": id ", id,
          " is out of range; the table has ", rows[f],
          " rows, valid ids are 0 to ", rows[f] - 1, ".");
    }
  }
  return tensorflow::errors::Internal("ids changed while they were read");
}

absl::Status CheckIds(OpKernelContext* ctx,
                      const std::vector<Feature>& features,
                      const std::vector<int64_t>& rows,
                      const std::vector<std::string>& names) {
  const AllIds ids(features);
  std::atomic<bool> found{false};
  ParallelFor(ctx, ids.total(), 2, [&](int64_t begin, int64_t end) {
    ids.Each(begin, end, [&](size_t f, int64_t first, int64_t last) {
      if (!Inside(features[f], first, last, rows[f])) found = true;
    });
  });
  return found ? OutOfRange(features, rows, names) : absl::OkStatus();
}

std::vector<int64_t> RowsOf(const std::vector<Feature>& features,
                            const std::vector<TableShape>& tables) {
  std::vector<int64_t> rows;
  for (const Feature& feature : features) {
    rows.push_back(tables[feature.table].rows);
  }
  return rows;
}

absl::Status Buckets::Sort(OpKernelContext* ctx,
                           const std::vector<Feature>& features,
                           const std::vector<TableShape>& tables) {
  TF_RETURN_IF_ERROR(CheckIds(ctx, features, RowsOf(features, tables)));
  const AllIds ids(features);
  const int64_t n = ids.total();
  std::vector<int64_t> uses_of(tables.size(), 0);
  bool factors = false;
  for (const Feature& feature : features) {
    uses_of[feature.table] += feature.n;
    factors |= feature.weights != nullptr || feature.scale != nullptr;
  }
  const int64_t threads = NumThreads(ctx);
  std::vector<Ranges> ranges;
  std::vector<int> small_of(tables.size(), -1);
  small_.clear();
  int64_t num_ranges = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    ranges.emplace_back(tables[t].rows, uses_of[t]);
    // One thread's work, so not where there is little else to do.
    const bool small = tables[t].rows * tables[t].dim <= kSmallTable &&
                       tables[t].rows <= 2 * uses_of[t] &&
                       uses_of[t] <= std::max(n / threads, kUsesPerShare);
    if (small) {
      small_of[t] = small_.size();
      small_.push_back({static_cast<int>(t), tables[t].rows, {}});
      ranges[t].count = 0;
    }
    ranges[t].first = num_ranges;
    num_ranges += ranges[t].count;
  }

  const int64_t parts =
      std::max<int64_t>(1, std::min<int64_t>(threads, n / kIdsPerThread));
  std::vector<int64_t> counts(parts * num_ranges, 0);
  auto each = [&](int64_t part, auto&& visit) {
    ids.Each(n * part / parts, n * (part + 1) / parts, visit);
  };
  auto in_parts = [&](std::function<void(int64_t)> run) {
    if (parts == 1) return run(0);
    ParallelFor(ctx, parts, 1 << 20, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) run(part);
    });
  };
  in_parts([&](int64_t part) {
    int64_t* of_part = counts.data() + part * num_ranges;
    each(part, [&](size_t f, int64_t begin, int64_t end) {
      const Feature& feature = features[f];
      if (small_of[feature.table] >= 0) return;
      const int shift = ranges[feature.table].shift;
      int64_t* mine = of_part + ranges[feature.table].first;
      for (int64_t i = begin; i < end; ++i) ++mine[feature.id(i) >> shift];
    });
  });

  for (const Feature& feature : features) {
    const int small = small_of[feature.table];
    if (small >= 0) small_[small].features.push_back(feature);
  }

  // Neighbouring ranges become a bucket: rows that are updated together are
  // near each other, which spares the processor much of finding their pages.
  buckets_.clear();
  std::vector<int32_t> bucket_of(num_ranges);
  total_ = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    const Ranges& mine = ranges[t];
    bool open = false;
    for (int64_t k = 0; k < mine.count; ++k) {
      int64_t uses = 0;
      for (int64_t part = 0; part < parts; ++part) {
        uses += counts[part * num_ranges + mine.first + k];
      }
      if (uses == 0) continue;
      if (open) {
        const Span& last = buckets_.back();
        open = last.end - last.begin + uses <= kUsesPerBucket;
      }
      if (!open) {
        buckets_.push_back({static_cast<int>(t), total_, total_, 0});
        open = true;
      }
      total_ += uses;
      buckets_.back().end = total_;
      buckets_.back().rows += int64_t{1} << mine.shift;
      bucket_of[mine.first + k] = buckets_.size() - 1;
    }
  }
  // A part's uses of a bucket come after those of the parts before it.
  const int64_t num_buckets = buckets_.size();
  std::vector<int64_t> places(parts * num_buckets, 0);
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t k = 0; k < num_ranges; ++k) {
      const int64_t uses = counts[part * num_ranges + k];
      if (uses) places[part * num_buckets + bucket_of[k]] += uses;
    }
  }
  for (int64_t b = 0; b < num_buckets; ++b) {
    int64_t place = buckets_[b].begin;
    for (int64_t part = 0; part < parts; ++part) {
      std::swap(place, places[part * num_buckets + b]);
      place += places[part * num_buckets + b];
    }
  }
  TF_RETURN_IF_ERROR(Allocate(ctx, total_ * sizeof(TfrsGradientRef), &memory_));
  uses_ = reinterpret_cast<TfrsGradientRef*>(memory_.flat<uint8_t>().data());
  factors_ = nullptr;
  if (factors) {
    TF_RETURN_IF_ERROR(Allocate(ctx, total_ * sizeof(float), &coefficients_));
    factors_ = reinterpret_cast<float*>(coefficients_.flat<uint8_t>().data());
  }
  in_parts([&](int64_t part) {
    int64_t* at = places.data() + part * num_buckets;
    each(part, [&](size_t f, int64_t begin, int64_t end) {
      const Feature& feature = features[f];
      if (small_of[feature.table] >= 0) return;
      const int shift = ranges[feature.table].shift;
      const int32_t* mine = bucket_of.data() + ranges[feature.table].first;
      // Bags without ids come before the one that has this id.
      int64_t bag = feature.BagFrom(begin + 1) - 1;
      int64_t stop = tfrs_first_id(&feature, bag + 1);
      for (int64_t i = begin; i < end; ++i) {
        while (i >= stop) stop = tfrs_first_id(&feature, ++bag + 1);
        const int64_t id = feature.id(i);
        const int64_t to = at[mine[id >> shift]]++;
        uses_[to] = {id, feature.gradient + bag * feature.stride};
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
  // What threads take turns with: small tables, and buckets, the largest ones
  // in shares, each of which reads the whole bucket to find its rows.
  struct Work {
    const Small* table;  // Else:
    const Span* bucket;
    uint32_t share, shares;
  };
  std::vector<Work> work;
  int64_t small_uses = 0;
  for (const Small& small : small_) {
    work.push_back({&small, nullptr, 0, 0});
    for (const TfrsGradients& ids : small.features) small_uses += ids.n;
  }
  int64_t dim = 0, most_uses = 0, most_rows = 0;
  for (const TfrsTable& table : tables) dim = std::max(dim, table.dim);
  for (const Span& bucket : buckets_) {
    const int64_t uses = bucket.end - bucket.begin;
    most_uses = std::max(most_uses, uses);
    most_rows = std::max(most_rows, std::min(uses, bucket.rows));
    const uint32_t shares =
        std::max<int64_t>(1, std::min(kMostShares, uses / kUsesPerShare));
    for (uint32_t s = 0; s < shares; ++s) {
      work.push_back({nullptr, &bucket, s, shares});
    }
  }
  if (work.empty()) return absl::OkStatus();
  auto heads = [](int64_t rows) {
    uint32_t size = 16;
    while (size < 2 * rows) size *= 2;
    return size;
  };
  const int64_t words =
      std::max(heads(most_rows) + most_uses + 2 * most_rows + dim,
               small_.empty() ? 0 : 2 * kSmallTable);
  // Work isn't even, so each thread takes the next that nobody has.
  std::atomic<size_t> next{0};
  const int64_t threads = std::min<int64_t>(
      {NumThreads(ctx),
       static_cast<int64_t>(work.size()),
       1 + (total_ + small_uses) * dim / kValuesPerThread});
  ParallelFor(ctx, threads, 1 << 20, [&](int64_t, int64_t) {
    // Not a vector, which would fill all of it for the largest bucket's sake.
    std::unique_ptr<uint32_t[]> room(new uint32_t[words]);
    TfrsGroups groups;
    groups.heads = room.get();
    groups.next = groups.heads + heads(most_rows);
    groups.first = groups.next + most_uses;
    groups.last = groups.first + most_rows;
    groups.sum = reinterpret_cast<float*>(groups.last + most_rows);
    for (size_t w = next++; w < work.size(); w = next++) {
      if (const Small* small = work[w].table) {
        float* sums = reinterpret_cast<float*>(room.get());
        loops.update_all(&tables[small->table], small->features.data(),
                         small->features.size(), small->rows, sums,
                         reinterpret_cast<uint8_t*>(sums + kSmallTable));
        continue;
      }
      const Span& bucket = *work[w].bucket;
      const int64_t n = bucket.end - bucket.begin;
      groups.mask = heads(std::min(n, bucket.rows)) - 1;
      groups.share = work[w].share;
      groups.shares = work[w].shares;
      loops.update(&tables[bucket.table], uses_ + bucket.begin,
                   factors_ ? factors_ + bucket.begin : nullptr, n, &groups);
    }
  });
  return absl::OkStatus();
}

}  // namespace tfrs_embed
