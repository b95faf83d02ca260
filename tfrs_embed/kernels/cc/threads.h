// An operation's work on TensorFlow's own threads.

#ifndef TFRS_EMBED_KERNELS_CC_THREADS_H_
#define TFRS_EMBED_KERNELS_CC_THREADS_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>

#include "chunks.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/threadpool.h"

namespace tfrs_embed {

// The number of TensorFlow's threads for an operation's own work.
inline int64_t NumThreads(tensorflow::OpKernelContext* ctx) {
  return ctx->device()->tensorflow_cpu_worker_threads()->num_threads;
}

// Runs fn(begin, end) over [0, total) on several threads, in parts that are
// worth waking a thread up. `cost` is the cost of one of the total, in cycles.
inline void ParallelFor(tensorflow::OpKernelContext* ctx, int64_t total,
                        int64_t cost, const Chunks::Function& fn) {
  constexpr int64_t kLeastCost = 40000;
  constexpr int64_t kChunksPerThread = 8;
  if (total <= 0) return;
  const int64_t threads = NumThreads(ctx);
  const int64_t most = threads * kChunksPerThread;
  const int64_t per_chunk =
      std::max<int64_t>({1, kLeastCost / std::max<int64_t>(1, cost),
                         (total + most - 1) / most});
  const int64_t chunks = (total + per_chunk - 1) / per_chunk;
  const int64_t helpers = std::min(threads, chunks) - 1;
  if (helpers <= 0) return fn(0, total);
  auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
  Chunks::Run(
      total, chunks, helpers,
      [pool](std::function<void()> run) { pool->Schedule(std::move(run)); },
      fn);
}

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_THREADS_H_
