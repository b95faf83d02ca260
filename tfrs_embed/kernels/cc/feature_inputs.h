// The features of an operation: their attributes, inputs and ids.

#ifndef TFRS_EMBED_KERNELS_CC_FEATURE_INPUTS_H_
#define TFRS_EMBED_KERNELS_CC_FEATURE_INPUTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "rows.h"
#include "table_shape.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfrs_embed {

// The inputs and attributes that describe features, in all operations that look
// them up or update their tables. FeatureLayout and ReadFeatures read them.
#define TFRS_FEATURES(op)                    \
  op.Input("ids: M * Tids")                  \
      .Input("bags: B * int32")              \
      .Input("weights: W * float")           \
      .Input("scales: S * float")            \
      .Input("counts: int32")                \
      .Attr("M: int >= 1")                   \
      .Attr("B: int >= 0")                   \
      .Attr("W: int >= 0")                   \
      .Attr("S: int >= 0")                   \
      .Attr("Tids: {int32, int64}")          \
      .Attr("table_of: list(int)")           \
      .Attr("has_bag: list(bool)")           \
      .Attr("has_weights: list(bool)")       \
      .Attr("has_scale: list(bool)")         \
      .Attr("splits: list(bool) = []")       \
      .Attr("per_bag: list(int) = []")

// A feature: its ids, with the gradients of its bags in an update.
//
// The methods are called for each id, so they are here to be inlined.
struct Feature : TfrsGradients {
  int table = 0;

  // Holds `splits` if they are not an input.
  std::unique_ptr<int32_t[]> memory;

  int64_t id(int64_t i) const {
    return wide ? static_cast<const int64_t*>(ids)[i]
                : static_cast<const int32_t*>(ids)[i];
  }

  // The first bag that begins at id number i or later.
  int64_t BagFrom(int64_t i) const {
    if (!splits) return (i + per_bag - 1) / per_bag;
    return std::lower_bound(splits, splits + count, i) - splits;
  }
};

// The attributes that say, for each feature, its table and its inputs.
struct FeatureLayout {
  std::vector<int> table_of;
  std::vector<bool> has_bag, has_weights, has_scale;
  // Whether the bags of a ragged feature are given as row splits; else they are
  // given as each id's bag.
  std::vector<bool> is_ragged;
  // The ids of each bag, for features without an input of bags.
  std::vector<int64_t> per_bag;

  absl::Status Read(tensorflow::OpKernelConstruction* ctx);
};

// Reads the features' inputs, and checks all that memory safety depends on but
// the ids' range.
absl::Status ReadFeatures(tensorflow::OpKernelContext* ctx,
                          const FeatureLayout& layout, int num_tables,
                          std::vector<Feature>* features);

// Splits a feature whose ids number the rows of `span` tables of one width, from
// its own on, one table after the other. A bag has one id, or none. Appends a
// feature for each run of ids of one table in neighbouring bags, whose ids are in
// `rows`, resized to the number of ids.
absl::Status SplitByTable(const Feature& joint, int span,
                          const std::vector<TableShape>& tables,
                          std::vector<int64_t>* rows,
                          std::vector<Feature>* features);

// Features of which only the ids are known, one for each tensor of ids.
std::vector<Feature> IdsOnly(const tensorflow::OpInputList& ids);

// The ids of several features, numbered through all features.
//
// The methods run once for each part of a thread's work, so they are here to be
// inlined with the loops over ids that they call.
class AllIds {
 public:
  explicit AllIds(const std::vector<Feature>& features)
      : starts_(features.size() + 1, 0) {
    for (size_t f = 0; f < features.size(); ++f) {
      starts_[f + 1] = starts_[f] + features[f].n;
    }
  }

  int64_t total() const { return starts_.back(); }

  // Calls visit(feature, first, last) for each feature's part of [begin, end),
  // in order; [first, last) are numbers of the feature's own ids.
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

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_FEATURE_INPUTS_H_
