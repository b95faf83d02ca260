// The loops that the operations run.

#ifndef TFRS_EMBED_KERNELS_CC_LOOPS_H_
#define TFRS_EMBED_KERNELS_CC_LOOPS_H_

#include "rows.h"

namespace tfrs_embed {

// The best loops that this machine can run, or those that the environment
// variable TFRS_EMBED_LOOPS names.
const TfrsLoops& Loops();

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_LOOPS_H_
