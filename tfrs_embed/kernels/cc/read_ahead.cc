// The pages of mapped files' rows: reading them ahead, so that a step needn't
// wait for them, and counting those in memory.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "input_checks.h"
#include "mapped_rows.h"
#include "op.h"
#include "variables.h"

namespace tfrs_embed {

namespace {

// A mapped table's memory; no rows if the table isn't mapped.
struct Mapped {
  uintptr_t begin = 0;
  int64_t rows = 0, row = 0;  // The number of rows, and a row's bytes.

  explicit Mapped(const Tensor& table) {
    // A scalar has no rows.
    if (!IsMapped(table) || table.dims() == 0) return;
    begin = reinterpret_cast<uintptr_t>(table.data());
    rows = table.dim_size(0);
    row = table.TotalBytes() / rows;
  }
};

// A run of neighbouring pages in memory.
struct Pages {
  uintptr_t begin, end;  // Of pages' bytes.
};

// The pages of some rows, each once.
std::vector<Pages> PagesOf(const Mapped& table, const int64_t* ids, int64_t n) {
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  std::vector<int64_t> sorted;
  sorted.reserve(n);
  for (int64_t i = 0; i < n; ++i) {
    // Others are the lookup's error.
    if (ids[i] >= 0 && ids[i] < table.rows) sorted.push_back(ids[i]);
  }
  std::sort(sorted.begin(), sorted.end());
  std::vector<Pages> runs;
  for (const int64_t id : sorted) {
    const uintptr_t begin = table.begin + id * table.row;
    const uintptr_t first = begin / page * page;
    const uintptr_t end = (begin + table.row + page - 1) / page * page;
    if (runs.empty() || first > runs.back().end) {
      runs.push_back({first, end});
    } else {
      runs.back().end = end;
    }
  }
  return runs;
}

// Calls a function with the pages of rows `ids` of all tables, and sets the
// kernel's status.
template <typename Function>
void ForPages(OpKernelContext* ctx, Function take) {
  int64_t n;
  const int64_t* ids;
  OP_REQUIRES_OK(ctx, ReadVector(ctx, "ids", &n, &ids));
  OpInputList handles;
  OP_REQUIRES_OK(ctx, ctx->input_list("tables", &handles));
  for (int t = 0; t < handles.size(); ++t) {
    const tensorflow::ResourceHandle* handle;
    OP_REQUIRES_OK(ctx, FindScalar(handles[t], "A table", &handle));
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    OP_REQUIRES_OK(ctx, tensorflow::LookupResource(ctx, *handle, &variable));
    // Neither locked meanwhile, for which updates would wait, nor referred
    // to, for which the first of them would copy it.
    const Mapped table = [&] {
      tensorflow::tf_shared_lock lock(*variable->mu());
      return Mapped(*variable->tensor());
    }();
    for (const Pages& pages : PagesOf(table, ids, n)) take(pages);
  }
}

class ReadAheadOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    ForPages(ctx, [](const Pages& pages) {
      madvise(reinterpret_cast<void*>(pages.begin), pages.end - pages.begin,
              MADV_WILLNEED);
    });
  }
};

// How many pages of rows there are, and how many of them are in memory.
class PagesInMemoryOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({2}), &output));
    auto counts = output->flat<int64_t>();
    counts.setZero();
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    std::array<unsigned char, 4096> found;
    ForPages(ctx, [&](const Pages& pages) {
      for (uintptr_t at = pages.begin; at < pages.end;) {
        const size_t count = std::min((pages.end - at) / page, found.size());
        std::fill_n(found.begin(), count, 0);
        mincore(reinterpret_cast<void*>(at), count * page, found.data());
        counts(0) += count;
        for (size_t i = 0; i < count; ++i) counts(1) += found[i] & 1;
        at += count * page;
      }
    });
  }
};

}  // namespace

REGISTER_OP("TfrsEmbedReadAhead")
    .Input("tables: N * resource")
    .Input("ids: int64")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

TFRS_KERNEL("TfrsEmbedReadAhead", ReadAheadOp);

REGISTER_OP("TfrsEmbedPagesInMemory")
    .Input("tables: N * resource")
    .Input("ids: int64")
    .Output("counts: int64")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(2));
      return absl::OkStatus();
    });

TFRS_KERNEL("TfrsEmbedPagesInMemory", PagesInMemoryOp);

}  // namespace tfrs_embed
