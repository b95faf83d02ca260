// Tables in files that are mapped into memory.

#ifndef TFRS_EMBED_KERNELS_CC_MAPPED_ROWS_H_
#define TFRS_EMBED_KERNELS_CC_MAPPED_ROWS_H_

#include "tensorflow/core/framework/tensor.h"

namespace tfrs_embed {

// Whether a tensor's memory is a file. Huge pages would read all of it.
bool IsMapped(const tensorflow::Tensor& tensor);

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_MAPPED_ROWS_H_
