#include "spill_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace tfrs_embed {

namespace {

constexpr int kLimit = -1;  // An error: max_bytes.

}  // namespace

bool SpillFile::AreParts(const std::vector<int64_t>& parts) {
  int64_t left = kMostBytes;
  for (const int64_t bytes : parts) {
    if (bytes <= 0 || bytes > left) return false;
    left -= bytes;
  }
  return true;
}

SpillFile::SpillFile(const Settings& settings)
    : settings_(settings), process_(getpid()), index_(0) {
  for (const int64_t bytes : settings_.parts) {
    offsets_.push_back(record_);
    record_ += bytes;
  }
  segment_ = std::max<int64_t>(1, kSegmentBytes / record_);
  filled_ = segment_;  // There is none yet.
  buffer_.resize(segment_ * record_);
  std::string path = settings_.folder + "/spill-XXXXXX";
  file_ = mkostemp(&path[0], O_CLOEXEC);
  if (file_ < 0) Fail("no file can be made", errno);
  unlink(path.c_str());
#if defined(POSIX_FADV_RANDOM)
  posix_fadvise(file_, 0, 0, POSIX_FADV_RANDOM);  // Nothing beside a record.
#endif
}

SpillFile::~SpillFile() { close(file_); }

std::vector<int64_t> SpillFile::Require(int64_t more) {
  std::vector<int64_t> moved;
  if (more > 0) CheckProcess();
  int error = 0;
  while (Available() < more) {
    // Up to half more than is in use, so that segments become empty enough.
    const int64_t records = segments_.size() * segment_;
    const bool small = records < (size_ + more) * 3 / 2;
    if (small && error == 0 && (error = Grow(more - Available())) == 0) {
      continue;
    }
    if (Clean(&moved)) continue;
    if (error != 0 || (error = Grow(more - Available())) != 0) {
      FailForRoom(more, error);
    }
  }
  return moved;
}

int SpillFile::Grow(int64_t more) {
  const int64_t here = segments_.size(), bytes = segment_ * record_;
  const int64_t most = settings_.max_bytes / bytes;
  const int64_t needed = here + (more + segment_ - 1) / segment_;
  // At least a sixteenth more, so that it is seldom done.
  const int64_t wanted = std::min(std::max(needed, here + here / 16), most);
  if (wanted <= here) return kLimit;
#if defined(__linux__)
  const int error = posix_fallocate(file_, 0, wanted * bytes);
#else
  const int error = ftruncate(file_, wanted * bytes) == 0 ? 0 : errno;
#endif
  if (error != 0) return error;
  segments_.resize(wanted);
  for (int64_t i = wanted; i-- > here;) free_.push_back(i);
  return 0;
}

bool SpillFile::Clean(std::vector<int64_t>* moved) {
  int64_t least = present_, left = segment_;
  if (present_ >= 0) left = segments_[present_].size + segment_ - filled_;
  for (int64_t i = 0; i < static_cast<int64_t>(segments_.size()); ++i) {
    const int64_t size = segments_[i].size;
    if (i == present_ || size == 0 || size >= left) continue;
    least = i;
    left = size;
  }
  if (left == segment_) return false;
  std::vector<KeyRecord> keys;
  std::vector<char> records;
  for (int64_t i = 0; i < segment_; ++i) {
    const int64_t place = 1 + least * segment_ + i;
    if (!Holds(place)) continue;
    keys.push_back(record(place));
    records.resize(records.size() + record_);
    Read(place, records.data() + records.size() - record_);
    Forget(place);
  }
  if (least == present_) filled_ = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const int64_t place = Insert(keys[i]);
    std::memcpy(InBuffer(place), records.data() + i * record_, record_);
    moved->push_back(keys[i].key);
  }
  return true;
}

void SpillFile::Put(const KeyRecord& key, const Memory& memory, int64_t row) {
  int64_t place = Find(key.key);
  if (place == 0) {
    place = Insert({key.key, key.frequency, key.last_used, KeyRecord::kLive});
  } else {
    // It has come back and goes again, before its row could be found.
    KeyRecord& here = record(place);
    SetReturning(&here, false);
    here.frequency = key.frequency;
    here.last_used = key.last_used;
  }
  for (size_t part = 0; part < offsets_.size(); ++part) {
    Write(place, part, memory.values[part] + row * settings_.parts[part]);
  }
  ++written_;
}

void SpillFile::Return(int64_t place) {
  SetReturning(&record(place), true);
  ++returned_;
}

void SpillFile::SetReturning(KeyRecord* key, bool returning) {
  returning_ += returning - IsReturning(*key);
  key->set_queued(KeyRecord::kMain, returning);
}

