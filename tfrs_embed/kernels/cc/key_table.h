// The keys of a shard's rows: which are admitted, which are evicted.

#ifndef TFRS_EMBED_KERNELS_CC_KEY_TABLE_H_
#define TFRS_EMBED_KERNELS_CC_KEY_TABLE_H_

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "chunks.h"
#include "eviction_order.h"
#include "key_store.h"

namespace tfrs_embed {

// What lookups of keys without a row read: zeros.
constexpr int64_t kAbsentRow = 0;
// What takes the gradients of keys without a row.
constexpr int64_t kTrashRow = 1;
constexpr int64_t kFirstRow = 2;

// See KeyRules in key_table.py.
struct KeyRules {
  int64_t capacity, max_capacity, candidates, threshold;
  double probability;
  uint64_t seed;
  bool has_policy, by_frequency, evicts;
  int64_t ttl;  // 0: none.
};

// The keys of a step.
struct KeyStep {
  const int64_t* keys;
  const int64_t* counts;  // Null: ones.
  int64_t n;
  int64_t number;  // last_used of the keys that it uses.

  int64_t count(int64_t i) const { return counts == nullptr ? 1 : counts[i]; }
};

// What a step does to the rows.
struct KeyChanges {
  std::vector<int64_t> new_keys, new_rows, evicted_keys;
  int64_t lacking = 0;  // If it isn't 0, the step does nothing.
};

// Keys with their records by place, and the order in which they go.
class KeyStore {
 public:
  KeyStore(int64_t count, int64_t places, int64_t first, bool by_frequency)
      : index_(count), records_(places), end_(first), order_(by_frequency) {}

  int64_t size() const { return size_; }
  const KeyIndex& index() const { return index_; }
  KeyRecord* records() { return records_.data(); }
  // Behind the last place that a key has had.
  int64_t end() const { return end_; }

  bool Holds(int64_t place, int64_t key) const {
    return place < end_ && records_[place].key == key && records_[place].live();
  }

  void Prefetch(int64_t place) const {
    const bool valid = 0 <= place && place < end_;
    __builtin_prefetch(&records_[valid ? place : 0], 1);
  }

  // Makes room for so many keys.
  void Reserve(int64_t count) { index_.Reserve(count); }

  // Gives a place to a key that has none.
  void Insert(int64_t place, const KeyRecord& record) {
    if (place >= records_.size()) {
      records_.Grow(std::max(place + 1, 2 * records_.size()), end_);
    }
    end_ = std::max(end_, place + 1);
    index_.FindOrInsert(record.key, place);
    records_[place] = record;
    order_.Add(records(), place);
    ++size_;
  }

  void Erase(int64_t place) {
    index_.Erase(records_[place].key);
    records_[place].state = 0;
    --size_;
  }

  // See EvictionOrder.
  int64_t Pop(uint64_t pinned) { return order_.Pop(records(), end_, pinned); }
  void PutBack(int64_t place) { order_.PutBack(records(), place); }
  void EndPops() { order_.EndPops(records(), end_); }
  void Prepare(int64_t pops) { order_.Prepare(records(), end_, pops); }
  void ScoresFell() { order_.Reset(records()); }

 private:
  KeyIndex index_;
  ZeroedArray<KeyRecord> records_;
  int64_t end_, size_ = 0;
  EvictionOrder order_;
};

// The rows that no key has: those that keys had, and then those that none had.
class FreeRows {
 public:
  explicit FreeRows(int64_t physical) : physical_(physical) {}

  // The rows that the variables must have.
  int64_t physical() const { return physical_; }
  void Raise(int64_t physical) { physical_ = std::max(physical_, physical); }

  int64_t Take() {
    if (used_.empty()) {
      Raise(next_ + 1);
      return next_++;
    }
    const int64_t row = used_.front();
    used_.pop_front();
    return row;
  }

  void Give(int64_t row) { used_.push_back(row); }

  // Rows that stay free, others than the last time if there are enough.
  void Show(int64_t count, int64_t* rows) {
    const int64_t used = used_.size();
    Raise(next_ + count - used);
    const int64_t size = used + physical_ - next_;
    for (int64_t i = 0; i < count; ++i) {
      if (shown_ >= size) shown_ = 0;
      rows[i] = shown_ < used ? used_[shown_] : next_ + shown_ - used;
      ++shown_;
    }
  }

