// What newer systems' libraries have and older ones lack, for the builds that
// wheels carry. All of it is hidden: no other library sees it.

#include <new>

// glibc 2.32 says here that a process has one thread yet, which lets counters of
// references be changed without a lock. TensorFlow's processes have many.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace std {

// libstdc++ 11 throws from here what older headers throw in place. Nothing that
// the kernels throw leaves them.
__attribute__((visibility("hidden"))) void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}

}  // namespace std
