// The operations on a shard's keys. key_table.py says what they do.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "key_table_op.h"

namespace tfrs_embed {

namespace {

constexpr int kNumInfo = 16;  // See KeyTables.info.

// Makes a table that lives as long as its handle.
class KeyTableOp : public OpKernel {
 public:
  explicit KeyTableOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int64_t seed;
    std::string policy;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("capacity", &rules_.capacity));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_capacity", &rules_.max_capacity));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("candidates", &rules_.candidates));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("threshold", &rules_.threshold));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("seed", &seed));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("policy", &policy));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("ttl", &rules_.ttl));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("half_life", &rules_.half_life.length));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("by_time", &rules_.by_time));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("floor", &rules_.floor));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("evicts", &rules_.evicts));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("spill_owner", &spill_.owner));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("spill_folder", &spill_.folder));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("spill_parts", &spill_.parts));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("spill_bytes", &spill_.max_bytes));
    // Twice as many of their rows must have numbers before those of spills.
    for (const int64_t n : {rules_.capacity, rules_.candidates}) {
      OP_REQUIRES(ctx, n < KeyTable::kSpilled / 2,
                  InvalidArgument("A table has no room for ", n, " keys."));
    }
    OP_REQUIRES(ctx, rules_.max_capacity >= rules_.capacity,
                InvalidArgument("max_capacity ", rules_.max_capacity,
                                " is less than capacity ", rules_.capacity));
    OP_REQUIRES(ctx, rules_.floor <= rules_.max_capacity,
                InvalidArgument("floor ", rules_.floor,
                                " is above max_capacity ",
                                rules_.max_capacity));
    const bool decays = policy == "decay";
    rules_.scored = policy == "score";
    OP_REQUIRES(ctx, decays == (rules_.half_life.length > 0),
                InvalidArgument("half_life ", rules_.half_life.length,
                                " doesn't fit the policy ", policy));
    if (!spill_.parts.empty()) {
      OP_REQUIRES(ctx, SpillFile::AreParts(spill_.parts),
                  InvalidArgument("spill_parts must be positive, and in all at "
                                  "most ", SpillFile::kMostBytes, " bytes."));
      OP_REQUIRES(ctx, spill_.max_bytes > 0 && !spill_.folder.empty(),
                  InvalidArgument("A spill must have a folder and bytes."));
    }
    rules_.seed = seed;
    rules_.has_policy = policy != "none";
    const bool by_frequency = policy == "lfu" || rules_.scored;
    rules_.by = decays         ? OrderBy::kDecayed
                : by_frequency ? OrderBy::kFrequency
                               : OrderBy::kLastUsed;
    if (policy == "none") rules_.ttl = 0;
  }

  void Compute(OpKernelContext* ctx) override {
    Tensor* handle;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &handle));
    KeyRules rules = rules_;
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "probability", &rules.probability));
    // No number isn't in this range either.
    OP_REQUIRES(ctx, rules.probability >= 0 && rules.probability <= 1,
                InvalidArgument("probability ", rules.probability,
                                " is not from 0 to 1."));
    KeyTableResource* resource = nullptr;
    OP_REQUIRES_OK(ctx, Catch([&] {
      std::unique_ptr<SpillFile> spill;
      if (!spill_.parts.empty()) spill = std::make_unique<SpillFile>(spill_);
      resource = new KeyTableResource(rules, std::move(spill));
      return absl::OkStatus();
    }));
    handle->scalar<ResourceHandle>()() =
        ResourceHandle::MakeRefCountingHandle<KeyTableResource>(
            resource, ctx->device()->name());
  }

 private:
  KeyRules rules_;
  SpillFile::Settings spill_;
};

class FindKeysOp : public OpOnTables {
  using OpOnTables::OpOnTables;

  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    int64_t n;
    const int64_t* keys;
    TF_RETURN_IF_ERROR(ReadVector(ctx, "keys", &n, &keys));
    Entries entries;
    TF_RETURN_IF_ERROR(entries.Read(ctx, n, tables.size()));
    std::vector<int64_t> memory, versions(tables.size());
    keys = entries.Sorted(keys, &memory);
    int64_t* rows;
    TF_RETURN_IF_ERROR(RowsOut(ctx, entries.total(), &rows));
    const auto find = [&](size_t t, const auto& parallel) {
      const int64_t begin = entries.begin(t);
      tensorflow::tf_shared_lock lock(tables[t]->mutex);
      tables[t]->table.Find(parallel, keys + begin, entries.size(t),
                            rows + begin);
      versions[t] = tables[t]->table.version();
    };
    TF_RETURN_IF_ERROR(ForEach(ctx, entries, tables, find));
    entries.Unsort(rows);
    return CopyOut(ctx, 1, versions);
  }
};

