// See rows.h. This file is compiled once for each instruction set; TFRS_LOOPS
// names the function that returns the loops of that one. It includes no header
// with inline functions: the linker keeps one copy of such a function, and that
// copy could need instructions that the machine at hand doesn't have.

#include "rows.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>  // Its functions are always inlined.
#endif

#ifndef TFRS_LOOPS
#define TFRS_LOOPS tfrs_loops_baseline
#define TFRS_NAME "baseline"
#endif

namespace {

// Rows are prefetched into the second cache: the first can wait for few lines at
// once, and then the loops wait, too. An update prefetches up to kRowsAhead rows
// and kUpdateBytes, which leaves most of that cache to other data. A lookup
// prefetches fewer: a memory keeps about 64 lines on their way, and a processor
// that is asked for many more forgets some.
constexpr int64_t kUpdateBytes = 40 * 1024;
constexpr int64_t kRowsAhead = 32;
constexpr int64_t kLine = 64;
constexpr int64_t kLookupBytes = 64 * kLine;
constexpr int64_t kLookupsAhead = 64;
constexpr int kGradientsAhead = 4;

// How many rows of a size to prefetch: at most so many, and so many bytes.
inline int64_t Ahead(int64_t most_rows, int64_t most_bytes, int64_t bytes) {
  const int64_t n = most_rows * bytes > most_bytes ? most_bytes / bytes
                                                   : most_rows;
  return n > 2 ? n : 2;
}

// In the templates below, kDim is the width of a row if it is a common one, so
// that the compiler can unroll the loops over columns; else it is 0.
inline int64_t Width(int dim, int64_t any) { return dim ? dim : any; }

// A number that the compiler knows.
template <int kValue>
struct Number {
  constexpr int operator()() const { return kValue; }
};

// GCC thinks that a function which only prefetches does nothing, and removes
// its calls. Inlining the function first prevents that.
#define TFRS_INLINED __attribute__((always_inline))
#define TFRS_INLINE inline TFRS_INLINED
// The vectors of an array get registers only if loops over them are unrolled.
#define TFRS_UNROLL _Pragma("GCC unroll 8")

template <typename T>
TFRS_INLINE void PrefetchRead(const T* row, int64_t dim) {
  const char* bytes = reinterpret_cast<const char*>(row);
  const int64_t n = dim * sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(bytes + i, 0, 2);
}

template <typename T>
TFRS_INLINE void PrefetchWrite(const T* row, int64_t dim) {
  const char* bytes = reinterpret_cast<const char*>(row);
  const int64_t n = dim * sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(bytes + i, 1, 2);
}

// Calls f with the width as a Number; 0 if the width isn't a common one. Builds
// for sanitizers have one common width, as compiling each takes long.
template <typename F>
inline void ByWidth(int64_t dim, F f) {
  switch (dim) {
    case 16: return f(Number<16>());
#ifndef TFRS_ONE_WIDTH
    case 8: return f(Number<8>());
    case 32: return f(Number<32>());
    case 64: return f(Number<64>());
    case 128: return f(Number<128>());
#endif
    default: return f(Number<0>());
  }
}

// How many ids after the one that is looked up its row is prefetched.
inline int64_t LookupsAhead(int64_t row_bytes) {
  return Ahead(kLookupsAhead, kLookupBytes, row_bytes);
}

inline int64_t IdAt(const TfrsIds& l, int64_t i) {
  return l.wide ? static_cast<const int64_t*>(l.ids)[i]
                : static_cast<const int32_t*>(l.ids)[i];
}

inline uint32_t Bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float FromBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Vectors of the machine: of float32, of their bits, and of integers. Extend makes
// 32 bits of each narrower number.
template <int kWide>
struct VectorOf;
template <>
struct VectorOf<8> {
  typedef float Floats __attribute__((vector_size(32)));
  typedef uint32_t Words __attribute__((vector_size(32)));
  typedef int32_t Integers __attribute__((vector_size(32)));
  static TFRS_INLINE Words Extend(const uint16_t* from);
  static TFRS_INLINE Integers Extend(const int8_t* from);
};
template <>
struct VectorOf<16> {
  typedef float Floats __attribute__((vector_size(64)));
  typedef uint32_t Words __attribute__((vector_size(64)));
  typedef int32_t Integers __attribute__((vector_size(64)));
  static TFRS_INLINE Words Extend(const uint16_t* from);
  static TFRS_INLINE Integers Extend(const int8_t* from);
};

#ifdef __AVX2__
// One instruction each; GCC 12 makes many of the code for all machines below.
#define TFRS_EXTEND(kWide, Wide, Number, Narrow, instruction)            \
  TFRS_INLINE VectorOf<kWide>::Wide VectorOf<kWide>::Extend(             \
      const Number* from) {                                              \
    Narrow narrow = {};                                                  \
    memcpy(&narrow, from, kWide * sizeof(*from));                        \
    return reinterpret_cast<VectorOf<kWide>::Wide>(instruction(narrow)); \
  }
TFRS_EXTEND(8, Words, uint16_t, __m128i, _mm256_cvtepu16_epi32)
TFRS_EXTEND(8, Integers, int8_t, __m128i, _mm256_cvtepi8_epi32)
#ifdef __AVX512F__
TFRS_EXTEND(16, Words, uint16_t, __m256i, _mm512_cvtepu16_epi32)
TFRS_EXTEND(16, Integers, int8_t, __m128i, _mm512_cvtepi8_epi32)
#endif
#else
TFRS_INLINE VectorOf<8>::Words VectorOf<8>::Extend(const uint16_t* from) {
  uint16_t halves __attribute__((vector_size(16)));
  memcpy(&halves, from, sizeof(halves));
  return __builtin_convertvector(halves, Words);
}
TFRS_INLINE VectorOf<8>::Integers VectorOf<8>::Extend(const int8_t* from) {
  typedef int16_t Shorts __attribute__((vector_size(16)));
  int8_t bytes __attribute__((vector_size(8)));
  memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(__builtin_convertvector(bytes, Shorts),
                                 Integers);
}
#endif

// The bits of the difference between numbers and one other, all given by their
// bits.
TFRS_INLINE uint32_t SubtractBits(uint32_t bits, uint32_t other) {
  return Bits(FromBits(bits) - FromBits(other));
}

template <typename Floats, typename Words>
TFRS_INLINE Words SubtractVectors(Words bits, uint32_t other) {
  Floats values;
  memcpy(&values, &bits, sizeof(values));
  values -= FromBits(other);
  memcpy(&bits, &values, sizeof(bits));
  return bits;
}

TFRS_INLINE VectorOf<8>::Words SubtractBits(VectorOf<8>::Words bits,
                                            uint32_t other) {
  return SubtractVectors<VectorOf<8>::Floats>(bits, other);
}

TFRS_INLINE VectorOf<16>::Words SubtractBits(VectorOf<16>::Words bits,
                                             uint32_t other) {
  return SubtractVectors<VectorOf<16>::Floats>(bits, other);
}

// Numbers of the types that aren't float32, by their bits.
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Int8 {
  int8_t value;
};
// Two numbers.
struct Int4 {
  int8_t bits;
};

// Calls f with a number of the type that `type` stands for.
template <typename F>
inline auto ByType(int32_t type, F f) {
  switch (type) {
    case kBfloat16: return f(Bfloat16());
    case kFloat16: return f(Float16());
    default: return f(0.0f);
  }
}

// The bits of numbers as float32: of one, or of a vector of them. Each number's
// own bits are the low ones of a word.
template <typename Words>
TFRS_INLINE Words WidenBits(Words bits, Bfloat16) {
  return bits << 16;
}

template <typename Words>
TFRS_INLINE Words WidenBits(Words bits, Float16) {
  const Words magnitude = (bits & 0x7FFF) << 13;
  const Words rebias = magnitude + 0x38000000;
  // A denormal number is an integer beside 2^-14's exponent, which is then
  // taken off again.
  const Words beside = magnitude + 0x38800000;
  const Words small = SubtractBits(beside, 0x38800000);
  const Words wide = magnitude < 0x00800000    ? small
                     : magnitude >= 0x0F800000 ? rebias + 0x38000000
                                               : rebias;
  return wide | (bits & 0x8000) << 16;
}

inline float Widen(float value) { return value; }
inline float Widen(Bfloat16 value) {
  return FromBits(static_cast<uint32_t>(value.bits) << 16);
}
inline float Widen(Float16 value) {
  const uint32_t bits = value.bits;
  return FromBits(WidenBits(bits, value));
}

// Both round to the nearest, ties to even, as TensorFlow's casts do.
inline uint16_t ToBfloat16(float value) {
  const uint32_t bits = Bits(value);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return value != value ? 0x7FC0 | (bits >> 16 & 0x8000) : rounded;
}

inline uint16_t ToFloat16(float value) {
  const uint32_t bits = Bits(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  // Below 2^-14 the mantissa loses bits: adding 0.5 moves the rest to where
  // they belong, rounded.
  const uint32_t small =
      Bits(FromBits(magnitude) + 0.5f) - Bits(0.5f);
  const uint32_t normal =
      (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  const uint32_t large = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
  const uint32_t half = magnitude < 0x38800000   ? small
                        : magnitude < 0x477FF000 ? normal
                                                 : large;
  return sign | half;
}

// Writes columns of a bag's sum to an output that isn't float32.
inline void StoreHalves(const TfrsLookup& l, int64_t bag, int64_t first,
                        int64_t columns, const float* sum) {
  // A product with 1 would not be the same: TensorFlow's threads flush denormal
  // numbers to 0.
  const bool scaled = l.scale != nullptr;
  const float scale = scaled ? l.scale[bag] : 1.0f;
  uint16_t* out = static_cast<uint16_t*>(l.out) + bag * l.stride + first;
  if (l.output == kBfloat16) {
    for (int64_t j = 0; j < columns; ++j) {
      out[j] = ToBfloat16(scaled ? scale * sum[j] : sum[j]);
    }
  } else {
    for (int64_t j = 0; j < columns; ++j) {
      out[j] = ToFloat16(scaled ? scale * sum[j] : sum[j]);
    }
  }
}

inline void Zero(const TfrsLookup& l, int64_t bag) {
  const int64_t size = l.output == kFloat32 ? 4 : 2;
  memset(static_cast<char*>(l.out) + bag * l.stride * size, 0, l.dim * size);
}

// The number of columns that are summed at once if the output isn't float32, or
// if there are more than kTerms rows to sum.
constexpr int64_t kColumns = 256;

// A running sum in float32 of millions of numbers loses some percent. So up to
// this many numbers are added in float32, and their sums in float64.
constexpr int64_t kTerms = 512;

// Begins totals with the numbers, or adds the numbers to the totals.
__attribute__((noinline)) void AddTotals(const float* numbers, int64_t n,
                                         bool begins, double* totals) {
  for (int64_t j = 0; j < n; ++j) {
    totals[j] = begins ? numbers[j] : totals[j] + numbers[j];
  }
}

__attribute__((noinline)) void RoundTotals(const double* totals, int64_t n,
                                           float* numbers) {
  for (int64_t j = 0; j < n; ++j) numbers[j] = static_cast<float>(totals[j]);
}

// Calls f(first, n) for each kColumns of the columns.
template <typename F>
inline void InColumns(int64_t columns, F f) {
  for (int64_t j = 0; j < columns; j += kColumns) {
    f(j, columns - j < kColumns ? columns - j : kColumns);
  }
}

// Columns of a row as vectors of the machine, whose sums stay in registers.
// Compilers don't achieve that from plain loops over columns.
template <int kNumber, int kWide>
struct Vectors {
  typedef typename VectorOf<kWide>::Floats Vector;
  static constexpr int kVectors = kNumber;
  static constexpr int kColumns = kNumber * kWide;

  Vector v[kNumber];

  // One vector of this width.
  static TFRS_INLINE Vectors<1, kWide> One() { return {}; }

  TFRS_INLINE void Load(const float* from) {
    TFRS_UNROLL
    for (int k = 0; k < kNumber; ++k) {
      memcpy(&v[k], from + k * kWide, sizeof(Vector));
    }
  }
  template <typename Half>
  TFRS_INLINE void Load(const Half* from) {
    TFRS_UNROLL
    for (int k = 0; k < kNumber; ++k) {
      const auto words = VectorOf<kWide>::Extend(&from[k * kWide].bits);
      v[k] = reinterpret_cast<Vector>(WidenBits(words, Half()));
    }
  }
  // Integers, of which integer(bytes) makes 32 bits each.
  template <typename Integer>
  TFRS_INLINE void Load(const int8_t* from, Integer integer) {
    TFRS_UNROLL
    for (int k = 0; k < kNumber; ++k) {
      const auto integers = VectorOf<kWide>::Extend(from + k * kWide);
      v[k] = __builtin_convertvector(integer(integers), Vector);
    }
  }
  TFRS_INLINE void Store(float* to) const {
    TFRS_UNROLL
    for (int k = 0; k < kNumber; ++k) {
      memcpy(to + k * kWide, &v[k], sizeof(Vector));
    }
  }
  TFRS_INLINE void Add(const Vectors& other) {
    TFRS_UNROLL
    for (int k = 0; k < kNumber; ++k) v[k] += other.v[k];
  }
  TFRS_INLINE void Square() {
    TFRS_UNROLL
    for (int k = 0; k < kNumber; ++k) v[k] *= v[k];
  }
  TFRS_INLINE void Multiply(float factor) {
    TFRS_UNROLL
    for (int k = 0; k < kNumber; ++k) v[k] *= factor;
  }
};

#ifdef __AVX512F__
constexpr int kWidest = 16;
#else
constexpr int kWidest = 8;
#endif
// The number of vectors that fit into AVX2's registers, with some to spare.
constexpr int kRegisters = 8;

// Splits [0, columns) into pieces of whole vectors and calls f(vectors, first)
// for each. Returns where the rest begins, which is fewer than eight columns.
template <typename F>
TFRS_INLINE int64_t InVectors(int64_t columns, F f) {
  int64_t j = 0;
  auto fits = [&](const auto& vectors) TFRS_INLINED {
    return columns - j >= vectors.kColumns;
  };
  auto take = [&](const auto& vectors) TFRS_INLINED {
    f(vectors, j);
    j += vectors.kColumns;
  };
  auto take_one = [&](const auto& vectors) TFRS_INLINED {
    if (fits(vectors)) take(vectors);
  };
  while (fits(Vectors<kRegisters, kWidest>())) {
    take(Vectors<kRegisters, kWidest>());
  }
  take_one(Vectors<4, kWidest>());
  take_one(Vectors<2, kWidest>());
  take_one(Vectors<1, kWidest>());
  if (kWidest > 8) take_one(Vectors<1, 8>());
  return j;
}

// Columns of a table, from `first` on. Rows are `stride` elements apart.
template <typename Row>
struct Columns {
  const Row* first;
  int64_t stride;

  TFRS_INLINE void Prefetch(int64_t row, int64_t at, int64_t columns) const {
    PrefetchRead(first + row * stride + at, columns);
  }
  template <typename Vectors>
  TFRS_INLINE void Load(Vectors* vectors, int64_t row, int64_t at) const {
    vectors->Load(first + row * stride + at);
  }
  TFRS_INLINE float At(int64_t row, int64_t at) const {
    return Widen(first[row * stride + at]);
  }
};

// Columns of integers, of which `integer` makes 32 bits each.
template <typename Integer>
struct ScaledColumns {
  const int8_t* first;
  int64_t stride;
  const float* factors;  // Of the rows.
  Integer integer;

  TFRS_INLINE void Prefetch(int64_t row, int64_t at, int64_t columns) const {
    PrefetchRead(first + row * stride + at, columns);
    if (at == 0) PrefetchRead(factors + row, 1);
  }
  template <typename Vectors>
  TFRS_INLINE void Load(Vectors* vectors, int64_t row, int64_t at) const {
    vectors->Load(first + row * stride + at, integer);
    vectors->Multiply(factors[row]);
  }
  TFRS_INLINE float At(int64_t row, int64_t at) const {
    const int32_t byte = first[row * stride + at];
    return static_cast<float>(integer(byte)) * factors[row];
  }
};

// A bag's ids, [begin, end), of those that are looked up, which end at `last`.
// With each id, the row of the one that is `ahead` of it is prefetched.
struct Bag {
  int64_t begin, end, last, ahead;
};

// Sums the rows of a bag's ids: so many of the columns. The processor begins as
// many loads as fit into its window of instructions, so the loop over ids has
// few others: an addition takes its row from memory, which GCC achieves if
// vectors are loaded one by one.
template <bool kWeighted, typename From>
TFRS_INLINE void SumRowsOf(const TfrsLookup& l, const From& from,
                           const Bag& bag, int64_t columns,
                           float* __restrict sum) {
  const int64_t i = bag.begin;
  auto prefetch = [&](int64_t k, int64_t at, int64_t n) TFRS_INLINED {
    const int64_t later = k + bag.ahead;
    from.Prefetch(IdAt(l, later < bag.last ? later : bag.last - 1), at, n);
  };
  auto sum_vectors = [&](const auto& vectors, int64_t at) TFRS_INLINED {
    auto sums = vectors;
    prefetch(i, at, sums.kColumns);
    from.Load(&sums, IdAt(l, i), at);
    if (kWeighted) sums.Multiply(l.weights[i]);
    for (int64_t k = i + 1; k < bag.end; ++k) {
      prefetch(k, at, sums.kColumns);
      const int64_t row = IdAt(l, k);
      TFRS_UNROLL
      for (int v = 0; v < sums.kVectors; ++v) {
        auto value = sums.One();
        from.Load(&value, row, at + v * value.kColumns);
        if (kWeighted) value.Multiply(l.weights[k]);
        sums.v[v] += value.v[0];
      }
    }
    sums.Store(sum + at);
  };
  const int64_t rest = InVectors(columns, sum_vectors);
  for (int64_t j = rest; j < columns; ++j) {
    for (int64_t k = i; k < bag.end; ++k) {
      if (j == rest) prefetch(k, j, columns - j);
      const float value = from.At(IdAt(l, k), j);
      const float term = kWeighted ? l.weights[k] * value : value;
      sum[j] = k == i ? term : sum[j] + term;
    }
  }
}

template <typename From>
TFRS_INLINE void SumRows(const TfrsLookup& l, const From& from, const Bag& bag,
                         int64_t columns, float* __restrict sum) {
  return l.weights ? SumRowsOf<true>(l, from, bag, columns, sum)
                   : SumRowsOf<false>(l, from, bag, columns, sum);
}

// The same of columns [first, first + columns), for each type of rows.
template <typename Row>
TFRS_INLINE void SumColumns(const TfrsLookup& l, int64_t dim, const Bag& bag,
                            int64_t first, int64_t columns,
                            float* __restrict sum, Row) {
  const Row* rows = static_cast<const Row*>(l.table);
  SumRows(l, Columns<Row>{rows + first, dim}, bag, columns, sum);
}

template <typename Integer>
TFRS_INLINE void SumIntegers(const TfrsLookup& l, int64_t stride,
                             const Bag& bag, int64_t first, int64_t columns,
                             float* __restrict sum, Integer integer) {
  const int8_t* rows = static_cast<const int8_t*>(l.table) + first;
  SumRows(l, ScaledColumns<Integer>{rows, stride, l.factors, integer}, bag,
          columns, sum);
}

TFRS_INLINE void SumColumns(const TfrsLookup& l, int64_t dim, const Bag& bag,
                            int64_t first, int64_t columns,
                            float* __restrict sum, Int8) {
  SumIntegers(l, dim, bag, first, columns, sum,
              [](auto byte) TFRS_INLINED { return byte; });
}

TFRS_INLINE void SumColumns(const TfrsLookup& l, int64_t dim, const Bag& bag,
                            int64_t first, int64_t columns,
                            float* __restrict sum, Int4) {
  const int64_t half = (dim + 1) / 2, last = first + columns;
  const int64_t low = last < half ? last : half;  // Columns of lower bits end.
  const int64_t high = first > half ? first : half;
  if (first < low) {
    SumIntegers(l, half, bag, first, low - first, sum,
                [](auto byte) TFRS_INLINED { return (byte & 15) - 8; });
  }
  if (high < last) {
    SumIntegers(l, half, bag, high - half, last - high, sum + (high - first),
                [](auto byte) TFRS_INLINED { return (byte >> 4 & 15) - 8; });
  }
}

// The same of more than kTerms ids.
template <typename Row>
__attribute__((noinline)) void SumManyRows(const TfrsLookup& l, const Bag& bag,
                                           int64_t first, int64_t columns,
                                           float* sum) {
  double totals[kColumns];
  InColumns(columns, [&](int64_t at, int64_t n) {
    for (int64_t k = bag.begin; k < bag.end; k += kTerms) {
      const int64_t stop = bag.end - k < kTerms ? bag.end : k + kTerms;
      const Bag some = {k, stop, bag.last, bag.ahead};
      SumColumns(l, l.dim, some, first + at, n, sum + at, Row());
      AddTotals(sum + at, n, k == bag.begin, totals);
    }
    RoundTotals(totals, n, sum + at);
  });
}

// The same of any number of ids.
template <typename Row>
TFRS_INLINE void SumBag(const TfrsLookup& l, int64_t dim, const Bag& bag,
                        int64_t first, int64_t columns, float* sum) {
  if (bag.end - bag.begin > kTerms) {
    return SumManyRows<Row>(l, bag, first, columns, sum);
  }
  SumColumns(l, dim, bag, first, columns, sum, Row());
}

void Prefetch(const TfrsLookup* lookup, int64_t begin, int64_t end) {
  const TfrsLookup& l = *lookup;
  const char* table = static_cast<const char*>(l.table);
  const int64_t first = tfrs_first_id(&l, begin);
  const int64_t row = tfrs_row_bytes(l.type, l.dim);
  const int64_t n = tfrs_first_id(&l, end) - first, most = LookupsAhead(row);
  for (int64_t i = first; i < first + (n < most ? n : most); ++i) {
    PrefetchRead(table + IdAt(l, i) * row, row);
    if (l.factors) PrefetchRead(l.factors + IdAt(l, i), 1);
  }
}

template <int kDim, typename Row>
void LookupRows(const TfrsLookup& l, int64_t begin, int64_t end) {
  const int64_t dim = Width(kDim, l.dim);
  const int64_t last = tfrs_first_id(&l, end);
  const int64_t ahead = LookupsAhead(tfrs_row_bytes(l.type, l.dim));
  int64_t i = tfrs_first_id(&l, begin);
  for (int64_t bag = begin; bag < end; ++bag) {
    const int64_t stop = tfrs_first_id(&l, bag + 1);
    if (i == stop) {
      Zero(l, bag);
      continue;
    }
    const Bag ids = {i, stop, last, ahead};
    if (l.output == kFloat32) {
      float* out = static_cast<float*>(l.out) + bag * l.stride;
      SumBag<Row>(l, dim, ids, 0, dim, out);
      if (l.scale) {
        const float scale = l.scale[bag];
        for (int64_t j = 0; j < dim; ++j) out[j] = scale * out[j];
      }
    } else {
      float sum[kColumns];
      InColumns(dim, [&](int64_t first, int64_t columns) TFRS_INLINED {
        SumBag<Row>(l, dim, ids, first, columns, sum);
        StoreHalves(l, bag, first, columns, sum);
      });
    }
    i = stop;
  }
}

void Lookup(const TfrsLookup* lookup, int64_t begin, int64_t end,
            bool prefetched) {
  if (!prefetched) Prefetch(lookup, begin, end);
  ByWidth(lookup->dim, [=](auto width) {
    auto run = [=](auto row) {
      LookupRows<width(), decltype(row)>(*lookup, begin, end);
    };
    switch (lookup->type) {
      case kBfloat16: return run(Bfloat16());
      case kFloat16: return run(Float16());
      case kInt8: return run(Int8());
      case kInt4: return run(Int4());
      default: return run(0.0f);
    }
  });
}

// The sum of a row's squares: column j is added to sum j % 16, and these sums
// are added up by halves. So the order is that of all instruction sets.
TFRS_INLINE float SumSquares(const float* g, int64_t dim) {
  constexpr int kSums = 16;
  Vectors<kSums / kWidest, kWidest> sums = {}, values;
  int64_t j = 0;
  for (; j + kSums <= dim; j += kSums) {
    values.Load(g + j);
    values.Square();
    sums.Add(values);
  }
  float s[kSums];
  sums.Store(s);
  for (int k = 0; j < dim; ++j, ++k) s[k] += g[j] * g[j];
  for (int half = kSums / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) s[k] += s[k + half];
  }
  return s[0];
}

// The random bits of a number of a row: the higher, the better. They are uniform
// as the row's key is, since no two keys become one. The steps are there so that
// columns beside each other are not rounded alike. More of them would cost as
// much as all the rest of rounding.
TFRS_INLINE uint32_t RandomBits(uint32_t row, uint32_t column) {
  const uint32_t x = row + column * 0x9E3779B9u;
  return (x ^ x >> 15) * 0x846CA68Bu;
}

// Rounds to one of the two nearest numbers, to each with the probability that
// makes the value the mean. Beyond the largest number, as to the nearest.
TFRS_INLINE uint16_t Round(float value, uint32_t random, Bfloat16) {
  const uint32_t bits = Bits(value);
  const uint32_t nearest = 0x7FFF + (bits >> 16 & 1);
  const uint32_t up =
      (bits & 0x7FFFFFFF) > 0x7F7F0000 ? nearest : random >> 16;
  const uint32_t rounded = (bits + up) >> 16;
  return value != value ? 0x7FC0 | (bits >> 16 & 0x8000) : rounded;
}

TFRS_INLINE uint16_t Round(float value, uint32_t random, Float16) {
  const uint32_t bits = Bits(value);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t normal = (magnitude - 0x38000000 + (random >> 19)) >> 13;
  // Below 2^-14 the steps are of 2^-24 each, of which 21 bits are kept.
  const uint32_t most = 0x387FFFFF;
  const float steps = FromBits(magnitude < most ? magnitude : most) * 0x1p45f;
  const uint32_t small =
      (static_cast<uint32_t>(static_cast<int32_t>(steps)) + (random >> 11)) >>
      21;
  // Computed: of choices GCC would make jumps here, and no vectors of the loop.
  const uint32_t is_infinite = magnitude >= 0x477FF000;
  const uint32_t is_nan = magnitude > 0x7F800000;
  const uint32_t large = 0x7BFF + is_infinite + (is_nan << 9);
  const uint32_t is_small = 0u - (magnitude <= most);
  const uint32_t is_large = 0u - (magnitude > 0x477FE000);
  const uint32_t half = (small & is_small) | (large & is_large) |
                        (normal & ~is_small & ~is_large);
  return (bits >> 16 & 0x8000) | half;
}

TFRS_INLINE uint16_t Nearest(float value, Bfloat16) {
  return ToBfloat16(value);
}
TFRS_INLINE uint16_t Nearest(float value, Float16) { return ToFloat16(value); }

// The update rules, as in tfrs_embed/optimizers/rules.py.

// Updates a row and its slots by its gradient, g. New values are rounded by
// round(value, column), one by one rather than as a row: what is between would
// go through memory.
template <int kDim, typename Row, typename Rounded>
TFRS_INLINE void ApplyRule(const TfrsTable& t, int64_t row,
                           const float* __restrict g, Rounded round) {
  const int64_t dim = Width(kDim, t.dim);
  Row* __restrict w = static_cast<Row*>(t.parameters) + row * dim;
  const float rate = t.rate;
  const float* s = t.settings;
  switch (t.rule) {
    case kSum:
      for (int64_t j = 0; j < dim; ++j) w[j] = round(Widen(w[j]) + g[j], j);
      return;
    case kSgd:
      for (int64_t j = 0; j < dim; ++j) {
        w[j] = round(Widen(w[j]) - rate * g[j], j);
      }
      return;
    case kAdagrad: {
      float* __restrict a = t.slots[0] + row * dim;
      for (int64_t j = 0; j < dim; ++j) {
        a[j] += g[j] * g[j];
        w[j] = round(Widen(w[j]) - rate * g[j] / sqrtf(a[j]), j);
      }
      return;
    }
    case kAdagradMomentum: {
      const float momentum = s[0], power = s[2], kept = s[3], added = s[4],
                  epsilon = s[5];
      const bool nesterov = s[1] != 0;
      float* __restrict a = t.slots[0] + row * dim;
      float* __restrict m = t.slots[1] + row * dim;
      for (int64_t j = 0; j < dim; ++j) {
        a[j] = kept * a[j] + added * (g[j] * g[j]);
        const float scaled = power == -0.5f
                                 ? g[j] / sqrtf(a[j] + epsilon)
                                 : powf(a[j] + epsilon, power) * g[j];
        m[j] = momentum * m[j] + scaled;
        const float moved = nesterov ? momentum * m[j] + scaled : m[j];
        w[j] = round(Widen(w[j]) - rate * moved, j);
      }
      return;
    }
    case kAdam: {
      const float beta1 = s[0], rest1 = s[1], beta2 = s[2], rest2 = s[3],
                  epsilon = s[4];
      float* __restrict m = t.slots[0] + row * dim;
      float* __restrict v = t.slots[1] + row * dim;
      if (s[5] != 0) {
        for (int64_t j = 0; j < dim; ++j) {
          m[j] = beta1 * m[j] + rest1 * g[j];
          v[j] = beta2 * v[j] + rest2 * (g[j] * g[j]);
          const float root = sqrtf(v[j] + epsilon);
          const float moved = root == 0 ? 0 : m[j] / root;
          w[j] = round(Widen(w[j]) - rate * moved, j);
        }
      } else {
        for (int64_t j = 0; j < dim; ++j) {
          m[j] = beta1 * m[j] + rest1 * g[j];
          v[j] = beta2 * v[j] + rest2 * (g[j] * g[j]);
          const float moved = m[j] / (sqrtf(v[j]) + epsilon);
          w[j] = round(Widen(w[j]) - rate * moved, j);
        }
      }
      return;
    }
    case kFtrl: {
      const float power = s[0], l1 = s[1], l2 = s[2], beta = s[3];
      const bool multiply = s[4] != 0;
      const float bound = multiply ? rate * l1 : l1;
      float* __restrict a = t.slots[0] + row * dim;
      float* __restrict l = t.slots[1] + row * dim;
      auto update = [=](auto raise) {
        for (int64_t j = 0; j < dim; ++j) {
          const float before = raise(a[j]);
          a[j] += g[j] * g[j];
          const float root = raise(a[j]);
          const float d = root - before;
          float denominator;
          if (multiply) {
            l[j] = l[j] + rate * g[j] - d * Widen(w[j]);
            denominator = root + 2 * rate * l2 + beta;
          } else {
            l[j] = l[j] + g[j] - d * Widen(w[j]) / rate;
            denominator = (root + beta) / rate + 2 * l2;
          }
          float clipped = l[j] < bound ? l[j] : bound;
          clipped = clipped > -bound ? clipped : -bound;
          w[j] = round((clipped - l[j]) / denominator, j);
        }
      };
      // Only the root is computed for several columns at once.
      if (power == 0.5f) {
        update([](float value) { return sqrtf(value); });
      } else {
        update([=](float value) { return powf(value, power); });
      }
      return;
    }
    case kMomentum: {
      const float momentum = s[0];
      const bool nesterov = s[1] != 0;
      float* __restrict m = t.slots[0] + row * dim;
      for (int64_t j = 0; j < dim; ++j) {
        const float scaled = rate * g[j];
        m[j] = momentum * m[j] - scaled;
        const float moved = nesterov ? momentum * m[j] - scaled : m[j];
        w[j] = round(Widen(w[j]) + moved, j);
      }
      return;
    }
    case kRmsprop: {
      const float rho = s[0], rest = s[1], epsilon = s[2];
      float* __restrict v = t.slots[0] + row * dim;
      for (int64_t j = 0; j < dim; ++j) {
        v[j] = rho * v[j] + rest * (g[j] * g[j]);
        w[j] = round(Widen(w[j]) - rate * g[j] / sqrtf(v[j] + epsilon), j);
      }
      return;
    }
    case kRowWiseAdagrad: {
      float* a = t.slots[0] + row;
      *a += SumSquares(g, dim) / dim;
      const float scale = rate / (sqrtf(*a) + s[0]);
      for (int64_t j = 0; j < dim; ++j) {
        w[j] = round(Widen(w[j]) - scale * g[j], j);
      }
      return;
    }
    case kRowWiseAdam: {
      const float beta1 = s[0], rest1 = s[1], beta2 = s[2], rest2 = s[3],
                  epsilon = s[4];
      float* __restrict m = t.slots[0] + row * dim;
      float* v = t.slots[1] + row;
      *v = beta2 * *v + rest2 * (SumSquares(g, dim) / dim);
      const float root = sqrtf(*v * t.unbias[1]);
      const float scale = rate * t.unbias[0] / (root + epsilon);
      for (int64_t j = 0; j < dim; ++j) {
        m[j] = beta1 * m[j] + rest1 * g[j];
        w[j] = round(Widen(w[j]) - scale * m[j], j);
      }
      return;
    }
  }
}

// Updates a row of a type that isn't float32.
template <int kDim, typename Row>
TFRS_INLINE void ApplyToHalves(const TfrsTable& t, int64_t row,
                               const float* g) {
  const TfrsRounding& r = t.rounding;
  if (r.stochastic) {
    const uint64_t number =
        r.first_row + static_cast<uint64_t>(row) * r.row_stride;
    const uint32_t key = tfrs_mix(r.stream ^ number) >> 32;
    const uint32_t first = r.first_column;
    ApplyRule<kDim, Row>(t, row, g, [=](float value, int64_t j) TFRS_INLINED {
      const uint32_t column = first + static_cast<uint32_t>(j);
      return Row{Round(value, RandomBits(key, column), Row())};
    });
  } else {
    ApplyRule<kDim, Row>(t, row, g, [](float value, int64_t) TFRS_INLINED {
      return Row{Nearest(value, Row())};
    });
  }
}

// Few tables have what follows. It stays out of the loops over rows, which are
// compiled for each width.

// The factor that limits the norm of numbers. A norm that is NaN makes it NaN.
float NormFactor(const float* g, int64_t dim, float limit) {
  const float norm = sqrtf(SumSquares(g, dim));
  return limit / (norm < limit ? limit : norm);
}

// Writes a row's gradient after its table's clips to `clipped`, [dim], which may
// be g.
__attribute__((noinline)) void Clip(const TfrsTable& t, const float* g,
                                    float* clipped) {
  const float low = t.clip_low, high = t.clip_high;
  float scale = 1.0f;
  if (t.row_norm < INFINITY) scale = NormFactor(g, t.dim, t.row_norm);
  for (int64_t j = 0; j < t.dim; ++j) {
    const float above = g[j] < low ? low : g[j];
    clipped[j] = (above > high ? high : above) * scale;
  }
}

// Takes its share away from a row of float32.
__attribute__((noinline)) void Decay(const TfrsTable& t, int64_t row) {
  const float decay = t.decay;
  float* w = static_cast<float*>(t.parameters) + row * t.dim;
  for (int64_t j = 0; j < t.dim; ++j) w[j] -= decay * w[j];
}

// Scales a row of float32 down to its table's largest norm.
__attribute__((noinline)) void LimitNorm(const TfrsTable& t, int64_t row) {
  float* w = static_cast<float*>(t.parameters) + row * t.dim;
  const float scale = NormFactor(w, t.dim, t.max_norm);
  for (int64_t j = 0; j < t.dim; ++j) w[j] *= scale;
}

// Updates a row by its gradient, g; `sum` is memory for a gradient, or g.
template <int kDim>
inline void Apply(const TfrsTable& t, int64_t row, const float* g,
                  float* sum) {
  if (t.clips) {
    Clip(t, g, sum);
    g = sum;
  }
  if (t.decay != 0) Decay(t, row);
  if (t.marks) t.marks[row] = t.mark;
  switch (t.type) {
    case kBfloat16: return ApplyToHalves<kDim, Bfloat16>(t, row, g);
    case kFloat16: return ApplyToHalves<kDim, Float16>(t, row, g);
    default:
      ApplyRule<kDim, float>(t, row, g,
                             [](float value, int64_t) TFRS_INLINED {
                               return value;
                             });
      if (t.max_norm > 0) LimitNorm(t, row);
  }
}

constexpr uint32_t kNone = 0xFFFFFFFF;

// The gradients of one row as a linked list: the index of the first, and for
// each the index of the next.
struct Chain {
  const TfrsGradientRef* refs;
  const float* factors;
  const uint32_t* next;
  uint32_t first;
};

// Sums columns of up to kTerms gradients of a row, numbers of the type. Returns
// the first gradient of the others, or kNone.
template <typename Number>
TFRS_INLINE uint32_t SumGradients(const Chain& chain, int64_t first,
                                  int64_t columns, float* __restrict sum) {
  uint32_t rest = kNone;
  auto gradient = [&](uint32_t i) TFRS_INLINED {
    return static_cast<const Number*>(chain.refs[i].gradient) + first;
  };
  auto sum_vectors = [&](const auto& vectors, int64_t at) TFRS_INLINED {
    auto sums = vectors, values = vectors;
    uint32_t prefetched = chain.first;
    for (int k = 0; k < kGradientsAhead && prefetched != kNone; ++k) {
      prefetched = chain.next[prefetched];
    }
    uint32_t i = chain.first;
    for (int64_t k = 0; i != kNone && k < kTerms; i = chain.next[i], ++k) {
      if (prefetched != kNone) {
        PrefetchRead(gradient(prefetched) + at, sums.kColumns);
        prefetched = chain.next[prefetched];
      }
      values.Load(gradient(i) + at);
      if (chain.factors) values.Multiply(chain.factors[i]);
      if (i == chain.first) {
        sums = values;
      } else {
        sums.Add(values);
      }
    }
    sums.Store(sum + at);
    rest = i;
  };
  for (int64_t j = InVectors(columns, sum_vectors); j < columns; ++j) {
    uint32_t i = chain.first;
    for (int64_t k = 0; i != kNone && k < kTerms; i = chain.next[i], ++k) {
      float value = Widen(gradient(i)[j]);
      if (chain.factors) value *= chain.factors[i];
      sum[j] = i == chain.first ? value : sum[j] + value;
    }
    rest = i;
  }
  return rest;
}

// Adds a row's other gradients, from `rest` on, to the sum of the first ones.
template <typename Number>
__attribute__((noinline)) void AddOthers(Chain chain, uint32_t rest,
                                         int64_t dim, float* sum) {
  double totals[kColumns];
  InColumns(dim, [&](int64_t at, int64_t n) {
    AddTotals(sum + at, n, true, totals);
    for (uint32_t i = rest; i != kNone;) {
      chain.first = i;
      i = SumGradients<Number>(chain, at, n, sum + at);
      AddTotals(sum + at, n, false, totals);
    }
    RoundTotals(totals, n, sum + at);
  });
}

template <int kDim>
void UpdateRows(const TfrsTable& t, const TfrsGradientRef* refs,
                const float* factors, int64_t n, const TfrsGroups* groups) {
  const int64_t dim = Width(kDim, t.dim);
  const int states = tfrs_states(t.rule);
  const int64_t row_bytes = dim * tfrs_size(t.type);
  const int64_t gradient_bytes = dim * tfrs_size(t.gradients);
  // The widths of the slots' rows; 0: the rule has no such slot.
  auto width = [&](int slot) -> int64_t {
    return slot + 1 >= states ? 0 : tfrs_by_row(t.rule, slot) ? 1 : dim;
  };
  const int64_t first_width = width(0), second_width = width(1);
  const uint32_t rows_ahead =
      Ahead(kRowsAhead, kUpdateBytes,
            row_bytes + gradient_bytes +
                (first_width + second_width) * sizeof(float));
  auto prefetch = [&](const TfrsGradientRef& ref) TFRS_INLINED {
    PrefetchWrite(static_cast<char*>(t.parameters) + ref.row * row_bytes,
                  row_bytes);
    if (states > 1) {
      PrefetchWrite(t.slots[0] + ref.row * first_width, first_width);
    }
    if (states > 2) {
      PrefetchWrite(t.slots[1] + ref.row * second_width, second_width);
    }
    if (t.marks) PrefetchWrite(t.marks + ref.row, 1);
    PrefetchRead(static_cast<const char*>(ref.gradient), gradient_bytes);
  };
  const uint32_t mask = groups->mask, shares = groups->shares;
  uint32_t* heads = groups->heads;
  uint32_t* next = groups->next;
  uint32_t* first = groups->first;
  uint32_t* last = groups->last;
  // Links the gradients of each row, in their order; `first` lists the rows.
  memset(heads, 0xFF, (mask + 1) * sizeof(*heads));
  uint32_t rows = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const uint64_t hash = tfrs_hash(refs[i].row);
    if (shares > 1 && (hash >> 32) * shares >> 32 != groups->share) continue;
    next[i] = kNone;
    uint32_t slot = hash >> 20 & mask;
    while (true) {
      const uint32_t group = heads[slot];
      if (group == kNone) {
        heads[slot] = rows;
        first[rows] = last[rows] = i;
        if (rows <= rows_ahead) prefetch(refs[i]);
        ++rows;
        break;
      }
      if (refs[first[group]].row == refs[i].row) {
        next[last[group]] = i;
        last[group] = i;
        break;
      }
      slot = (slot + 1) & mask;
    }
  }
  float* __restrict sum = groups->sum;
  for (uint32_t r = 0; r < rows; ++r) {
    // The first rows were prefetched above.
    const uint32_t ahead = r + rows_ahead;
    if (r > 0 && ahead < rows) prefetch(refs[first[ahead]]);
    const uint32_t i = first[r];
    const float* g = sum;
    if (next[i] != kNone || factors || t.gradients != kFloat32) {
      const Chain chain = {refs, factors, next, i};
      ByType(t.gradients, [&](auto number) TFRS_INLINED {
        typedef decltype(number) Number;
        const uint32_t rest = SumGradients<Number>(chain, 0, dim, sum);
        if (rest != kNone) AddOthers<Number>(chain, rest, dim, sum);
      });
    } else {
      g = static_cast<const float*>(refs[i].gradient);
    }
    Apply<kDim>(t, refs[first[r]].row, g, sum);
  }
}

void Update(const TfrsTable* table, const TfrsGradientRef* refs,
            const float* factors, int64_t n, const TfrsGroups* groups) {
  ByWidth(table->dim, [=](auto width) {
    UpdateRows<width()>(*table, refs, factors, n, groups);
  });
}

// Adds a feature's gradients, numbers of the type, to the sums of their rows.
template <int kDim, typename Number>
void AddGradients(const TfrsGradients& ids, int64_t any,
                  const TfrsRowSums& rows) {
  const int64_t dim = Width(kDim, any);
  int64_t bag = -1, stop = 0;
  for (int64_t i = 0; i < ids.n; ++i) {
    while (i >= stop) stop = tfrs_first_id(&ids, ++bag + 1);
    const char* from = ids.gradient + bag * ids.stride;
    const Number* g = reinterpret_cast<const Number*>(from);
    if (i + kGradientsAhead < ids.n) {
      PrefetchRead(from + kGradientsAhead * ids.stride, dim * sizeof(Number));
    }
    const int64_t row = IdAt(ids, i);
    float* __restrict sum = rows.sums + row * dim;
    const uint32_t terms = rows.terms[row]++;
    const bool begins = terms % kTerms == 0;
    if (begins && terms > 0) {
      AddTotals(sum, dim, terms == kTerms, rows.totals + row * dim);
    }
    const bool scaled = ids.weights || ids.scale;
    const float c = (ids.weights ? ids.weights[i] : 1.0f) *
                    (ids.scale ? ids.scale[bag] : 1.0f);
    auto add = [&](const auto& vectors, int64_t at) TFRS_INLINED {
      auto values = vectors, before = vectors;
      values.Load(g + at);
      if (scaled) values.Multiply(c);
      if (!begins) {
        before.Load(sum + at);
        values.Add(before);
      }
      values.Store(sum + at);
    };
    for (int64_t j = InVectors(dim, add); j < dim; ++j) {
      const float value = scaled ? c * Widen(g[j]) : Widen(g[j]);
      sum[j] = begins ? value : sum[j] + value;
    }
  }
}

template <int kDim>
void UpdateAllRows(const TfrsTable& t, const TfrsGradients* features,
                   int64_t num_features, int64_t rows, const TfrsRowSums& sums) {
  const int64_t dim = Width(kDim, t.dim);
  memset(sums.terms, 0, rows * sizeof(*sums.terms));
  for (int64_t f = 0; f < num_features; ++f) {
    ByType(t.gradients, [&](auto number) {
      AddGradients<kDim, decltype(number)>(features[f], dim, sums);
    });
  }
  for (int64_t row = 0; row < rows; ++row) {
    float* const sum = sums.sums + row * dim;
    if (sums.terms[row] > kTerms) {
      double* const totals = sums.totals + row * dim;
      AddTotals(sum, dim, false, totals);
      RoundTotals(totals, dim, sum);
    }
    if (sums.terms[row]) Apply<kDim>(t, row, sum, sum);
  }
}

void UpdateAll(const TfrsTable* table, const TfrsGradients* features,
               int64_t num_features, int64_t rows, const TfrsRowSums* sums) {
  ByWidth(table->dim, [=](auto width) {
    UpdateAllRows<width()>(*table, features, num_features, rows, *sums);
  });
}

const TfrsLoops kLoops = {TFRS_NAME, Prefetch, Lookup, Update, UpdateAll};

}  // namespace

extern "C" const TfrsLoops* TFRS_LOOPS() { return &kLoops; }
