// CUDA SpMM over COO (GAS). A group of lanes per edge reads the source row with 16-byte loads and updates the destination row
// by atomics in the accumulation type: sums by atomic add (four floats at once from sm_90 on), maxima by integer maximum of
// keys that sort as the floats do, which makes them the same from run to run.
#include <torch/csrc/stable/library.h>

#include "common/atomics.cuh"
#include "common/ids.cuh"
#include "common/launch.cuh"
#include "common/vec.cuh"
#include "spmm_coo.h"

namespace gnnfast {
namespace {

template <class T, class I, int OP, int VEC>
__global__ void __launch_bounds__(kBlock) spmm_coo_kernel(const SpmmCooArgs p, int lanes, longlong2* complaint) {
  using A = acc_t<T>;
  const int64_t thread = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  const int t = static_cast<int>(thread % lanes);
  const int64_t edge = min(thread / lanes, p.num_edges - 1), segment = p.width / p.heads;
  int64_t row = static_cast<const I*>(p.row)[edge], column = p.column ? static_cast<const I*>(p.column)[edge] : edge;
  const bool good_row = inside(row, p.num_rows), good = good_row && inside(column, p.num_cols);
  const bool mine = thread / lanes < p.num_edges, live = mine && good;
  if (mine && !good && t == 0) complain(complaint, good_row ? column : row, good_row ? p.num_cols : p.num_rows);
  if (p.num_cols == 0 || (OP != kCooSumAndDot && !live)) return;
  if (!good) row = column = 0;
  const T* x = static_cast<const T*>(p.x) + column * p.width;
  const T *self = static_cast<const T*>(p.self) + row * p.width, *weight = static_cast<const T*>(p.weight);
  A* out = static_cast<A*>(p.out) + row * p.width;
  const A sign = p.negate ? -1 : 1, share = p.x_degree ? static_cast<A>(max(__ldg(p.x_degree + column), 1)) : A{1};
  if (p.mean && t == 0) atomicAdd(p.degree + row, 1);
  for (int64_t h = 0; h < p.heads; ++h) {
    const A w = weight ? to_acc(__ldg(weight + edge * p.heads + h)) : A{1};
    A sum = 0;
    for (int64_t f = h * segment + int64_t{t} * VEC; f < (h + 1) * segment; f += int64_t{lanes} * VEC) {
      A v[VEC];
      load_vector<VEC>(v, x + f);
      if (p.x_degree) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[i] /= share;
      }
      if constexpr (OP == kCooSumAndDot) {
        A own[VEC];
        load_vector<VEC>(own, self + f);
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum += own[i] * v[i];
      }
      if (weight) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[i] *= w;
      }
      if constexpr (OP == kCooMax) {
        using K = typename Key<A>::type;
        K keys[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) keys[i] = to_key(sign * round_to<T>(v[i]));
        raise_to(reinterpret_cast<K*>(out + f), keys);
      } else if (live) {
        atomic_add<VEC>(out + f, v);
      }
    }
    if constexpr (OP == kCooSumAndDot) {
      for (int o = 1; o < lanes; o <<= 1) sum += __shfl_xor_sync(kAllLanes, sum, o);
      if (mine && t == 0) static_cast<T*>(p.dot)[edge * p.heads + h] = from_acc<T>(good ? sum : A{0});
    }
  }
}

// Divides sums by degrees, or turns keys back into numbers, N at a time.
template <class A, int N>
__global__ void __launch_bounds__(kBlock) finish_kernel(const SpmmCooArgs p) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x, vectors = p.width / N;
  if (i >= p.num_rows * vectors) return;
  using Bits = typename Raw<A, N>::Bits;
  Bits* out = static_cast<Bits*>(p.out) + i;
  Bits raw = *out;
  A* v = reinterpret_cast<A*>(&raw);
  const A share = p.mean ? static_cast<A>(max(p.degree[row_and_feature(i, vectors).x], 1)) : A{1};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const auto key = reinterpret_cast<const typename Key<A>::type*>(v)[n];
    v[n] = p.mean ? v[n] / share : key == 0 ? A{0} : p.negate ? -from_key(key) : from_key(key);
  }
  *out = raw;
}

template <class T, class I, int VEC>
void launch_coo(const SpmmCooArgs& p, cudaStream_t stream) {
  int lanes = 1;
  while (lanes < kWarp && lanes * VEC < p.width / p.heads) lanes *= 2;
  const unsigned grid = blocks_for(p.num_edges * lanes);
  longlong2* complaint = complaints();
  if (p.op == kCooSum) spmm_coo_kernel<T, I, kCooSum, VEC><<<grid, kBlock, 0, stream>>>(p, lanes, complaint);
  if (p.op == kCooMax) spmm_coo_kernel<T, I, kCooMax, VEC><<<grid, kBlock, 0, stream>>>(p, lanes, complaint);
  if (p.op == kCooSumAndDot) spmm_coo_kernel<T, I, kCooSumAndDot, VEC><<<grid, kBlock, 0, stream>>>(p, lanes, complaint);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if ((p.mean || p.op == kCooMax) && p.width > 0) {
    constexpr int N = VEC == 1 ? 1 : kVec<acc_t<T>>;
    finish_kernel<acc_t<T>, N><<<blocks_for(p.num_rows * p.width / N), kBlock, 0, stream>>>(p);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

}  // namespace

void Cuda::spmm_coo(const SpmmCooArgs& args, const Tensor& x) {
  const Launch launch(x);
  // Without the dispatcher, whose share of a small graph's time would be twice that of the kernel.
  if (args.out_bytes) STD_CUDA_CHECK(cudaMemsetAsync(args.out, 0, args.out_bytes, launch.stream));
  if (args.mean) STD_CUDA_CHECK(cudaMemsetAsync(args.degree, 0, args.num_rows * sizeof(int32_t), launch.stream));
  if (args.num_edges == 0) return;
  dispatch_cuda(dtype_of("x", x), [&](auto type) {
    using T = typename decltype(type)::type;
    const bool vectors = args.width / args.heads % kVec<T> == 0 && aligned16(args.x) && aligned16(args.self);
    if (vectors)
      args.index64 ? launch_coo<T, int64_t, kVec<T>>(args, launch.stream)
                   : launch_coo<T, int32_t, kVec<T>>(args, launch.stream);
    else
      args.index64 ? launch_coo<T, int64_t, 1>(args, launch.stream) : launch_coo<T, int32_t, 1>(args, launch.stream);
  });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("spmm_coo", TORCH_BOX(&spmm_coo<Cuda>));
  m.impl("spmm_coo_backward", TORCH_BOX(&spmm_coo_backward<Cuda>));
}

}  // namespace gnnfast
