// Included before all else in the builds that wheels carry: it makes them ask
// for functions as old systems have them, which new ones keep for programs like
// this. What it can't ask for by an older name is in old_symbols.cc.

#ifndef TFRS_EMBED_TOOLS_WHEELS_OLD_SYMBOLS_H_
#define TFRS_EMBED_TOOLS_WHEELS_OLD_SYMBOLS_H_

#if defined(__x86_64__)
// glibc 2.27 and 2.29 only dropped a wrapper that sets errno; the numbers are
// the same.
__asm__(".symver pow, pow@GLIBC_2.2.5");
__asm__(".symver powf, powf@GLIBC_2.2.5");
// GCC 12 only added noexcept.
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif

#endif  // TFRS_EMBED_TOOLS_WHEELS_OLD_SYMBOLS_H_
