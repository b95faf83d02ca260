// Checks that ids are rows of their tables.

#ifndef TFRS_EMBED_KERNELS_CC_ID_CHECKS_H_
#define TFRS_EMBED_KERNELS_CC_ID_CHECKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "feature_inputs.h"
#include "table_shape.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfrs_embed {

// Whether a feature's ids [begin, end) are in [0, rows).
bool Inside(const Feature& feature, int64_t begin, int64_t end, int64_t rows);

// Whether the ids of a feature's bags [begin, end) are in [0, rows). Lookups
// check the bags that they read next, so that ids come from memory only once.
bool BagsInside(const Feature& feature, int64_t begin, int64_t end,
                int64_t rows);

// The error for the first id that isn't in [0, rows[f]), where f is its
// feature. It names the feature, or numbers it if there are no names.
absl::Status OutOfRange(const std::vector<Feature>& features,
                        const std::vector<int64_t>& rows,
                        const std::vector<std::string>& names);

// Fails with that error if there is such an id.
absl::Status CheckIds(tensorflow::OpKernelContext* ctx,
                      const std::vector<Feature>& features,
                      const std::vector<int64_t>& rows,
                      const std::vector<std::string>& names = {});

// The number of rows of each feature's table.
std::vector<int64_t> RowsOf(const std::vector<Feature>& features,
                            const std::vector<TableShape>& tables);

// The attributes of a check: for each feature the number of rows that its ids
// may name, and its name. A lookup that does the check itself has them too (see
// fuse_check.cc); for other lookups they are empty.
struct IdLimits {
  std::vector<int64_t> rows;
  std::vector<std::string> names;

  absl::Status Read(tensorflow::OpKernelConstruction* ctx);

  // The number of rows that each feature's ids may name: no more than its table
  // has.
  absl::Status Of(const std::vector<Feature>& features,
                  const std::vector<TableShape>& tables,
                  std::vector<int64_t>* limits) const;
};

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_ID_CHECKS_H_
