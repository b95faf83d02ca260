// How a step's keys are found, admitted and evicted.

#include "key_table.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace tfrs_embed {

KeyChanges KeyTable::Reserve(const Parallel& parallel, const KeyStep& step,
                             int64_t* rows) {
  ++stamp_;
  FindCounted(parallel, step, rows);
  CollectUnknown(parallel, step);
  Admit(step.number);
  const int64_t wanted = live_.size() + admitted_.size();
  KeyChanges changes;
  if (wanted > capacity_ && !CannotFail(step.n)) {
    changes.lacking = FindRoom(step.now, Pin(step, rows)).lacking;
    PutVictimsBack();
    if (changes.lacking > 0) return changes;
  }
  const int64_t n = admitted_.size();
  if (spill_ != nullptr) {
    const bool evicts = wanted > Grown(wanted);
    RequireSpill(evicts ? std::min(wanted - rules_.floor, live_.size()) : 0);
  }
  // So that the variables grow once, not again when the step is committed.
  free_rows_.Raise(kFirstRow + Grown(wanted));
  changes.new_rows.resize(n);
  free_rows_.Show(n, changes.new_rows.data());
  for (int64_t a = 0; a < n; ++a) {
    changes.new_keys.push_back(unknown_[admitted_[a]]);
    rows_[admitted_[a]] = changes.new_rows[a];
  }
  WriteUnknown(kAbsentRow, rows);
  HideUnpublished(step.n, rows);
  if (n > 0) Stamp(changes.new_rows);
  changes.version = version_;
  return changes;
}

KeyChanges KeyTable::Commit(const Parallel& parallel, const KeyStep& step,
                            const int64_t* hints, int64_t* rows) {
  ++stamp_;
  const bool lacks_rows =
      spill_ != nullptr && step.memory.rows < live_.end();
  // A spill needs to know how many keys can go.
  const bool counts_keys = spill_ != nullptr &&
                           rules_.floor < rules_.max_capacity;
  const bool cannot_fail = CannotFail(step.n) && !lacks_rows && !counts_keys;
  const int64_t hits = FindHinted(parallel, step, hints, cannot_fail, rows);
  CollectUnknown(parallel, step);
  Admit(step.number);
  Room room = {capacity_, 0, 0};
  if (live_.size() + static_cast<int64_t>(admitted_.size()) > capacity_) {
    room = FindRoom(step.now, cannot_fail ? 0 : Pin(step, rows));
  }
  KeyChanges changes;
  changes.lacking = room.lacking;
  if (room.lacking > 0) {
    PutVictimsBack();
    return changes;
  }
  try {
    const int64_t evictions = victims_.size() + room.least;
    if (lacks_rows && evictions > 0) {
      throw KeyError("A variable of " + std::to_string(step.memory.rows) +
                     " rows lacks some of the rows to spill.");
    }
    if (spill_ != nullptr) RequireSpill(evictions);
    free_rows_.Raise(kFirstRow + room.capacity);
    live_.Reserve(room.capacity);
    written_.resize(physical());
  } catch (const std::exception&) {
    PutVictimsBack();
    throw;
  }
  capacity_ = room.capacity;
  newest_ = step.now;
  if (!cannot_fail) UseAll(parallel, step, rows);
  // Expired keys first: they are in no order any more, and a new one must not
  // find them.
  int64_t evicted = EvictVictims(step);
  if (scores_fell_.exchange(false)) live_.ScoresFell();
  for (int64_t i = 0; i < room.least; ++i) {
    const int64_t row = live_.Pop(stamp_);
    if (row == 0) break;
    victims_.push_back(row);
  }
  live_.EndPops();
  evicted += EvictVictims(step);
  Place(step.now, &changes);
  if (!changes.new_rows.empty()) {
    Stamp(changes.new_rows);
    unpublished_.push_back(version_);
    if (spill_ != nullptr) ReturnFromSpill(changes.new_keys);
    if (unpublished_.size() > kMostUnpublished) Publish(unpublished_.front());
    changes.version = version_;
  }
  RememberCandidates(step.now);
  WriteUnknown(kTrashRow, rows);
  const int64_t admitted = admitted_.size(), unknown = unknown_.size();
  last_ = {admitted, evicted, unknown - admitted, hits};
  total_.admitted += last_.admitted;
  total_.evicted += last_.evicted;
  total_.rejected += last_.rejected;
  total_.hits = Plus(total_.hits, last_.hits);
  return changes;
}

