// Sums and maxima by atomics, of N consecutive numbers. Maxima are those of integers that sort as the numbers do, the same from
// run to run.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

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

// Looks first, past the SM's own cache: of a large group few rows are above what is there by then, and atomics of one address
// follow each other. A look that comes too early only costs an atomic.
template <class K>
__device__ inline void raise_to(K* at, K key, K seen) {
  if (key > seen) atomicMax(at, key);
}
template <class K>
__device__ inline void raise_to(K* at, K key) {
  raise_to(at, key, __ldcg(at));
}
template <int N, class K>
__device__ inline void raise_to(K* at, const K (&keys)[N]) {
  if constexpr (N == 1) {
    raise_to(at, keys[0]);
  } else {
    using V = std::conditional_t<sizeof(K) == 8, ulonglong2, uint4>;  // of whole keys
    constexpr int M = sizeof(V) / sizeof(K);
#pragma unroll
    for (int i = 0; i < N; i += M) {
      const V seen = __ldcg(reinterpret_cast<const V*>(at + i));
#pragma unroll
      for (int j = 0; j < M; ++j) raise_to(at + i + j, keys[i + j], reinterpret_cast<const K*>(&seen)[j]);
    }
  }
}

// Four floats at once from sm_90 on.
template <int N, class A>
__device__ inline void atomic_add(A* p, const A (&v)[N]) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kFour = N % 4 == 0 && sizeof(A) == 4;
#else
  constexpr bool kFour = false;
#endif
  if constexpr (kFour) {
#pragma unroll
    for (int i = 0; i < N; i += 4) atomicAdd(reinterpret_cast<float4*>(p + i), make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) atomicAdd(p + i, v[i]);
  }
}

}  // namespace gnnfast
