// The order in which keys are evicted, found out as far as it is needed.

#ifndef TFRS_EMBED_KERNELS_CC_EVICTION_ORDER_H_
#define TFRS_EMBED_KERNELS_CC_EVICTION_ORDER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "key_index.h"

namespace tfrs_embed {

// What is known of a key: half a cache line.
struct KeyRecord {
  // In which of two orders a record may be queued.
  static constexpr uint64_t kMain = 1, kExpiry = 2;
  static constexpr uint64_t Stamped(uint64_t stamp) { return stamp << 2; }
  static constexpr uint64_t kLive = 4;  // The state after a first stamp.

  // The frequency is a score, where the program gives scores: see KeyRules.
  int64_t key, frequency, last_used;
  uint64_t state;  // Four times the last stamp, plus kMain and kExpiry; or 0.

  bool live() const { return state != 0; }
  uint64_t stamp() const { return state >> 2; }
  void set_stamp(uint64_t stamp) { state = Stamped(stamp) | (state & 3); }
  bool queued(uint64_t order) const { return state & order; }
  void set_queued(uint64_t order, bool queued) {
    state = (state & ~order) | (queued ? order : 0);
  }
};

// Frequencies that are halved, rounding down, at each multiple of a length. A
// frequency is as of the key's last use.
struct HalfLife {
  int64_t length;  // In steps or microseconds; 0: nothing is halved.

  // The number of the half-life of a moment.
  int64_t Number(int64_t moment) const {
    return moment / length - (moment % length < 0);
  }

  // What a frequency has become since a moment.
  int64_t Later(int64_t frequency, int64_t then, int64_t now) const {
    if (length == 0 || now <= then) return frequency;
    const uint64_t halvings = static_cast<uint64_t>(Number(now)) -
                              static_cast<uint64_t>(Number(then));
    return halvings < 63 ? frequency >> halvings : 0;
  }

  // Orders keys by frequency * 2^Number(last_used), which stays the same while
  // all frequencies decay, and rises with each use of the key. This number's
  // binary exponent is followed by 22 bits that follow its leading bit.
  int64_t Score(const KeyRecord& record) const {
    constexpr int64_t kMost = (int64_t{1} << 41) - 64;
    const uint64_t frequency = record.frequency;
    if (record.frequency <= 0) return -std::numeric_limits<int64_t>::max();
    const int bits = 64 - __builtin_clzll(frequency);
    const int64_t exponent =
        std::clamp(Number(record.last_used), -kMost, kMost) + bits;
    const int64_t fraction = frequency << (64 - bits) << 1 >> 42;
    return exponent * (int64_t{1} << 22) + fraction;
  }
};

// How an order begins; it ends with the last use, then the key.
enum class OrderBy { kLastUsed, kFrequency, kDecayed };

// Keys, or the memory of their rows, that can't be right.
struct KeyError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;

  static KeyError Twice(const KeyRecord& record) {
    return KeyError("Key " + std::to_string(record.key) +
                    " is among the keys twice.");
  }
};

// The keys with the least scores, of which the very least are sorted. Scores
// rise with each use of a key, and most keys are used far more often than they
// are evicted: so a use changes nothing here. A key's entry has the score that
// it had when it was queued, and is compared with the present one when it comes
// up.
//
// All keys whose scores are up to `complete_` are queued. When few are left, a
// scan of all records queues those up to `collected_`, a little of it with each
// call so that no step has to wait for all. Of the queued ones those up to
// `sorted_` are sorted, or in a heap if they were queued later.
class EvictionOrder {
 public:
  // `queued_as`: how records know that they are queued here.
  EvictionOrder(OrderBy by, HalfLife half_life, uint64_t queued_as)
      : by_(by), half_life_(half_life), queued_as_(queued_as) {}

  // Forgets the order: scores have fallen.
  void Reset(KeyRecord* records) {
    for (const auto* entries : {&run_, &late_, &rest_}) {
      for (const Entry& entry : *entries) {
        records[entry.place].set_queued(queued_as_, false);
      }
    }
    run_.clear();
    late_.clear();
    rest_.clear();
    next_ = 0;
    complete_ = collected_ = sorted_ = Score::Least();
    scanning_ = false;
  }