  // Keys have the first rows, and so many.
  void Reset(int64_t keys) {
    used_.clear();
    next_ = kFirstRow + keys;
    Raise(next_);
  }

 private:
  int64_t physical_;
  int64_t next_ = kFirstRow;  // No key has had it, nor those behind it.
  std::deque<int64_t> used_;
  int64_t shown_ = 0;
};

// Not safe for threads, but for Find beside Find.
class KeyTable {
 public:
  struct Parallel {
    int64_t threads;
    // Runs a function over parts of [0, total), as ParallelFor of threads.h.
    std::function<void(int64_t total, int64_t cost, const Chunks::Function& fn)>
        run;
  };

  // The last step's numbers, and in all.
  struct Statistics {
    int64_t admitted, evicted, rejected, hits;
  };

  explicit KeyTable(const KeyRules& rules)
      : rules_(rules),
        capacity_(rules.capacity),
        // Memory that is not used costs nothing.
        live_(rules.capacity, kFirstRow + 2 * rules.capacity, kFirstRow,
              rules.by_frequency),
        candidates_(rules.threshold ? rules.candidates : 0,
                    rules.threshold ? 2 * rules.candidates : 1, 1, false),
        free_rows_(kFirstRow + rules.capacity),
        scratch_(0) {}

  int64_t size() const { return live_.size(); }
  int64_t capacity() const { return capacity_; }
  int64_t physical() const { return free_rows_.physical(); }
  const Statistics& last() const { return last_; }
  const Statistics& total() const { return total_; }
  KeyStore& live() { return live_; }
  KeyStore& candidates() { return candidates_; }

  // The rows of keys, or kAbsentRow.
  void Find(const Parallel& parallel, const int64_t* keys, int64_t n,
            int64_t* rows) const {
    FindAll(parallel, live_, keys, n, rows);
  }

  // What Commit would do, with rows that stay free for the keys that it would
  // admit. rows[i]: keys[i]'s, or kAbsentRow.
  KeyChanges Plan(const Parallel& parallel, const KeyStep& step,
                  int64_t* rows) {
    ++stamp_;
    FindCounted(parallel, step, rows);
    CollectUnknown(parallel, step);
    Admit(step.number);
    const int64_t wanted = live_.size() + admitted_.size();
    KeyChanges changes;
    if (wanted > capacity_ && !CannotFail(step.n)) {
      changes.lacking = FindRoom(step.number, Pin(step, rows)).lacking;
      PutVictimsBack();
      if (changes.lacking > 0) return changes;
    }
    const int64_t n = admitted_.size();
    // So that the variables grow once, not again when the step is committed.
    free_rows_.Raise(kFirstRow + Grown(wanted));
    changes.new_rows.resize(n);
    free_rows_.Show(n, changes.new_rows.data());
    for (int64_t a = 0; a < n; ++a) {
      changes.new_keys.push_back(unknown_[admitted_[a]]);
      rows_[admitted_[a]] = changes.new_rows[a];
    }
    WriteUnknown(kAbsentRow, rows);
    return changes;
  }

  // Counts a step's keys, and gives rows to those that are admitted. hints[i]:
  // the row that keys[i] probably has. rows[i]: what it has, or kTrashRow.
  KeyChanges Commit(const Parallel& parallel, const KeyStep& step,
                    const int64_t* hints, int64_t* rows) {
    ++stamp_;
    const bool cannot_fail = CannotFail(step.n);
    const int64_t hits = FindHinted(parallel, step, hints, cannot_fail, rows);
    CollectUnknown(parallel, step);
    Admit(step.number);
    Room room = {capacity_, 0, 0};
    if (live_.size() + static_cast<int64_t>(admitted_.size()) > capacity_) {
      room = FindRoom(step.number, cannot_fail ? 0 : Pin(step, rows));
    }
    KeyChanges changes;
    changes.lacking = room.lacking;
    if (room.lacking > 0) {
      PutVictimsBack();
      return changes;
    }
    capacity_ = room.capacity;
    free_rows_.Raise(kFirstRow + capacity_);
    live_.Reserve(capacity_);
    if (!cannot_fail) UseAll(parallel, step, rows);
    if (scores_fell_.exchange(false)) live_.ScoresFell();
    Evict(room.least, &changes);
    Place(step.number, &changes);
    RememberCandidates(step.number);
    WriteUnknown(kTrashRow, rows);
    const int64_t admitted = admitted_.size(), unknown = unknown_.size();
    last_ = {admitted, static_cast<int64_t>(changes.evicted_keys.size()),
             unknown - admitted, hits};
    total_.admitted += last_.admitted;
    total_.evicted += last_.evicted;
    total_.rejected += last_.rejected;
    total_.hits += last_.hits;
    return changes;
  }

