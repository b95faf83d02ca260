// The ids of several features, sorted into buckets of rows that are updated
// together: the first half of every operation that adds to rows.

#ifndef TFRS_EMBED_KERNELS_CC_BUCKETS_H_
#define TFRS_EMBED_KERNELS_CC_BUCKETS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "rows.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "threads.h"

namespace tfrs_embed {

// A feature of a table.
struct Feature : TfrsGradients {
  int table = 0;

  // What `splits` are if they aren't an input.
  std::unique_ptr<int32_t[]> memory;

  int64_t id(int64_t i) const {
    return wide ? static_cast<const int64_t*>(ids)[i]
                : static_cast<const int32_t*>(ids)[i];
  }

  // The first bag that begins with an id or after it.
  int64_t BagFrom(int64_t i) const {
    if (!splits) return (i + per_bag - 1) / per_bag;
    return std::lower_bound(splits, splits + count, i) - splits;
  }
};

// A table as far as its uses are concerned.
struct TableShape {
  int64_t rows = 0;
  int64_t dim = 0;
};

// The shape of a tensor of rows; an error if it isn't one.
absl::Status ShapeOf(const tensorflow::Tensor& table, TableShape* shape);

// The ids of several features as one row of ids.
class AllIds {
 public:
  explicit AllIds(const std::vector<Feature>& features)
      : starts_(features.size() + 1, 0) {
    for (size_t f = 0; f < features.size(); ++f) {
      starts_[f + 1] = starts_[f] + features[f].n;
    }
  }

  int64_t total() const { return starts_.back(); }

  // Calls visit(feature, first, last) for the parts of [begin, end), in order:
  // [first, last) are numbers of the feature's own ids.
  template <typename Visit>
  void Each(int64_t begin, int64_t end, Visit visit) const {
    size_t f = std::upper_bound(starts_.begin(), starts_.end(), begin) -
               starts_.begin() - 1;
    for (int64_t i = begin; i < end;) {
      while (starts_[f + 1] <= i) ++f;
      const int64_t stop = std::min(end, starts_[f + 1]);
      visit(f, i - starts_[f], stop - starts_[f]);
      i = stop;
    }
  }

 private:
  std::vector<int64_t> starts_;
};

// Whether a feature's ids [begin, end) are in [0, rows).
bool Inside(const Feature& feature, int64_t begin, int64_t end, int64_t rows);

// The error of the first id that isn't in [0, rows[f]) of its feature f. The
// features' names are what they are called, if there are any.
absl::Status OutOfRange(const std::vector<Feature>& features,
                        const std::vector<int64_t>& rows,
                        const std::vector<std::string>& names);

// Fails if there is one.
absl::Status CheckIds(tensorflow::OpKernelContext* ctx,
                      const std::vector<Feature>& features,
                      const std::vector<int64_t>& rows,
                      const std::vector<std::string>& names = {});

// The number of rows of each feature's table.
std::vector<int64_t> RowsOf(const std::vector<Feature>& features,
                            const std::vector<TableShape>& tables);

// Uses of rows, bucket after bucket; in each in the order of the features and
// of their ids, so that sums don't depend on the number of threads.
class Buckets {
 public:
  // Sorts the features' ids. Features of a table must follow each other.
  // An id that isn't in [0, rows) is an error.
  absl::Status Sort(tensorflow::OpKernelContext* ctx,
                    const std::vector<Feature>& features,
                    const std::vector<TableShape>& tables);

  // Calls the loops' update for each bucket; `tables` are those of Sort.
  absl::Status Update(tensorflow::OpKernelContext* ctx,
                      const TfrsLoops& loops,
                      const std::vector<TfrsTable>& tables) const;

 private:
  struct Span {
    int table;
    int64_t begin, end;
    int64_t rows;  // At most so many.
  };
  // A table so small that it needs no buckets.
  struct Small {
    int table;
    int64_t rows;
    std::vector<TfrsGradients> features;
  };
  std::vector<Span> buckets_;
  std::vector<Small> small_;
  tensorflow::Tensor memory_, coefficients_;
  TfrsGradientRef* uses_ = nullptr;
  float* factors_ = nullptr;  // Null: all are 1.
  int64_t total_ = 0;         // In buckets.
};

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_BUCKETS_H_
