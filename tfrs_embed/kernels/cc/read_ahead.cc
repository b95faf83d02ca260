// Reading rows of mapped files ahead, so that a step needn't wait for them.

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

// Asks Linux to read the pages of some rows.
void ReadPages(const Mapped& table, const int64_t* ids, int64_t n) {
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
  for (size_t i = 0; i < pages.size();) {
    size_t end = i + 1;
    while (end < pages.size() && pages[end] == pages[end - 1] + 1) ++end;
    madvise(reinterpret_cast<void*>((begin + pages[i]) * page),
            (end - i) * page, MADV_WILLNEED);
    i = end;
  }
}

class ReadAheadOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
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
      ReadPages(table, ids->flat<int64_t>().data(), ids->NumElements());
    }
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

}  // namespace tfrs_embed
