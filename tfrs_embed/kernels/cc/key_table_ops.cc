// The operations on a shard's keys. key_table.py says what they do.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <vector>

#include "key_table.h"
#include "op.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/refcount.h"
#include "threads.h"

namespace tfrs_embed {

using tensorflow::ResourceHandle;

namespace {

class KeyTableResource : public tensorflow::ResourceBase {
 public:
  explicit KeyTableResource(const KeyRules& rules) : table(rules) {}

  std::string DebugString() const override { return "TfrsEmbedKeyTable"; }

  tensorflow::mutex mutex;
  KeyTable table;
};

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
    OP_REQUIRES_OK(ctx, ctx->GetAttr("evicts", &rules_.evicts));
    rules_.seed = seed;
    rules_.has_policy = policy != "none";
    rules_.by_frequency = policy == "lfu";
    if (policy != "ttl") rules_.ttl = 0;
  }

  void Compute(OpKernelContext* ctx) override {
    Tensor* handle;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &handle));
    KeyRules rules = rules_;
    rules.probability = ctx->input(0).scalar<double>()();
    KeyTableResource* resource = nullptr;
    try {
      resource = new KeyTableResource(rules);
    } catch (const std::bad_alloc&) {
      ctx->SetStatus(tensorflow::errors::ResourceExhausted(
          "No memory for the keys of ", rules.capacity, " rows."));
      return;
    }
    handle->scalar<ResourceHandle>()() =
        ResourceHandle::MakeRefCountingHandle<KeyTableResource>(
            resource, ctx->device()->name());
  }

 private:
  KeyRules rules_;
};

absl::Status CopyOut(OpKernelContext* ctx, int output,
                     const std::vector<int64_t>& values) {
  Tensor* tensor;
  TF_RETURN_IF_ERROR(ctx->allocate_output(
      output, TensorShape({static_cast<int64_t>(values.size())}), &tensor));
  std::copy(values.begin(), values.end(), tensor->flat<int64_t>().data());
  return absl::OkStatus();
}

absl::Status ScalarOut(OpKernelContext* ctx, int output, int64_t value) {
  Tensor* tensor;
  TF_RETURN_IF_ERROR(ctx->allocate_output(output, TensorShape({}), &tensor));
  tensor->scalar<int64_t>()() = value;
  return absl::OkStatus();
}

absl::Status RowsOut(OpKernelContext* ctx, int64_t n, int64_t** rows) {
  Tensor* tensor;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({n}), &tensor));
  *rows = tensor->flat<int64_t>().data();
  return absl::OkStatus();
}

// Checks that inputs after the table's handle are vectors of one length.
absl::Status CheckAlike(OpKernelContext* ctx, int first, int last) {
  const int64_t n = ctx->input(first).NumElements();
  for (int i = first; i <= last; ++i) {
    if (ctx->input(i).NumElements() != n) {
      return InvalidArgument(
          "Input ", i, " has ", ctx->input(i).NumElements(),
          " elements, input ", first, " has ", n, ".");
    }
  }
  return absl::OkStatus();
}

