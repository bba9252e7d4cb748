// Loads and stores of N consecutive elements, in the accumulation type. N * sizeof(T) is 16 or 8 bytes, or N is 1.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "types.h"

namespace gnnfast {

template <class T>
constexpr int kVec = 16 / sizeof(T);

// Calls f with the C++ type that stores `dtype` on the device.
template <class F>
void dispatch_cuda(DType dtype, const F& f) {
  switch (dtype) {
    case kFloat:
      return f(Type<float>{});
    case kDouble:
      return f(Type<double>{});
    case kHalf:
      return f(Type<__half>{});
    case kBFloat16:
      return f(Type<__nv_bfloat16>{});
  }
}

__device__ inline float to_acc(float v) { return v; }
__device__ inline double to_acc(double v) { return v; }
__device__ inline float to_acc(__half v) { return __half2float(v); }
__device__ inline float to_acc(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
__device__ inline T from_acc(acc_t<T> v) {
  return static_cast<T>(v);
}
template <>
__device__ inline __half from_acc<__half>(float v) {
  return __float2half(v);
}
template <>
__device__ inline __nv_bfloat16 from_acc<__nv_bfloat16>(float v) {
  return __float2bfloat16(v);
}

// The nearest value that T can hold.
template <class T>
__device__ inline acc_t<T> round_to(acc_t<T> v) {
  return to_acc(from_acc<T>(v));
}

// What an edge adds to a gradient that goes to those whose message is the maximum or minimum `best` of the row. Where that is
// NaN torch counts no edge and gives each 0 times infinity.
template <class A>
__device__ inline A share_of_best(A message, A best, A share) {
  return message == best ? share : best == best ? 0 * share : best;
}

// Storage of N elements in one register load.
template <class T, int N>
struct Raw {
  static_assert(N == 1 || N * sizeof(T) == 16 || N * sizeof(T) == 8);
  using Bits = std::conditional_t<N == 1, T, std::conditional_t<N * sizeof(T) == 16, uint4, uint2>>;
  Bits bits;

  // Volatile, so that the compiler issues all loads of a step before it waits for the first.
  __device__ void load(const T* p) {
    if constexpr (sizeof(Bits) == 16)
      asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                   : "l"(p));
    else if constexpr (N > 1)
      asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(bits.x), "=r"(bits.y) : "l"(p));
    else
      bits = __ldg(p);
  }
  __device__ acc_t<T> get(int i) const { return to_acc(reinterpret_cast<const T*>(&bits)[i]); }
};

template <int N, class T>
__device__ inline void load_vector(acc_t<T> (&v)[N], const T* p) {
  Raw<T, N> raw;
  raw.load(p);
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = raw.get(i);
}

template <int N, class T>
__device__ inline void store_vector(T* p, const acc_t<T> (&v)[N]) {
  Raw<T, N> raw;
  T* elements = reinterpret_cast<T*>(&raw.bits);
#pragma unroll
  for (int i = 0; i < N; ++i) elements[i] = from_acc<T>(v[i]);
  *reinterpret_cast<typename Raw<T, N>::Bits*>(p) = raw.bits;
}

// N int32, N a multiple of 4, or 1.
template <int N>
__device__ inline void load_ints(int32_t (&v)[N], const int32_t* p) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const int4 raw = __ldg(reinterpret_cast<const int4*>(p + i));
      v[i] = raw.x, v[i + 1] = raw.y, v[i + 2] = raw.z, v[i + 3] = raw.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = __ldg(p + i);
  }
}

inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace gnnfast