  // Forgets all. Then has these keys, which differ: a live one in each row from
  // kFirstRow on, and the candidates that were seen last. Returns whether there
  // is room for them; if not, nothing changes.
  bool Replace(const std::vector<KeyRecord>& live,
               const std::vector<KeyRecord>& candidates) {
    const int64_t n = live.size();
    if (n > rules_.max_capacity) return false;
    capacity_ = Grown(n);
    live_ = KeyStore(capacity_, kFirstRow + 2 * capacity_, kFirstRow,
                     rules_.by_frequency);
    free_rows_.Reset(n);
    free_rows_.Raise(kFirstRow + capacity_);
    for (int64_t i = 0; i < n; ++i) {
      live_.Insert(kFirstRow + i, live[i]);
    }
    if (rules_.threshold == 0) return true;
    candidates_ = KeyStore(rules_.candidates, 2 * rules_.candidates, 1, false);
    candidate_places_.clear();
    for (const KeyRecord& record : candidates) {
      if (live_.index().Find(record.key) == 0) InsertCandidate(record);
    }
    ForgetCandidates();
    return true;
  }

  // Forgets keys. rows[i]: the row that keys[i] had, or kAbsentRow.
  void Remove(const Parallel& parallel, const int64_t* keys, int64_t n,
              bool evicted, int64_t* rows) {
    Find(parallel, keys, n, rows);
    for (int64_t i = 0; i < n; ++i) {
      // It may be among them twice.
      if (rows[i] != kAbsentRow && live_.Holds(rows[i], keys[i])) {
        live_.Erase(rows[i]);
        free_rows_.Give(rows[i]);
        total_.evicted += evicted;
      }
      const int64_t place = candidates_.index().Find(keys[i]);
      if (place != 0) EraseCandidate(place);
    }
  }

 private:
  struct Room {
    int64_t capacity;
    int64_t least;    // Keys that must go beside the victims.
    int64_t lacking;
  };

  static void FindAll(const Parallel& parallel, const KeyStore& store,
                      const int64_t* keys, int64_t n, int64_t* places) {
    parallel.run(n, kFindCost, [&](int64_t begin, int64_t end) {
      store.index().Find(keys + begin, end - begin, places + begin);
    });
  }

  // Whether there is room for any n entries.
  bool CannotFail(int64_t n) const {
    // A row that isn't used in this step can be evicted.
    const int64_t kept = rules_.has_policy && rules_.evicts ? 0 : live_.size();
    return n <= rules_.max_capacity - kept;
  }

  // The capacity for so many keys, or the greatest.
  int64_t Grown(int64_t keys) const {
    int64_t capacity = capacity_;
    while (capacity < keys && capacity < rules_.max_capacity) {
      capacity = capacity > rules_.max_capacity / 2 ? rules_.max_capacity
                                                    : 2 * capacity;
    }
    return capacity;
  }

  // Finds rows as Find does. Entries that don't count get kAbsentRow; lists the
  // others without a row in entries_.
  void FindCounted(const Parallel& parallel, const KeyStep& step,
                   int64_t* rows) {
    std::mutex mutex;
    std::vector<std::vector<int64_t>> lists;
    parallel.run(step.n, kFindCost, [&](int64_t begin, int64_t end) {
      live_.index().Find(step.keys + begin, end - begin, rows + begin);
      std::vector<int64_t> list;
      for (int64_t i = begin; i < end; ++i) {
        if (step.count(i) <= 0) {
          rows[i] = kAbsentRow;
        } else if (rows[i] == kAbsentRow) {
          list.push_back(i);
        }
      }
      std::lock_guard<std::mutex> lock(mutex);
      lists.push_back(std::move(list));
    });
    entries_ = Merge(&lists);
  }