// An operation on a table, which is its first input.
class OpOnKeys : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<KeyTableResource> resource;
    OP_REQUIRES_OK(ctx, tensorflow::LookupResource(
                            ctx, tensorflow::HandleFromInput(ctx, 0),
                            &resource));
    try {
      OP_REQUIRES_OK(ctx, Run(ctx, resource.get()));
    } catch (const std::bad_alloc&) {
      ctx->SetStatus(
          tensorflow::errors::ResourceExhausted("No memory for more keys."));
    }
  }

 protected:
  virtual absl::Status Run(OpKernelContext* ctx,
                           KeyTableResource* resource) = 0;

  static KeyTable::Parallel ParallelOn(OpKernelContext* ctx) {
    return {NumThreads(ctx), [ctx](int64_t total, int64_t cost,
                                   const Chunks::Function& fn) {
              ParallelFor(ctx, total, cost, fn);
            }};
  }

  static const int64_t* Input(OpKernelContext* ctx, int i) {
    return ctx->input(i).flat<int64_t>().data();
  }

  // A step, of the inputs keys, counts and the step's number, which is the last
  // of so many inputs. No counts are ones.
  static absl::Status ReadStep(OpKernelContext* ctx, int inputs,
                               KeyStep* step) {
    const bool counted = ctx->input(2).NumElements() > 0;
    step->n = ctx->input(1).NumElements();
    step->keys = Input(ctx, 1);
    step->counts = counted ? Input(ctx, 2) : nullptr;
    TF_RETURN_IF_ERROR(ReadScalar(ctx, inputs - 1, "step", &step->number));
    return counted ? CheckAlike(ctx, 1, 2) : absl::OkStatus();
  }

  static absl::Status ReadScalar(OpKernelContext* ctx, int input,
                                 const char* name, int64_t* value) {
    if (ctx->input(input).NumElements() != 1) {
      return InvalidArgument("The ", name, " must be a scalar.");
    }
    *value = *Input(ctx, input);
    return absl::OkStatus();
  }

  // The outputs of a plan or a commit, behind the rows.
  static absl::Status ChangesOut(OpKernelContext* ctx,
                                 const KeyChanges& changes,
                                 const KeyTable& table) {
    TF_RETURN_IF_ERROR(CopyOut(ctx, 1, changes.new_keys));
    TF_RETURN_IF_ERROR(CopyOut(ctx, 2, changes.new_rows));
    TF_RETURN_IF_ERROR(ScalarOut(ctx, 3, changes.lacking));
    TF_RETURN_IF_ERROR(ScalarOut(ctx, 4, table.physical()));
    return ScalarOut(ctx, 5, changes.version);
  }
};

class FindKeysOp : public OpOnKeys {
  using OpOnKeys::OpOnKeys;

  absl::Status Run(OpKernelContext* ctx, KeyTableResource* resource) override {
    const int64_t n = ctx->input(1).NumElements();
    int64_t* rows;
    TF_RETURN_IF_ERROR(RowsOut(ctx, n, &rows));
    tensorflow::tf_shared_lock lock(resource->mutex);
    resource->table.Find(ParallelOn(ctx), Input(ctx, 1), n, rows);
    return ScalarOut(ctx, 1, resource->table.version());
  }
};

class CheckRowsOp : public OpOnKeys {
  using OpOnKeys::OpOnKeys;

  absl::Status Run(OpKernelContext* ctx, KeyTableResource* resource) override {
    int64_t version;
    TF_RETURN_IF_ERROR(ReadScalar(ctx, 2, "version", &version));
    const Tensor& found = ctx->input(1);
    const int64_t n = found.NumElements();
    tensorflow::tf_shared_lock lock(resource->mutex);
    if (resource->table.version() == version) {
      ctx->set_output(0, found);
      return ScalarOut(ctx, 1, 0);
    }
    int64_t* rows;
    TF_RETURN_IF_ERROR(RowsOut(ctx, n, &rows));
    for (int64_t i = 0; i < n; ++i) {
      rows[i] = Input(ctx, 1)[i];
      if (rows[i] < 0) {
        return InvalidArgument("Row ", rows[i], " < 0");
      }
    }
    return ScalarOut(ctx, 1, resource->table.Check(n, version, rows));
  }
};

class PublishKeysOp : public OpOnKeys {
  using OpOnKeys::OpOnKeys;

  absl::Status Run(OpKernelContext* ctx, KeyTableResource* resource) override {
    int64_t version;
    TF_RETURN_IF_ERROR(ReadScalar(ctx, 1, "version", &version));
    if (version == 0) return absl::OkStatus();
    tensorflow::mutex_lock lock(resource->mutex);
    resource->table.Publish(version);
    return absl::OkStatus();
  }
};

class PlanKeysOp : public OpOnKeys {
  using OpOnKeys::OpOnKeys;

  absl::Status Run(OpKernelContext* ctx, KeyTableResource* resource) override {
    KeyStep step;
    TF_RETURN_IF_ERROR(ReadStep(ctx, 4, &step));
    int64_t* rows;
    TF_RETURN_IF_ERROR(RowsOut(ctx, step.n, &rows));
    tensorflow::mutex_lock lock(resource->mutex);
    const KeyChanges plan = resource->table.Plan(ParallelOn(ctx), step, rows);
    return ChangesOut(ctx, plan, resource->table);
  }
};

