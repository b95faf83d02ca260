// Loops over rows of tables. The interface is plain C, so that the loops can be
// compiled once for each instruction set that a machine may have.
//
// The caller splits the work among threads. The loops allocate nothing and
// trust their arguments.

#ifndef TFRS_EMBED_KERNELS_CC_ROWS_H_
#define TFRS_EMBED_KERNELS_CC_ROWS_H_

#include <stdint.h>

// The type of a table's rows, or of a lookup's vectors. The loops compute in
// float32 whatever they are. Only tables that are looked up have the last two:
// integers times a factor of their row. A byte of int4 has column j in its lower
// four bits and column j + (dim + 1) / 2 in the others, each plus 8.
enum TfrsType {
  kFloat32 = 0,
  kBfloat16 = 1,
  kFloat16 = 2,
  kInt8 = 3,
  kInt4 = 4,
};

// The type of the marks of changed rows, bytes; see storage/row_marks.py.
constexpr int32_t kMarks = 5;

// The bytes of a number of a type of whole bytes.
static inline int64_t tfrs_size(int32_t type) {
  return type == kFloat32 ? 4 : type == kInt8 ? 1 : 2;
}

// The bytes of a row.
static inline int64_t tfrs_row_bytes(int32_t type, int64_t dim) {
  return type == kInt4 ? (dim + 1) / 2 : dim * tfrs_size(type);
}

// A feature's ids. The id at i, in bag b, counts with the factor
// scale[b] * weights[i]; a null pointer stands for ones.
struct TfrsIds {
  const void* ids = nullptr;     // int64_t if wide, else int32_t.
  // [count + 1]: where each bag begins, and where the last one ends. Null: each
  // bag has per_bag ids.
  const int32_t* splits = nullptr;
  const float* weights = nullptr;
  const float* scale = nullptr;
  int64_t n = 0;      // The number of ids.
  int64_t count = 0;  // The number of bags.
  int64_t per_bag = 1;
  int32_t wide = 0;
};

// Where the ids of a bag begin.
static inline int64_t tfrs_first_id(const TfrsIds* ids, int64_t bag) {
  return ids->splits ? ids->splits[bag] : bag * ids->per_bag;
}

// A feature's lookup. A bag's vector is the sum of its ids' rows times their
// factors.
struct TfrsLookup : TfrsIds {
  const void* table = nullptr;
  int32_t type = kFloat32;  // TfrsType of the table.
  int64_t dim = 0;
  void* out = nullptr;  // [count, dim], rows `stride` columns apart.
  int64_t stride = 0;
  int32_t output = kFloat32;  // TfrsType of the vectors.
  const float* factors = nullptr;  // Of the rows, if they are int8 or int4.
};

// A feature's ids with the gradients of its bags.
struct TfrsGradients : TfrsIds {
  const char* gradient = nullptr;  // [count, dim], rows `stride` bytes apart.
  int64_t stride = 0;
};

// A contribution to the gradient of a table's row: the gradient of a bag that
// has the row's id.
struct TfrsGradientRef {
  int64_t row;
  const void* gradient;
};

// The update rules of tfrs_embed/optimizers/rules.py, by their names and numbers
// there.
enum TfrsRule {
  kSum = 0,  // Not an optimizer: adds the gradient to the row.
  kSgd = 1,
  kAdagrad = 2,
  kAdagradMomentum = 3,
  kAdam = 4,
  kFtrl = 5,
  kMomentum = 6,
  kRmsprop = 7,
  kRowWiseAdagrad = 8,
  kRowWiseAdam = 9,
  kRules,  // The number of rules.
};

// The number of variables that a rule updates: the parameters and the slots.
static inline int tfrs_states(int rule) {
  switch (rule) {
    case kAdagrad:
    case kMomentum:
    case kRmsprop:
    case kRowWiseAdagrad: return 2;
    case kAdagradMomentum:
    case kAdam:
    case kFtrl:
    case kRowWiseAdam: return 3;
    default: return 1;
  }
}

// How new rows are rounded to a type that isn't float32: to the nearest number,
// or up or down by random bits, as ops/rounding.py defines them.
struct TfrsRounding {
  int32_t stochastic;
  uint64_t stream;  // What the bits of an update begin with.
  // Row i here is row first_row + i * row_stride of the table, and column j
  // here is column first_column + j.
  int64_t first_row, row_stride, first_column;
};

