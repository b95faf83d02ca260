// The keys of a shard's rows: which are admitted, which are evicted.

#ifndef TFRS_EMBED_KERNELS_CC_KEY_TABLE_H_
#define TFRS_EMBED_KERNELS_CC_KEY_TABLE_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "chunks.h"
#include "free_rows.h"
#include "key_index.h"
#include "key_store.h"
#include "spill_file.h"

namespace tfrs_embed {

// See KeyRules in key_table.py.
struct KeyRules {
  int64_t capacity, max_capacity, candidates, threshold;
  double probability;
  uint64_t seed;
  bool has_policy, evicts;
  bool scored;  // Frequencies are scores, which steps leave as they are.
  OrderBy by;
  HalfLife half_life;
  int64_t ttl;    // 0: none.
  bool by_time;   // Whether moments are times, else numbers of steps.
  int64_t floor;  // To how many keys a full table evicts.
};

// The keys of a step.
struct KeyStep {
  const int64_t* keys;
  const int64_t* counts;  // Null: ones.
  int64_t n;
  int64_t number;  // Of the step.
  int64_t now;     // last_used of the keys that it uses.
  SpillFile::Memory memory;  // Of a table with a spill, in a commit.

  int64_t count(int64_t i) const { return counts == nullptr ? 1 : counts[i]; }
};

// What a step does to the rows.
struct KeyChanges {
  std::vector<int64_t> new_keys, new_rows;
  int64_t lacking = 0;  // If it isn't 0, the step does nothing.
  // Of a reservation: which rows it read. Of a commit: what to publish; 0:
  // nothing.
  int64_t version = 0;
};

// Not safe for threads, but for const methods beside each other.
//
// Rows are read after they are found, while other threads may give them to
// other keys. So each time that rows are about to be written for other keys, by
// a commit or for a reservation, is a version, and each row knows its last one: a
// reader asks afterwards whether its rows have a later one. Keys that a commit
// admits are found once their rows are written and the commit is published.
//
// A table may have a spill: then keys that are evicted keep their rows there.
// They are admitted when they occur again, and come back with their frequency;
// the caller reads their rows from the spill.
class KeyTable {
 public:
  // A row with this number or a greater one is in the spill, at the place that
  // is the rest.
  static constexpr int64_t kSpilled = int64_t{1} << 48;

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

  explicit KeyTable(const KeyRules& rules,
                    std::unique_ptr<SpillFile> spill = nullptr)
      : rules_(rules),
        spill_(std::move(spill)),
        capacity_(rules.capacity),
        // Memory that is not used costs nothing.
        live_(MakeLive(rules, rules.capacity)),
        candidates_(MakeCandidates(rules)),
        free_rows_(kFirstRow + rules.capacity),
        scratch_(0) {}

  // The keys with rows, in memory or in the spill, which may be null.
  int64_t size() const {
    return live_.size() + (spill_ == nullptr ? 0 : spill_->size());
  }
  SpillFile* spill() { return spill_.get(); }
  int64_t capacity() const { return capacity_; }
  int64_t physical() const { return free_rows_.physical(); }
  const Statistics& last() const { return last_; }
  const Statistics& total() const { return total_; }
  KeyStore& live() { return live_; }
  KeyStore& candidates() { return candidates_; }

  // The moment of a step with a number at a time. A clock that has jumped back
  // stands still until it gets beyond the times that it has shown.
  int64_t Moment(int64_t number, int64_t time) const {
    return rules_.by_time ? std::max(time, newest_) : number;
  }

  int64_t version() const { return version_; }
  // The number of commits that are not published.
  int64_t unpublished() const { return unpublished_.size(); }

  // The rows of keys, or kAbsentRow.
  void Find(const Parallel& parallel, const int64_t* keys, int64_t n,
            int64_t* rows) const {
    FindAll(parallel, live_, keys, n, rows);
    HideUnpublished(n, rows);
  }

