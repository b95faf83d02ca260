// A hash map of keys to places, and the memory that it is in.

#ifndef TFRS_EMBED_KERNELS_CC_KEY_INDEX_H_
#define TFRS_EMBED_KERNELS_CC_KEY_INDEX_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <utility>

#include "rows.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace tfrs_embed {

// a + b, or the nearest number that there is: counts and steps may be any.
inline int64_t Plus(int64_t a, int64_t b) {
  int64_t sum;
  if (!__builtin_add_overflow(a, b, &sum)) return sum;
  return b < 0 ? std::numeric_limits<int64_t>::min()
               : std::numeric_limits<int64_t>::max();
}

// Zeros, which take memory only once they are written to. They begin at a cache
// line. Throws std::bad_alloc.
template <typename T>
class ZeroedArray {
 public:
  explicit ZeroedArray(int64_t size = 0) : size_(size) {
    constexpr size_t kLine = 64;
    const size_t bytes = size * sizeof(T);
    memory_.reset(std::calloc(bytes + kLine, 1));
    if (memory_ == nullptr) throw std::bad_alloc();
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory_.get());
    data_ = reinterpret_cast<T*>((begin + kLine - 1) / kLine * kLine);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    // Records are read in random order: see huge_pages.h. These pages come when
    // they are first written to.
    constexpr uintptr_t kPage = 2 << 20;
    const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
    const uintptr_t last = (begin + bytes) / kPage * kPage;
    if (first < last) {
      madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
    }
#endif
  }

  // Makes it larger; the first `used` values stay.
  void Grow(int64_t size, int64_t used) {
    ZeroedArray grown(size);
    std::memcpy(grown.data_, data_, used * sizeof(T));
    *this = std::move(grown);
  }

  int64_t size() const { return size_; }
  T* data() { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  T* data_;
  int64_t size_;
};

// A hash map with open addressing of keys to places. A place is not 0.
class KeyIndex {
 public:
  // Has room for so many keys, of whose slots they take at most half.
  explicit KeyIndex(int64_t count) { Allocate(count); }

  // Makes room for so many keys.
  void Reserve(int64_t count) {
    if (4 * count <= 3 * (mask_ + 1)) return;
    const ZeroedArray<Slot> old = std::move(slots_);
    const int64_t slots = mask_ + 1;
    Allocate(count);
    for (int64_t i = 0; i < slots; ++i) {
      if (old[i].place != 0) slots_[FindSlot(old[i].key)] = old[i];
    }
  }

  // Forgets all keys, and makes room for so many.
  void Clear(int64_t count) {
    if (2 * count > slots_.size()) return Allocate(count);
    SetBits(count);
    std::memset(slots_.data(), 0, (mask_ + 1) * sizeof(Slot));
  }

  // The key's place, or 0.
  int64_t Find(int64_t key) const { return slots_[FindSlot(key)].place; }

  // Finds the places of n keys. It is much faster than one key at a time: slots
  // are on their way from memory while others are looked at.
  void Find(const int64_t* keys, int64_t n, int64_t* places) const {
    constexpr int64_t kAhead = 64;
    int64_t homes[kAhead];
    auto approach = [&](int64_t i) {
      homes[i % kAhead] = Home(keys[i]);
      __builtin_prefetch(&slots_[homes[i % kAhead]]);
    };
    for (int64_t i = 0; i < std::min(n, kAhead); ++i) approach(i);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t home = homes[i % kAhead];
      if (i + kAhead < n) approach(i + kAhead);
      places[i] = slots_[FindSlot(keys[i], home)].place;
    }
  }

  // The key's place, which is the given one if it had none.
  int64_t FindOrInsert(int64_t key, int64_t place) {
    Slot& slot = slots_[FindSlot(key)];
    if (slot.place == 0) slot = {key, place};
    return slot.place;
  }

  void Prefetch(int64_t key) const {
    __builtin_prefetch(&slots_[Home(key)], 1);
  }

  // Forgets a key that there is.
  void Erase(int64_t key) {
    int64_t hole = FindSlot(key);
    // Keys behind it that could be where the hole is move up, so that none is
    // searched for beyond an empty slot.
    for (int64_t at = (hole + 1) & mask_; slots_[at].place != 0;
         at = (at + 1) & mask_) {
      const int64_t home = Home(slots_[at].key);
      if (((at - home) & mask_) >= ((at - hole) & mask_)) {
        slots_[hole] = slots_[at];
        hole = at;
      }
    }
    slots_[hole].place = 0;
  }

 private:
  struct Slot {
    int64_t key, place;  // Place 0: no key.
  };

  void SetBits(int64_t count) {
    bits_ = 4;
    while ((int64_t{1} << bits_) < 2 * count) ++bits_;
    mask_ = (int64_t{1} << bits_) - 1;
  }

  void Allocate(int64_t count) {
    SetBits(count);
    slots_ = ZeroedArray<Slot>(mask_ + 1);
  }

  int64_t Home(int64_t key) const { return tfrs_mix(key) >> (64 - bits_); }

  // The slot of a key, or the empty one that it would get.
  int64_t FindSlot(int64_t key) const { return FindSlot(key, Home(key)); }

  int64_t FindSlot(int64_t key, int64_t at) const {
    while (slots_[at].place != 0 && slots_[at].key != key) {
      at = (at + 1) & mask_;
    }
    return at;
  }

  int bits_;
  int64_t mask_;
  ZeroedArray<Slot> slots_;
};

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_KEY_INDEX_H_
