// Integers that sort as numbers do, so that atomic maxima of numbers are those of integers, the same from run to run.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace gnnfast {

// 0 is below every value and means "no edge"; NaN is above every value.
__device__ inline uint32_t to_key(float v) {
  const uint32_t bits = __float_as_uint(v);
  return v != v ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline unsigned long long to_key(double v) {
  const unsigned long long bits = __double_as_longlong(v), top = 1ull << 63;
  return v != v ? ~0ull : bits & top ? ~bits : bits | top;
}
__device__ inline float from_key(uint32_t key) {
  return __uint_as_float(key == 0xffffffffu ? 0x7fc00000u : key & 0x80000000u ? key ^ 0x80000000u : ~key);
}
__device__ inline double from_key(unsigned long long key) {
  const unsigned long long top = 1ull << 63;
  return __longlong_as_double(key == ~0ull ? 0x7ff8000000000000ull : key & top ? key ^ top : ~key);
}
template <class A>
struct Key {
  using type = uint32_t;
};
template <>
struct Key<double> {
  using type = unsigned long long;
};

}  // namespace gnnfast
