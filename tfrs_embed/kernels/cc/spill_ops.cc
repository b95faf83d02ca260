// The operations on rows that are in a table's spill. key_table.py says what
// they do.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "key_table_op.h"
#include "tensorflow/core/util/overflow.h"

namespace tfrs_embed {

namespace {

// Finds the rows of keys in the spill; kAbsentRow for those that aren't there.
class FindSpilledOp : public OpOnTables {
  using OpOnTables::OpOnTables;

  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    KeyTableResource* resource;
    TF_RETURN_IF_ERROR(TheOneWithSpill(tables, &resource));
    int64_t n;
    const int64_t* keys;
    TF_RETURN_IF_ERROR(ReadVector(ctx, "keys", &n, &keys));
    int64_t* rows;
    TF_RETURN_IF_ERROR(RowsOut(ctx, n, &rows));
    tensorflow::tf_shared_lock lock(resource->mutex);
    resource->table.spill()->Find(keys, n, rows);
    for (int64_t i = 0; i < n; ++i) {
      if (rows[i] != 0) rows[i] += KeyTable::kSpilled;
    }
    return absl::OkStatus();
  }
};

// Begins to read the rows of keys.
class ReadAheadSpilledOp : public OpOnTables {
  using OpOnTables::OpOnTables;

  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    KeyTableResource* resource;
    TF_RETURN_IF_ERROR(TheOneWithSpill(tables, &resource));
    int64_t n;
    const int64_t* keys;
    TF_RETURN_IF_ERROR(ReadVector(ctx, "keys", &n, &keys));
    std::vector<int64_t> places(n);
    {
      tensorflow::tf_shared_lock lock(resource->mutex);
      resource->table.spill()->Find(keys, n, places.data());
    }
    resource->table.spill()->ReadAhead(places.data(), n);
    return absl::OkStatus();
  }
};

// Finds rows of keys of several tables, as FindKeysOp does. For keys that have
// none: an index from 1 on among the vectors found in the tables' spills, or 0,
// where the first vector is zeros. Nothing changes in between, so that a key is
// always in one of the two. Given the parameters of the tables with spills, the
// vectors are those of their rows, too.
class LookupSpilledOp : public OpOnTables {
 public:
  explicit LookupSpilledOp(OpKernelConstruction* ctx) : OpOnTables(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_));
    tensorflow::DataType dtype;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype));
    ReadType(dtype, &type_);
    OP_REQUIRES(ctx, dim_ <= SpillFile::kMostBytes / tfrs_size(type_),
                InvalidArgument("dim is ", dim_, "."));
  }

 private:
  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    int64_t n;
    const int64_t* keys;
    TF_RETURN_IF_ERROR(ReadVector(ctx, "keys", &n, &keys));
    const int64_t bytes = tfrs_row_bytes(type_, dim_);
    for (const auto& resource : tables) {
      const SpillFile* spill = resource->table.spill();
      if (spill != nullptr && spill->parts()[0] != bytes) {
        return InvalidArgument("A row of a spill has ", spill->parts()[0],
                               " bytes, not ", bytes, ".");
      }
    }
    Entries entries;
    TF_RETURN_IF_ERROR(entries.Read(ctx, n, tables.size()));
    std::vector<int64_t> memory;
    keys = entries.Sorted(keys, &memory);
    int64_t* rows;
    TF_RETURN_IF_ERROR(RowsOut(ctx, entries.total(), &rows));
    std::vector<int64_t> versions(tables.size());
    Tensor* index_out;
    TF_RETURN_IF_ERROR(
        ctx->allocate_output(2, TensorShape({entries.total()}), &index_out));
    int64_t* index = index_out->flat<int64_t>().data();
    std::fill_n(index, entries.total(), 0);
    std::vector<char> vectors(bytes);
    int64_t found = 0;
    Variables variables(&cache_);
    OpInputList handles;
    TF_RETURN_IF_ERROR(ctx->input_list("parameters", &handles));
    if (handles.size() > 0) {
      TF_RETURN_IF_ERROR(variables.Find(ctx, "parameters", {}));
      TF_RETURN_IF_ERROR(variables.LockToRead());
    }
    size_t next = 0;
    for (size_t t = 0; t < tables.size(); ++t) {
      KeyTable& table = tables[t]->table;
      SpillFile* spill = table.spill();
      const int64_t begin = entries.begin(t), n = entries.size(t);
      tensorflow::tf_shared_lock lock(tables[t]->mutex);
      table.Find(ParallelOn(ctx), keys + begin, n, rows + begin);
      versions[t] = table.version();
      if (spill == nullptr) continue;
      const char* parameters = nullptr;
      int64_t rows_there = 0;
      if (handles.size() > 0) {
        if (next == variables.size()) {
          return InvalidArgument("A table's parameters are missing.");
        }
        const TableShape& shape = variables.shapes()[next];
        if (shape.dim != dim_ || shape.type != type_) {
          return InvalidArgument("A table's parameters have rows of ",
                                 shape.dim, " numbers, not ", dim_,
                                 ", or of another type.");
        }
        rows_there = shape.rows;
        parameters = static_cast<const char*>(variables.values()[next++]);
      }
      std::vector<int64_t> places(n, 0);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t row = rows[begin + i];
        if (row == kAbsentRow) {
          places[i] = spill->Find(keys[begin + i]);
        } else if (parameters != nullptr && row < rows_there) {
          index[begin + i] = ++found;
          const char* from = parameters + row * bytes;
          vectors.insert(vectors.end(), from, from + bytes);
        }
      }
      spill->Read(places, [&](size_t i, const char* record) {
        index[begin + i] = ++found;
        vectors.insert(vectors.end(), record, record + bytes);
      });
    }
    if (next != variables.size()) {
      return InvalidArgument(variables.size(), " parameters, but ", next,
                             " tables with spills.");
    }
    entries.Unsort(rows);
    entries.Unsort(index);
    TF_RETURN_IF_ERROR(CopyOut(ctx, 1, versions));
    Tensor* out;
    TF_RETURN_IF_ERROR(
        ctx->allocate_output(3, TensorShape({found + 1, dim_}), &out));
    std::memcpy(out->data(), vectors.data(), vectors.size());
    return absl::OkStatus();
  }

  int64_t dim_;
  int32_t type_ = kFloat32;
  Variables::Cache cache_;
};

