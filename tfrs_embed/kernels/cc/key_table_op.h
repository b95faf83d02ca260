// What operations on shards' keys have in common.

#ifndef TFRS_EMBED_KERNELS_CC_KEY_TABLE_OP_H_
#define TFRS_EMBED_KERNELS_CC_KEY_TABLE_OP_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "input_checks.h"
#include "key_table.h"
#include "op.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/refcount.h"
#include "threads.h"
#include "variables.h"

namespace tfrs_embed {

using tensorflow::ResourceHandle;

// An operation's definition, which its other inputs and outputs follow.
#define TFRS_ON_TABLES(name)               \
  REGISTER_OP("TfrsEmbedKeyTables" name)   \
      .Attr("N: int >= 1")                 \
      .Input("tables: N * resource")       \
      .SetIsStateful()

// Returns the status of work, or that of what it throws.
template <typename Work>
absl::Status Catch(const Work& work) {
  try {
    return work();
  } catch (const KeyError& error) {
    return InvalidArgument(error.what());
  } catch (const SpillError& error) {
    return tensorflow::errors::ResourceExhausted(error.what());
  } catch (const std::bad_alloc&) {
    return tensorflow::errors::ResourceExhausted("No memory for more keys.");
  }
}

class KeyTableResource : public tensorflow::ResourceBase {
 public:
  KeyTableResource(const KeyRules& rules, std::unique_ptr<SpillFile> spill)
      : table(rules, std::move(spill)) {}

  std::string DebugString() const override { return "TfrsEmbedKeyTable"; }

  tensorflow::mutex mutex;
  KeyTable table;
};

inline absl::Status CopyOut(OpKernelContext* ctx, int output,
                     const std::vector<int64_t>& values) {
  Tensor* tensor;
  TF_RETURN_IF_ERROR(ctx->allocate_output(
      output, TensorShape({static_cast<int64_t>(values.size())}), &tensor));
  std::copy(values.begin(), values.end(), tensor->flat<int64_t>().data());
  return absl::OkStatus();
}

inline absl::Status ScalarOut(OpKernelContext* ctx, int output, int64_t value) {
  Tensor* tensor;
  TF_RETURN_IF_ERROR(ctx->allocate_output(output, TensorShape({}), &tensor));
  tensor->scalar<int64_t>()() = value;
  return absl::OkStatus();
}

inline absl::Status RowsOut(OpKernelContext* ctx, int64_t n, int64_t** rows) {
  Tensor* tensor;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({n}), &tensor));
  *rows = tensor->flat<int64_t>().data();
  return absl::OkStatus();
}

inline KeyTable::Parallel ParallelOn(OpKernelContext* ctx) {
  return {NumThreads(ctx), [ctx](int64_t total, int64_t cost,
                                 const Chunks::Function& fn) {
            ParallelFor(ctx, total, cost, fn);
          }};
}

// The entries of several tables, which may come in any order.
class Entries {
 public:
  // Reads which of `tables` tables each of n entries is of. With one table
  // nobody says it.
  absl::Status Read(OpKernelContext* ctx, int64_t n, int64_t tables) {
    const Tensor* table_of;
    TF_RETURN_IF_ERROR(ctx->input("table_of", &table_of));
    ends_.assign(tables, 0);
    if (tables == 1 && table_of->NumElements() == 0) {
      ends_[0] = n;
      return absl::OkStatus();
    }
    const int32_t* of;
    TF_RETURN_IF_ERROR(ReadTableOf(*table_of, n, tables, &of));
    for (int64_t i = 0; i < n; ++i) ++ends_[of[i]];
    const bool sorted = std::is_sorted(of, of + n);
    for (int64_t t = 1; t < tables; ++t) ends_[t] += ends_[t - 1];
    if (sorted) return absl::OkStatus();
    order_.resize(n);
    std::vector<int64_t> next(tables, 0);
    std::copy(ends_.begin(), ends_.end() - 1, next.begin() + 1);
    for (int64_t i = 0; i < n; ++i) order_[next[of[i]]++] = i;
    return absl::OkStatus();
  }

  int64_t total() const { return ends_.back(); }
  int64_t begin(size_t table) const { return table ? ends_[table - 1] : 0; }
  int64_t size(size_t table) const { return ends_[table] - begin(table); }

  // The entries' values, table after table. `memory` must outlive them.
  const int64_t* Sorted(const int64_t* values,
                        std::vector<int64_t>* memory) const {
    if (order_.empty()) return values;
    memory->resize(order_.size());
    for (size_t i = 0; i < order_.size(); ++i) (*memory)[i] = values[order_[i]];
    return memory->data();
  }

