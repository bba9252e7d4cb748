// The instruction set the CPU kernels run with: the best that was compiled and that this processor has, or a lesser one named
// by the environment variable GNNFAST_ISA (baseline, avx2, avx512), for tests and bug hunts.
#pragma once

#include <cstdlib>
#include <cstring>

namespace gnnfast {

enum class Isa { kBaseline, kAvx2, kAvx512 };

inline Isa find_isa() {
#if defined(GNNFAST_X86)
  const char* wish = std::getenv("GNNFAST_ISA");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (wish && std::strcmp(wish, "baseline") == 0) return Isa::kBaseline;
  if (avx512 && !(wish && std::strcmp(wish, "avx2") == 0)) return Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

inline Isa isa() {
  static const Isa found = find_isa();
  return found;
}

inline const char* isa_name() { return isa() == Isa::kAvx512 ? "avx512" : isa() == Isa::kAvx2 ? "avx2" : "baseline"; }

#if defined(GNNFAST_X86)
#define GNNFAST_CALL_ISA(function, ...)       \
  switch (isa()) {                            \
    case Isa::kAvx512:                        \
      return avx512::function(__VA_ARGS__);   \
    case Isa::kAvx2:                          \
      return avx2::function(__VA_ARGS__);     \
    default:                                  \
      return baseline::function(__VA_ARGS__); \
  }
#else
#define GNNFAST_CALL_ISA(function, ...) return baseline::function(__VA_ARGS__)
#endif

}  // namespace gnnfast