void KeyTable::Replace(const std::vector<KeyRecord>& live,
                       const std::vector<KeyRecord>& spilled,
                       const std::vector<KeyRecord>& candidates) {
  const int64_t n = live.size();
  if (n > rules_.max_capacity || (spill_ == nullptr && !spilled.empty())) {
    throw KeyError("There is no room for " +
                   std::to_string(n + spilled.size()) + " keys.");
  }
  const int64_t capacity = Grown(n);
  KeyStore new_live = MakeLive(rules_, capacity);
  for (const KeyRecord& record : live) new_live.InsertNew(record);
  for (const KeyRecord& record : spilled) {
    if (new_live.index().Find(record.key) != 0) throw KeyError::Twice(record);
  }
  KeyStore new_candidates = MakeCandidates(rules_);
  if (rules_.threshold > 0) {
    for (const KeyRecord& record : candidates) {
      if (new_live.index().Find(record.key) == 0) {
        new_candidates.InsertNew(record);
      }
    }
  }
  written_.reserve(std::max(physical(), kFirstRow + capacity));
  if (spill_ != nullptr) spill_->Replace(spilled);
  returning_.clear();
  capacity_ = capacity;
  newest_ = std::numeric_limits<int64_t>::min();
  for (const auto* records : {&live, &spilled, &candidates}) {
    for (const KeyRecord& record : *records) {
      newest_ = std::max(newest_, record.last_used);
    }
  }
  live_ = std::move(new_live);
  candidates_ = std::move(new_candidates);
  candidate_places_.clear();
  free_rows_.Reset(n);
  free_rows_.Raise(kFirstRow + capacity_);
  written_.assign(physical(), ++version_);
  unpublished_ = {version_};
  ForgetCandidates();
}

void KeyTable::Remove(const Parallel& parallel, const int64_t* keys, int64_t n,
                      bool evicted, int64_t* rows) {
  FindAll(parallel, live_, keys, n, rows);
  for (int64_t i = 0; i < n; ++i) {
    // It may be among them twice.
    if (rows[i] != kAbsentRow && live_.Holds(rows[i], keys[i])) {
      Erase(rows[i]);
      total_.evicted += evicted;
    }
    const int64_t place = candidates_.index().Find(keys[i]);
    if (place != 0) EraseCandidate(place);
    const int64_t spilled = spill_ == nullptr ? 0 : spill_->Find(keys[i]);
    if (spilled == 0) continue;
    if (rows[i] == kAbsentRow) {
      rows[i] = kSpilled + spilled;
      NoteRemoved(keys[i]);
      total_.evicted += evicted;
    }
    spill_->Forget(spilled);
  }
}

void KeyTable::Score(const Parallel& parallel, const int64_t* keys, int64_t n,
                     const int64_t* scores, int64_t* rows) {
  FindAll(parallel, live_, keys, n, rows);
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] != kAbsentRow) {
      live_.SetFrequency(rows[i], scores[i]);
      continue;
    }
    const int64_t place = spill_ == nullptr ? 0 : spill_->Find(keys[i]);
    if (place == 0) continue;
    spill_->record(place).frequency = scores[i];
    rows[i] = kSpilled + place;
    NoteRemoved(keys[i]);  // A key there has changed if it is noted.
  }
}

std::vector<int64_t> KeyTable::TakeRemoved(bool* missed) {
  *missed = missed_removed_;
  notes_removed_ = true;
  missed_removed_ = false;
  return std::exchange(removed_, {});
}

void KeyTable::RequireSpill(int64_t more) {
  // A key that has moved there is noted, as one that has moved there from
  // memory is: who reads rows by their places later has to read it again.
  for (const int64_t key : spill_->Require(more)) NoteRemoved(key);
}

void KeyTable::NoteRemoved(int64_t key) {
  if (!notes_removed_) return;
  if (static_cast<int64_t>(removed_.size()) > 2 * (capacity_ + size())) {
    removed_.clear();
    missed_removed_ = true;
  }
  removed_.push_back(key);
}

void KeyTable::Erase(int64_t row) {
  NoteRemoved(live_.records()[row].key);
  live_.Erase(row);
  free_rows_.Give(row);
}

int64_t KeyTable::Check(int64_t n, int64_t version, int64_t* rows) const {
  if (version_ == version) return 0;
  const int64_t size = written_.size();
  int64_t changed = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] >= size || written_[rows[i]] <= version) continue;
    rows[i] = kAbsentRow;
    ++changed;
  }
  return changed;
}

void KeyTable::Publish(int64_t version) {
  const auto end = unpublished_.end();
  unpublished_.erase(std::remove(unpublished_.begin(), end, version), end);
  for (size_t i = 0; i < returning_.size(); ++i) {
    if (returning_[i].first != version) continue;
    for (const int64_t key : returning_[i].second) {
      const int64_t place = spill_->Find(key);
      // It may have been removed, or have gone again.
      if (place != 0 && spill_->Returning(place)) spill_->Forget(place);
    }
    returning_.erase(returning_.begin() + i);
    break;
  }
}

