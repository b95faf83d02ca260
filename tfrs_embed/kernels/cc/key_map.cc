// A hash map of int64 to int64 with open addressing. TensorFlow's own
// operations for lookup tables find, insert, export and import its keys.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "rows.h"
#include "tensorflow/core/framework/lookup_interface.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/mutex.h"
#include "threads.h"

namespace tfrs_embed {

using tensorflow::DT_INT64;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

constexpr int64_t kKeysAhead = 8;
// Marks a slot without a key; no value may be this.
constexpr int64_t kEmpty = std::numeric_limits<int64_t>::min();

class KeyMap : public tensorflow::lookup::LookupInterface {
 public:
  KeyMap() : slots_(1 << kFewestBits, Slot{0, kEmpty}) {}

  size_t size() const override {
    tensorflow::tf_shared_lock lock(mutex_);
    return size_;
  }

  absl::Status Find(OpKernelContext* ctx, const Tensor& keys, Tensor* values,
                    const Tensor& default_value) override {
    const int64_t absent = default_value.flat<int64_t>()(0);
    const int64_t* key = keys.flat<int64_t>().data();
    int64_t* value = values->flat<int64_t>().data();
    tensorflow::tf_shared_lock lock(mutex_);
    ParallelFor(ctx, keys.NumElements(), 50,
                [&](int64_t begin, int64_t end) {
                  for (int64_t i = begin; i < end; ++i) {
                    if (i + kKeysAhead < end) {
                      __builtin_prefetch(&slots_[Home(key[i + kKeysAhead])]);
                    }
                    const Slot& slot = slots_[Place(key[i])];
                    value[i] = slot.value == kEmpty ? absent : slot.value;
                  }
                });
    return absl::OkStatus();
  }

  absl::Status Insert(OpKernelContext* ctx, const Tensor& keys,
                      const Tensor& values) override {
    TF_RETURN_IF_ERROR(CheckValues(values));
    tensorflow::mutex_lock lock(mutex_);
    InsertAll(keys, values);
    return absl::OkStatus();
  }

  absl::Status ImportValues(OpKernelContext* ctx, const Tensor& keys,
                            const Tensor& values) override {
    TF_RETURN_IF_ERROR(CheckValues(values));
    tensorflow::mutex_lock lock(mutex_);
    size_ = 0;
    bits_ = kFewestBits;
    slots_.assign(int64_t{1} << bits_, Slot{0, kEmpty});
    InsertAll(keys, values);
    return absl::OkStatus();
  }

  absl::Status Remove(OpKernelContext* ctx, const Tensor& keys) override {
    return tensorflow::errors::Unimplemented(
        "Keys can't be removed from a key map.");
  }

  absl::Status ExportValues(OpKernelContext* ctx) override {
    tensorflow::tf_shared_lock lock(mutex_);
    Tensor *keys, *values;
    const TensorShape shape({size_});
    TF_RETURN_IF_ERROR(ctx->allocate_output("keys", shape, &keys));
    TF_RETURN_IF_ERROR(ctx->allocate_output("values", shape, &values));
    int64_t i = 0;
    for (const Slot& slot : slots_) {
      if (slot.value == kEmpty) continue;
      keys->flat<int64_t>()(i) = slot.key;
      values->flat<int64_t>()(i++) = slot.value;
    }
    return absl::OkStatus();
  }

  tensorflow::DataType key_dtype() const override { return DT_INT64; }
  tensorflow::DataType value_dtype() const override { return DT_INT64; }
  TensorShape key_shape() const override { return TensorShape(); }
  TensorShape value_shape() const override { return TensorShape(); }

  int64_t MemoryUsed() const override {
    tensorflow::tf_shared_lock lock(mutex_);
    return sizeof(*this) + slots_.size() * sizeof(Slot);
  }

  std::string DebugString() const override { return "TfrsEmbedKeyMap"; }

 private:
  struct Slot {
    int64_t key, value;
  };
  static constexpr int kFewestBits = 6;

  int64_t Home(int64_t key) const { return tfrs_hash(key) >> (64 - bits_); }

  // The slot of a key, or the empty one that it would get.
  int64_t Place(int64_t key) const {
    const int64_t mask = slots_.size() - 1;
    int64_t at = Home(key);
    while (slots_[at].value != kEmpty && slots_[at].key != key) {
      at = (at + 1) & mask;
    }
    return at;
  }

  static absl::Status CheckValues(const Tensor& values) {
    const auto flat = values.flat<int64_t>();
    for (int64_t i = 0; i < flat.size(); ++i) {
      if (flat(i) == kEmpty) {
        return tensorflow::errors::InvalidArgument(
            "A key map can't hold the value ", kEmpty, ".");
      }
    }
    return absl::OkStatus();
  }

  // The last one of equal keys stays.
  void InsertAll(const Tensor& keys, const Tensor& values) {
    const auto key = keys.flat<int64_t>();
    const auto value = values.flat<int64_t>();
    Reserve(size_ + key.size());
    for (int64_t i = 0; i < key.size(); ++i) {
      Slot& slot = slots_[Place(key(i))];
      if (slot.value == kEmpty) ++size_;
      slot = {key(i), value(i)};
    }
  }

  // Makes slots for so many keys, of which at most half are then in use.
  void Reserve(int64_t count) {
    int bits = bits_;
    while ((int64_t{1} << bits) < 2 * count) ++bits;
    if (bits == bits_) return;
    std::vector<Slot> old(int64_t{1} << bits, Slot{0, kEmpty});
    old.swap(slots_);
    bits_ = bits;
    for (const Slot& slot : old) {
      if (slot.value != kEmpty) slots_[Place(slot.key)] = slot;
    }
  }

  mutable tensorflow::mutex mutex_;
  std::vector<Slot> slots_;
  int64_t size_ = 0;
  int bits_ = kFewestBits;
};

// Makes a map that lives as long as its handle.
class KeyMapOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    Tensor* handle;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &handle));
    tensorflow::lookup::LookupInterface* map = new KeyMap();
    handle->scalar<ResourceHandle>()() = ResourceHandle::MakeRefCountingHandle<
        tensorflow::lookup::LookupInterface>(map, ctx->device()->name());
  }
};

}  // namespace

REGISTER_OP("TfrsEmbedKeyMap")
    .Output("handle: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_KERNEL_BUILDER(
    Name("TfrsEmbedKeyMap").Device(tensorflow::DEVICE_CPU), KeyMapOp);

}  // namespace tfrs_embed
