// The one prologue of every CUDA op: device guard, torch's current stream, grid size, launch check.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

#include "dtype.h"
#include "types.h"

namespace gnnfast {

constexpr int kBlock = 256;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct Launch {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  explicit Launch(const Tensor& t) : guard(t.get_device_index()), stream(current_stream(t.get_device_index())) {}

  static cudaStream_t current_stream(int32_t device) {
    void* s = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &s));
    return static_cast<cudaStream_t>(s);
  }
};

// Work items of a schedule: all, pieces, those for a block, those for a warp.
__device__ inline int4 count_items(const Csr& a) {
  if (a.counts) return __ldg(reinterpret_cast<const int4*>(a.counts));
  return make_int4(static_cast<int>(a.num_items), static_cast<int>(a.num_pieces), static_cast<int>(a.num_block_items),
                   static_cast<int>(a.num_warp_items));
}

// Blocks for `threads` threads in total. The x dimension of a grid holds 2^31 - 1 blocks, more than any int32 graph needs, so
// kernels that use this need no grid-stride loop.
inline unsigned blocks_for(int64_t threads) {
  const int64_t blocks = (threads + kBlock - 1) / kBlock;
  GNNFAST_CHECK(blocks <= 2147483647, threads, " threads are more than one CUDA launch can start");
  return static_cast<unsigned>(blocks);
}

// Row and feature of an element: a 64-bit division takes as long as a thread's loads.
__device__ inline longlong2 row_and_feature(int64_t element, int64_t width) {
  if (((element | width) >> 32) == 0) {
    const uint32_t e = static_cast<uint32_t>(element), w = static_cast<uint32_t>(width), row = e / w;
    return make_longlong2(row, e - row * w);
  }
  const int64_t row = element / width;
  return make_longlong2(row, element - row * width);
}

}  // namespace gnnfast