  // Finds rows, and uses their records if told so. Entries that don't count get
  // kTrashRow; lists the others without a row in entries_. Returns the
  // occurrences of keys that have rows.
  int64_t FindHinted(const Parallel& parallel, const KeyStep& step,
                     const int64_t* hints, bool use, int64_t* rows) {
    std::mutex mutex;
    std::vector<std::vector<int64_t>> lists;
    int64_t hits = 0;
    ByRow(parallel, hints, step.n, [&](const auto& for_each) {
      std::vector<int64_t> missed;
      int64_t found = 0;
      for_each([&](int64_t i) {
        rows[i] = kTrashRow;
        if (step.count(i) <= 0) return;
        if (hints[i] < kFirstRow || !live_.Holds(hints[i], step.keys[i])) {
          return missed.push_back(i);
        }
        rows[i] = hints[i];
        found += step.count(i);
        if (use) Use(step, i, rows[i]);
      });
      std::lock_guard<std::mutex> lock(mutex);
      hits += found;
      lists.push_back(std::move(missed));
    });
    const std::vector<int64_t> missed = Merge(&lists);
    std::vector<int64_t> keys, places(missed.size());
    for (const int64_t i : missed) keys.push_back(step.keys[i]);
    FindAll(parallel, live_, keys.data(), keys.size(), places.data());
    entries_.clear();
    for (size_t m = 0; m < missed.size(); ++m) {
      const int64_t i = missed[m];
      if (places[m] == 0) {
        entries_.push_back(i);
        continue;
      }
      rows[i] = places[m];
      hits += step.count(i);
      if (use) Use(step, i, rows[i]);
    }
    return hits;
  }

  // Joins ascending lists to one.
  static std::vector<int64_t> Merge(std::vector<std::vector<int64_t>>* lists) {
    std::vector<int64_t> merged;
    std::sort(lists->begin(), lists->end());
    for (const std::vector<int64_t>& list : *lists) {
      const int64_t size = merged.size();
      merged.insert(merged.end(), list.begin(), list.end());
      const auto middle = merged.begin() + size;
      if (size > 0 && !list.empty() && middle[0] < middle[-1]) {
        std::inplace_merge(merged.begin(), middle, merged.end());
      }
    }
    return merged;
  }

  // Lets each thread work on the entries of some rows, all those of a row and
  // in their order, so that records need no lock: calls work(for_each) on it,
  // where for_each(fn) calls fn(i).
  template <typename Work>
  void ByRow(const Parallel& parallel, const int64_t* rows, int64_t n,
             const Work& work) {
    constexpr int64_t kBlock = 64;
    // All threads look at all entries, which takes a small part of the time.
    const uint64_t shares = std::clamp<int64_t>(n / 1024, 1, parallel.threads);
    const auto run = [&](int64_t begin, int64_t end) {
      for (uint64_t share = begin; share < static_cast<uint64_t>(end);
           ++share) {
        work([&](const auto& fn) {
          int64_t mine[kBlock];
          for (int64_t i = 0; i < n;) {
            int64_t m = 0;
            for (; i < n && m < kBlock; ++i) {
              mine[m] = i;
              // Two records are in one cache line. The product spreads rows
              // over 32 bits, of which each share has as many.
              const uint32_t spread = (rows[i] >> 1) * 0x9E3779B1;
              m += spread * shares >> 32 == share;
            }
            for (int64_t j = 0; j < m; ++j) live_.Prefetch(rows[mine[j]]);
            for (int64_t j = 0; j < m; ++j) fn(mine[j]);
          }
        });
      }
    };
    parallel.run(shares, kFindCost * n / shares, run);
  }

  // No other thread may use the record's row.
  void Use(const KeyStep& step, int64_t i, int64_t row) {
    KeyRecord& record = live_.records()[row];
    record.frequency += step.count(i);
    if (record.last_used > step.number) {
      scores_fell_.store(true, std::memory_order_relaxed);
    }
    record.last_used = step.number;
    record.set_stamp(stamp_);
  }

