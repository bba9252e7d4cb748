// CUDA kernels on sparse features. In the product a warp owns a slab of the columns of one output row (or of a piece of a long
// one) in shared memory. It takes the edges in order; the lanes read the stored entries of the source's row, whose columns
// differ, so that they never add to one place at once: no atomics, and the same sums from run to run. Neighbouring warps own
// the slabs of the same row and so find the indices in L1. Pieces of long rows go to a workspace, which a second kernel
// combines.
//
// Bytes that must move: width * sizeof(T) a row (the result), and 4 + sizeof(T) an edge and stored entry, mostly from L2.
#include <torch/csrc/stable/library.h>

#include "common/launch.cuh"
#include "common/vec.cuh"
#include "sparse_features.h"

namespace gnnfast {
namespace {

constexpr int kThreads = 128;  // a small block: shared memory is given to blocks, and none should wait for a long row
constexpr int kSlabBytes =
    8192;                  // of shared memory a warp: large slabs read the entries less often, small ones let more warps in
constexpr int kAhead = 4;  // edges whose entries are in flight together
constexpr int kEach = 2;   // entries of an edge a lane reads at once

// N accumulators in shared memory, read by 16 bytes where there are so many.
template <class A, int N>
struct alignas(N * sizeof(A) < 16 ? N * sizeof(A) : 16) Accumulators {
  A v[N];
};

template <class T, int VEC>
__global__ void __launch_bounds__(kThreads)
    features_kernel(const SparseFeaturesArgs p, acc_t<T>* pieces, int slab, int64_t slabs) {
  using A = acc_t<T>;
  extern __shared__ uint4 shared[];
  const int lane = threadIdx.x % kWarp;
  const int64_t warp = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp, id = warp / slabs;
  if (id >= p.a.num_items) return;
  A* acc = reinterpret_cast<A*>(shared) + threadIdx.x / kWarp * slab;
  const int c0 = static_cast<int>(warp % slabs) * slab, size = static_cast<int>(min(int64_t{slab}, p.width - c0));
  for (int i = lane; i < slab * static_cast<int>(sizeof(A)) / 16; i += kWarp) reinterpret_cast<uint4*>(acc)[i] = uint4{};
  __syncwarp();

  const int4 item = __ldg(reinterpret_cast<const int4*>(p.a.schedule) + id);
  const T *weight = static_cast<const T*>(p.weight), *xval = static_cast<const T*>(p.xval);
  const int64_t last = p.stored - 1;
  for (int first = item.y; first < item.z; first += kWarp) {
    const int slot = min(first + lane, item.z - 1), source = __ldg(p.a.col + slot);
    const A w = weight ? to_acc(__ldg(weight + (p.a.perm ? __ldg(p.a.perm + slot) : slot))) : A{1};
    const int begin = __ldg(p.xrowptr + source), end = first + lane < item.z ? __ldg(p.xrowptr + source + 1) : begin;
    const int edges = min(kWarp, item.z - first);
    for (int e = 0; e < edges; e += kAhead) {
      int at[kAhead], stop[kAhead], longest = 0;
      A factor[kAhead];
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        at[q] = __shfl_sync(kAllLanes, begin, e + q);
        stop[q] = __shfl_sync(kAllLanes, end, e + q);
        factor[q] = __shfl_sync(kAllLanes, w, e + q);
        longest = max(longest, stop[q] - at[q]);
      }
      for (int base = 0; base < longest; base += kWarp * kEach) {
        int c[kAhead][kEach];
        A v[kAhead][kEach];
#pragma unroll
        for (int q = 0; q < kAhead; ++q)
#pragma unroll
          for (int s = 0; s < kEach; ++s) {
            // No load behind a condition: all are issued before the first is waited for.
            const int64_t k = int64_t{at[q]} + base + s * kWarp + lane, safe = min(k, last);
            c[q][s] = __ldg(p.xcol + safe) - c0;
            v[q][s] = to_acc(__ldg(xval + safe));
            if (k >= stop[q]) c[q][s] = -1;
          }
#pragma unroll
        for (int q = 0; q < kAhead; ++q) {
#pragma unroll
          for (int s = 0; s < kEach; ++s)
            if (static_cast<unsigned>(c[q][s]) < static_cast<unsigned>(size)) acc[c[q][s]] += factor[q] * v[q][s];
          __syncwarp();  // the next edge may have the same columns
        }
      }
    }
  }