void SpillFile::Replace(const std::vector<KeyRecord>& keys) {
  const int64_t n = keys.size();
  if (n > settings_.max_bytes / (segment_ * record_) * segment_) {
    FailForRoom(n - size_, kLimit);
  }
  std::vector<bool> kept(end(), false);
  KeyIndex others(n);
  int64_t added = 0;
  for (const KeyRecord& key : keys) {
    const int64_t place = Find(key.key);
    const bool first = place ? !kept[place]
                             : others.FindOrInsert(key.key, ++added) == added;
    if (!first) throw KeyError::Twice(key);
    kept[place] = true;
  }
  if (added > 0) CheckProcess();
  for (int64_t place = 1; place < static_cast<int64_t>(kept.size()); ++place) {
    if (Holds(place) && !kept[place]) Forget(place);
  }
  Require(added);
  for (const KeyRecord& key : keys) {
    int64_t place = Find(key.key);
    if (place == 0) {
      place = Insert({key.key, 0, 0, KeyRecord::kLive});
    }
    KeyRecord& here = record(place);
    here.frequency = key.frequency;
    here.last_used = key.last_used;
    SetReturning(&here, false);
  }
}

void SpillFile::ReadAhead(const int64_t* places, int64_t n) const {
#if defined(POSIX_FADV_WILLNEED)
  if (process_ != getpid()) return;
  for (int64_t i = 0; i < n; ++i) {
    if (places[i] == 0) continue;
    posix_fadvise(file_, (places[i] - 1) * record_, record_,
                  POSIX_FADV_WILLNEED);
  }
#endif
}

// A fork has the same file as its parent.
void SpillFile::CheckProcess() const {
  if (process_ == getpid()) return;
  throw SpillError(settings_.owner +
                   ": its spill is of the process that made the table, not of "
                   "a fork. Make the layer after the fork.");
}

int64_t SpillFile::Insert(const KeyRecord& key) {
  if (filled_ == segment_) {
    if (free_.empty()) FailForRoom(1, ENOSPC);
    if (present_ >= 0) {
      const int64_t bytes = buffer_.size();
      Transfer(present_ * bytes, bytes, nullptr, buffer_.data());
      const int64_t full = std::exchange(present_, -1);
      FreeIfEmpty(full);
    }
    present_ = free_.back();
    free_.pop_back();
    filled_ = 0;
  }
  Segment& segment = segments_[present_];
  if (segment.keys.empty()) segment.keys.resize(segment_);
  ++segment.size;
  const int64_t place = 1 + present_ * segment_ + filled_++;
  record(place) = key;
  returning_ += IsReturning(key);
  index_.Reserve(++size_);
  index_.FindOrInsert(key.key, place);
  return place;
}

void SpillFile::Forget(int64_t place) {
  KeyRecord& key = record(place);
  returning_ -= IsReturning(key);
  index_.Erase(key.key);
  key.state = 0;
  --size_;
  --segments_[SegmentOf(place)].size;
  FreeIfEmpty(SegmentOf(place));
}

void SpillFile::FreeIfEmpty(int64_t segment) {
  if (segment == present_ || segments_[segment].size > 0) return;
  segments_[segment].keys = {};
  free_.push_back(segment);
}

char* SpillFile::InBuffer(int64_t place) {
  if (SegmentOf(place) != present_) return nullptr;
  return buffer_.data() + (place - 1) % segment_ * record_;
}

void SpillFile::Read(int64_t place, char* to) {
  CheckProcess();
  if (const char* here = InBuffer(place)) {
    std::memcpy(to, here, record_);
  } else {
    Transfer((place - 1) * record_, record_, to, nullptr);
  }
}

void SpillFile::Write(int64_t place, size_t part, const char* from) {
  CheckProcess();
  if (char* here = InBuffer(place)) {
    std::memcpy(here + offsets_[part], from, settings_.parts[part]);
  } else {
    Transfer((place - 1) * record_ + offsets_[part], settings_.parts[part],
             nullptr, from);
  }
}

void SpillFile::Transfer(int64_t offset, int64_t bytes, char* to,
                         const char* from) const {
  for (int64_t done = 0; done < bytes;) {
    const int64_t more =
        to != nullptr
            ? pread(file_, to + done, bytes - done, offset + done)
            : pwrite(file_, from + done, bytes - done, offset + done);
    if (more < 0 && errno == EINTR) continue;
    if (more <= 0) {
      Fail(to != nullptr ? "rows can't be read" : "rows can't be written",
           more < 0 ? errno : EIO);
    }
    done += more;
  }
}

void SpillFile::FailForRoom(int64_t more, int error) const {
  const int64_t keys = size_ + more;
  std::string why = error == 0 ? "" : std::string(": ") + std::strerror(error);
  if (error == kLimit) {
    why = ": max_bytes is " + std::to_string(settings_.max_bytes);
  }
  throw SpillError(settings_.owner + ": its spill in '" + settings_.folder +
                   "' has no room for rows of " + std::to_string(keys) +
                   " keys, " + std::to_string(keys * record_) + " bytes" + why +
                   ".");
}

void SpillFile::Fail(const std::string& what, int error) const {
  throw SpillError(settings_.owner + ": its spill in '" + settings_.folder +
                   "': " + what + ": " + std::strerror(error) + ".");
}

}  // namespace tfrs_embed
