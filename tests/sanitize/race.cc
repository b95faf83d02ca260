// Runs the loops of rows.cc and the steps of key_table.cc on several threads as
// the operations do, each on its own part, and compares with one thread:
// ThreadSanitizer sees all of it, which it can't of a program with TensorFlow.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "chunks.h"
#include "key_table.h"
#include "rows.h"

namespace {

std::mt19937_64 random_bits;

int64_t Draw(int64_t low, int64_t high) {  // In [low, high).
  return low + static_cast<int64_t>(random_bits() % (high - low));
}

std::vector<float> DrawFloats(int64_t n) {
  std::uniform_real_distribution<float> uniform(0.1f, 2.0f);
  std::vector<float> values(n);
  for (float& value : values) value = uniform(random_bits);
  return values;
}

// Runs fn(begin, end) over [0, total), on `threads` threads, some of which come
// late.
void InChunks(int threads, int64_t total,
              const tfrs_embed::Chunks::Function& fn) {
  if (total == 0) return;
  std::mutex mutex;
  std::deque<std::thread> pool;
  const int64_t late = Draw(0, 4);
  tfrs_embed::Chunks::Run(
      total, Draw(1, total + 1), threads - 1,
      [&](std::function<void()> run) {
        std::lock_guard<std::mutex> lock(mutex);
        const auto wait = std::chrono::microseconds(30 * late * pool.size());
        pool.emplace_back([=] {
          std::this_thread::sleep_for(wait);
          run();
        });
      },
      fn);
  // One that came late may still be about to wake another.
  while (true) {
    std::unique_lock<std::mutex> lock(mutex);
    if (pool.empty()) return;
    std::thread thread = std::move(pool.front());
    pool.pop_front();
    lock.unlock();
    thread.join();
  }
}

// Runs fn(part) for all parts, likewise.
void InParts(int threads, int64_t parts,
             const std::function<void(int64_t)>& fn) {
  InChunks(threads, parts, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) fn(part);
  });
}

void Require(bool ok, const char* what, const char* where) {
  if (ok) return;
  std::fprintf(stderr, "%s, %s: differs among threads\n", where, what);
  std::exit(1);
}

// Ids of bags, some of which are empty.
struct Ids {
  std::vector<int64_t> wide;
  std::vector<int32_t> narrow, splits;

  Ids(int64_t n, int64_t rows) {
    splits.assign(Draw(1, 4), 0);
    for (int64_t i = 0; i < n; ++i) {
      wide.push_back(Draw(0, rows));
      narrow.push_back(wide.back());
      if (i && Draw(0, 3) == 0) splits.insert(splits.end(), Draw(1, 4), i);
    }
    splits.insert(splits.end(), Draw(1, 4), n);
  }
};

// Whether all bits are equal, those of what isn't a number too.
bool Same(const std::vector<float>& one, const std::vector<float>& other) {
  return std::memcmp(one.data(), other.data(), one.size() * sizeof(float)) == 0;
}

void TryLookup(const TfrsLoops& loops, int64_t n, int64_t rows, int64_t dim) {
  const int64_t per_bag = Draw(1, 4);
  n *= per_bag;
  const Ids ids(n, rows);
  const std::vector<float> table = DrawFloats(rows * dim);
  const std::vector<float> weights = DrawFloats(n), scale = DrawFloats(n * 4);
  const bool bags = Draw(0, 4) > 0;
  TfrsLookup lookup = {};
  lookup.table = table.data();
  lookup.type = Draw(0, 3);  // Any bits are numbers of two bytes.
  lookup.dim = dim;
  lookup.stride = dim + Draw(0, 2) * Draw(1, 20);
  lookup.wide = Draw(0, 2);
  lookup.ids = lookup.wide ? static_cast<const void*>(ids.wide.data())
                           : ids.narrow.data();
  lookup.splits = bags ? ids.splits.data() : nullptr;
  lookup.weights = Draw(0, 2) ? weights.data() : nullptr;
  lookup.scale = Draw(0, 2) ? scale.data() : nullptr;
  lookup.n = n;
  lookup.per_bag = per_bag;
  lookup.count = bags ? ids.splits.size() - 1 : n / per_bag;
  lookup.output = Draw(0, 3);
  std::vector<float> one(lookup.count * lookup.stride), many(one);
  if (bags && lookup.count > n * 4) lookup.scale = nullptr;
  lookup.out = one.data();
  loops.lookup(&lookup, 0, lookup.count, false);
  lookup.out = many.data();
  const int64_t parts = Draw(1, 20);
  InParts(Draw(1, 9), parts, [&](int64_t part) {
    const int64_t begin = lookup.count * part / parts;
    const int64_t end = lookup.count * (part + 1) / parts;
    const bool prefetched = part % 2 == 0;
    if (prefetched) loops.prefetch(&lookup, begin, end);
    loops.lookup(&lookup, begin, end, prefetched);
  });
  Require(Same(one, many), "lookup", loops.name);
}

