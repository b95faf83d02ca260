#include "loops.h"

#include <cstdlib>

#include "op.h"
#include "rows.h"
#include "tensorflow/core/platform/tstring.h"

namespace tfrs_embed {

const TfrsLoops& Loops() {
  static const TfrsLoops* loops = tfrs_loops(std::getenv("TFRS_EMBED_LOOPS"));
  return *loops;
}

namespace {

// The name of the instruction set whose loops run.
class LoopsOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* ctx) override {
    tensorflow::Tensor* out;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, tensorflow::TensorShape({}), &out));
    out->scalar<tensorflow::tstring>()() = Loops().name;
  }
};

}  // namespace

REGISTER_OP("TfrsEmbedLoops")
    .Output("name: string")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

TFRS_KERNEL("TfrsEmbedLoops", LoopsOp);

}  // namespace tfrs_embed