  // Writes kAbsentRow in the place of rows that have been, or are being, written
  // for other keys since a version. Returns their number.
  int64_t Check(int64_t n, int64_t version, int64_t* rows) const;

  // Lets the keys be found that a commit, or Replace, gave rows to.
  void Publish(int64_t version);

  // What Commit would do, with rows that stay free for the keys that it would
  // admit. rows[i]: keys[i]'s, or kAbsentRow.
  KeyChanges Reserve(const Parallel& parallel, const KeyStep& step,
                     int64_t* rows);

  // Counts a step's keys, and gives rows to those that are admitted. hints[i]:
  // the row that keys[i] probably has. rows[i]: what it has, or kTrashRow.
  KeyChanges Commit(const Parallel& parallel, const KeyStep& step,
                    const int64_t* hints, int64_t* rows);

  // Forgets all. Then has these keys, which differ: a live one in each row from
  // kFirstRow on, the others in the spill, and the candidates that were seen
  // last. The live ones are found once version() is published. Throws KeyError
  // before anything changes if there is no room for them, or if they don't
  // differ.
  void Replace(const std::vector<KeyRecord>& live,
               const std::vector<KeyRecord>& spilled,
               const std::vector<KeyRecord>& candidates);

  // Returns the keys that have lost their rows since the last call, in that
  // order; they are noted from the first call on. `missed`: whether more than
  // twice as many as have room were, so that the first ones are missing.
  std::vector<int64_t> TakeRemoved(bool* missed);

  // Forgets keys, also in the spill. rows[i]: the row that keys[i] had, or
  // kAbsentRow.
  void Remove(const Parallel& parallel, const int64_t* keys, int64_t n,
              bool evicted, int64_t* rows);

  const KeyRules& rules() const { return rules_; }

  // Sets the scores of keys, also in the spill. rows[i]: the row of keys[i], or
  // kAbsentRow; such keys get none.
  void Score(const Parallel& parallel, const int64_t* keys, int64_t n,
             const int64_t* scores, int64_t* rows);

 private:
  static KeyStore MakeLive(const KeyRules& rules, int64_t capacity) {
    return KeyStore(capacity, kFirstRow + 2 * capacity, kFirstRow, rules.by,
                    rules.half_life, rules.ttl > 0);
  }

  static KeyStore MakeCandidates(const KeyRules& rules) {
    const int64_t count = rules.threshold ? rules.candidates : 0;
    return KeyStore(count, count ? 2 * count : 1, 1, OrderBy::kLastUsed, {0},
                    false);
  }

  struct Room {
    int64_t capacity;
    int64_t least;  // Keys that go beside the victims, if so many can.
    int64_t lacking;
  };

  static void FindAll(const Parallel& parallel, const KeyStore& store,
                      const int64_t* keys, int64_t n, int64_t* places);

  // Begins a version, in which some rows are written.
  void Stamp(const std::vector<int64_t>& rows);

  void HideUnpublished(int64_t n, int64_t* rows) const;

  // Whether there is room for any n entries.
  bool CannotFail(int64_t n) const;

  // The capacity for so many keys, or the greatest.
  int64_t Grown(int64_t keys) const;

  // Finds rows as Find does. Entries that don't count get kAbsentRow; lists the
  // others without a row in entries_.
  void FindCounted(const Parallel& parallel, const KeyStep& step,
                   int64_t* rows);

  // Finds rows, and uses their records if told so. Entries that don't count get
  // kTrashRow; lists the others without a row in entries_. Returns the
  // occurrences of keys that have rows.
  int64_t FindHinted(const Parallel& parallel, const KeyStep& step,
                     const int64_t* hints, bool use, int64_t* rows);

  // Joins ascending lists to one.
  static std::vector<int64_t> Merge(std::vector<std::vector<int64_t>>* lists);

  // Lets each thread work on the entries of some rows, all those of a row and
  // in their order, so that records need no lock: calls work(for_each) on it,
  // where for_each(fn) calls fn(i).
  template <typename Work>
  void ByRow(const Parallel& parallel, const int64_t* rows, int64_t n,
             const Work& work);

