#include "feature_inputs.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

#include "absl/strings/str_cat.h"
#include "input_checks.h"
#include "op.h"

namespace tfrs_embed {

namespace {

// Whether each value is at least the one before it.
bool Ascending(const int32_t* values, int64_t n) {
  int32_t falls = 0;
  for (int64_t i = 1; i < n; ++i) falls |= values[i] < values[i - 1];
  return !falls;
}

// Reads where a feature's bags begin and end.
absl::Status ReadSplits(const Tensor& input, Feature* feature) {
  const int32_t* splits = input.flat<int32_t>().data();
  if (input.NumElements() != feature->count + 1) {
    return InvalidArgument(input.NumElements(), " splits for ", feature->count,
                           " bags");
  }
  if (splits[0] != 0 || splits[feature->count] != feature->n) {
    return InvalidArgument("splits ", splits[0], " to ",
                           splits[feature->count], " for ", feature->n,
                           " ids");
  }
  if (!Ascending(splits, feature->count + 1)) {
    return InvalidArgument("the splits aren't ascending");
  }
  feature->splits = splits;
  return absl::OkStatus();
}

// Reads the bag of each id, and makes row splits of them.
absl::Status ReadBags(const Tensor& input, Feature* feature) {
  const int32_t* bags = input.flat<int32_t>().data();
  const int64_t n = feature->n;
  TF_RETURN_IF_ERROR(CheckNumber(input.NumElements(), "bags", n, "ids"));
  // They ascend, as is checked below, so the first and the last are the bounds.
  if (n > 0 && (bags[0] < 0 || bags[n - 1] >= feature->count)) {
    return InvalidArgument("bags ", bags[0], " to ", bags[n - 1], " of ",
                           feature->count);
  }
  if (!Ascending(bags, n)) {
    return InvalidArgument("the bags aren't ascending");
  }
  if (n > std::numeric_limits<int32_t>::max()) {
    return InvalidArgument(n, " ids are too many");
  }
  feature->memory.reset(new (std::nothrow) int32_t[feature->count + 1]);
  int32_t* splits = feature->memory.get();
  if (splits == nullptr) {
    return tensorflow::errors::ResourceExhausted(
        "no memory for the splits of ", feature->count, " bags");
  }
  int64_t bag = 0;
  for (int64_t i = 0; i < n; ++i) {
    while (bag <= bags[i]) splits[bag++] = i;
  }
  while (bag <= feature->count) splits[bag++] = n;
  feature->splits = splits;
  return absl::OkStatus();
}

// Reads one factor for each of n ids or bags.
absl::Status ReadFactors(const Tensor& input, const char* name, int64_t n,
                         const char* of, const float** factors) {
  TF_RETURN_IF_ERROR(CheckNumber(input.NumElements(), name, n, of));
  *factors = input.flat<float>().data();
  return absl::OkStatus();
}

// The inputs of all features, which are read in the features' order.
class Inputs {
 public:
  absl::Status Find(OpKernelContext* ctx, const FeatureLayout& layout) {
    TF_RETURN_IF_ERROR(ctx->input_list("ids", &ids_));
    TF_RETURN_IF_ERROR(ctx->input_list("bags", &bags_));
    TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights_));
    TF_RETURN_IF_ERROR(ctx->input_list("scales", &scales_));
    TF_RETURN_IF_ERROR(ctx->input("counts", &counts_));
    const int m = layout.table_of.size();
    auto number = [](const std::vector<bool>& has) {
      return std::count(has.begin(), has.end(), true);
    };
    if (ids_.size() != m || counts_->NumElements() != m ||
        bags_.size() != number(layout.has_bag) ||
        weights_.size() != number(layout.has_weights) ||
        scales_.size() != number(layout.has_scale)) {
      return InvalidArgument("The inputs don't fit table_of, has_bag, ",
                             "has_weights and has_scale.");
    }
    return absl::OkStatus();
  }

  // Reads feature f. To be called once for each, in order: an input has tensors
  // only for the features that have it.
  absl::Status Read(const FeatureLayout& layout, int num_tables, int f,
                    Feature* feature) {
    feature->table = layout.table_of[f];
    if (feature->table < 0 || feature->table >= num_tables) {
      return InvalidArgument("table ", feature->table, " of ", num_tables);
    }
    feature->n = ids_[f].NumElements();
    feature->count = counts_->flat<int32_t>()(f);
    if (feature->count == -1) {  // It follows from the other inputs.
      feature->count = !layout.has_bag[f]     ? feature->n / layout.per_bag[f]
                       : layout.is_ragged[f]
                           ? bags_[next_bags_].NumElements() - 1
                           : -1;
    }
    if (feature->count < 0) return InvalidArgument(feature->count, " bags");
    feature->wide = ids_[f].dtype() == tensorflow::DT_INT64;
    feature->ids = ids_[f].data();
    feature->per_bag = layout.per_bag[f];
    if (layout.has_bag[f]) {
      const Tensor& input = bags_[next_bags_++];
      TF_RETURN_IF_ERROR(layout.is_ragged[f] ? ReadSplits(input, feature)
                                             : ReadBags(input, feature));
    } else if (feature->n % feature->per_bag != 0 ||
               feature->n / feature->per_bag != feature->count) {
      return InvalidArgument(feature->n, " ids for ", feature->count,
                             " bags of ", feature->per_bag);
    }
    if (layout.has_weights[f]) {
      TF_RETURN_IF_ERROR(ReadFactors(weights_[next_weights_++], "weights",
                                     feature->n, "ids", &feature->weights));
    }
    if (layout.has_scale[f]) {
      TF_RETURN_IF_ERROR(ReadFactors(scales_[next_scales_++], "scales",
                                     feature->count, "bags", &feature->scale));
    }
    return absl::OkStatus();
  }