class CheckRowsOp : public OpOnTables {
  using OpOnTables::OpOnTables;

  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    int64_t n;
    const int64_t *found, *versions;
    TF_RETURN_IF_ERROR(ReadVector(ctx, "rows", &n, &found));
    TF_RETURN_IF_ERROR(OfTables(ctx, "versions", tables, &versions));
    bool same = true;
    for (size_t t = 0; t < tables.size(); ++t) {
      tensorflow::tf_shared_lock lock(tables[t]->mutex);
      same = same && tables[t]->table.version() == versions[t];
    }
    if (same) {
      ctx->set_output(0, ctx->input(tables.size()));
      return ScalarOut(ctx, 1, 0);
    }
    Entries entries;
    TF_RETURN_IF_ERROR(entries.Read(ctx, n, tables.size()));
    for (int64_t i = 0; i < entries.total(); ++i) {
      if (found[i] < 0) return InvalidArgument("Row ", found[i], " < 0");
    }
    std::vector<int64_t> memory;
    found = entries.Sorted(found, &memory);
    int64_t* rows;
    TF_RETURN_IF_ERROR(RowsOut(ctx, entries.total(), &rows));
    std::copy_n(found, entries.total(), rows);
    std::atomic<int64_t> changed{0};
    const auto check = [&](size_t t, const auto&) {
      tensorflow::tf_shared_lock lock(tables[t]->mutex);
      changed += tables[t]->table.Check(entries.size(t), versions[t],
                                        rows + entries.begin(t));
    };
    TF_RETURN_IF_ERROR(ForEach(ctx, entries, tables, check));
    entries.Unsort(rows);
    return ScalarOut(ctx, 1, changed);
  }
};

class PublishKeysOp : public OpOnTables {
  using OpOnTables::OpOnTables;

  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    const int64_t* versions;
    TF_RETURN_IF_ERROR(OfTables(ctx, "versions", tables, &versions));
    for (size_t t = 0; t < tables.size(); ++t) {
      if (versions[t] == 0) continue;
      tensorflow::mutex_lock lock(tables[t]->mutex);
      tables[t]->table.Publish(versions[t]);
    }
    return absl::OkStatus();
  }
};

// A step's keys, of the inputs keys, counts and step. No counts are ones.
class OpOnStep : public OpOnTables {
  using OpOnTables::OpOnTables;

 protected:
  // What a reservation or a commit does with the keys of one table: `begin` is the
  // first of them among the entries, as which `rows` are sorted.
  using Change = std::function<KeyChanges(
      KeyTable* table, const KeyTable::Parallel& parallel, const KeyStep& step,
      int64_t begin, int64_t* rows)>;

  static absl::Status ReadKeys(OpKernelContext* ctx, const Tables& tables,
                               Entries* entries, const int64_t** keys) {
    int64_t n;
    TF_RETURN_IF_ERROR(ReadVector(ctx, "keys", &n, keys));
    return entries->Read(ctx, n, tables.size());
  }

