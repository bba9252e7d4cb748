// CUDA kernels on sparse features. In the product a group of 1 or 4 warps owns a slab of the columns of one output row (or of a
// piece of a long one) in shared memory; wide rows get 4, so that few slabs, which each read all entries, still leave many
// warps a multiprocessor. The group stages stored entries, times the weights of their edges, side by side in shared memory: all
// of them are read at once, whatever the lengths of the rows. Its first warp then adds them up edge by edge; the columns of an
// edge differ, so that its lanes never add to one place at once: no atomics, and the same sums from run to run. Pieces of long
// rows go to a workspace, which a second kernel combines.
//
// Bytes that must move: width * sizeof(T) a row (the result), and 4 + sizeof(T) an edge and stored entry, mostly from L2.
#include <torch/csrc/stable/library.h>

#include "common/launch.cuh"
#include "common/vec.cuh"
#include "sparse_features.h"

namespace gnnfast {
namespace {

constexpr int kThreads = 128;       // a small block: shared memory is given to blocks, and none should wait for a long row
constexpr int kNarrowBytes = 4096;  // accumulators of a row up to which one warp has it
constexpr int kSlabBytes = 36864;   // accumulators of a group of 4 warps, at most
constexpr int kEach = 4;            // entries a thread reads at once

// sum / degree, by a reciprocal and a correction: the result is mostly zeros, and a division of each would cost more than all
// else.
template <class A>
__device__ inline A divided(A sum, A degree, A reciprocal) {
  const A quotient = sum * reciprocal, rest = fma(-quotient, degree, sum);
  return rest == rest ? fma(rest, reciprocal, quotient) : quotient;  // infinities have no rest
}

template <int WARPS>
__device__ inline void sync_group() {
  if constexpr (WARPS == 1)
    __syncwarp();
  else
    __syncthreads();
}

// `slab` columns a group, a multiple of 16. Shared memory of each group: its accumulators, then values and columns of staged
// entries. Column 0 of the accumulators has the place within 16 bytes that it has in the result, so that both are accessed by
// 16 bytes whatever the width.
template <class T, int WARPS>
__global__ void __launch_bounds__(kThreads)
    features_kernel(const SparseFeaturesArgs p, acc_t<T>* pieces, int slab, int64_t slabs) {
  using A = acc_t<T>;
  constexpr int kGroup = WARPS * kWarp, kStage = kGroup * kEach;
  extern __shared__ uint4 shared[];
  const int lane = threadIdx.x % kWarp, t = threadIdx.x % kGroup;
  const int64_t group = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kGroup, id = group / slabs;
  if (id >= p.a.num_items) return;
  char* own =
      reinterpret_cast<char*>(shared) + threadIdx.x / kGroup * ((slab + 16) * sizeof(A) + kStage * (sizeof(A) + sizeof(int)));
  A *places = reinterpret_cast<A*>(own), *staged_value = places + slab + 16;
  int* staged_column = reinterpret_cast<int*>(staged_value + kStage);
  const int c0 = static_cast<int>(group % slabs) * slab, size = static_cast<int>(min(int64_t{slab}, p.width - c0));

  const int4 item = __ldg(reinterpret_cast<const int4*>(p.a.schedule) + id);
  const T *weight = static_cast<const T*>(p.weight), *xval = static_cast<const T*>(p.xval);
  T* out = static_cast<T*>(p.out) + item.x * p.width + c0;
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(out) % 16 / sizeof(T));
  A* acc = places + shift;
  for (int first = item.y; first == item.y || first < item.z; first += kWarp) {
    // An edge for each lane of every warp. `end` counts the entries of this and the edges before.
    int begin = 0, length = 0;
    A w = 1;
    if (first + lane < item.z) {
      const int slot = first + lane, source = __ldg(p.a.col + slot);
      if (weight) w = to_acc(__ldg(weight + (p.a.perm ? __ldg(p.a.perm + slot) : slot)));
      begin = __ldg(p.xrowptr + source), length = __ldg(p.xrowptr + source + 1) - begin;
    }
    if (first == item.y)  // while the first loads are on their way
      for (int i = t; i < (slab + 16) * static_cast<int>(sizeof(A)) / 16; i += kGroup)
        reinterpret_cast<uint4*>(places)[i] = uint4{};
    int end = length;
#pragma unroll
    for (int o = 1; o < kWarp; o <<= 1) {
      const int before = __shfl_up_sync(kAllLanes, end, o);
      if (lane >= o) end += before;
    }
    const int total = __shfl_sync(kAllLanes, end, kWarp - 1), start = begin - (end - length);

    for (int base = 0; base < total; base += kStage) {
      const int staged = min(total - base, kStage);
      int c[kEach];
      A v[kEach];
#pragma unroll
      for (int q = 0; q < kEach; ++q) {
        const int at = min(base + q * kGroup + t, total - 1);
        int edge = 0;  // the first with end > at
#pragma unroll
        for (int o = kWarp / 2; o > 0; o >>= 1)
          if (__shfl_sync(kAllLanes, end, edge + o - 1) <= at) edge += o;
        const int k = __shfl_sync(kAllLanes, start, edge) + at;
        c[q] = __ldg(p.xcol + k);
        v[q] = to_acc(__ldg(xval + k)) * __shfl_sync(kAllLanes, w, edge);
      }
      sync_group<WARPS>();  // what was staged before is added up, and the accumulators are zero
#pragma unroll
      for (int q = 0; q < kEach; ++q) staged_column[q * kGroup + t] = c[q] - c0, staged_value[q * kGroup + t] = v[q];
      sync_group<WARPS>();
      if (t >= kWarp) continue;
      for (int edge = 0, from = 0; from < staged; ++edge) {
        const int to = min(__shfl_sync(kAllLanes, end, edge) - base, staged);
        for (int i = from + lane; i < to; i += 2 * kWarp) {  // two places a lane
          const bool two = i + kWarp < to;
          const int a = staged_column[i], b = two ? staged_column[i + kWarp] : -1;
          const bool add_a = static_cast<unsigned>(a) < static_cast<unsigned>(size);
          const bool add_b = static_cast<unsigned>(b) < static_cast<unsigned>(size);
          const A sum_a = add_a ? acc[a] + staged_value[i] : A{0}, sum_b = add_b ? acc[b] + staged_value[i + kWarp] : A{0};
          if (add_a) acc[a] = sum_a;
          if (add_b) acc[b] = sum_b;
        }
        __syncwarp();  // the next edge may have the same columns
        from = max(from, to);
      }
    }
  }
  sync_group<WARPS>();

