#include "buckets.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "feature_inputs.h"
#include "id_checks.h"
#include "op.h"
#include "rows.h"
#include "table_shape.h"
#include "threads.h"

namespace tfrs_embed {

namespace {

// A bucket's references, and what groups them by row, stay in the first caches.
constexpr int64_t kGradientsPerBucket = 512;
// A bucket of many more gradients, of a few frequent rows, is shared among
// threads.
constexpr int64_t kGradientsPerShare = 4096;
constexpr int64_t kMostShares = 64;
// The sums of a small table's rows stay in the second cache: at most so many
// values.
constexpr int64_t kSmallTable = 32768;
// A thread updates at least so many values.
constexpr int64_t kValuesPerThread = 8192;
// A thread sorts at least so many ids. For fewer, waking it costs more.
constexpr int64_t kIdsPerThread = 8192;
// Ids are counted in ranges of rows that are this much finer than buckets.
// Buckets are made of whole ranges, so they have about the same size even if
// ids are frequent in some ranges.
constexpr int64_t kRangesPerBucket = 8;
// References are numbered in 32 bits, and a hash table has twice as many places.
constexpr int64_t kMostIds = int64_t{1} << 30;

// Memory that TensorFlow frees after the operation.
template <typename T>
absl::Status Allocate(OpKernelContext* ctx, int64_t n, Tensor* memory,
                      T** values) {
  const int64_t bytes = n * sizeof(T);
  TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_UINT8,
                                        TensorShape({bytes}), memory));
  *values = reinterpret_cast<T*>(memory->flat<uint8_t>().data());
  return absl::OkStatus();
}

}  // namespace

// A counting sort. Threads take equal parts of the ids: each counts its ids in
// every range, and later places its references behind those of the parts before
// it, so that the order is the same as with one part.
class Buckets::Sorter {
 public:
  Sorter(OpKernelContext* ctx, const std::vector<Feature>& features,
         Buckets* result)
      : ctx_(ctx),
        features_(features),
        ids_(features),
        parts_(std::max<int64_t>(
            1, std::min(NumThreads(ctx), ids_.total() / kIdsPerThread))),
        result_(*result) {}

  // The phases, in the order in which they must be called.
  void SplitTables(const std::vector<TableShape>& tables);
  void Count();
  void Cut();
  void FindPositions();
  absl::Status Place();

 private:
  // A table's rows in ranges of 2^shift rows.
  struct Ranges {
    bool small = false;  // The table needs no buckets, and has no ranges.
    int shift = 0;
    int64_t first = 0;  // Among the ranges of all tables.
    int64_t count = 0;
  };

  static Ranges MakeRanges(int64_t rows, int64_t gradients) {
    const int64_t most =
        gradients <= kGradientsPerBucket
            ? 1
            : kRangesPerBucket * (gradients / kGradientsPerBucket);
    Ranges ranges;
    while (ranges.shift < 62 && (rows - 1) >> ranges.shift >= most) {
      ++ranges.shift;
    }
    ranges.count = rows > 0 ? ((rows - 1) >> ranges.shift) + 1 : 1;
    return ranges;
  }

  // Calls run(part) for all parts, on several threads.
  void EachPart(const std::function<void(int64_t)>& run) {
    if (parts_ == 1) return run(0);
    ParallelFor(ctx_, parts_, 1 << 20, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) run(part);
    });
  }

  // Calls visit(feature, ranges of its table, first, last) for a part's ids.
  template <typename Visit>
  void EachSorted(int64_t part, Visit visit) {
    const int64_t n = ids_.total();
    ids_.Each(n * part / parts_, n * (part + 1) / parts_,
              [&](size_t f, int64_t begin, int64_t end) {
                const Feature& feature = features_[f];
                const Ranges& ranges = ranges_[feature.table];
                if (!ranges.small) visit(feature, ranges, begin, end);
              });
  }

  void PlacePart(int64_t part);

  OpKernelContext* const ctx_;
  const std::vector<Feature>& features_;
  const AllIds ids_;
  const int64_t parts_;
  Buckets& result_;

  std::vector<Ranges> ranges_;  // By table.
  int64_t num_ranges_ = 0;
  std::vector<int64_t> counts_;     // [parts, ranges]: gradients.
  std::vector<int32_t> bucket_of_;  // By range; only where there are gradients.
  std::vector<int64_t> positions_;  // [parts, buckets]: the next reference's.
};

