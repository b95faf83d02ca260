// The least memory traffic of a step on one table: what no library can beat
// while its table is out of the caches. It computes nothing.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kLinesAhead = 160;

// Calls f(begin, end) on equal parts of [0, n), each in a thread of its own.
template <typename F>
void Parallel(int64_t n, int threads, F f) {
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) {
    others.emplace_back(f, n * i / threads, n * (i + 1) / threads);
  }
  f(0, n / threads);
  for (std::thread& other : others) other.join();
}

template <bool write>
int64_t Touch(char* table, int64_t row_bytes, const int64_t* rows,
              int64_t begin, int64_t end) {
  const int64_t ahead =
      std::max<int64_t>(2, kLinesAhead * kLine / std::max(row_bytes, kLine));
  int64_t sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    const char* next = table + rows[std::min(i + ahead, end - 1)] * row_bytes;
    char* row = table + rows[i] * row_bytes;
    for (int64_t at = 0; at < row_bytes; at += kLine) {
      // Into the second cache: the first can wait for fewer lines at once.
      __builtin_prefetch(next + at, write, 2);
      int64_t& word = *reinterpret_cast<int64_t*>(row + at);
      sum += word;
      if (write) word = sum;
    }
  }
  return sum;
}

}  // namespace

// Reads the looked-up rows of the first table in their order, then reads and
// writes each unique row of the first `updated` tables. Returns a number that
// keeps the compiler from leaving the reads out.
extern "C" int64_t Step(char** tables, int64_t updated, int64_t row_bytes,
                        const int64_t* lookups, int64_t n_lookups,
                        const int64_t* unique, int64_t n_unique,
                        int64_t threads) {
  std::atomic<int64_t> sum{0};
  Parallel(n_lookups, threads, [=, &sum](int64_t begin, int64_t end) {
    sum += Touch<false>(tables[0], row_bytes, lookups, begin, end);
  });
  Parallel(n_unique, threads, [=](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < updated; ++t) {
      Touch<true>(tables[t], row_bytes, unique, begin, end);
    }
  });
  return sum;
}
