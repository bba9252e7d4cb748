// Whether functions of Python run the code that they did when somebody looked. A layer asks that of tens of functions in each
// call. Asked for as attributes, each code would be an event for audit hooks and a reference counted in memory of its own,
// which after a backward pass is in no cache.

#include <cstdint>

namespace gnnfast {

// Of arrays of words as ctypes makes them, with the GIL: PyFunction_GetCode, how many functions there are, and each function,
// which somebody holds, with its code. Nothing of Python is linked, so that one library serves all of its releases.
extern "C" __attribute__((visibility("default"))) int gnnfast_same_codes(const uintptr_t* words) {
  const auto code_of = reinterpret_cast<uintptr_t (*)(uintptr_t)>(words[0]);
  const uintptr_t* const end = words + 2 + 2 * words[1];
  for (const uintptr_t* word = words + 2; word != end; word += 2)
    if (code_of(word[0]) != word[1]) return 0;
  return 1;
}

}  // namespace gnnfast