void TryUpdate(const TfrsLoops& loops, int64_t n, int64_t rows, int64_t dim) {
  const int rule = Draw(kSum, kRules);
  const std::vector<float> gradients = DrawFloats(n * dim);
  const std::vector<float> factors = DrawFloats(n);
  const bool weighted = Draw(0, 2);
  const int32_t type = Draw(0, 3), stochastic = Draw(0, 2);
  const int64_t parts = Draw(1, 20);
  const uint32_t shares = Draw(0, 2) ? 1 : Draw(2, 9);
  // A row's gradients are in one bucket, and in one share of it: no two threads
  // write the same row.
  std::vector<std::vector<TfrsGradientRef>> refs(parts);
  std::vector<std::vector<float>> factors_of(parts);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = Draw(0, rows);
    refs[row % parts].push_back({row, gradients.data() + i * dim});
    factors_of[row % parts].push_back(factors[i]);
  }
  std::vector<float> states[2][3];
  for (int k = 0; k < 3; ++k) {
    states[0][k] = states[1][k] = DrawFloats(rows * dim);
  }
  for (int run = 0; run < 2; ++run) {
    TfrsTable table = {};
    table.parameters = states[run][0].data();
    for (int k = 0; k < 2; ++k) table.slots[k] = states[run][k + 1].data();
    table.type = type;
    table.rounding = {stochastic, 7, 0, 1, 0};
    table.dim = dim;
    table.rule = rule;
    table.rate = 0.3f;
    for (float& setting : table.settings) setting = 0.5f;
    InParts(run ? Draw(2, 9) : 1, parts * shares, [&](int64_t work) {
      const int64_t part = work / shares;
      const int64_t m = refs[part].size();
      if (m == 0) return;
      const int64_t most = std::min(m, rows);
      uint32_t size = 16;
      while (size < 2 * most) size *= 2;
      std::vector<uint32_t> heads(size), next(m), first(most), last(most);
      std::vector<float> sum(dim);
      TfrsGroups groups = {};
      groups.heads = heads.data();
      groups.next = next.data();
      groups.first = first.data();
      groups.last = last.data();
      groups.sum = sum.data();
      groups.mask = size - 1;
      groups.share = work % shares;
      groups.shares = shares;
      loops.update(&table, refs[part].data(),
                   weighted ? factors_of[part].data() : nullptr, m, &groups);
    });
  }
  for (int k = 0; k < 3; ++k) {
    Require(Same(states[0][k], states[1][k]), "update", loops.name);
  }
}

void TryKeys() {
  using tfrs_embed::KeyTable;
  const int64_t capacity = Draw(1, 3000);
  const bool counts_seen = Draw(0, 2);
  using tfrs_embed::OrderBy;
  const OrderBy orders[] = {OrderBy::kLastUsed, OrderBy::kFrequency,
                            OrderBy::kDecayed};
  const OrderBy by = orders[Draw(0, 3)];
  tfrs_embed::KeyRules rules = {};
  rules.capacity = capacity;
  rules.max_capacity = 2 * capacity;
  rules.candidates = Draw(1, 500);
  rules.threshold = counts_seen ? Draw(1, 4) : 0;
  rules.probability = Draw(0, 2) ? 1.0 : 0.5;
  rules.seed = random_bits();
  rules.has_policy = rules.evicts = true;
  rules.by = by;
  rules.scored = by == OrderBy::kFrequency && Draw(0, 2);
  rules.half_life.length = by == OrderBy::kDecayed ? Draw(1, 4) : 0;
  rules.ttl = Draw(0, 3);
  rules.by_time = Draw(0, 2);
  rules.floor = Draw(0, 2) ? rules.max_capacity : Draw(1, 2 * capacity);
  KeyTable one(rules), many(rules);
  const KeyTable::Parallel alone = {
      1, [](int64_t total, int64_t, const tfrs_embed::Chunks::Function& fn) {
        fn(0, total);
      }};
  for (int64_t number = 1; number < 6; ++number) {
    const int threads = Draw(2, 9);
    const KeyTable::Parallel together = {
        threads, [threads](int64_t total, int64_t,
                           const tfrs_embed::Chunks::Function& fn) {
          InChunks(threads, total, fn);
        }};
    const int64_t n = Draw(0, 6000);
    std::vector<int64_t> keys(n), counts(n), rows[2], hints(n);
    for (int64_t& key : keys) key = Draw(0, capacity);
    for (int64_t& count : counts) count = Draw(0, 3);
    tfrs_embed::KeyStep step = {
        keys.data(), Draw(0, 2) ? counts.data() : nullptr, n, number};
    step.now = one.Moment(number, Draw(0, 9));  // A clock that may jump back.
    int64_t lacking[2];
    for (int run = 0; run < 2; ++run) {
      KeyTable& table = run ? many : one;
      const KeyTable::Parallel& parallel = run ? together : alone;
      rows[run].resize(n);
      table.Reserve(parallel, step, hints.data());
      const tfrs_embed::KeyChanges changes =
          table.Commit(parallel, step, hints.data(), rows[run].data());
      lacking[run] = changes.lacking;
      table.Publish(changes.version);
      if (rules.scored && lacking[run] == 0) {
        table.Score(parallel, keys.data(), n, counts.data(), hints.data());
      }
      table.Find(parallel, keys.data(), n, hints.data());
      if (lacking[run] == 0) {
        rows[run].insert(rows[run].end(), hints.begin(), hints.end());
      }
    }
    Require(lacking[0] == lacking[1], "room", "keys");
    Require(lacking[0] > 0 || rows[0] == rows[1], "rows", "keys");
    Require(one.total().hits == many.total().hits, "hits", "keys");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::seconds(std::atoi(argv[1]));
  random_bits.seed(std::atoi(argv[2]));
  int cases = 0;
  for (; std::chrono::steady_clock::now() < end; ++cases) {
    const TfrsLoops& loops = *tfrs_loops("baseline");
    const int64_t n = Draw(1, 500), rows = Draw(1, 200);
    const int64_t common[] = {8, 16, 32, 64, 128};
    const int64_t dim = Draw(0, 2) ? common[Draw(0, 5)] : Draw(1, 300);
    TryLookup(loops, n, rows, dim);
    TryUpdate(loops, n, rows, dim);
    TryKeys();
  }
  std::printf("threads: %d cases\n", cases);
}
