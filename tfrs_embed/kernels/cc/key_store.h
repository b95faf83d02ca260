// Keys that have a record each, at a place that stays theirs.

#ifndef TFRS_EMBED_KERNELS_CC_KEY_STORE_H_
#define TFRS_EMBED_KERNELS_CC_KEY_STORE_H_

#include <algorithm>
#include <cstdint>

#include "eviction_order.h"
#include "key_index.h"

namespace tfrs_embed {

// Keys with their records by place, and the order in which they go.
class KeyStore {
 public:
  // `expires`: whether the oldest keys can be popped too.
  KeyStore(int64_t count, int64_t places, int64_t first, OrderBy by,
           HalfLife half_life, bool expires)
      : index_(count),
        records_(places),
        end_(first),
        order_(by, half_life, KeyRecord::kMain),
        expiry_(OrderBy::kLastUsed, half_life, KeyRecord::kExpiry),
        has_expiry_(expires && by != OrderBy::kLastUsed) {}

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
    Reserve(size_ + 1);
    end_ = std::max(end_, place + 1);
    index_.FindOrInsert(record.key, place);
    records_[place] = record;
    order_.Add(records(), place);
    if (has_expiry_) expiry_.Add(records(), place);
    ++size_;
  }

  // Gives a key the next place. Throws KeyError if it has one already.
  void InsertNew(const KeyRecord& record) {
    if (index_.Find(record.key) != 0) throw KeyError::Twice(record);
    Insert(end_, record);
  }

  void Erase(int64_t place) {
    index_.Erase(records_[place].key);
    records_[place].state = 0;
    --size_;
  }

  // Sets the frequency, or score, of the key at a place.
  void SetFrequency(int64_t place, int64_t frequency) {
    const bool fell = frequency < records_[place].frequency;
    records_[place].frequency = frequency;
    if (fell) order_.Fell(records(), place);
  }

  // See EvictionOrder.
  int64_t Pop(uint64_t pinned) { return order_.Pop(records(), end_, pinned); }
  // As Pop, by the last use.
  int64_t PopOldest(uint64_t pinned) {
    return oldest().Pop(records(), end_, pinned);
  }
  void PutBackOldest(int64_t place) { oldest().PutBack(records(), place); }
  void EndPops() {
    order_.EndPops(records(), end_);
    if (has_expiry_) expiry_.EndPops(records(), end_);
  }
  void Prepare(int64_t pops) { order_.Prepare(records(), end_, pops); }
  void ScoresFell() {
    order_.Reset(records());
    if (has_expiry_) expiry_.Reset(records());
  }

 private:
  EvictionOrder& oldest() { return has_expiry_ ? expiry_ : order_; }

  KeyIndex index_;
  ZeroedArray<KeyRecord> records_;
  int64_t end_, size_ = 0;
  EvictionOrder order_, expiry_;
  bool has_expiry_;  // Else order_ is by the last use, or nothing expires.
};

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_KEY_STORE_H_
