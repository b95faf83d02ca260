// The rows of keys that lost them to others, in a file.

#ifndef TFRS_EMBED_KERNELS_CC_SPILL_FILE_H_
#define TFRS_EMBED_KERNELS_CC_SPILL_FILE_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "eviction_order.h"
#include "key_index.h"

namespace tfrs_embed {

// A file can't be used, or has no room.
struct SpillError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Keys whose rows are in a file. A key's record in the file is its row of each
// of the table's variables, one behind the other.
//
// The file is written a segment of many records at a time, since disks do few
// operations a second: the present segment is in memory until it is full. When
// there are no empty segments left, the file grows, or the records that are
// left of the emptiest segment move on. Reads are of single records.
//
// The file has no name, so that it is gone with the process. Its room on the
// disk is taken before it is needed: a full disk is an error of the step that
// would evict too many keys, before it changes anything.
//
// A key that comes back to memory stays here until its row there can be found:
// meanwhile it is `returning`.
class SpillFile {
 public:
  struct Settings {
    std::string owner;           // As which errors know the table.
    std::string folder;
    std::vector<int64_t> parts;  // The bytes of a row of each variable.
    int64_t max_bytes;
  };

  // A table's variables, of which a row each is a record.
  struct Memory {
    std::vector<char*> values;
    int64_t rows = std::numeric_limits<int64_t>::max();
  };

  // The most bytes of a record.
  static constexpr int64_t kMostBytes = 1 << 30;

  // Whether the parts' bytes are positive, and their sum is no more than that.
  static bool AreParts(const std::vector<int64_t>& parts);

  // Throws SpillError, as all methods do that use the file.
  explicit SpillFile(const Settings& settings);
  ~SpillFile();
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  // The number of keys, without returning ones.
  int64_t size() const { return size_ - returning_; }
  // The file's size, and how many rows were written to it and have come back.
  int64_t bytes() const { return segments_.size() * segment_ * record_; }
  int64_t written() const { return written_; }
  int64_t returned() const { return returned_; }
  const std::vector<int64_t>& parts() const { return settings_.parts; }

  // A key's place, or 0.
  int64_t Find(int64_t key) const { return index_.Find(key); }
  void Find(const int64_t* keys, int64_t n, int64_t* places) const {
    index_.Find(keys, n, places);
  }
  // Of a place that a key has.
  KeyRecord& record(int64_t place) {
    return segments_[SegmentOf(place)].keys[(place - 1) % segment_];
  }
  // Behind the last place.
  int64_t end() const { return 1 + segments_.size() * segment_; }
  // Whether a key has a place from 1 to the end.
  bool Holds(int64_t place) {
    return !segments_[SegmentOf(place)].keys.empty() && record(place).live();
  }

  // Makes room on the disk for so many more keys. Returns the keys whose places
  // have changed.
  std::vector<int64_t> Require(int64_t more);

  // Writes a key's row, which the memory has.
  void Put(const KeyRecord& key, const Memory& memory, int64_t row);

  // The key at a place comes back to memory, until Forget is called.
  void Return(int64_t place);
  bool Returning(int64_t place) { return IsReturning(record(place)); }

  void Forget(int64_t place);

  // Has these keys only; those that it had before keep their places. Throws
  // before it changes anything if max_bytes is too little, and KeyError if the
  // keys don't differ.
  void Replace(const std::vector<KeyRecord>& keys);

  // Begins to read the records at some places.
  void ReadAhead(const int64_t* places, int64_t n) const;

  // Reads the records at the places that aren't 0. Calls take(i, record).
  template <typename Take>
  void Read(const std::vector<int64_t>& places, const Take& take) {
    ReadAhead(places.data(), places.size());
    std::vector<char> record(record_);
    for (size_t i = 0; i < places.size(); ++i) {
      if (places[i] == 0) continue;
      Read(places[i], record.data());
      take(i, record.data());
    }
  }
  int64_t record_bytes() const { return record_; }
  // Where a part begins in a record.
  int64_t offset(size_t part) const { return offsets_[part]; }

  void Write(int64_t place, size_t part, const char* from);

 private:
  // A segment's bytes, about.
  static constexpr int64_t kSegmentBytes = 1 << 18;

  // Keys here are in no order of eviction, which else has this bit.
  static bool IsReturning(const KeyRecord& key) {
    return key.queued(KeyRecord::kMain);
  }

  void CheckProcess() const;
  int64_t SegmentOf(int64_t place) const { return (place - 1) / segment_; }
  // How many keys find a place without more room.
  int64_t Available() const {
    return segment_ - filled_ + segment_ * free_.size();
  }
  // Makes the file larger, for at least so many more keys if it can be. Returns
  // an error, or 0.
  int Grow(int64_t more);
  // Empties the emptiest segment. Returns false if that makes no room.
  bool Clean(std::vector<int64_t>* moved);
  // Gives a key a place, whose record is then in the buffer.
  int64_t Insert(const KeyRecord& key);
  void SetReturning(KeyRecord* key, bool returning);
  void FreeIfEmpty(int64_t segment);
  // Where a record is in the buffer; null: it is in the file.
  char* InBuffer(int64_t place);
  void Read(int64_t place, char* to);
  // Reads `to`, or writes `from`.
  void Transfer(int64_t offset, int64_t bytes, char* to,
                const char* from) const;
  [[noreturn]] void FailForRoom(int64_t more, int error) const;
  [[noreturn]] void Fail(const std::string& what, int error) const;

  const Settings settings_;
  std::vector<int64_t> offsets_;  // Of parts in a record.
  int64_t record_ = 0;            // A record's bytes.
  int64_t segment_;               // A segment's records.
  int file_ = -1;
  int process_;
  // Keys by place, and how many of them there are; none if it is empty.
  struct Segment {
    std::vector<KeyRecord> keys;
    int64_t size = 0;
  };

  KeyIndex index_;
  std::vector<Segment> segments_;
  std::vector<int64_t> free_;  // Segments without keys.
  int64_t size_ = 0;
  int64_t present_ = -1;       // The segment that is filled.
  int64_t filled_;
  std::vector<char> buffer_;  // Its records.
  int64_t returning_ = 0, written_ = 0, returned_ = 0;
};

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_SPILL_FILE_H_