// Tells small tables from those whose rows are divided into ranges.
void Buckets::Sorter::SplitTables(const std::vector<TableShape>& tables) {
  std::vector<int64_t> gradients_of(tables.size(), 0);
  for (const Feature& feature : features_) {
    gradients_of[feature.table] += feature.n;
  }
  // One thread updates a small table, so it must not be most of the work.
  const int64_t most =
      std::max(ids_.total() / NumThreads(ctx_), kGradientsPerShare);
  std::vector<int> small_of(tables.size(), -1);
  result_.small_tables_.clear();
  for (size_t t = 0; t < tables.size(); ++t) {
    const int64_t rows = tables[t].rows, gradients = gradients_of[t];
    Ranges ranges;
    // Rows of no columns need memory too: for whether they are used.
    ranges.small = rows * std::max<int64_t>(1, tables[t].dim) <= kSmallTable &&
                   rows <= 2 * gradients && gradients <= most;
    if (ranges.small) {
      small_of[t] = result_.small_tables_.size();
      result_.small_tables_.push_back({static_cast<int>(t), rows, {}});
    } else {
      ranges = MakeRanges(rows, gradients);
    }
    ranges.first = num_ranges_;
    num_ranges_ += ranges.count;
    ranges_.push_back(ranges);
  }
  for (const Feature& feature : features_) {
    const int small = small_of[feature.table];
    if (small >= 0) result_.small_tables_[small].features.push_back(feature);
  }
}

// Counts the gradients of each range.
void Buckets::Sorter::Count() {
  counts_.assign(parts_ * num_ranges_, 0);
  EachPart([&](int64_t part) {
    int64_t* counts = counts_.data() + part * num_ranges_;
    EachSorted(part, [&](const Feature& feature, const Ranges& ranges,
                         int64_t begin, int64_t end) {
      const int shift = ranges.shift;
      int64_t* mine = counts + ranges.first;
      for (int64_t i = begin; i < end; ++i) ++mine[feature.id(i) >> shift];
    });
  });
}

// Cuts the ranges into buckets. A bucket's ranges are neighbours, so rows that
// are updated together are in few pages of memory, which the processor has to
// find.
void Buckets::Sorter::Cut() {
  auto& buckets = result_.buckets_;
  buckets.clear();
  bucket_of_.resize(num_ranges_);
  int64_t total = 0;
  for (size_t t = 0; t < ranges_.size(); ++t) {
    const Ranges& ranges = ranges_[t];
    bool open = false;
    for (int64_t r = ranges.first; r < ranges.first + ranges.count; ++r) {
      int64_t gradients = 0;
      for (int64_t part = 0; part < parts_; ++part) {
        gradients += counts_[part * num_ranges_ + r];
      }
      if (gradients == 0) continue;
      if (open) {
        const Bucket& last = buckets.back();
        open = last.end - last.begin + gradients <= kGradientsPerBucket;
      }
      if (!open) {
        buckets.push_back({static_cast<int>(t), total, total, 0});
        open = true;
      }
      total += gradients;
      buckets.back().end = total;
      buckets.back().rows += int64_t{1} << ranges.shift;
      bucket_of_[r] = buckets.size() - 1;
    }
  }
  result_.total_ = total;
}

// Finds where each part's first reference in each bucket belongs.
void Buckets::Sorter::FindPositions() {
  const int64_t num_buckets = result_.buckets_.size();
  positions_.assign(parts_ * num_buckets, 0);
  // First the number of the part's references in the bucket.
  for (int64_t part = 0; part < parts_; ++part) {
    for (int64_t r = 0; r < num_ranges_; ++r) {
      const int64_t count = counts_[part * num_ranges_ + r];
      if (count) positions_[part * num_buckets + bucket_of_[r]] += count;
    }
  }
  for (int64_t b = 0; b < num_buckets; ++b) {
    int64_t position = result_.buckets_[b].begin;
    for (int64_t part = 0; part < parts_; ++part) {
      int64_t& first = positions_[part * num_buckets + b];
      position += std::exchange(first, position);
    }
  }
}

// Writes each reference, and its factor, to its position.
absl::Status Buckets::Sorter::Place() {
  const int64_t total = result_.total_;
  TF_RETURN_IF_ERROR(
      Allocate(ctx_, total, &result_.refs_memory_, &result_.refs_));
  result_.factors_ = nullptr;
  const bool factors = std::any_of(
      features_.begin(), features_.end(), [](const Feature& feature) {
        return feature.weights != nullptr || feature.scale != nullptr;
      });
  if (factors) {
    TF_RETURN_IF_ERROR(
        Allocate(ctx_, total, &result_.factors_memory_, &result_.factors_));
  }
  EachPart([&](int64_t part) { PlacePart(part); });
  return absl::OkStatus();
}

void Buckets::Sorter::PlacePart(int64_t part) {
  int64_t* positions = positions_.data() + part * result_.buckets_.size();
  TfrsGradientRef* const refs = result_.refs_;
  float* const factors = result_.factors_;
  EachSorted(part, [&](const Feature& feature, const Ranges& ranges,
                       int64_t begin, int64_t end) {
    const int shift = ranges.shift;
    const int32_t* bucket_of = bucket_of_.data() + ranges.first;
    // The last bag that begins at the first id or before it: the others that
    // begin there are empty.
    int64_t bag = feature.BagFrom(begin + 1) - 1;
    int64_t stop = tfrs_first_id(&feature, bag + 1);
    for (int64_t i = begin; i < end; ++i) {
      while (i >= stop) stop = tfrs_first_id(&feature, ++bag + 1);
      const int64_t id = feature.id(i);
      const int64_t to = positions[bucket_of[id >> shift]]++;
      refs[to] = {id, feature.gradient + bag * feature.stride};
      if (factors) {
        factors[to] = (feature.weights ? feature.weights[i] : 1.0f) *
                      (feature.scale ? feature.scale[bag] : 1.0f);
      }
    }
  });
}