  static absl::Status Apply(OpKernelContext* ctx, const Tables& tables,
                            const Entries& entries, const int64_t* keys,
                            const std::vector<SpillFile::Memory>& memory,
                            const Change& change) {
    int64_t num_counts, num_moments;
    const int64_t *counts, *moments;
    TF_RETURN_IF_ERROR(ReadVector(ctx, "counts", &num_counts, &counts));
    TF_RETURN_IF_ERROR(ReadVector(ctx, "step", &num_moments, &moments));
    if (num_moments != 2) {
      return InvalidArgument("step must be its number and its time, got ",
                             num_moments, " numbers.");
    }
    const bool counted = num_counts > 0;
    if (counted) {
      TF_RETURN_IF_ERROR(
          CheckNumber(num_counts, "counts", entries.total(), "keys"));
    }
    std::vector<int64_t> sorted_keys, sorted_counts;
    keys = entries.Sorted(keys, &sorted_keys);
    if (counted) counts = entries.Sorted(counts, &sorted_counts);
    int64_t* rows;
    TF_RETURN_IF_ERROR(RowsOut(ctx, entries.total(), &rows));
    std::vector<KeyChanges> changes(tables.size());
    std::vector<int64_t> physical(tables.size());
    const auto apply = [&](size_t t, const auto& parallel) {
      const int64_t begin = entries.begin(t);
      KeyStep step;
      step.n = entries.size(t);
      step.keys = keys + begin;
      step.counts = counted ? counts + begin : nullptr;
      step.number = moments[0];
      if (!memory.empty()) step.memory = memory[t];
      tensorflow::mutex_lock lock(tables[t]->mutex);
      KeyTable& table = tables[t]->table;
      step.now = table.Moment(moments[0], moments[1]);
      changes[t] = change(&table, parallel, step, begin, rows + begin);
      physical[t] = table.physical();
    };
    TF_RETURN_IF_ERROR(ForEach(ctx, entries, tables, apply));
    entries.Unsort(rows);
    std::vector<int64_t> new_keys, new_rows, sizes, lacking, versions;
    for (const KeyChanges& each : changes) {
      new_keys.insert(new_keys.end(), each.new_keys.begin(),
                      each.new_keys.end());
      new_rows.insert(new_rows.end(), each.new_rows.begin(),
                      each.new_rows.end());
      sizes.push_back(each.new_keys.size());
      lacking.push_back(each.lacking);
      versions.push_back(each.version);
    }
    TF_RETURN_IF_ERROR(CopyOut(ctx, 1, new_keys));
    TF_RETURN_IF_ERROR(CopyOut(ctx, 2, new_rows));
    TF_RETURN_IF_ERROR(CopyOut(ctx, 3, sizes));
    TF_RETURN_IF_ERROR(CopyOut(ctx, 4, lacking));
    TF_RETURN_IF_ERROR(CopyOut(ctx, 5, physical));
    return CopyOut(ctx, 6, versions);
  }
};

class ReserveKeysOp : public OpOnStep {
  using OpOnStep::OpOnStep;

  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    Entries entries;
    const int64_t* keys;
    TF_RETURN_IF_ERROR(ReadKeys(ctx, tables, &entries, &keys));
    return Apply(ctx, tables, entries, keys, {},
                 [](KeyTable* table, const auto& parallel, const KeyStep& step,
                    int64_t, int64_t* rows) {
                   return table->Reserve(parallel, step, rows);
                 });
  }
};

class CommitKeysOp : public OpOnStep {
  using OpOnStep::OpOnStep;

  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    Entries entries;
    const int64_t* keys;
    TF_RETURN_IF_ERROR(ReadKeys(ctx, tables, &entries, &keys));
    int64_t num_rows;
    const int64_t* hints;
    TF_RETURN_IF_ERROR(ReadVector(ctx, "rows", &num_rows, &hints));
    TF_RETURN_IF_ERROR(CheckNumber(num_rows, "rows", entries.total(), "keys"));
    std::vector<int64_t> memory;
    hints = entries.Sorted(hints, &memory);
    // Rows that are evicted to spills are read.
    Variables variables(&cache_);
    std::vector<SpillFile::Memory> spilling(tables.size());
    OpInputList handles;
    TF_RETURN_IF_ERROR(ctx->input_list("memory", &handles));
    if (handles.size() > 0) {
      TF_RETURN_IF_ERROR(variables.Find(ctx, "memory", {}));
      TF_RETURN_IF_ERROR(variables.LockToWrite());
    }
    size_t next = 0;
    for (size_t t = 0; t < tables.size(); ++t) {
      TF_RETURN_IF_ERROR(
          MemoryOf(tables[t]->table, variables, &next, &spilling[t]));
    }
    if (next != variables.size()) {
      return InvalidArgument("memory has ", variables.size(),
                             " variables, the spills have ", next, ".");
    }
    return Apply(ctx, tables, entries, keys, spilling,
                 [=](KeyTable* table, const auto& parallel, const KeyStep& step,
                     int64_t begin, int64_t* rows) {
                   return table->Commit(parallel, step, hints + begin, rows);
                 });
  }

  Variables::Cache cache_;
};