  void UseAll(const Parallel& parallel, const KeyStep& step,
              const int64_t* rows) {
    ByRow(parallel, rows, step.n, [&](const auto& for_each) {
      for_each([&](int64_t i) {
        if (rows[i] != kTrashRow) Use(step, i, rows[i]);
      });
    });
  }

  // Stamps the records of a step's keys, and returns their number.
  int64_t Pin(const KeyStep& step, const int64_t* rows) {
    KeyRecord* records = live_.records();
    int64_t pinned = 0;
    for (int64_t i = 0; i < step.n; ++i) {
      KeyRecord& record = records[rows[i]];
      if (rows[i] < kFirstRow || record.stamp() == stamp_) continue;
      record.set_stamp(stamp_);
      ++pinned;
    }
    return pinned;
  }

  // Finds the distinct keys of entries_, their occurrences, and their places
  // among the candidates.
  void CollectUnknown(const Parallel& parallel, const KeyStep& step) {
    const int64_t n = entries_.size();
    scratch_.Clear(n);
    unknown_.clear();
    occurrences_.clear();
    unknown_of_entry_.resize(n);
    for (int64_t e = 0; e < n; ++e) {
      const int64_t key = step.keys[entries_[e]];
      const int64_t next = unknown_.size();
      const int64_t u = scratch_.FindOrInsert(key, next + 1) - 1;
      if (u == next) {
        unknown_.push_back(key);
        occurrences_.push_back(0);
      }
      occurrences_[u] += step.count(entries_[e]);
      unknown_of_entry_[e] = u;
    }
    places_.assign(unknown_.size(), 0);
    if (rules_.threshold == 0) return;
    FindAll(parallel, candidates_, unknown_.data(), unknown_.size(),
            places_.data());
  }

  // Lists the unknown keys that are to have rows.
  void Admit(int64_t step) {
    rows_.assign(unknown_.size(), kAbsentRow);
    admitted_.clear();
    const int64_t n = unknown_.size();
    for (int64_t u = 0; u < n; ++u) {
      if (rules_.threshold > 0) {
        if (places_[u] != 0) {
          occurrences_[u] += candidates_.records()[places_[u]].frequency;
        }
        if (occurrences_[u] < rules_.threshold) continue;
      } else if (rules_.probability < 1) {
        const double rejected =
            std::pow(1 - rules_.probability, occurrences_[u]);
        if (!(Uniform(unknown_[u], step) < 1 - rejected)) continue;
      }
      admitted_.push_back(u);
    }
  }

  // A number in [0, 1) that depends on the key and the step.
  double Uniform(int64_t key, int64_t step) const {
    const uint64_t of_key = MixBits(rules_.seed ^ MixBits(key));
    return (MixBits(of_key + step) >> 11) * 0x1p-53;
  }

  // Finds room for the admitted keys, where there is too little: victims_ are
  // expired keys, which must be evicted or put back. `pinned` is the number of
  // records with the present stamp, or 0 where there is room for sure.
  Room FindRoom(int64_t step, int64_t pinned) {
    int64_t keys = live_.size() + admitted_.size();
    victims_.clear();
    while (rules_.ttl > 0 && keys > capacity_) {
      const int64_t row = live_.Pop(stamp_);
      if (row == 0) break;
      if (live_.records()[row].last_used >= step - rules_.ttl) {
        live_.PutBack(row);
        break;
      }
      victims_.push_back(row);
      --keys;
    }
    live_.EndPops();
    Room room = {Grown(keys), 0, 0};
    const int64_t lacking = std::max<int64_t>(0, keys - room.capacity);
    if (rules_.has_policy && rules_.evicts) {
      const int64_t left = keys - admitted_.size() - pinned;
      room.least = std::min(lacking, left);
    }
    room.lacking = lacking - room.least;
    return room;
  }

  void PutVictimsBack() {
    for (const int64_t row : victims_) live_.PutBack(row);
    victims_.clear();
  }

