// Chooses the loops for the machine that runs.

#include <cstring>

#include "rows.h"

const TfrsLoops* tfrs_loops(const char* name) {
  auto wanted = [name](const TfrsLoops* loops) {
    return name == nullptr || *name == '\0' ||
           std::strcmp(name, loops->name) == 0;
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  // Processors without the last of these extensions lower their frequency when
  // vectors are 512 bits wide, and that slows down all that runs on them.
  const bool avx512 = __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vbmi2");
  if (avx512 && wanted(tfrs_loops_avx512())) return tfrs_loops_avx512();
  if (__builtin_cpu_supports("avx2") && wanted(tfrs_loops_avx2())) {
    return tfrs_loops_avx2();
  }
#else
  (void)wanted;
#endif
  // Every x86-64 has SSE2, and every 64-bit Arm NEON.
  return tfrs_loops_baseline();
}