void KeyTable::ReturnFromSpill(const std::vector<int64_t>& keys) {
  std::vector<int64_t> found;
  for (const int64_t key : keys) {
    const int64_t place = spill_->Find(key);
    if (place == 0) continue;
    spill_->Return(place);
    found.push_back(key);
  }
  if (!found.empty()) returning_.emplace_back(version_, std::move(found));
}

void KeyTable::Stamp(const std::vector<int64_t>& rows) {
  ++version_;
  if (static_cast<int64_t>(written_.size()) < physical()) {
    written_.resize(physical());
  }
  for (const int64_t row : rows) written_[row] = version_;
}

void KeyTable::HideUnpublished(int64_t n, int64_t* rows) const {
  if (unpublished_.empty()) return;
  const int64_t size = written_.size();
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] < size &&
        std::binary_search(unpublished_.begin(), unpublished_.end(),
                           written_[rows[i]])) {
      rows[i] = kAbsentRow;
    }
  }
}

void KeyTable::FindAll(const Parallel& parallel, const KeyStore& store,
                       const int64_t* keys, int64_t n, int64_t* places) {
  parallel.run(n, kFindCost, [&](int64_t begin, int64_t end) {
    store.index().Find(keys + begin, end - begin, places + begin);
  });
}

bool KeyTable::CannotFail(int64_t n) const {
  // A row that isn't used in this step can be evicted.
  const int64_t kept = rules_.has_policy && rules_.evicts ? 0 : live_.size();
  return n <= rules_.max_capacity - kept;
}

int64_t KeyTable::Grown(int64_t keys) const {
  int64_t capacity = capacity_;
  while (capacity < keys && capacity < rules_.max_capacity) {
    capacity = capacity > rules_.max_capacity / 2 ? rules_.max_capacity
                                                  : 2 * capacity;
  }
  return capacity;
}

void KeyTable::FindCounted(const Parallel& parallel, const KeyStep& step,
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

template <typename Work>
void KeyTable::ByRow(const Parallel& parallel, const int64_t* rows, int64_t n,
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
            const uint32_t spread = uint32_t(rows[i] >> 1) * 0x9E3779B1;
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

int64_t KeyTable::FindHinted(const Parallel& parallel, const KeyStep& step,
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
      found = Plus(found, step.count(i));
      if (use) Use(step, i, rows[i]);
    });
    std::lock_guard<std::mutex> lock(mutex);
    hits = Plus(hits, found);
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
    hits = Plus(hits, step.count(i));
    if (use) Use(step, i, rows[i]);
  }
  return hits;
}

