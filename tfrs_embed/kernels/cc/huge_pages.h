// Huge pages for tables.

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

// The memory of a table.
struct Memory {
  uintptr_t begin, end;
};

// Asks Linux to put tables into pages of 2 MiB. Rows are read in random order,
// and the processor has to find the page of each: it remembers too few pages of
// 4 KiB, but enough huge ones. Small tables that lie side by side are taken
// together. Where Linux can't do this, nothing happens. Memory that was written
// before is copied into huge pages, in seconds for each GiB that has none.
inline void UseHugePages(std::vector<Memory> tables, bool written) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 2 << 20;
  constexpr uintptr_t kLeast = 4 * kPage;
  std::sort(tables.begin(), tables.end(),
            [](const Memory& a, const Memory& b) { return a.begin < b.begin; });
  for (size_t t = 0; t < tables.size();) {
    // A run of tables with gaps of less than a page between them.
    const uintptr_t begin = tables[t].begin;
    uintptr_t end = tables[t].end, used = 0;
    for (; t < tables.size() && tables[t].begin < end + kPage; ++t) {
      used += tables[t].end - tables[t].begin;
      end = std::max(end, tables[t].end);
    }
    const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
    const uintptr_t last = end / kPage * kPage;
    // The memory in the gaps gets huge pages too: no more of it than of tables.
    if (last < first + kLeast || used < (end - begin) / 2) continue;
    constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1.
    void* pages = reinterpret_cast<void*>(first);
    if (madvise(pages, last - first, MADV_HUGEPAGE) == 0 && written) {
      madvise(pages, last - first, kCollapse);
    }
  }
#endif
}

}  // namespace tfrs_embed

#endif  // TFRS_EMBED_KERNELS_CC_HUGE_PAGES_H_
