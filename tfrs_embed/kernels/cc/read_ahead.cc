// The pages of mapped files' rows: reading them ahead, so that a step needn't
// wait for them, and counting those in memory.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

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
    if (!IsMapped(table) || table.dim_size(0) == 0) return;
    begin = reinterpret_cast<uintptr_t>(table.data());
    rows = table.dim_size(0);
    row = table.TotalBytes() / rows;
  }
};

// A run of neighbouring pages in memory.
struct Pages {
  void* begin;
  size_t count, page;  // A page's bytes.
};

// The pages of some rows, each once.
std::vector<Pages> PagesOf(const Mapped& table, const int64_t* ids, int64_t n) {
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  const uintptr_t begin = table.begin / page;
  const int64_t rows = table.rows, row = table.row;
  std::vector<uint32_t> pages;
  pages.reserve(n);
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] < 0 || ids[i] >= rows) continue;  // The lookup's error.
    const int64_t first = ids[i] * row / page;
    const int64_t last = ((ids[i] + 1) * row - 1) / page;
    for (int64_t p = first; p <= last; ++p) pages.push_back(p);
  }
  std::sort(pages.begin(), pages.end());
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  std::vector<Pages> runs;
  for (size_t i = 0; i < pages.size();) {
    size_t end = i + 1;
    while (end < pages.size() && pages[end] == pages[end - 1] + 1) ++end;
    runs.push_back({reinterpret_cast<void*>((begin + pages[i]) * page),
                    end - i, page});
    i = end;
  }
  return runs;
}

// Calls a function with the pages of rows `ids` of all tables, and sets the
// kernel's status.
template <typename Function>
void ForPages(OpKernelContext* ctx, Function take) {
  const Tensor* ids;
  OP_REQUIRES_OK(ctx, ctx->input("ids", &ids));
  OP_REQUIRES(ctx, ids->dims() == 1, InvalidArgument("ids must be a vector."));
  OpInputList handles;
  OP_REQUIRES_OK(ctx, ctx->input_list("tables", &handles));
  for (int t = 0; t < handles.size(); ++t) {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    OP_REQUIRES_OK(ctx, tensorflow::LookupResource(
                            ctx, tensorflow::HandleFromInput(ctx, t),
                            &variable));
    // Neither locked meanwhile, for which updates would wait, nor referred
    // to, for which the first of them would copy it.
    const Mapped table = [&] {
      tensorflow::tf_shared_lock lock(*variable->mu());
      return Mapped(*variable->tensor());
    }();
    for (const Pages& pages : PagesOf(table, ids->flat<int64_t>().data(),
                                      ids->NumElements())) {
      take(pages);
    }
  }
}

class ReadAheadOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    ForPages(ctx, [](const Pages& pages) {
      madvise(pages.begin, pages.count * pages.page, MADV_WILLNEED);
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
    std::vector<unsigned char> found;
    ForPages(ctx, [&](const Pages& pages) {
      found.assign(pages.count, 0);
      mincore(pages.begin, pages.count * pages.page, found.data());
      counts(0) += pages.count;
      for (unsigned char each : found) counts(1) += each & 1;
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
