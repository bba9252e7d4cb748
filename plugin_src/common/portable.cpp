// What newer compilers put into headers as calls into libstdc++ and glibc that manylinux_2_28 does not have, for releases that
// are built on a newer system (.ci/release): with GCC 8's libstdc++ and glibc 2.28 the libraries load too.
#include <new>
#include <sstream>

namespace std {
#if _GLIBCXX_RELEASE >= 11
void __throw_bad_array_new_length() { throw bad_array_new_length(); }  // GLIBCXX_3.4.29
#endif
template basic_stringstream<char>::basic_stringstream();  // GLIBCXX_3.4.26
template basic_ostringstream<char>::basic_ostringstream();
}  // namespace std

extern "C" {
// glibc 2.32: whether reference counts need no atomics. They are used here.
__attribute__((visibility("hidden"))) extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}
