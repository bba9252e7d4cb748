// Arithmetic of softmax on the device.
#pragma once

#include "vec.cuh"

namespace gnnfast {

__device__ inline float fast_exp(float v) { return __expf(v); }
__device__ inline double fast_exp(double v) { return exp(v); }

// A product that is rounded, and not part of a sum that follows: a score must have the same bits in each pass, or what is
// subtracted from a large one does not cancel.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// Four numbers of the accumulation type, in one or two loads.
template <class A>
__device__ inline void load_four(A (&v)[4], const A* p) {
  constexpr int N = 16 / sizeof(A);
#pragma unroll
  for (int i = 0; i < 4; i += N) {
    Raw<A, N> raw;
    raw.load(p + i);
#pragma unroll
    for (int k = 0; k < N; ++k) v[i + k] = raw.get(k);
  }
}

// Of two partial sums of exponentials, each less its maximum: the common maximum in `most`, and what each is multiplied by.
template <class A>
__device__ inline void merge_most(A& most, A other, A& mine, A& theirs) {
  const A top = max(most, other);  // of a number and NaN the number
  mine = most == top ? A{1} : fast_exp(most - top), theirs = other == top ? A{1} : fast_exp(other - top);
  most = top;
}

}  // namespace gnnfast
