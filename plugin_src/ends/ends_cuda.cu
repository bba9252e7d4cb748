// CUDA kernels of the ops of ends. Bytes that must move: E * F * sizeof(T) written, as many read for each end, mostly from the
// L2, and the ids. torch's index_select has a block for each row: 0.6 ns an edge on an H200 however narrow rows are.
#include <torch/csrc/stable/library.h>

#include "common/ids.cuh"
#include "common/launch.cuh"
#include "common/vec.cuh"
#include "ends.h"

namespace gnnfast {
namespace {

constexpr int kFlight = 4;  // vectors of a thread, all of which are asked for before the first is waited for

template <class T, class I, int VEC, EndsOp OP>
__global__ void __launch_bounds__(kBlock) ends_kernel(const EndsArgs p, int64_t vectors, longlong2* complaint) {
  const T *a = static_cast<const T*>(p.a), *b = static_cast<const T*>(p.b);
  const int64_t first = int64_t{blockIdx.x} * kBlock * kFlight + threadIdx.x, of_row = p.width / VEC;
  Raw<T, VEC> left[kFlight], right[kFlight];
  bool exists[kFlight];
#pragma unroll
  for (int k = 0; k < kFlight; ++k) {
    const longlong2 at = row_and_feature(min(first + k * kBlock, vectors - 1), of_row);
    const int64_t row = __ldg(static_cast<const I*>(p.row) + at.x);
    exists[k] = inside(row, p.num_rows);
    if (!exists[k]) complain(complaint, row, p.num_rows);
    left[k].load(a + (exists[k] ? row : 0) * p.width + at.y * VEC);
    if constexpr (OP != kGather) {
      const int64_t column = __ldg(static_cast<const I*>(p.column) + at.x);
      const bool known = inside(column, p.num_cols);
      if (!known) complain(complaint, column, p.num_cols);
      right[k].load(b + (known ? column : 0) * p.width + at.y * VEC);
      exists[k] &= known;
    }
  }
#pragma unroll
  for (int k = 0; k < kFlight; ++k) {
    if (first + k * kBlock >= vectors) return;
    acc_t<T> found[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      found[i] = left[k].get(i);
      if constexpr (OP == kAdd) found[i] += right[k].get(i);
      if constexpr (OP == kSubtract) found[i] -= right[k].get(i);
      if constexpr (OP == kMultiply) found[i] *= right[k].get(i);
      if (!exists[k]) found[i] = 0;
    }
    store_vector<VEC>(static_cast<T*>(p.out) + (first + k * kBlock) * VEC, found);
  }
}

template <class T, class I, int VEC>
void launch_ends(const EndsArgs& p, cudaStream_t stream) {
  const int64_t vectors = p.num_edges * p.width / VEC;
  const unsigned blocks = blocks_for((vectors + kFlight - 1) / kFlight);
  longlong2* at = complaints();
  auto of_op = [&](auto op) {
    ends_kernel<T, I, VEC, EndsOp{decltype(op)::value}><<<blocks, kBlock, 0, stream>>>(p, vectors, at);
  };
  switch (p.op) {
    case kAdd:
      of_op(Int<kAdd>{});
      break;
    case kSubtract:
      of_op(Int<kSubtract>{});
      break;
    case kMultiply:
      of_op(Int<kMultiply>{});
      break;
    case kGather:
      of_op(Int<kGather>{});
      break;
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void Cuda::ends(const EndsArgs& p, const Tensor& a) {
  const Launch launch(a);
  dispatch_cuda(dtype_of("a", a), [&](auto type) {
    using T = typename decltype(type)::type;
    auto of_ids = [&](auto index) {
      using I = typename decltype(index)::type;
      // The widest vectors that rows consist of, of 16 bytes or of 8, wherever arrays begin.
      const int64_t bytes = p.width * sizeof(T) | reinterpret_cast<uintptr_t>(p.a) | reinterpret_cast<uintptr_t>(p.b);
      if (bytes % 16 == 0) return launch_ends<T, I, kVec<T>>(p, launch.stream);
      if (bytes % 8 == 0) return launch_ends<T, I, kVec<T> / 2>(p, launch.stream);
      launch_ends<T, I, 1>(p, launch.stream);
    };
    p.index64 ? of_ids(Type<int64_t>{}) : of_ids(Type<int32_t>{});
  });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("gather_ends", TORCH_BOX(&gather_ends<Cuda>));
  m.impl("combine_ends", TORCH_BOX(&combine_ends<Cuda>));
}

}  // namespace gnnfast
