// The gradients of features' ids, sorted into buckets of rows that are updated
// together: the first half of every operation that adds to rows.

#ifndef TFRS_EMBED_KERNELS_CC_BUCKETS_H_
#define TFRS_EMBED_KERNELS_CC_BUCKETS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "feature_inputs.h"
#include "rows.h"
#include "table_shape.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfrs_embed {

// References to gradients, bucket after bucket. In a bucket they are in the
// order of the features and of their ids, so that sums don't depend on the
// number of threads.
class Buckets {
 public:
  // Sorts the gradients of the features' ids. Features of a table must follow
  // each other. An id that isn't in [0, rows) is an error.
  absl::Status Sort(tensorflow::OpKernelContext* ctx,
                    const std::vector<Feature>& features,
                    const std::vector<TableShape>& tables);

  // Updates the tables: calls the loops' update for each bucket, and update_all
  // for each small table. `tables` are those of Sort. Without memory for it,
  // fails before anything is updated.
  absl::Status Update(tensorflow::OpKernelContext* ctx, const TfrsLoops& loops,
                      const std::vector<TfrsTable>& tables) const;

 private:
  class Sorter;
  struct Work;
  struct Scratch;

  struct Bucket {
    int table;
    int64_t begin, end;  // The bucket's gradients among all.
    int64_t rows;        // An upper bound.
  };
  // A table so small that it needs no buckets.
  struct SmallTable {
    int table;
    int64_t rows;
    std::vector<TfrsGradients> features;
  };

  std::vector<Work> ListWork() const;

  std::vector<Bucket> buckets_;
  std::vector<SmallTable> small_tables_;
  tensorflow::Tensor refs_memory_, factors_memory_;
  TfrsGradientRef* refs_ = nullptr;
  float* factors_ = nullptr;  // Null: all are 1.
  int64_t total_ = 0;         // The number of gradients in all buckets.
};

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_BUCKETS_H_