  // No other thread may use the record's row.
  void Use(const KeyStep& step, int64_t i, int64_t row);

  void UseAll(const Parallel& parallel, const KeyStep& step,
              const int64_t* rows);

  // Stamps the records of a step's keys, and returns their number.
  int64_t Pin(const KeyStep& step, const int64_t* rows);

  // Finds the distinct keys of entries_, their occurrences, and their places
  // among the candidates.
  void CollectUnknown(const Parallel& parallel, const KeyStep& step);

  // Lists the unknown keys that are to have rows.
  void Admit(int64_t step);

  // A number in [0, 1) that depends on the key and the step.
  double Uniform(int64_t key, int64_t step) const;

  // Finds room for the admitted keys, where there is too little: victims_ are
  // expired keys, which must be evicted or put back. `pinned` is the number of
  // records with the present stamp, or 0 where there is room for sure.
  Room FindRoom(int64_t now, int64_t pinned);

  void PutVictimsBack();

  // Makes room in the spill.
  void RequireSpill(int64_t more);

  void NoteRemoved(int64_t key);

  // Keeps the victims' rows, if there is a spill.
  void SpillVictims(const KeyStep& step);

  int64_t EvictVictims(const KeyStep& step);

  // New keys that were in the spill come back, when their rows can be found.
  void ReturnFromSpill(const std::vector<int64_t>& keys);

  // Forgets a key that has a row.
  void Erase(int64_t row);

  // Gives rows to the admitted keys.
  void Place(int64_t now, KeyChanges* changes);

  static bool IsNearly(int64_t size, int64_t full) {
    return size > full - full / 8;
  }

  // Remembers the unknown keys that have not been admitted.
  void RememberCandidates(int64_t now);

  void InsertCandidate(const KeyRecord& record);

  void EraseCandidate(int64_t place);

  // Forgets those that are too many, which were seen longest ago.
  void ForgetCandidates();

  // Writes the unknown keys' rows to those of the step, `none` where they have
  // none.
  void WriteUnknown(int64_t none, int64_t* rows) const;

  static constexpr int64_t kFindCost = 50;  // Cycles.
  // A step that fails between its commit and its publication leaves its commit
  // here, until so many others follow.
  static constexpr size_t kMostUnpublished = 16;

  const KeyRules rules_;
  const std::unique_ptr<SpillFile> spill_;
  // The keys that come back with a version.
  std::vector<std::pair<int64_t, std::vector<int64_t>>> returning_;
  int64_t capacity_;
  KeyStore live_, candidates_;
  FreeRows free_rows_;
  std::vector<int64_t> candidate_places_;  // That are free.
  Statistics last_ = {}, total_ = {};
  uint64_t stamp_ = 1;  // Of the present call, which is 2 or more.
  std::atomic<bool> scores_fell_{false};
  int64_t newest_ = std::numeric_limits<int64_t>::min();  // Moment of a step.
  int64_t version_ = 0;
  std::vector<int64_t> written_;      // The last version of each row.
  std::vector<int64_t> unpublished_;  // Versions, ascending.
  bool notes_removed_ = false, missed_removed_ = false;
  std::vector<int64_t> removed_;

  // Of the present call.
  std::vector<int64_t> entries_;           // Without a row, but with a count.
  std::vector<int64_t> unknown_of_entry_;  // Index of the four that follow.
  std::vector<int64_t> unknown_;           // Distinct keys.
  std::vector<int64_t> occurrences_;       // With those that are remembered.
  std::vector<int64_t> places_;            // Among candidates, or 0.
  std::vector<int64_t> rows_;              // That they get.
  std::vector<int64_t> admitted_;          // Which of the unknown ones.
  std::vector<int64_t> victims_;           // Rows of live keys.
  KeyIndex scratch_;
};

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_KEY_TABLE_H_
