// New tables and slots.

#include <algorithm>
#include <cstdint>

#include "huge_pages.h"
#include "op.h"
#include "tensorflow/core/framework/tensor_util.h"
#include "threads.h"

namespace tfrs_embed {

namespace {

// As TensorFlow's Fill, in huge pages from the start: Linux would have to copy
// all of the memory into huge pages later.
class FillOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    TensorShape shape;
    OP_REQUIRES_OK(ctx, tensorflow::tensor::MakeShape(ctx->input(0), &shape));
    const Tensor& value = ctx->input(1);
    OP_REQUIRES(ctx, value.dims() == 0,
                InvalidArgument("value must be a scalar"));
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &out));
    const auto begin = reinterpret_cast<uintptr_t>(out->data());
    UseHugePages({{begin, begin + out->TotalBytes()}}, /*written=*/false);
    if (tensorflow::DataTypeSize(value.dtype()) == 4) {
      Fill<uint32_t>(ctx, value, out);
    } else {
      Fill<uint16_t>(ctx, value, out);
    }
  }

 private:
  template <typename Bits>
  static void Fill(OpKernelContext* ctx, const Tensor& value, Tensor* out) {
    const Bits bits = *static_cast<const Bits*>(value.data());
    Bits* const numbers = static_cast<Bits*>(out->data());
    ParallelFor(ctx, out->NumElements(), 1, [=](int64_t begin, int64_t end) {
      std::fill_n(numbers + begin, end - begin, bits);
    });
  }
};

}  // namespace

REGISTER_OP("TfrsEmbedFill")
    .Input("dims: int64")
    .Input("value: T")
    .Output("filled: T")
    .Attr("T: {float, bfloat16, half}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->MakeShapeFromShapeTensor(0, &shape));
      c->set_output(0, shape);
      return absl::OkStatus();
    });

TFRS_KERNEL("TfrsEmbedFill", FillOp);

}  // namespace tfrs_embed