  // A key has been placed, whose record isn't queued.
  void Add(KeyRecord* records, int64_t place) {
    QueueIfCovered(records[place], place);
  }

  // A key's score has fallen, so that its entry is too late.
  void Fell(KeyRecord* records, int64_t place) {
    records[place].set_queued(queued_as_, false);
    QueueIfCovered(records[place], place);
  }

  // The place of the key with the least score, whose record is then not queued;
  // 0 if there is none. Passes over keys that have this stamp. `end` is behind
  // the last record.
  int64_t Pop(KeyRecord* records, int64_t end, uint64_t pinned) {
    Entry entry;
    while (TakeLeast(records, end, &entry)) {
      ++pops_;
      KeyRecord& record = records[entry.place];
      // It was removed, and perhaps another key has come to its place, or it
      // has come back and has an entry of its own.
      if (!record.live() || record.key != entry.score.key) continue;
      if (!record.queued(queued_as_)) continue;
      record.set_queued(queued_as_, false);
      if (entry.score < ScoreOf(record)) {
        QueueIfCovered(record, entry.place);
      } else if (record.stamp() == pinned) {
        passed_over_.push_back(entry.place);
      } else {
        return entry.place;
      }
    }
    return 0;
  }

  // Takes back what Pop returned.
  void PutBack(KeyRecord* records, int64_t place) {
    Queue(records[place], place);
  }

  // Must follow calls of Pop that had the same keys pinned. Looks for the keys
  // that come next.
  void EndPops(KeyRecord* records, int64_t end) {
    for (const int64_t place : passed_over_) PutBack(records, place);
    passed_over_.clear();
    // Keys that another order evicts, or that are removed, leave entries here.
    if (queued() > 2 * end + kShare) Reset(records);
    Prepare(records, end, pops_);
    pops_ = 0;
  }

  // Looks for the keys that come next, with work for so many pops.
  void Prepare(KeyRecord* records, int64_t end, int64_t pops) {
    const bool enough =
        complete_ == Score::Greatest() || queued() > end / kShare / 2;
    if (pops == 0 || (enough && !scanning_)) return;
    // A scan begins with at least half a share of the records queued: with so
    // many records a pop it ends when half of these are gone.
    constexpr int64_t kRecordsPerPop = 4 * kShare;
    Scan(records, end, pops * kRecordsPerPop);
  }

 private:
  struct Score {
    int64_t first, second, key;

    static constexpr Score All(int64_t x) { return {x, x, x}; }
    static constexpr Score Least() {
      return All(std::numeric_limits<int64_t>::min());
    }
    static constexpr Score Greatest() {
      return All(std::numeric_limits<int64_t>::max());
    }
    auto tie() const { return std::tie(first, second, key); }
    bool operator<(const Score& other) const { return tie() < other.tie(); }
    bool operator==(const Score& other) const { return tie() == other.tie(); }
  };

  struct Entry {
    Score score;
    int64_t place;
  };

  // std's heaps have what comes last in front.
  static bool After(const Entry& a, const Entry& b) {
    return b.score < a.score;
  }

  // A scan queues about one of so many keys, of which so many are sorted.
  static constexpr int64_t kShare = 16;
  // The scores by which these are chosen.
  static constexpr int64_t kSample = 1024;

  Score ScoreOf(const KeyRecord& record) const {
    switch (by_) {
      case OrderBy::kFrequency:
        return {record.frequency, record.last_used, record.key};
      case OrderBy::kDecayed:
        return {half_life_.Score(record), record.last_used, record.key};
      case OrderBy::kLastUsed:
        break;
    }
    return {record.last_used, 0, record.key};
  }

  int64_t queued() const {
    return run_.size() - next_ + late_.size() + rest_.size();
  }

  void Queue(KeyRecord& record, int64_t place) {
    record.set_queued(queued_as_, true);
    const Entry entry = {ScoreOf(record), place};
    if (sorted_ < entry.score) {
      rest_.push_back(entry);
    } else {
      late_.push_back(entry);
      std::push_heap(late_.begin(), late_.end(), After);
    }
  }

