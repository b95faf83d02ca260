// Large pages for tables.

#ifndef TFRS_EMBED_KERNELS_CC_HUGE_PAGES_H_
#define TFRS_EMBED_KERNELS_CC_HUGE_PAGES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace tfrs_embed {

// Where a table's rows are.
struct Memory {
  uintptr_t begin, end;
};

// Rows are read in no order, each from a page that the processor has to find
// first: of 4 KiB there are more than it remembers, of 2 MiB there are not.
// Linux gathers the pages of large tables, and of small ones that lie side by
// side, here, one after the other; where it can't, nothing happens.
inline void UseHugePages(std::vector<Memory> tables) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 2 << 20;
  constexpr uintptr_t kLeast = 4 * kPage;
  std::sort(tables.begin(), tables.end(),
            [](const Memory& a, const Memory& b) { return a.begin < b.begin; });
  for (size_t t = 0; t < tables.size();) {
    // Tables without a gap of a page, which something else is in.
    const uintptr_t begin = tables[t].begin;
    uintptr_t end = tables[t].end, used = 0;
    for (; t < tables.size() && tables[t].begin < end + kPage; ++t) {
      used += tables[t].end - tables[t].begin;
      end = std::max(end, tables[t].end);
    }
    const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
    const uintptr_t last = end / kPage * kPage;
    // What is between them comes with them: not more than they are.
    if (last < first + kLeast || used < (end - begin) / 2) continue;
    constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1.
    void* pages = reinterpret_cast<void*>(first);
    if (madvise(pages, last - first, MADV_HUGEPAGE) == 0) {
      madvise(pages, last - first, kCollapse);
    }
  }
#endif
}

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_HUGE_PAGES_H_
