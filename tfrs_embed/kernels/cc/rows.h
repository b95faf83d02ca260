// Loops over rows of tables: plain C, so that they can be compiled once for
// each instruction set that a machine may have.
//
// Everything here works on [begin, end) of some work that the caller splits
// among threads, allocates nothing, and trusts its arguments.

#ifndef TFRS_EMBED_KERNELS_CC_ROWS_H_
#define TFRS_EMBED_KERNELS_CC_ROWS_H_

#include <stdint.h>

// What the vectors of a lookup are stored as.
enum TfrsOutput { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// A feature's ids. Bag b is of scale[b] * weights[i] for each of its ids i; null
// pointers stand for ones.
struct TfrsIds {
  const void* ids = nullptr;     // int64_t if wide, else int32_t.
  // [count + 1], where each bag begins and the last ends; null: every bag has
  // per_bag ids.
  const int32_t* splits = nullptr;
  const float* weights = nullptr;
  const float* scale = nullptr;
  int64_t n = 0;      // Of ids.
  int64_t count = 0;  // Of bags.
  int64_t per_bag = 1;
  int32_t wide = 0;
};

// Where the ids of a bag begin.
static inline int64_t tfrs_first_id(const TfrsIds* ids, int64_t bag) {
  return ids->splits ? ids->splits[bag] : bag * ids->per_bag;
}

// A feature's lookup. A bag's vector is the sum of its ids' rows, each as often
// as the bag is of its id.
struct TfrsLookup : TfrsIds {
  const float* table = nullptr;
  int64_t dim = 0;
  void* out = nullptr;  // [count, dim], rows `stride` columns apart.
  int64_t stride = 0;
  int32_t output = kFloat32;  // TfrsOutput
};

// A feature's ids with the gradients of its bags.
struct TfrsGradients : TfrsIds {
  const float* gradient = nullptr;  // [count, dim], as a lookup's out.
  int64_t stride = 0;
};

// An occurrence of a row: whose gradient row it adds, and how much of it.
struct TfrsUse {
  int64_t row;
  const float* gradient;
};

enum TfrsRule {
  kSum = 0,  // Not an optimizer: adds the gradient to the row.
  kSgd = 1,
  kAdagrad = 2,
  kAdagradMomentum = 3,
  kAdam = 4,
  kFtrl = 5,
};

// How many variables a rule updates: the parameters and its slots.
static inline int tfrs_states(int rule) {
  return rule == kAdagrad ? 2 : rule > kAdagrad ? 3 : 1;
}

// A table whose rows are updated. The rule's settings are, in this order:
// AdagradMomentum: momentum, use_nesterov, -1 / exponent, beta2, the factor of
// g^2, epsilon;
// Adam: beta_1, 1 - beta_1, beta_2, 1 - beta_2, epsilon (squared if
// sum_inside_sqrt), sum_inside_sqrt;
// FTRL: -learning_rate_power, l1, l2, beta, multiply_linear_by_learning_rate.
struct TfrsTable {
  float* state[3];  // Parameters, then slots; each [rows, dim].
  int64_t dim;
  int32_t rule;     // TfrsRule
  float rate;
  float settings[6];
};

// Room to group the uses of a bucket by row, and which of its rows to update.
struct TfrsGroups {
  uint32_t* heads;  // [mask + 1]: twice as many as rows, or more.
  uint32_t* next;   // One for each use.
  uint32_t* first;  // One for each row.
  uint32_t* last;   // One for each row.
  float* sum;       // [dim]
  uint32_t mask;    // A power of two, less 1.
  uint32_t share, shares;  // The share's rows, if a bucket is shared.
};

// The loops, compiled for one instruction set.
struct TfrsLoops {
  const char* name;
  // Tells the processor of the first rows of the bags [begin, end); returns of
  // how many.
  int64_t (*tell)(const TfrsLookup* lookup, int64_t begin, int64_t end);
  // Looks up the bags [begin, end), of whose rows `told` have been told of.
  void (*lookup)(const TfrsLookup* lookup, int64_t begin, int64_t end,
                 int64_t told);
  // Sums the gradients of equal rows and updates each row once. `coefficients`
  // has one factor for each use, or is null.
  void (*update)(const TfrsTable* table, const TfrsUse* uses,
                 const float* coefficients, int64_t n,
                 const TfrsGroups* groups);
  // The same for all of a small table's features, by a sum for each row: `sums`
  // is room for [rows, dim], and `used` for [rows].
  void (*update_all)(const TfrsTable* table,
                     const TfrsGradients* features, int64_t num_features,
                     int64_t rows, float* sums, uint8_t* used);
};

extern "C" {
const TfrsLoops* tfrs_loops_baseline();
const TfrsLoops* tfrs_loops_avx2();
const TfrsLoops* tfrs_loops_avx512();
}

// The best that this machine runs, or what `name` says, if it runs that.
const TfrsLoops* tfrs_loops(const char* name);

// A row's place among 2^k buckets or hash slots, spread over all 64 bits.
static inline uint64_t tfrs_hash(int64_t row) {
  return (uint64_t)row * 0x9E3779B97F4A7C15ull;
}

#endif  // TFRS_EMBED_KERNELS_CC_ROWS_H_