class ExportKeysOp : public OpOnTables {
 public:
  explicit ExportKeysOp(OpKernelConstruction* ctx) : OpOnTables(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("candidates", &candidates_));
  }

 private:
  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    KeyTableResource* resource;
    TF_RETURN_IF_ERROR(TheOne(tables, &resource));
    tensorflow::mutex_lock lock(resource->mutex);
    KeyStore& store = candidates_ ? resource->table.candidates()
                                  : resource->table.live();
    std::vector<int64_t> keys, places, frequency, last_used;
    for (int64_t place = 0; place < store.end(); ++place) {
      const KeyRecord& record = store.records()[place];
      if (!record.live()) continue;
      keys.push_back(record.key);
      places.push_back(place);
      frequency.push_back(record.frequency);
      last_used.push_back(record.last_used);
    }
    SpillFile* spill = candidates_ ? nullptr : resource->table.spill();
    for (int64_t place = 1; spill && place < spill->end(); ++place) {
      if (!spill->Holds(place)) continue;
      const KeyRecord& record = spill->record(place);
      if (spill->Returning(place)) continue;
      keys.push_back(record.key);
      places.push_back(KeyTable::kSpilled + place);
      frequency.push_back(record.frequency);
      last_used.push_back(record.last_used);
    }
    TF_RETURN_IF_ERROR(CopyOut(ctx, 0, keys));
    TF_RETURN_IF_ERROR(CopyOut(ctx, 1, places));
    TF_RETURN_IF_ERROR(CopyOut(ctx, 2, frequency));
    return CopyOut(ctx, 3, last_used);
  }

  bool candidates_;
};

// The least that a key's frequency may be: a score is a number from a float's
// 32 bits.
int64_t LeastFrequency(const KeyTable& table) {
  return table.rules().scored ? std::numeric_limits<int32_t>::min() : 0;
}

class ReplaceKeysOp : public OpOnTables {
  using OpOnTables::OpOnTables;

  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    KeyTableResource* resource;
    TF_RETURN_IF_ERROR(TheOne(tables, &resource));
    std::vector<KeyRecord> live, candidates;
    TF_RETURN_IF_ERROR(
        Read(ctx, {"keys", "frequency", "last_used"},
             LeastFrequency(resource->table), &live));
    TF_RETURN_IF_ERROR(Read(ctx,
                            {"candidate_keys", "candidate_frequency",
                             "candidate_last_seen"},
                            0, &candidates));
    int64_t in_memory;
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "in_memory", &in_memory));
    const int64_t n = live.size();
    if (in_memory < 0 || in_memory > n) {
      return InvalidArgument("in_memory is ", in_memory, " of ", n, " keys.");
    }
    const auto middle = live.begin() + in_memory;
    const std::vector<KeyRecord> spilled(middle, live.end());
    live.erase(middle, live.end());
    tensorflow::mutex_lock lock(resource->mutex);
    resource->table.Replace(live, spilled, candidates);
    return ScalarOut(ctx, 0, resource->table.version());
  }

  // Reads keys, and how often and when they were used last. No score of a key
  // is the least that there is, which has no place in the order of eviction.
  static absl::Status Read(OpKernelContext* ctx,
                           const std::array<const char*, 3>& names,
                           int64_t least, std::vector<KeyRecord>* records) {
    std::array<const int64_t*, 3> values;
    for (size_t i = 0; i < names.size(); ++i) {
      int64_t n;
      TF_RETURN_IF_ERROR(ReadVector(ctx, names[i], &n, &values[i]));
      if (i == 0) records->resize(n);
      TF_RETURN_IF_ERROR(CheckNumber(n, names[i], records->size(), names[0]));
    }
    for (size_t i = 0; i < records->size(); ++i) {
      (*records)[i] = {values[0][i], values[1][i], values[2][i],
                       KeyRecord::kLive};
      if (values[1][i] < least) {
        return InvalidArgument("Key ", values[0][i], " was used ",
                               values[1][i], " times.");
      }
    }
    return absl::OkStatus();
  }
};