 private:
  OpInputList ids_, bags_, weights_, scales_;
  const Tensor* counts_ = nullptr;
  int next_bags_ = 0, next_weights_ = 0, next_scales_ = 0;
};

}  // namespace

absl::Status FeatureLayout::Read(OpKernelConstruction* ctx) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("table_of", &table_of));
  const size_t m = table_of.size();
  const auto each = [&](const char* name, auto* values) {
    return GetEach(ctx, name, m, "feature", values);
  };
  TF_RETURN_IF_ERROR(each("has_bag", &has_bag));
  TF_RETURN_IF_ERROR(each("has_weights", &has_weights));
  TF_RETURN_IF_ERROR(each("has_scale", &has_scale));
  // Exports of earlier releases have no entries in these two.
  TF_RETURN_IF_ERROR(ctx->GetAttr("splits", &is_ragged));
  TF_RETURN_IF_ERROR(ctx->GetAttr("per_bag", &per_bag));
  if (is_ragged.empty()) is_ragged.assign(m, false);
  if (per_bag.empty()) per_bag.assign(m, 1);
  const bool positive = std::all_of(per_bag.begin(), per_bag.end(),
                                    [](int64_t size) { return size > 0; });
  if (is_ragged.size() != m || per_bag.size() != m || !positive) {
    return InvalidArgument("splits and per_bag must have an entry for each "
                           "feature, or none; those of per_bag are positive.");
  }
  return absl::OkStatus();
}

absl::Status ReadFeatures(OpKernelContext* ctx, const FeatureLayout& layout,
                          int num_tables, std::vector<Feature>* features) {
  Inputs inputs;
  TF_RETURN_IF_ERROR(inputs.Find(ctx, layout));
  const int m = layout.table_of.size();
  features->resize(m);
  for (int f = 0; f < m; ++f) {
    const absl::Status status =
        inputs.Read(layout, num_tables, f, &(*features)[f]);
    if (!status.ok()) {
      return absl::Status(status.code(), absl::StrCat("feature ", f, ": ",
                                                      status.message()));
    }
  }
  return absl::OkStatus();
}

absl::Status SplitByTable(const Feature& joint, int span,
                          const std::vector<TableShape>& tables,
                          std::vector<int64_t>* rows,
                          std::vector<Feature>* features) {
  std::vector<int64_t> firsts = {0};
  for (int t = 0; t < span; ++t) {
    const TableShape& table = tables[joint.table + t];
    if (table.dim != tables[joint.table].dim) {
      return InvalidArgument("tables of ", tables[joint.table].dim, " and of ",
                             table.dim, " columns have joint ids");
    }
    firsts.push_back(firsts.back() + table.rows);
  }
  if (joint.n > joint.count || joint.weights || joint.scale ||
      firsts.back() > kMostRows) {
    return InvalidArgument("joint ids of ", firsts.back(),
                           " rows, or with weights, scales or several in a bag");
  }
  rows->resize(joint.n);
  int t = 0;
  bool begins = true;  // A run.
  for (int64_t bag = 0; bag < joint.count; ++bag) {
    const int64_t i = tfrs_first_id(&joint, bag);
    const int64_t n = tfrs_first_id(&joint, bag + 1) - i;
    if (n > 1) return InvalidArgument("a bag has ", n, " joint ids");
    if (n == 0) {
      begins = true;
      continue;
    }
    const int64_t id = joint.id(i);
    if (id < 0 || id >= firsts.back()) {
      return InvalidArgument("id ", id, " is out of range; the tables have ",
                             firsts.back(), " rows");
    }
    if (id < firsts[t] || id >= firsts[t + 1]) {
      t = std::upper_bound(firsts.begin(), firsts.end(), id) -
          firsts.begin() - 1;
      begins = true;
    }
    if (begins) {
      Feature& run = features->emplace_back();
      run.table = joint.table + t;
      run.ids = rows->data() + i;
      run.wide = 1;
      run.gradient = joint.gradient + bag * joint.stride;
      run.stride = joint.stride;
      begins = false;
    }
    (*rows)[i] = id - firsts[t];
    ++features->back().n;
    ++features->back().count;
  }
  return absl::OkStatus();
}

std::vector<Feature> IdsOnly(const OpInputList& ids) {
  std::vector<Feature> features(ids.size());
  for (int f = 0; f < ids.size(); ++f) {
    features[f].n = ids[f].NumElements();
    features[f].wide = ids[f].dtype() == tensorflow::DT_INT64;
    features[f].ids = ids[f].data();
  }
  return features;
}

}  // namespace tfrs_embed
