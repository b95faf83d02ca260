// Large pages for large tables.

#ifndef TFRS_EMBED_KERNELS_CC_HUGE_PAGES_H_
#define TFRS_EMBED_KERNELS_CC_HUGE_PAGES_H_

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace tfrs_embed {

// Rows are read in no order, each from a page that the processor has to find
// first: of 4 KiB there are more than it remembers, of 2 MiB there are not.
// Linux gathers a table's pages here, one after the other; where it can't,
// nothing happens.
inline void UseHugePages(const void* data, size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 2 << 20;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t end = (begin + bytes) / kPage * kPage;
  if (end < first + 4 * kPage) return;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1.
  void* pages = reinterpret_cast<void*>(first);
  if (madvise(pages, end - first, MADV_HUGEPAGE) == 0) {
    madvise(pages, end - first, kCollapse);
  }
#endif
}

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_HUGE_PAGES_H_