class ScoreKeysOp : public OpOnTables {
  using OpOnTables::OpOnTables;

  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    KeyTableResource* resource;
    TF_RETURN_IF_ERROR(TheOne(tables, &resource));
    if (!resource->table.rules().scored) {
      return InvalidArgument("The table's policy isn't score.");
    }
    int64_t n, num_scores;
    const int64_t *keys, *scores;
    TF_RETURN_IF_ERROR(ReadVector(ctx, "keys", &n, &keys));
    TF_RETURN_IF_ERROR(ReadVector(ctx, "scores", &num_scores, &scores));
    TF_RETURN_IF_ERROR(CheckNumber(num_scores, "scores", n, "keys"));
    const int64_t least = LeastFrequency(resource->table);
    for (int64_t i = 0; i < n; ++i) {
      if (scores[i] < least) {
        return InvalidArgument("Key ", keys[i], " has the score ", scores[i],
                               ", less than ", least, ".");
      }
    }
    int64_t* rows;
    TF_RETURN_IF_ERROR(RowsOut(ctx, n, &rows));
    tensorflow::mutex_lock lock(resource->mutex);
    resource->table.Score(ParallelOn(ctx), keys, n, scores, rows);
    return absl::OkStatus();
  }
};

class RemoveKeysOp : public OpOnTables {
 public:
  explicit RemoveKeysOp(OpKernelConstruction* ctx) : OpOnTables(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("evicted", &evicted_));
  }

 private:
  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    KeyTableResource* resource;
    TF_RETURN_IF_ERROR(TheOne(tables, &resource));
    int64_t n;
    const int64_t* keys;
    TF_RETURN_IF_ERROR(ReadVector(ctx, "keys", &n, &keys));
    int64_t* rows;
    TF_RETURN_IF_ERROR(RowsOut(ctx, n, &rows));
    tensorflow::mutex_lock lock(resource->mutex);
    resource->table.Remove(ParallelOn(ctx), keys, n, evicted_, rows);
    return absl::OkStatus();
  }

  bool evicted_;
};

class TakeRemovedOp : public OpOnTables {
  using OpOnTables::OpOnTables;

  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    KeyTableResource* resource;
    TF_RETURN_IF_ERROR(TheOne(tables, &resource));
    tensorflow::mutex_lock lock(resource->mutex);
    bool missed;
    const std::vector<int64_t> keys = resource->table.TakeRemoved(&missed);
    TF_RETURN_IF_ERROR(CopyOut(ctx, 0, keys));
    return CopyOut(ctx, 1, {missed});
  }
};

class KeyTableInfoOp : public OpOnTables {
  using OpOnTables::OpOnTables;

  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    Tensor* out;
    const int64_t n = tables.size();
    TF_RETURN_IF_ERROR(
        ctx->allocate_output(0, TensorShape({n, kNumInfo}), &out));
    int64_t* info = out->flat<int64_t>().data();
    for (const auto& resource : tables) {
      tensorflow::tf_shared_lock lock(resource->mutex);
      const KeyTable& table = resource->table;
      for (const int64_t v : {table.size(), table.capacity(), table.physical()})
        *info++ = v;
      for (const KeyTable::Statistics& s : {table.last(), table.total()}) {
        for (const int64_t v : {s.admitted, s.evicted, s.rejected, s.hits})
          *info++ = v;
      }
      *info++ = table.unpublished();
      const SpillFile* spill = resource->table.spill();
      for (const int64_t v :
           {spill ? spill->size() : 0, spill ? spill->bytes() : 0,
            spill ? spill->written() : 0, spill ? spill->returned() : 0})
        *info++ = v;
    }
    return absl::OkStatus();
  }
};

// The first output is like the keys, or their rows, behind N tables; others have
// a number for each table.
absl::Status LikeKeysOfTables(InferenceContext* c) {
  int n;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  c->set_output(0, c->input(n));
  for (int i = 1; i < c->num_outputs(); ++i) c->set_output(i, c->Vector(n));
  return absl::OkStatus();
}

absl::Status InferChanges(InferenceContext* c) {
  TF_RETURN_IF_ERROR(LikeKeysOfTables(c));
  for (int i : {1, 2}) c->set_output(i, c->Vector(c->kUnknownDim));
  return absl::OkStatus();
}

// An operation on the keys of tables, which are its first inputs.
// What a reservation and a commit return.
#define TFRS_CHANGES(op)           \
  op.Output("final_rows: int64")   \
      .Output("new_keys: int64")   \
      .Output("new_rows: int64")   \
      .Output("new_sizes: int64")  \
      .Output("lacking: int64")    \
      .Output("physical: int64")   \
      .Output("versions: int64")   \
      .SetShapeFn(InferChanges)

}  // namespace

