// Work in chunks, each of which the next free thread takes.

#ifndef TFRS_EMBED_KERNELS_CC_CHUNKS_H_
#define TFRS_EMBED_KERNELS_CC_CHUNKS_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace tfrs_embed {

// Waking a thread takes longer than some operations take in all. So the thread
// that has the work begins at once, and in the end waits only for chunks that
// other threads have begun.
class Chunks : public std::enable_shared_from_this<Chunks> {
 public:
  using Function = std::function<void(int64_t, int64_t)>;
  // Lets a thread of a pool run a function later.
  using Schedule = std::function<void(std::function<void()>)>;

  // Runs fn(begin, end) over [0, total) in chunks, with up to `helpers` of the
  // pool's threads.
  static void Run(int64_t total, int64_t chunks, int64_t helpers,
                  Schedule schedule, const Function& fn) {
    auto work = std::make_shared<Chunks>(total, chunks, helpers,
                                         std::move(schedule), fn);
    work->Work();
    work->Wait();
  }

  Chunks(int64_t total, int64_t chunks, int64_t helpers, Schedule schedule,
         const Function& fn)
      : total_(total),
        chunks_(chunks),
        schedule_(std::move(schedule)),
        fn_(&fn),
        helpers_(helpers) {}

 private:
  // About the time that a thread needs to fall asleep and wake up.
  static constexpr int kYields = 100;

  void Work() {
    // Each thread wakes two others, so that many are soon awake.
    for (int i = 0; i < 2 && next_ < chunks_ && helpers_-- > 0; ++i) {
      schedule_([self = shared_from_this()] { self->Work(); });
    }
    for (int64_t c = next_++; c < chunks_; c = next_++) {
      (*fn_)(total_ * c / chunks_, total_ * (c + 1) / chunks_);
      if (++done_ == chunks_) {
        // With the lock, a thread that is about to wait either sees the new
        // number or gets the notification.
        std::lock_guard<std::mutex> lock(mutex_);
        all_done_.notify_all();
      }
    }
  }

  void Wait() {
    for (int i = 0; i < kYields && done_ < chunks_; ++i) {
      std::this_thread::yield();
    }
    if (done_ == chunks_) return;
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [this] { return done_ == chunks_; });
  }

  const int64_t total_, chunks_;
  const Schedule schedule_;
  // The caller's function, which lives until all chunks are done. A thread that
  // comes later must not touch it.
  const Function* const fn_;
  std::atomic<int64_t> helpers_, next_{0}, done_{0};
  std::mutex mutex_;
  std::condition_variable all_done_;
};

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_CHUNKS_H_