  // Evicts the victims, and so many other keys.
  void Evict(int64_t least, KeyChanges* changes) {
    for (int64_t i = 0; i < least; ++i) victims_.push_back(live_.Pop(stamp_));
    if (least > 0) live_.EndPops();
    for (const int64_t row : victims_) {
      live_.index().Prefetch(live_.records()[row].key);
    }
    for (const int64_t row : victims_) {
      changes->evicted_keys.push_back(live_.records()[row].key);
      live_.Erase(row);
      free_rows_.Give(row);
    }
    victims_.clear();
  }

  // Gives rows to the admitted keys.
  void Place(int64_t step, KeyChanges* changes) {
    for (const int64_t u : admitted_) live_.index().Prefetch(unknown_[u]);
    for (const int64_t u : admitted_) {
      const int64_t row = free_rows_.Take();
      live_.Insert(row, {unknown_[u], occurrences_[u], step, stamp_ << 1});
      if (places_[u] != 0) EraseCandidate(places_[u]);
      rows_[u] = row;
      changes->new_keys.push_back(unknown_[u]);
      changes->new_rows.push_back(row);
    }
    // So that the order is known when the last row is taken.
    if (rules_.has_policy && IsNearly(live_.size(), capacity_)) {
      live_.Prepare(admitted_.size());
    }
  }

  static bool IsNearly(int64_t size, int64_t full) {
    return size > full - full / 8;
  }

  // Remembers the unknown keys that have not been admitted.
  void RememberCandidates(int64_t step) {
    if (rules_.threshold == 0) return;
    const int64_t n = unknown_.size();
    int64_t added = 0;
    bool fell = false;
    candidates_.Reserve(candidates_.size() + n);
    for (int64_t u = 0; u < n; ++u) {
      if (rows_[u] != kAbsentRow) continue;
      if (places_[u] == 0) {
        InsertCandidate({unknown_[u], occurrences_[u], step, stamp_ << 1});
        ++added;
      } else {
        KeyRecord& record = candidates_.records()[places_[u]];
        fell |= record.last_used > step;
        record.frequency = occurrences_[u];
        record.last_used = step;
      }
    }
    if (fell) candidates_.ScoresFell();
    ForgetCandidates();
    if (IsNearly(candidates_.size(), rules_.candidates)) {
      candidates_.Prepare(added);
    }
  }

  void InsertCandidate(const KeyRecord& record) {
    int64_t place = candidates_.end();
    if (!candidate_places_.empty()) {
      place = candidate_places_.back();
      candidate_places_.pop_back();
    }
    candidates_.Insert(place, record);
  }

  void EraseCandidate(int64_t place) {
    candidates_.Erase(place);
    candidate_places_.push_back(place);
  }

  // Forgets those that are too many, which were seen longest ago.
  void ForgetCandidates() {
    if (candidates_.size() <= rules_.candidates) return;
    while (candidates_.size() > rules_.candidates) {
      EraseCandidate(candidates_.Pop(0));
    }
    candidates_.EndPops();
  }

  // Writes the unknown keys' rows to those of the step, `none` where they have
  // none.
  void WriteUnknown(int64_t none, int64_t* rows) const {
    for (size_t e = 0; e < entries_.size(); ++e) {
      const int64_t row = rows_[unknown_of_entry_[e]];
      rows[entries_[e]] = row == kAbsentRow ? none : row;
    }
  }

  static constexpr int64_t kFindCost = 50;  // Cycles.

  const KeyRules rules_;
  int64_t capacity_;
  KeyStore live_, candidates_;
  FreeRows free_rows_;
  std::vector<int64_t> candidate_places_;  // That are free.
  Statistics last_ = {}, total_ = {};
  uint64_t stamp_ = 1;  // Of the present call, which is 2 or more.
  std::atomic<bool> scores_fell_{false};

  // Of the present call.
  std::vector<int64_t> entries_;           // Without a row, but with a count.
  std::vector<int64_t> unknown_of_entry_;  // Index of the four that follow.
  std::vector<int64_t> unknown_;           // Distinct keys.
  std::vector<int64_t> occurrences_;  // With those that are remembered.
  std::vector<int64_t> places_;       // Among candidates, or 0.
  std::vector<int64_t> rows_;         // That they get.
  std::vector<int64_t> admitted_;     // Which of the unknown ones.
  std::vector<int64_t> victims_;      // Rows of live keys.
  KeyIndex scratch_;
};

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_KEY_TABLE_H_