absl::Status Buckets::Sort(OpKernelContext* ctx,
                           const std::vector<Feature>& features,
                           const std::vector<TableShape>& tables) {
  const int64_t total = AllIds(features).total();
  if (total > kMostIds) {
    return InvalidArgument(total, " ids are more than ", kMostIds);
  }
  TF_RETURN_IF_ERROR(CheckIds(ctx, features, RowsOf(features, tables)));
  Sorter sorter(ctx, features, this);
  sorter.SplitTables(tables);
  sorter.Count();
  sorter.Cut();
  sorter.FindPositions();
  return sorter.Place();
}

// What a thread does next: updates a small table, a bucket, or one share of the
// rows of a large bucket, of which it reads all references.
struct Buckets::Work {
  const SmallTable* table;  // Null: `bucket`.
  const Bucket* bucket;
  uint32_t share, shares;
};

std::vector<Buckets::Work> Buckets::ListWork() const {
  std::vector<Work> work;
  for (const SmallTable& small : small_tables_) {
    work.push_back({&small, nullptr, 0, 0});
  }
  for (const Bucket& bucket : buckets_) {
    const int64_t n = bucket.end - bucket.begin;
    const uint32_t shares = std::max<int64_t>(
        1, std::min(kMostShares, n / kGradientsPerShare));
    for (uint32_t s = 0; s < shares; ++s) {
      work.push_back({nullptr, &bucket, s, shares});
    }
  }
  return work;
}

// The memory that a thread needs for any of the work.
struct Buckets::Scratch {
  int64_t most_gradients = 0, most_rows = 0, dim = 0;  // Of a bucket.
  int64_t words = 0;

  Scratch(const Buckets& buckets, const std::vector<TfrsTable>& tables) {
    for (const Bucket& bucket : buckets.buckets_) {
      dim = std::max(dim, tables[bucket.table].dim);
      const int64_t n = bucket.end - bucket.begin;
      most_gradients = std::max(most_gradients, n);
      most_rows = std::max(most_rows, std::min(n, bucket.rows));
    }
    words = std::max(Heads(most_rows) + most_gradients + 2 * most_rows + dim,
                     buckets.small_tables_.empty() ? 0 : 4 * kSmallTable);
    words += words % 2;  // A small table's totals are of 64 bits.
  }

  // The size of the hash table that finds so many rows.
  static uint32_t Heads(int64_t rows) {
    uint32_t size = 16;
    while (size < 2 * rows) size *= 2;
    return size;
  }

  TfrsGroups Divide(uint32_t* memory) const {
    TfrsGroups groups;
    groups.heads = memory;
    groups.next = groups.heads + Heads(most_rows);
    groups.first = groups.next + most_gradients;
    groups.last = groups.first + most_rows;
    groups.sum = reinterpret_cast<float*>(groups.last + most_rows);
    return groups;
  }
};

absl::Status Buckets::Update(OpKernelContext* ctx, const TfrsLoops& loops,
                             const std::vector<TfrsTable>& tables) const {
  const std::vector<Work> work = ListWork();
  if (work.empty()) return absl::OkStatus();
  int64_t gradients = total_, dim = 0;
  for (const TfrsTable& table : tables) dim = std::max(dim, table.dim);
  for (const SmallTable& small : small_tables_) {
    for (const TfrsGradients& feature : small.features) gradients += feature.n;
  }
  const Scratch scratch(*this, tables);
  const int64_t threads = std::min<int64_t>(
      {NumThreads(ctx), static_cast<int64_t>(work.size()),
       1 + gradients * dim / kValuesPerThread});
  Tensor memory;
  uint32_t* words;
  TF_RETURN_IF_ERROR(Allocate(ctx, threads * scratch.words, &memory, &words));
  // Some work takes longer than other, so a thread takes the next when it is
  // done with one.
  std::atomic<size_t> next{0};
  ParallelFor(ctx, threads, 1 << 20, [&](int64_t thread, int64_t) {
    uint32_t* const mine = words + thread * scratch.words;
    TfrsGroups groups = scratch.Divide(mine);
    for (size_t w = next++; w < work.size(); w = next++) {
      if (const SmallTable* small = work[w].table) {
        const TfrsRowSums sums = {
            reinterpret_cast<float*>(mine + 2 * kSmallTable),
            reinterpret_cast<double*>(mine), mine + 3 * kSmallTable};
        loops.update_all(&tables[small->table], small->features.data(),
                         small->features.size(), small->rows, &sums);
        continue;
      }
      const Bucket& bucket = *work[w].bucket;
      const int64_t n = bucket.end - bucket.begin;
      groups.mask = Scratch::Heads(std::min(n, bucket.rows)) - 1;
      groups.share = work[w].share;
      groups.shares = work[w].shares;
      loops.update(&tables[bucket.table], refs_ + bucket.begin,
                   factors_ ? factors_ + bucket.begin : nullptr, n, &groups);
    }
  });
  return absl::OkStatus();
}

}  // namespace tfrs_embed