class CommitKeysOp : public OpOnKeys {
  using OpOnKeys::OpOnKeys;

  absl::Status Run(OpKernelContext* ctx, KeyTableResource* resource) override {
    KeyStep step;
    TF_RETURN_IF_ERROR(ReadStep(ctx, 5, &step));
    if (ctx->input(3).NumElements() != step.n) {
      return InvalidArgument(
          "A commit must have a row for each of ", step.n, " keys, got ",
          ctx->input(3).NumElements());
    }
    int64_t* rows;
    TF_RETURN_IF_ERROR(RowsOut(ctx, step.n, &rows));
    tensorflow::mutex_lock lock(resource->mutex);
    const KeyChanges changes = resource->table.Commit(ParallelOn(ctx), step,
                                                      Input(ctx, 3), rows);
    return ChangesOut(ctx, changes, resource->table);
  }
};

class ExportKeysOp : public OpOnKeys {
 public:
  explicit ExportKeysOp(OpKernelConstruction* ctx) : OpOnKeys(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("candidates", &candidates_));
  }

 private:
  absl::Status Run(OpKernelContext* ctx, KeyTableResource* resource) override {
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
    TF_RETURN_IF_ERROR(CopyOut(ctx, 0, keys));
    TF_RETURN_IF_ERROR(CopyOut(ctx, 1, places));
    TF_RETURN_IF_ERROR(CopyOut(ctx, 2, frequency));
    return CopyOut(ctx, 3, last_used);
  }

  bool candidates_;
};

class ReplaceKeysOp : public OpOnKeys {
  using OpOnKeys::OpOnKeys;

  absl::Status Run(OpKernelContext* ctx, KeyTableResource* resource) override {
    TF_RETURN_IF_ERROR(CheckAlike(ctx, 1, 3));
    TF_RETURN_IF_ERROR(CheckAlike(ctx, 4, 6));
    const std::vector<KeyRecord> live = Records(ctx, 1);
    const std::vector<KeyRecord> candidates = Records(ctx, 4);
    tensorflow::mutex_lock lock(resource->mutex);
    if (!resource->table.Replace(live, candidates)) {
      return InvalidArgument(
          "There is no room for ", live.size(), " keys.");
    }
    return ScalarOut(ctx, 0, resource->table.version());
  }

  static std::vector<KeyRecord> Records(OpKernelContext* ctx, int first) {
    std::vector<KeyRecord> records(ctx->input(first).NumElements());
    for (size_t i = 0; i < records.size(); ++i) {
      records[i] = {Input(ctx, first)[i], Input(ctx, first + 1)[i],
                    Input(ctx, first + 2)[i], KeyRecord::kLive};
    }
    return records;
  }
};

class RemoveKeysOp : public OpOnKeys {
 public:
  explicit RemoveKeysOp(OpKernelConstruction* ctx) : OpOnKeys(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("evicted", &evicted_));
  }

 private:
  absl::Status Run(OpKernelContext* ctx, KeyTableResource* resource) override {
    const int64_t n = ctx->input(1).NumElements();
    int64_t* rows;
    TF_RETURN_IF_ERROR(RowsOut(ctx, n, &rows));
    tensorflow::mutex_lock lock(resource->mutex);
    resource->table.Remove(ParallelOn(ctx), Input(ctx, 1), n, evicted_, rows);
    return absl::OkStatus();
  }

  bool evicted_;
};

class KeyTableInfoOp : public OpOnKeys {
  using OpOnKeys::OpOnKeys;

  absl::Status Run(OpKernelContext* ctx, KeyTableResource* resource) override {
    tensorflow::tf_shared_lock lock(resource->mutex);
    const KeyTable& table = resource->table;
    std::vector<int64_t> info = {table.size(), table.capacity(),
                                 table.physical()};
    for (const KeyTable::Statistics& s : {table.last(), table.total()}) {
      info.insert(info.end(), {s.admitted, s.evicted, s.rejected, s.hits});
    }
    info.push_back(table.unpublished());
    return CopyOut(ctx, 0, info);
  }
};

absl::Status LikeKeys(InferenceContext* c) {
  c->set_output(0, c->input(1));
  return absl::OkStatus();
}