std::vector<int64_t> KeyTable::Merge(std::vector<std::vector<int64_t>>* lists) {
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

void KeyTable::Use(const KeyStep& step, int64_t i, int64_t row) {
  KeyRecord& record = live_.records()[row];
  if (!rules_.scored) {
    const int64_t before = rules_.half_life.Later(
        record.frequency, record.last_used, step.now);
    record.frequency = Plus(before, step.count(i));
  }
  if (record.last_used > step.now) {
    scores_fell_.store(true, std::memory_order_relaxed);
  }
  record.last_used = step.now;
  record.set_stamp(stamp_);
}

void KeyTable::UseAll(const Parallel& parallel, const KeyStep& step,
                      const int64_t* rows) {
  ByRow(parallel, rows, step.n, [&](const auto& for_each) {
    for_each([&](int64_t i) {
      if (rows[i] != kTrashRow) Use(step, i, rows[i]);
    });
  });
}

int64_t KeyTable::Pin(const KeyStep& step, const int64_t* rows) {
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

void KeyTable::CollectUnknown(const Parallel& parallel, const KeyStep& step) {
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
    occurrences_[u] = Plus(occurrences_[u], step.count(entries_[e]));
    unknown_of_entry_[e] = u;
  }
  places_.assign(unknown_.size(), 0);
  if (rules_.threshold == 0) return;
  FindAll(parallel, candidates_, unknown_.data(), unknown_.size(),
          places_.data());
}

void KeyTable::Admit(int64_t step) {
  rows_.assign(unknown_.size(), kAbsentRow);
  admitted_.clear();
  const int64_t n = unknown_.size();
  for (int64_t u = 0; u < n; ++u) {
    if (spill_ != nullptr && spill_->Find(unknown_[u]) != 0) {
      // It was admitted once.
    } else if (rules_.threshold > 0) {
      if (places_[u] != 0) {
        occurrences_[u] = Plus(
            occurrences_[u], candidates_.records()[places_[u]].frequency);
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

double KeyTable::Uniform(int64_t key, int64_t step) const {
  const uint64_t of_key = tfrs_mix(rules_.seed ^ tfrs_mix(key));
  return (tfrs_mix(of_key + step) >> 11) * 0x1p-53;
}

KeyTable::Room KeyTable::FindRoom(int64_t now, int64_t pinned) {
  int64_t keys = live_.size() + admitted_.size();
  victims_.clear();
  const bool full = capacity_ == rules_.max_capacity;
  const int64_t goal = full ? rules_.floor : capacity_;
  while (rules_.ttl > 0 && keys > goal) {
    const int64_t row = live_.PopOldest(stamp_);
    if (row == 0) break;
    if (live_.records()[row].last_used >= Plus(now, -rules_.ttl)) {
      live_.PutBackOldest(row);
      break;
    }
    victims_.push_back(row);
    --keys;
  }
  live_.EndPops();
  Room room = {Grown(keys), 0, 0};
  const int64_t lacking = std::max<int64_t>(0, keys - room.capacity);
  if (rules_.has_policy && rules_.evicts && (full || lacking > 0)) {
    const int64_t left = keys - admitted_.size() - pinned;
    room.least = std::clamp<int64_t>(keys - rules_.floor, 0, left);
  }
  room.lacking = std::max<int64_t>(0, lacking - room.least);
  return room;
}

void KeyTable::PutVictimsBack() {
  for (const int64_t row : victims_) live_.PutBackOldest(row);
  victims_.clear();
}

void KeyTable::SpillVictims(const KeyStep& step) {
  size_t done = 0;
  try {
    for (; done < victims_.size(); ++done) {
      const int64_t row = victims_[done];
      spill_->Put(live_.records()[row], step.memory, row);
    }
  } catch (const SpillError&) {
    // These keep their rows in memory.
    for (size_t i = 0; i < done; ++i) {
      spill_->Forget(spill_->Find(live_.records()[victims_[i]].key));
    }
    PutVictimsBack();
    throw;
  }
}

int64_t KeyTable::EvictVictims(const KeyStep& step) {
  if (spill_ != nullptr) SpillVictims(step);
  for (const int64_t row : victims_) {
    live_.index().Prefetch(live_.records()[row].key);
  }
  for (const int64_t row : victims_) Erase(row);
  const int64_t count = victims_.size();
  victims_.clear();
  return count;
}

void KeyTable::Place(int64_t now, KeyChanges* changes) {
  for (const int64_t u : admitted_) live_.index().Prefetch(unknown_[u]);
  for (const int64_t u : admitted_) {
    const int64_t row = free_rows_.Take();
    const int64_t place = spill_ == nullptr ? 0 : spill_->Find(unknown_[u]);
    int64_t before = 0;
    if (place != 0) {
      const KeyRecord& record = spill_->record(place);
      before = rules_.half_life.Later(record.frequency, record.last_used, now);
    }
    const int64_t more = rules_.scored ? 0 : occurrences_[u];
    live_.Insert(row, {unknown_[u], Plus(before, more), now,
                       KeyRecord::Stamped(stamp_)});
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

void KeyTable::RememberCandidates(int64_t now) {
  if (rules_.threshold == 0) return;
  const int64_t n = unknown_.size();
  int64_t added = 0;
  bool fell = false;
  for (int64_t u = 0; u < n; ++u) {
    if (rows_[u] != kAbsentRow) continue;
    if (places_[u] == 0) {
      InsertCandidate({unknown_[u], occurrences_[u], now,
                       KeyRecord::Stamped(stamp_)});
      ++added;
    } else {
      KeyRecord& record = candidates_.records()[places_[u]];
      fell |= record.last_used > now;
      record.frequency = occurrences_[u];
      record.last_used = now;
    }
  }
  if (fell) candidates_.ScoresFell();
  ForgetCandidates();
  if (IsNearly(candidates_.size(), rules_.candidates)) {
    candidates_.Prepare(added);
  }
}

void KeyTable::InsertCandidate(const KeyRecord& record) {
  int64_t place = candidates_.end();
  if (!candidate_places_.empty()) {
    place = candidate_places_.back();
    candidate_places_.pop_back();
  }
  candidates_.Insert(place, record);
}

void KeyTable::EraseCandidate(int64_t place) {
  candidates_.Erase(place);
  candidate_places_.push_back(place);
}

void KeyTable::ForgetCandidates() {
  if (candidates_.size() <= rules_.candidates) return;
  while (candidates_.size() > rules_.candidates) {
    EraseCandidate(candidates_.Pop(0));
  }
  candidates_.EndPops();
}

void KeyTable::WriteUnknown(int64_t none, int64_t* rows) const {
  for (size_t e = 0; e < entries_.size(); ++e) {
    const int64_t row = rows_[unknown_of_entry_[e]];
    rows[entries_[e]] = row == kAbsentRow ? none : row;
  }
}

}  // namespace tfrs_embed