  if (id < p.a.num_pieces) {
    for (int i = lane; i < size; i += kWarp) pieces[id * p.width + c0 + i] = acc[i];
    return;
  }
  T* out = static_cast<T*>(p.out) + item.x * p.width + c0;
  const A degree = p.mean ? static_cast<A>(max(item.z - item.y, 1)) : A{1};
  for (int i = lane * VEC; i < size; i += kWarp * VEC) {
    Accumulators<A, VEC> sums = *reinterpret_cast<const Accumulators<A, VEC>*>(acc + i);
    Raw<T, VEC> raw;
#pragma unroll
    for (int n = 0; n < VEC; ++n) reinterpret_cast<T*>(&raw.bits)[n] = from_acc<T>(p.mean ? sums.v[n] / degree : sums.v[n]);
    // Evict first: the result is larger than L2, which the entries of X should have to themselves.
    __stcs(reinterpret_cast<typename Raw<T, VEC>::Bits*>(out + i), raw.bits);
  }
}

// A thread per piece and column; that of a row's first piece adds up the row.
template <class T>
__global__ void __launch_bounds__(kBlock) combine_kernel(const SparseFeaturesArgs p, const acc_t<T>* pieces) {
  using A = acc_t<T>;
  const int64_t thread = int64_t{blockIdx.x} * kBlock + threadIdx.x, id = thread / p.width, f = thread % p.width;
  if (id >= p.a.num_pieces) return;
  const int4 item = __ldg(reinterpret_cast<const int4*>(p.a.schedule) + id);
  if (item.w <= 0) return;
  A sum = 0;
  for (int64_t piece = id; piece < id + item.w; ++piece) sum += pieces[piece * p.width + f];
  const A degree = static_cast<A>(__ldg(p.a.rowptr + item.x + 1) - __ldg(p.a.rowptr + item.x));
  static_cast<T*>(p.out)[item.x * p.width + f] = from_acc<T>(p.mean ? sum / degree : sum);
}

// A thread per stored entry. Its row is found by bisection, so that rows of any length keep all threads busy.
template <class T>
__global__ void __launch_bounds__(kBlock) values_kernel(const SparseFeaturesArgs p) {
  using A = acc_t<T>;
  const int64_t k = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (k >= p.stored) return;
  int64_t row = 0, above = p.a.num_rows;  // xrowptr[row] <= k < xrowptr[above]
  while (above - row > 1) {
    const int64_t middle = (row + above) / 2;
    (__ldg(p.xrowptr + middle) <= k ? row : above) = middle;
  }
  const T *grad = static_cast<const T*>(p.grad) + __ldg(p.xcol + k), *weight = static_cast<const T*>(p.weight);
  A sum = 0;
  const int end = __ldg(p.a.rowptr + row + 1);
#pragma unroll 4
  for (int e = __ldg(p.a.rowptr + row); e < end; ++e) {
    const A w = weight ? to_acc(__ldg(weight + (p.a.perm ? __ldg(p.a.perm + e) : e))) : A{1};
    sum += w * to_acc(__ldg(grad + __ldg(p.a.col + e) * p.width));
  }
  static_cast<T*>(p.out)[k] = from_acc<T>(sum);
}

// A warp per item of the schedule, or eight where it has a block's edges; edge by edge, so that the row it holds comes from L1.
template <class T>
__global__ void __launch_bounds__(kBlock) edges_kernel(const SparseFeaturesArgs p) {
  using A = acc_t<T>;
  constexpr int kWarps = kBlock / kWarp;
  const int64_t warp = (int64_t{blockIdx.x} * kBlock + threadIdx.x) / kWarp, shared = p.a.num_block_items * kWarps;
  const int64_t id = warp < shared ? warp / kWarps : p.a.num_block_items + warp - shared;
  if (id >= p.a.num_items) return;
  const int lane = threadIdx.x % kWarp, stride = warp < shared ? kWarps : 1;
  const int4 item = __ldg(reinterpret_cast<const int4*>(p.a.schedule) + id);
  const T *grad = static_cast<const T*>(p.grad) + item.x * p.width, *xval = static_cast<const T*>(p.xval);
  for (int e = item.y + (warp < shared ? static_cast<int>(warp % kWarps) : 0); e < item.z; e += stride) {
    const int source = __ldg(p.a.col + e), end = __ldg(p.xrowptr + source + 1);
    A sum = 0;
#pragma unroll 2
    for (int k = __ldg(p.xrowptr + source) + lane; k < end; k += kWarp)
      sum += to_acc(__ldg(xval + k)) * to_acc(__ldg(grad + __ldg(p.xcol + k)));
    for (int o = 1; o < kWarp; o <<= 1) sum += __shfl_xor_sync(kAllLanes, sum, o);
    if (lane == 0) static_cast<T*>(p.out)[p.a.perm ? __ldg(p.a.perm + e) : e] = from_acc<T>(sum);
  }
}

template <class T, int VEC>
void launch_features(const SparseFeaturesArgs& p, acc_t<T>* pieces, cudaStream_t stream) {
  constexpr int kMost = kSlabBytes / sizeof(acc_t<T>), kWarps = kThreads / kWarp;
  // Slabs of equal size, in whole 16-byte vectors of any dtype.
  const int64_t slabs = (p.width + kMost - 1) / kMost, slab = ((p.width + slabs - 1) / slabs + 15) / 16 * 16;
  const int64_t blocks = (p.a.num_items * slabs + kWarps - 1) / kWarps;
  STD_TORCH_CHECK(blocks <= 2147483647, "gnnfast: ", p.a.num_rows, " rows of ", p.width,
                  " features are more than one CUDA launch "
                  "can make; split the features");
  const size_t bytes = kWarps * slab * sizeof(acc_t<T>);  // at most 4 * 8 KB, below the 48 KB that need no permission
  features_kernel<T, VEC><<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(p, pieces, static_cast<int>(slab), slabs);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (p.a.num_pieces > 0) {
    combine_kernel<T><<<blocks_for(p.a.num_pieces * p.width), kBlock, 0, stream>>>(p, pieces);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

}  // namespace

void Cuda::sparse_features(const SparseFeaturesArgs& args, const Tensor& ref) {
  const Launch launch(ref);
  std::optional<Tensor> workspace;  // freed in stream order when this returns
  if (args.op == kFeatures && args.a.num_pieces > 0)
    workspace = make_empty(ref, {args.a.num_pieces, args.width}, acc_dtype(ref.scalar_type()));
  dispatch_cuda(dtype_of("features", ref), [&](auto type) {
    using T = typename decltype(type)::type;
    if (args.op == kFeatures) {
      auto* pieces = workspace ? static_cast<acc_t<T>*>(workspace->mutable_data_ptr()) : nullptr;
      return args.width % kVec<T> == 0 && aligned16(args.out) ? launch_features<T, kVec<T>>(args, pieces, launch.stream)
                                                              : launch_features<T, 1>(args, pieces, launch.stream);
    }
    if (args.op == kValues) {
      values_kernel<T><<<blocks_for(args.stored), kBlock, 0, launch.stream>>>(args);
    } else {
      const int64_t warps = args.a.num_items + args.a.num_block_items * (kBlock / kWarp - 1);
      edges_kernel<T><<<blocks_for(warps * kWarp), kBlock, 0, launch.stream>>>(args);
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) { GNNFAST_IMPL_SPARSE_FEATURES(m, Cuda); }

}  // namespace gnnfast