absl::Status LikeKeysAndScalar(InferenceContext* c) {
  c->set_output(1, c->Scalar());
  return LikeKeys(c);
}

absl::Status InferChanges(InferenceContext* c) {
  for (int i = 1; i <= 5; ++i) {
    c->set_output(i, i <= 2 ? c->Vector(c->kUnknownDim) : c->Scalar());
  }
  return LikeKeys(c);
}

// An operation on a table of keys, which is its first input.
#define TFRS_ON_KEYS(name) \
  REGISTER_OP("TfrsEmbedKeyTable" name).Input("table: resource").SetIsStateful()

}  // namespace

REGISTER_OP("TfrsEmbedKeyTable")
    .Input("probability: double")
    .Output("handle: resource")
    .Attr("capacity: int >= 1")
    .Attr("max_capacity: int >= 1")
    .Attr("candidates: int >= 1")
    .Attr("threshold: int >= 0")
    .Attr("seed: int")
    .Attr("policy: {'none', 'lru', 'lfu', 'ttl'}")
    .Attr("ttl: int >= 0")
    .Attr("evicts: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

TFRS_ON_KEYS("Find")
    .Input("keys: int64")
    .Output("rows: int64")
    .Output("version: int64")
    .SetShapeFn(LikeKeysAndScalar);

TFRS_ON_KEYS("Check")
    .Input("rows: int64")
    .Input("version: int64")
    .Output("current_rows: int64")
    .Output("changed: int64")
    .SetShapeFn(LikeKeysAndScalar);

TFRS_ON_KEYS("Publish")
    .Input("version: int64")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

TFRS_ON_KEYS("Plan")
    .Input("keys: int64")
    .Input("counts: int64")
    .Input("step: int64")
    .Output("rows: int64")
    .Output("new_keys: int64")
    .Output("new_rows: int64")
    .Output("lacking: int64")
    .Output("physical: int64")
    .Output("version: int64")
    .SetShapeFn(InferChanges);

TFRS_ON_KEYS("Commit")
    .Input("keys: int64")
    .Input("counts: int64")
    .Input("rows: int64")
    .Input("step: int64")
    .Output("final_rows: int64")
    .Output("new_keys: int64")
    .Output("new_rows: int64")
    .Output("lacking: int64")
    .Output("physical: int64")
    .Output("version: int64")
    .SetShapeFn(InferChanges);

TFRS_ON_KEYS("Export")
    .Output("keys: int64")
    .Output("rows: int64")
    .Output("frequency: int64")
    .Output("last_used: int64")
    .Attr("candidates: bool")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 4; ++i) c->set_output(i, c->Vector(c->kUnknownDim));
      return absl::OkStatus();
    });

TFRS_ON_KEYS("Replace")
    .Input("keys: int64")
    .Input("frequency: int64")
    .Input("last_used: int64")
    .Input("candidate_keys: int64")
    .Input("candidate_frequency: int64")
    .Input("candidate_last_seen: int64")
    .Output("version: int64")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

TFRS_ON_KEYS("Remove")
    .Input("keys: int64")
    .Output("rows: int64")
    .Attr("evicted: bool")
    .SetShapeFn(LikeKeys);

TFRS_ON_KEYS("Info")
    .Output("info: int64")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(12));
      return absl::OkStatus();
    });

TFRS_KERNEL("TfrsEmbedKeyTable", KeyTableOp);
TFRS_KERNEL("TfrsEmbedKeyTableFind", FindKeysOp);
TFRS_KERNEL("TfrsEmbedKeyTableCheck", CheckRowsOp);
TFRS_KERNEL("TfrsEmbedKeyTablePublish", PublishKeysOp);
TFRS_KERNEL("TfrsEmbedKeyTablePlan", PlanKeysOp);
TFRS_KERNEL("TfrsEmbedKeyTableCommit", CommitKeysOp);
TFRS_KERNEL("TfrsEmbedKeyTableExport", ExportKeysOp);
TFRS_KERNEL("TfrsEmbedKeyTableReplace", ReplaceKeysOp);
TFRS_KERNEL("TfrsEmbedKeyTableRemove", RemoveKeysOp);
TFRS_KERNEL("TfrsEmbedKeyTableInfo", KeyTableInfoOp);

}  // namespace tfrs_embed
