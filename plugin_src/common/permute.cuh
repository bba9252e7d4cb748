// Edge values in another order of the edges.
#pragma once

#include "launch.cuh"

namespace gnnfast {

constexpr int kPermuteEach = 4;  // values a thread moves: their reads are in flight together

template <class T>
__global__ void __launch_bounds__(kBlock) permute_kernel(const T* in, const int32_t* index, T* out, int64_t count, int heads) {
  const int64_t first = int64_t{blockIdx.x} * kBlock * kPermuteEach + threadIdx.x;
  int64_t from[kPermuteEach];
#pragma unroll
  for (int i = 0; i < kPermuteEach; ++i) {
    const int64_t at = min(first + i * kBlock, count - 1);
    from[i] = heads == 1 ? __ldcs(index + at) : int64_t{__ldg(index + at / heads)} * heads + at % heads;
  }
  T value[kPermuteEach];
#pragma unroll
  for (int i = 0; i < kPermuteEach; ++i) value[i] = in[from[i]];
#pragma unroll
  for (int i = 0; i < kPermuteEach; ++i)
    if (first + i * kBlock < count) out[first + i * kBlock] = value[i];
}

// out[i, h] = in[index[i], h] for i < count > 0.
template <class T>
void permute(const void* in, const int32_t* index, void* out, int64_t count, int64_t heads, cudaStream_t stream) {
  const unsigned grid = blocks_for((count * heads + kPermuteEach - 1) / kPermuteEach);
  permute_kernel<T><<<grid, kBlock, 0, stream>>>(static_cast<const T*>(in), index, static_cast<T*>(out), count * heads,
                                                 static_cast<int>(heads));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gnnfast
