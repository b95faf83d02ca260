// An operation's work on TensorFlow's own threads.

#ifndef TFRS_EMBED_KERNELS_CC_THREADS_H_
#define TFRS_EMBED_KERNELS_CC_THREADS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "absl/synchronization/notification.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfrs_embed {

// The number of TensorFlow's threads for an operation's own work.
inline int64_t NumThreads(tensorflow::OpKernelContext* ctx) {
  return ctx->device()->tensorflow_cpu_worker_threads()->num_threads;
}

// Work in chunks, each of which the next free thread takes. A thread that sleeps
// needs longer to wake up than some operations take in all, so whoever has work
// to do begins with it at once, and waits for no thread that has none.
class Chunks : public std::enable_shared_from_this<Chunks> {
 public:
  using Function = std::function<void(int64_t, int64_t)>;

  Chunks(tensorflow::thread::ThreadPool* pool, int64_t total, int64_t chunks,
         int64_t helpers, const Function* fn)
      : pool_(pool), total_(total), chunks_(chunks), fn_(fn),
        helpers_(helpers) {}

  // Does all of the work, with helpers' help.
  void Run() {
    Work();
    // What isn't done yet, others are at: most often almost through.
    for (int i = 0; i < kYields && done_ < chunks_; ++i) {
      std::this_thread::yield();
    }
    if (done_ < chunks_) all_done_.WaitForNotification();
  }

 private:
  // About the time that a thread needs to fall asleep and wake up.
  static constexpr int kYields = 100;

  void Work() {
    // Each thread wakes two others, so that many are soon awake.
    for (int i = 0; i < 2 && next_ < chunks_ && helpers_-- > 0; ++i) {
      pool_->Schedule([self = shared_from_this()] { self->Work(); });
    }
    for (int64_t c = next_++; c < chunks_; c = next_++) {
      (*fn_)(total_ * c / chunks_, total_ * (c + 1) / chunks_);
      if (++done_ == chunks_) all_done_.Notify();
    }
  }

  tensorflow::thread::ThreadPool* const pool_;
  const int64_t total_, chunks_;
  const Function* const fn_;  // Of Run's caller: only for chunks.
  std::atomic<int64_t> helpers_, next_{0}, done_{0};
  absl::Notification all_done_;
};

// Runs fn(begin, end) over [0, total) in as many parts as threads may well take.
// `cost` is that of one of the total, in cycles.
inline void ParallelFor(tensorflow::OpKernelContext* ctx, int64_t total,
                        int64_t cost, Chunks::Function fn) {
  constexpr int64_t kLeastCost = 40000;
  constexpr int64_t kChunksPerThread = 8;
  if (total <= 0) return;
  const int64_t threads = NumThreads(ctx);
  const int64_t per_chunk = std::max<int64_t>(
      {1, kLeastCost / std::max<int64_t>(1, cost),
       (total + threads * kChunksPerThread - 1) / (threads * kChunksPerThread)});
  const int64_t chunks = (total + per_chunk - 1) / per_chunk;
  const int64_t helpers = std::min(threads, chunks) - 1;
  if (helpers <= 0) return fn(0, total);
  auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
  std::make_shared<Chunks>(pool, total, chunks, helpers, &fn)->Run();
}

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_THREADS_H_