  // Brings values, table after table, into the order of the entries.
  void Unsort(int64_t* values) const {
    if (order_.empty()) return;
    const std::vector<int64_t> sorted(values, values + order_.size());
    for (size_t i = 0; i < order_.size(); ++i) values[order_[i]] = sorted[i];
  }

 private:
  std::vector<int64_t> order_;  // Empty: as they are.
  std::vector<int64_t> ends_;   // Of each table's.
};

// An operation on the keys of several tables.
class OpOnTables : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OpInputList handles;
    OP_REQUIRES_OK(ctx, ctx->input_list("tables", &handles));
    Tables tables(handles.size());
    for (size_t t = 0; t < tables.size(); ++t) {
      const ResourceHandle* handle;
      OP_REQUIRES_OK(ctx, FindScalar(handles[t], "A table", &handle));
      OP_REQUIRES_OK(ctx,
                     tensorflow::LookupResource(ctx, *handle, &tables[t]));
    }
    OP_REQUIRES_OK(ctx, Catch([&] { return Run(ctx, tables); }));
  }

 protected:
  using Tables =
      std::vector<tensorflow::core::RefCountPtr<KeyTableResource>>;

  virtual absl::Status Run(OpKernelContext* ctx, const Tables& tables) = 0;

  // An input with a number for each table; of one table, also a scalar.
  static absl::Status OfTables(OpKernelContext* ctx, const char* name,
                               const Tables& tables, const int64_t** values) {
    const Tensor* tensor;
    TF_RETURN_IF_ERROR(ctx->input(name, &tensor));
    *values = tensor->flat<int64_t>().data();
    if (tensor->NumElements() == static_cast<int64_t>(tables.size())) {
      return absl::OkStatus();
    }
    return InvalidArgument("The ", name, " must be one of each table.");
  }

  // The only table of an operation that takes one.
  static absl::Status TheOne(const Tables& tables, KeyTableResource** table) {
    if (tables.size() != 1) return InvalidArgument("It takes one table.");
    *table = tables[0].get();
    return absl::OkStatus();
  }

  // The only table of an operation on a spill.
  static absl::Status TheOneWithSpill(const Tables& tables,
                                      KeyTableResource** table) {
    TF_RETURN_IF_ERROR(TheOne(tables, table));
    if ((*table)->table.spill() != nullptr) return absl::OkStatus();
    return InvalidArgument("The table has no spill.");
  }

  // Checks that a variable has rows of a part of a spill.
  static absl::Status CheckPart(const TableShape& shape, int64_t bytes) {
    const int64_t here = shape.dim == kByRow ? (shape.type == kMarks ? 1 : 4)
                                             : tfrs_row_bytes(shape.type,
                                                              shape.dim);
    if (here == bytes) return absl::OkStatus();
    return InvalidArgument("A variable has rows of ", here, " bytes, not ",
                           bytes, ".");
  }

  // Takes from `next` on the variables of a table, if it has a spill.
  static absl::Status MemoryOf(KeyTable& table, const Variables& variables,
                               size_t* next, SpillFile::Memory* memory) {
    if (table.spill() == nullptr) return absl::OkStatus();
    for (const int64_t bytes : table.spill()->parts()) {
      if (*next == variables.size()) {
        return InvalidArgument("A variable of a table is missing.");
      }
      const TableShape& shape = variables.shapes()[*next];
      TF_RETURN_IF_ERROR(CheckPart(shape, bytes));
      memory->rows = std::min(memory->rows, shape.rows);
      memory->values.push_back(
          static_cast<char*>(variables.values()[(*next)++]));
    }
    return absl::OkStatus();
  }

  // Runs work(table, parallel) for each table: one after the other on several
  // threads, or, where a table's keys are few, several at once.
  template <typename Work>
  static absl::Status ForEach(OpKernelContext* ctx, const Entries& entries,
                              const Tables& tables, const Work& work) {
    constexpr int64_t kFew = 1 << 14;
    constexpr int64_t kCost = 100;  // Of a key, in cycles.
    const int64_t n = tables.size();
    if (n == 1 || entries.total() > n * kFew) {
      for (int64_t t = 0; t < n; ++t) work(t, ParallelOn(ctx));
      return absl::OkStatus();
    }
    const KeyTable::Parallel alone = {
        1, [](int64_t total, int64_t, const Chunks::Function& fn) {
          if (total > 0) fn(0, total);
        }};
    // No exception may leave another thread's work.
    std::mutex mutex;
    absl::Status status;
    ParallelFor(ctx, n, kCost * (entries.total() / n),
                [&](int64_t begin, int64_t end) {
                  const absl::Status found = Catch([&] {
                    for (int64_t t = begin; t < end; ++t) work(t, alone);
                    return absl::OkStatus();
                  });
                  std::lock_guard<std::mutex> lock(mutex);
                  status.Update(found);
                });
    return status;
  }
};

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_KEY_TABLE_OP_H_
