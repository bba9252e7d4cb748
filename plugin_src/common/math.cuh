// Arithmetic of softmax on the device.
#pragma once

#include "vec.cuh"

namespace gnnfast {

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
  mine = most == top ? A{1} : exp(most - top), theirs = other == top ? A{1} : exp(other - top);
  most = top;
}

}  // namespace gnnfast