REGISTER_OP("TfrsEmbedKeyTable")
    .Input("probability: double")
    .Output("handle: resource")
    .Attr("capacity: int >= 1")
    .Attr("max_capacity: int >= 1")
    .Attr("candidates: int >= 1")
    .Attr("threshold: int >= 0")
    .Attr("seed: int")
    .Attr("policy: {'none', 'lru', 'lfu', 'decay', 'score'}")
    .Attr("ttl: int >= 0")
    .Attr("half_life: int >= 0")
    .Attr("by_time: bool")
    .Attr("floor: int >= 1")
    .Attr("evicts: bool")
    .Attr("spill_owner: string = ''")
    .Attr("spill_folder: string = ''")
    .Attr("spill_parts: list(int) = []")
    .Attr("spill_bytes: int = 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

TFRS_ON_TABLES("Find")
    .Input("keys: int64")
    .Input("table_of: int32")
    .Output("rows: int64")
    .Output("versions: int64")
    .SetShapeFn(LikeKeysOfTables);

TFRS_ON_TABLES("Check")
    .Input("rows: int64")
    .Input("table_of: int32")
    .Input("versions: int64")
    .Output("current_rows: int64")
    .Output("changed: int64")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(LikeKeysOfTables(c));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    });

TFRS_ON_TABLES("Publish")
    .Input("versions: int64")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

TFRS_CHANGES(TFRS_ON_TABLES("Reserve")
                 .Input("keys: int64")
                 .Input("table_of: int32")
                 .Input("counts: int64")
                 .Input("step: int64"));

TFRS_CHANGES(TFRS_ON_TABLES("Commit")
                 .Input("keys: int64")
                 .Input("table_of: int32")
                 .Input("counts: int64")
                 .Input("rows: int64")
                 .Input("step: int64")
                 .Input("memory: M * resource")
                 .Attr("M: int >= 0"));

TFRS_ON_TABLES("Export")
    .Output("keys: int64")
    .Output("rows: int64")
    .Output("frequency: int64")
    .Output("last_used: int64")
    .Attr("candidates: bool")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 4; ++i) c->set_output(i, c->Vector(c->kUnknownDim));
      return absl::OkStatus();
    });

TFRS_ON_TABLES("Replace")
    .Input("keys: int64")
    .Input("frequency: int64")
    .Input("last_used: int64")
    .Input("candidate_keys: int64")
    .Input("candidate_frequency: int64")
    .Input("candidate_last_seen: int64")
    .Input("in_memory: int64")
    .Output("version: int64")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

TFRS_ON_TABLES("Remove")
    .Input("keys: int64")
    .Output("rows: int64")
    .Attr("evicted: bool")
    .SetShapeFn(LikeKeysOfTables);

TFRS_ON_TABLES("Score")
    .Input("keys: int64")
    .Input("scores: int64")
    .Output("rows: int64")
    .SetShapeFn(LikeKeysOfTables);

TFRS_ON_TABLES("TakeRemoved")
    .Output("keys: int64")
    .Output("missed: int64")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->kUnknownDim));
      c->set_output(1, c->Vector(1));
      return absl::OkStatus();
    });

TFRS_ON_TABLES("Info")
    .Output("info: int64")
    .SetShapeFn([](InferenceContext* c) {
      int n;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      c->set_output(0, c->Matrix(n, kNumInfo));
      return absl::OkStatus();
    });

TFRS_KERNEL("TfrsEmbedKeyTable", KeyTableOp);
TFRS_KERNEL("TfrsEmbedKeyTablesFind", FindKeysOp);
TFRS_KERNEL("TfrsEmbedKeyTablesCheck", CheckRowsOp);
TFRS_KERNEL("TfrsEmbedKeyTablesPublish", PublishKeysOp);
TFRS_KERNEL("TfrsEmbedKeyTablesReserve", ReserveKeysOp);
TFRS_KERNEL("TfrsEmbedKeyTablesCommit", CommitKeysOp);
TFRS_KERNEL("TfrsEmbedKeyTablesExport", ExportKeysOp);
TFRS_KERNEL("TfrsEmbedKeyTablesReplace", ReplaceKeysOp);
TFRS_KERNEL("TfrsEmbedKeyTablesRemove", RemoveKeysOp);
TFRS_KERNEL("TfrsEmbedKeyTablesScore", ScoreKeysOp);
TFRS_KERNEL("TfrsEmbedKeyTablesTakeRemoved", TakeRemovedOp);
TFRS_KERNEL("TfrsEmbedKeyTablesInfo", KeyTableInfoOp);

}  // namespace tfrs_embed
