// A shard's rows that no key has.

#ifndef TFRS_EMBED_KERNELS_CC_FREE_ROWS_H_
#define TFRS_EMBED_KERNELS_CC_FREE_ROWS_H_

#include <algorithm>
#include <cstdint>
#include <deque>

namespace tfrs_embed {

// What lookups of keys without a row read: zeros.
constexpr int64_t kAbsentRow = 0;
// What takes the gradients of keys without a row.
constexpr int64_t kTrashRow = 1;
constexpr int64_t kFirstRow = 2;

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

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_FREE_ROWS_H_