// Gives keys' rows in memory their values, where the keys come from the spill:
// those of the first variables.
class FetchSpilledOp : public OpOnTables {
  using OpOnTables::OpOnTables;

  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    KeyTableResource* resource;
    TF_RETURN_IF_ERROR(TheOneWithSpill(tables, &resource));
    int64_t n, num_rows;
    const int64_t *keys, *rows;
    TF_RETURN_IF_ERROR(ReadVector(ctx, "keys", &n, &keys));
    TF_RETURN_IF_ERROR(ReadVector(ctx, "rows", &num_rows, &rows));
    TF_RETURN_IF_ERROR(CheckNumber(num_rows, "rows", n, "keys"));
    SpillFile* spill = resource->table.spill();
    std::vector<int64_t> places(n), to;
    std::vector<char> records;
    {
      // Other threads' lookups needn't wait for the disk.
      tensorflow::tf_shared_lock lock(resource->mutex);
      spill->Find(keys, n, places.data());
      const int64_t bytes = spill->record_bytes();
      spill->Read(places, [&](size_t i, const char* record) {
        to.push_back(rows[i]);
        records.insert(records.end(), record, record + bytes);
      });
    }
    if (to.empty()) return absl::OkStatus();
    Variables variables(&cache_);
    TF_RETURN_IF_ERROR(variables.Find(ctx, "memory", {}));
    TF_RETURN_IF_ERROR(variables.LockToWrite());
    const size_t parts = variables.size();
    if (parts > spill->parts().size()) {
      return InvalidArgument("The table has ", spill->parts().size(),
                             " variables, not ", parts, ".");
    }
    for (size_t p = 0; p < parts; ++p) {
      const TableShape& shape = variables.shapes()[p];
      TF_RETURN_IF_ERROR(CheckPart(shape, spill->parts()[p]));
      for (const int64_t row : to) {
        if (row >= 0 && row < shape.rows) continue;
        return InvalidArgument("No row ", row, " in memory.");
      }
    }
    const char* from = records.data();
    for (const int64_t row : to) {
      for (size_t p = 0; p < parts; ++p) {
        const int64_t bytes = spill->parts()[p];
        std::memcpy(static_cast<char*>(variables.values()[p]) + row * bytes,
                    from + spill->offset(p), bytes);
      }
      from += spill->record_bytes();
    }
    return absl::OkStatus();
  }

  Variables::Cache cache_;
};

// Reads or writes a variable's part of some rows of the spill.
class SpilledRowsOp : public OpOnTables {
 public:
  explicit SpilledRowsOp(OpKernelConstruction* ctx) : OpOnTables(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("part", &part_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("row", &row_));
    bytes_ = tensorflow::MultiplyWithoutOverflow(
        row_.num_elements(), tensorflow::DataTypeSize(dtype_));
  }

 protected:
  // Reads the places of the rows, in `spill`, and the shape of their values.
  // Those of keys that have left since are read all the same.
  absl::Status Places(OpKernelContext* ctx, KeyTableResource* resource,
                      std::vector<int64_t>* places,
                      TensorShape* shape) const {
    SpillFile* spill = resource->table.spill();
    const int64_t parts = spill->parts().size();
    if (part_ < 0 || part_ >= parts || spill->parts()[part_] != bytes_) {
      return InvalidArgument("The spill has no such part.");
    }
    int64_t n;
    const int64_t* rows;
    TF_RETURN_IF_ERROR(ReadVector(ctx, "rows", &n, &rows));
    for (int64_t i = 0; i < n; ++i) {
      const bool before = rows[i] <= KeyTable::kSpilled;
      if (before || rows[i] - KeyTable::kSpilled >= spill->end()) {
        return InvalidArgument("The spill has no row ", rows[i], ".");
      }
      places->push_back(rows[i] - KeyTable::kSpilled);
    }
    *shape = TensorShape({n});
    return shape->AppendShapeWithStatus(row_);
  }

