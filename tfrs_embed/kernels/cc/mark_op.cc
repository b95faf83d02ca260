// Marks the rows of tables that have changed.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/kernels/training_op_helpers.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/refcount.h"
#include "threads.h"

namespace tfrs_embed {

namespace {

// Writes a mark at the rows' places in the tables' vectors of marks.
class MarkOp : public OpKernel {
 public:
  explicit MarkOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table_of", &table_of_));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList marks, rows;
    OP_REQUIRES_OK(ctx, ctx->input_list("marks", &marks));
    OP_REQUIRES_OK(ctx, ctx->input_list("rows", &rows));
    const Tensor* mark;
    OP_REQUIRES_OK(ctx, ctx->input("mark", &mark));
    OP_REQUIRES(ctx,
                table_of_.size() == static_cast<size_t>(rows.size()) &&
                    mark->NumElements() == 1,
                InvalidArgument("one mark, and a table for each of the rows"));
    const uint8_t value = mark->flat<uint8_t>()(0);
    for (int t = 0; t < marks.size(); ++t) {
      tensorflow::core::RefCountPtr<tensorflow::Var> variable;
      const auto& handle = marks[t].flat<tensorflow::ResourceHandle>()(0);
      OP_REQUIRES_OK(ctx, tensorflow::LookupResource(ctx, handle, &variable));
      // Reads of the variable then copy it.
      OP_REQUIRES_OK(ctx, (tensorflow::EnsureSparseVariableAccess<
                              Eigen::ThreadPoolDevice, uint8_t>(
                              ctx, variable.get())));
      tensorflow::mutex_lock lock(*variable->mu());
      Tensor* tensor = variable->tensor();
      OP_REQUIRES(ctx,
                  tensor->dtype() == tensorflow::DT_UINT8 && tensor->dims() == 1,
                  InvalidArgument("marks must be a vector of uint8"));
      for (int i = 0; i < rows.size(); ++i) {
        if (table_of_[i] != t) continue;
        const bool wide = rows[i].dtype() == tensorflow::DT_INT64;
        const bool inside = wide ? Mark<int64_t>(ctx, rows[i], value, tensor)
                                 : Mark<int32_t>(ctx, rows[i], value, tensor);
        OP_REQUIRES(ctx, inside, InvalidArgument("a row is out of range"));
      }
    }
  }

 private:
  // Returns whether all rows are rows of the table.
  template <typename Id>
  static bool Mark(OpKernelContext* ctx, const Tensor& rows, uint8_t value,
                   Tensor* marks) {
    const Id* ids = rows.flat<Id>().data();
    uint8_t* to = marks->flat<uint8_t>().data();
    const uint64_t size = marks->NumElements();
    std::atomic<bool> inside{true};
    ParallelFor(ctx, rows.NumElements(), 5, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (static_cast<uint64_t>(ids[i]) < size) {
          to[ids[i]] = value;
        } else {
          inside = false;
        }
      }
    });
    return inside;
  }

  std::vector<int> table_of_;
};

}  // namespace

REGISTER_OP("TfrsEmbedMark")
    .Input("marks: N * resource")
    .Input("mark: uint8")
    .Input("rows: R")
    .Attr("N: int >= 1")
    .Attr("R: list({int32, int64})")
    .Attr("table_of: list(int)")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

TFRS_KERNEL("TfrsEmbedMark", MarkOp);

}  // namespace tfrs_embed