  // Takes the entry with the least score; false if there is none.
  bool TakeLeast(KeyRecord* records, int64_t end, Entry* entry) {
    constexpr size_t kAhead = 8;
    while (next_ == run_.size() && late_.empty()) {
      if (SortSome()) continue;
      if (complete_ == Score::Greatest()) return false;
      Scan(records, end, end);
    }
    if (next_ == run_.size() ||
        (!late_.empty() && late_.front().score < run_[next_].score)) {
      *entry = late_.front();
      std::pop_heap(late_.begin(), late_.end(), After);
      late_.pop_back();
    } else {
      if (next_ + kAhead < run_.size()) {
        __builtin_prefetch(&records[run_[next_ + kAhead].place], 1);
      }
      *entry = run_[next_++];
    }
    return true;
  }

  // Sorts a share of the entries that aren't, the least; false if no entry is
  // known to be among them.
  bool SortSome() {
    run_.clear();
    next_ = 0;
    sorted_ = std::min(complete_, ShareOf(rest_.size(), [this](uint64_t i) {
      return &rest_[i].score;
    }));
    const auto end = std::partition(
        rest_.begin(), rest_.end(),
        [this](const Entry& entry) { return sorted_ < entry.score; });
    run_.assign(end, rest_.end());
    rest_.erase(end, rest_.end());
    std::sort(run_.begin(), run_.end(),
              [](const Entry& a, const Entry& b) { return a.score < b.score; });
    return !run_.empty();
  }

  // Queues a key unless a scan will find it.
  void QueueIfCovered(KeyRecord& record, int64_t place) {
    const Score score = ScoreOf(record);
    const Score& covered =
        scanning_ && place < scanned_ ? collected_ : complete_;
    if (!(covered < score)) Queue(record, place);
  }

  // Looks at up to so many records, and begins a scan if there is none.
  void Scan(KeyRecord* records, int64_t end, int64_t count) {
    if (!scanning_) {
      collected_ = ChooseEnd(records, end);
      scanning_ = true;
      scanned_ = 0;
    }
    const int64_t stop = count < end - scanned_ ? scanned_ + count : end;
    for (; scanned_ < stop; ++scanned_) {
      KeyRecord& record = records[scanned_];
      if (!record.live() || record.queued(queued_as_)) continue;
      const Score score = ScoreOf(record);
      // A lower score is of a key that has just been popped.
      if (complete_ < score && !(collected_ < score)) Queue(record, scanned_);
    }
    if (scanned_ == end) {
      complete_ = collected_;
      scanning_ = false;
    }
  }

  // The score up to which about one of kShare keys is that isn't queued.
  Score ChooseEnd(const KeyRecord* records, int64_t end) {
    Score score;
    return ShareOf(end, [&](uint64_t i) -> const Score* {
      const KeyRecord& record = records[i];
      if (!record.live() || record.queued(queued_as_)) return nullptr;
      score = ScoreOf(record);
      return complete_ < score ? &score : nullptr;
    });
  }

  // The score up to which about one of kShare scores is, or all where they are
  // few. `score_at` returns one of `size`, or null.
  template <typename ScoreAt>
  Score ShareOf(int64_t size, const ScoreAt& score_at) {
    if (size <= kSample) return Score::Greatest();
    sample_.clear();
    for (int64_t i = 0; i < kSample; ++i) {
      random_ = tfrs_mix(random_);
      const Score* score = score_at(random_ % size);
      if (score != nullptr) sample_.push_back(*score);
    }
    const int64_t rank = sample_.size() / kShare;
    if (rank == 0) return Score::Greatest();
    std::nth_element(sample_.begin(), sample_.begin() + rank, sample_.end());
    return sample_[rank];
  }

  OrderBy by_;
  HalfLife half_life_;
  uint64_t queued_as_;
  std::vector<Entry> run_;   // Sorted; from next_ on.
  size_t next_ = 0;
  std::vector<Entry> late_;  // A heap.
  std::vector<Entry> rest_;  // With scores beyond sorted_.
  Score sorted_ = Score::Least();
  Score complete_ = Score::Least(), collected_ = Score::Least();
  bool scanning_ = false;
  int64_t scanned_ = 0;  // Records that the present scan has seen.
  int64_t pops_ = 0;     // Since the last EndPops.
  std::vector<int64_t> passed_over_;
  std::vector<Score> sample_;
  uint64_t random_ = 0;
};

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_EVICTION_ORDER_H_