  int64_t part_, bytes_;  // A part of the spill, and its bytes.
  tensorflow::DataType dtype_;
  TensorShape row_;
};

class ReadSpilledOp : public SpilledRowsOp {
  using SpilledRowsOp::SpilledRowsOp;

  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    KeyTableResource* resource;
    TF_RETURN_IF_ERROR(TheOneWithSpill(tables, &resource));
    tensorflow::tf_shared_lock lock(resource->mutex);
    std::vector<int64_t> places;
    TensorShape shape;
    TF_RETURN_IF_ERROR(Places(ctx, resource, &places, &shape));
    Tensor* out;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape, &out));
    SpillFile* spill = resource->table.spill();
    char* to = static_cast<char*>(out->data());
    spill->Read(places, [&](size_t i, const char* record) {
      std::memcpy(to + i * bytes_, record + spill->offset(part_), bytes_);
    });
    return absl::OkStatus();
  }
};

class WriteSpilledOp : public SpilledRowsOp {
  using SpilledRowsOp::SpilledRowsOp;

  absl::Status Run(OpKernelContext* ctx, const Tables& tables) override {
    KeyTableResource* resource;
    TF_RETURN_IF_ERROR(TheOneWithSpill(tables, &resource));
    tensorflow::mutex_lock lock(resource->mutex);
    std::vector<int64_t> places;
    TensorShape shape;
    TF_RETURN_IF_ERROR(Places(ctx, resource, &places, &shape));
    const Tensor& values = ctx->input(2);
    if (values.shape() != shape) {
      return InvalidArgument("values of shape ", values.shape().DebugString(),
                             ", not ", shape.DebugString(), ".");
    }
    const char* from = static_cast<const char*>(values.data());
    for (size_t i = 0; i < places.size(); ++i) {
      resource->table.spill()->Write(places[i], part_, from + i * bytes_);
    }
    return absl::OkStatus();
  }
};

constexpr char kRowTypes[] = "T: {float, bfloat16, half}";

}  // namespace

TFRS_ON_TABLES("FindSpilled")
    .Input("keys: int64")
    .Output("rows: int64")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(c->num_inputs() - 1));
      return absl::OkStatus();
    });

TFRS_ON_TABLES("ReadAheadSpilled")
    .Input("keys: int64")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

TFRS_ON_TABLES("LookupSpilled")
    .Input("keys: int64")
    .Input("table_of: int32")
    .Input("parameters: M * resource")
    .Output("rows: int64")
    .Output("versions: int64")
    .Output("index: int64")
    .Output("vectors: T")
    .Attr("M: int >= 0")
    .Attr("dim: int >= 1")
    .Attr(kRowTypes)
    .SetShapeFn([](InferenceContext* c) {
      int64_t dim;
      int n;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      c->set_output(0, c->input(n));
      c->set_output(1, c->Vector(n));
      c->set_output(2, c->input(n));
      c->set_output(3, c->Matrix(c->kUnknownDim, dim));
      return absl::OkStatus();
    });

TFRS_ON_TABLES("FetchSpilled")
    .Input("keys: int64")
    .Input("rows: int64")
    .Input("memory: M * resource")
    .Attr("M: int >= 1")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

TFRS_ON_TABLES("ReadSpilled")
    .Input("rows: int64")
    .Output("values: T")
    .Attr("part: int >= 0")
    .Attr("row: shape")
    .Attr(kRowTypes)
    .SetShapeFn(tensorflow::shape_inference::UnknownShape);

TFRS_ON_TABLES("WriteSpilled")
    .Input("rows: int64")
    .Input("values: T")
    .Attr("part: int >= 0")
    .Attr("row: shape")
    .Attr(kRowTypes)
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

TFRS_KERNEL("TfrsEmbedKeyTablesFindSpilled", FindSpilledOp);
TFRS_KERNEL("TfrsEmbedKeyTablesReadAheadSpilled", ReadAheadSpilledOp);
TFRS_KERNEL("TfrsEmbedKeyTablesLookupSpilled", LookupSpilledOp);
TFRS_KERNEL("TfrsEmbedKeyTablesFetchSpilled", FetchSpilledOp);
TFRS_KERNEL("TfrsEmbedKeyTablesReadSpilled", ReadSpilledOp);
TFRS_KERNEL("TfrsEmbedKeyTablesWriteSpilled", WriteSpilledOp);

}  // namespace tfrs_embed