// Whether a rule's slot of a number, from 0, has one number for each row, and not
// one for each of its columns.
static inline bool tfrs_by_row(int rule, int slot) {
  return rule == kRowWiseAdagrad || (rule == kRowWiseAdam && slot == 1);
}

// A table whose rows are updated. The rule's settings are, in this order:
// AdagradMomentum: momentum, use_nesterov, -1 / exponent, beta2, the factor of
// g^2, epsilon;
// Adam: beta_1, 1 - beta_1, beta_2, 1 - beta_2, epsilon (squared if
// sum_inside_sqrt), sum_inside_sqrt;
// FTRL: -learning_rate_power, l1, l2, beta, multiply_linear_by_learning_rate;
// Momentum: momentum, use_nesterov;
// RMSprop: rho, 1 - rho, epsilon;
// RowWiseAdagrad: epsilon;
// RowWiseAdam: beta_1, 1 - beta_1, beta_2, 1 - beta_2, epsilon.
struct TfrsTable {
  void* parameters;  // [rows, dim] of `type`.
  // As many as the rule has; each [rows, dim] or [rows].
  float* slots[2];
  int64_t dim;
  int32_t type;       // TfrsType
  int32_t gradients;  // TfrsType of the gradients of its rows.
  int32_t rule;       // TfrsRule
  float rate;
  float settings[6];
  // The factors of RowWiseAdam's moments in update t, 1 / (1 - beta^t).
  float unbias[2];
  TfrsRounding rounding;
  // Before the rule: each number of a row's gradient is clipped to the limits,
  // and its norm to row_norm, if it has clips; the row loses this share of
  // itself, if it is float32.
  int32_t clips;
  float clip_low, clip_high, row_norm;
  float decay;
  // After the rule: the largest norm of a row, if it is float32; 0: none.
  float max_norm;
  uint8_t* marks;  // [rows], or null: what changed rows are marked with,
  uint8_t mark;    // this mark.
};

// Memory to group a bucket's gradients by row, and the rows to update.
struct TfrsGroups {
  uint32_t* heads;  // [mask + 1], at least two for each row.
  uint32_t* next;   // One for each gradient.
  uint32_t* first;  // One for each row.
  uint32_t* last;   // One for each row.
  float* sum;       // [dim]
  uint32_t mask;    // A power of two, less 1.
  // If shares > 1, several threads share a bucket: this one updates the rows
  // whose hash is in share `share`.
  uint32_t share, shares;
};

// Memory to sum the gradients of a small table's rows.
struct TfrsRowSums {
  float* sums;      // [rows, dim]
  double* totals;   // [rows, dim]
  uint32_t* terms;  // [rows]: the number of a row's gradients.
};

// The loops, compiled for one instruction set.
struct TfrsLoops {
  const char* name;
  // Prefetches the first rows of the bags [begin, end).
  void (*prefetch)(const TfrsLookup* lookup, int64_t begin, int64_t end);
  // Looks up the bags [begin, end), whose first rows may have been prefetched.
  void (*lookup)(const TfrsLookup* lookup, int64_t begin, int64_t end,
                 bool prefetched);
  // Sums the gradients of equal rows and updates each row once. `factors` has
  // one factor for each gradient, or is null.
  void (*update)(const TfrsTable* table, const TfrsGradientRef* refs,
                 const float* factors, int64_t n, const TfrsGroups* groups);
  // The same for all features of a small table, with a sum for each row.
  void (*update_all)(const TfrsTable* table,
                     const TfrsGradients* features, int64_t num_features,
                     int64_t rows, const TfrsRowSums* sums);
};

extern "C" {
const TfrsLoops* tfrs_loops_baseline();
const TfrsLoops* tfrs_loops_avx2();
const TfrsLoops* tfrs_loops_avx512();
}

// The best loops that this machine can run; those called `name`, if it is given
// and the machine can run them.
const TfrsLoops* tfrs_loops(const char* name);

// splitmix64's next number of a state.
static inline uint64_t tfrs_mix(uint64_t z) {
  z += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// A hash of a row or key, spread over all 64 bits.
static inline uint64_t tfrs_hash(int64_t row) {
  return (uint64_t)row * 0x9E3779B97F4A7C15ull;
}

#endif  // TFRS_EMBED_KERNELS_CC_ROWS_H_