  if (id < p.a.num_pieces) {
    for (int i = t; i < size; i += kGroup) pieces[id * p.width + c0 + i] = acc[i];
    return;
  }
  const A degree = static_cast<A>(max(item.z - item.y, 1)), reciprocal = A{1} / degree;
  constexpr int kVector = kVec<T>;
  for (int i = t * kVector - shift; i < size; i += kGroup * kVector) {
    alignas(16) A sums[kVector];
#pragma unroll
    for (int n = 0; n < kVector * static_cast<int>(sizeof(A)) / 16; ++n)
      reinterpret_cast<uint4*>(sums)[n] = reinterpret_cast<const uint4*>(acc + i)[n];
    if (p.mean) {
#pragma unroll
      for (int n = 0; n < kVector; ++n) sums[n] = divided(sums[n], degree, reciprocal);
    }
    Raw<T, kVector> raw;
#pragma unroll
    for (int n = 0; n < kVector; ++n) reinterpret_cast<T*>(&raw.bits)[n] = from_acc<T>(sums[n]);
    // Evict first: the result is larger than L2, which the entries of X should have to themselves.
    if (i >= 0 && i + kVector <= size) {
      __stcs(reinterpret_cast<typename Raw<T, kVector>::Bits*>(out + i), raw.bits);
    } else {
#pragma unroll
      for (int n = 0; n < kVector; ++n)
        if (i + n >= 0 && i + n < size) out[i + n] = reinterpret_cast<const T*>(&raw.bits)[n];
    }
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

template <class T, int WARPS>
void launch_groups(const SparseFeaturesArgs& p, acc_t<T>* pieces, cudaStream_t stream) {
  using A = acc_t<T>;
  constexpr int kGroups = kThreads / (WARPS * kWarp), kMost = (WARPS == 1 ? kNarrowBytes : kSlabBytes) / sizeof(A);
  // Slabs of equal size, in whole 16-byte vectors of any dtype.
  const int64_t slabs = (p.width + kMost - 1) / kMost, slab = ((p.width + slabs - 1) / slabs + 15) / 16 * 16;
  const int64_t blocks = (p.a.num_items * slabs + kGroups - 1) / kGroups;
  GNNFAST_CHECK(blocks <= 2147483647, p.a.num_rows, " rows of ", p.width,
                " features are more than one CUDA launch can make; split the features");
  const size_t bytes = kGroups * ((slab + 16) * sizeof(A) + WARPS * kWarp * kEach * (sizeof(A) + sizeof(int)));
  static_assert((kMost + 31) / 16 * 16 * sizeof(A) * kGroups + kThreads * kEach * (sizeof(A) + sizeof(int)) <= 48 << 10,
                "more shared memory than needs no permission");
  features_kernel<T, WARPS>
      <<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(p, pieces, static_cast<int>(slab), slabs);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T>
void launch_features(const SparseFeaturesArgs& p, acc_t<T>* pieces, cudaStream_t stream) {
  if (p.width * static_cast<int64_t>(sizeof(acc_t<T>)) <= kNarrowBytes)
    launch_groups<T, 1>(p, pieces, stream);
  else
    launch_groups<T, 4>(p, pieces, stream);
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
      return launch_features<T>(args, pieces, launch.stream);
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
