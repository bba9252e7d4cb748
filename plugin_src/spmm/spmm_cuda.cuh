// CUDA SpMM over CSR. A warp owns one work item of the schedule: a row, or a piece of a long row. Its lanes are split into 32 /
// TPR groups; a group covers TPR * VEC features with 16-byte loads and the groups take the item's edges in turn. Column ids,
// edge ids and scalar weights of 32 edges are read at once and passed by shuffle, so that up to 8 gathers a lane are in flight.
// The groups' results are combined by shuffle and stored once: no memset, no atomics. Pieces of long rows go to a workspace,
// which a second, small kernel combines in the order of the edges, so results do not vary from run to run.
//
// Bytes that must move, per edge: 4 (col) + 4 (perm, with weights) + sizeof(weight) + F * sizeof(T) (gather, the bulk).
#pragma once

#include <limits>

#include "common/launch.cuh"
#include "common/vec.cuh"
#include "spmm_args.h"

namespace gnnfast {

// How a lane finds the weight of its features.
enum CudaWeight : int { kNone, kScalar, kPerHead, kPerElement };

constexpr bool is_max(int op) { return op == kMax || op == kMaxFirst || op == kMaxCount; }

// Takes `v`, attained by `aux_v` (first edge, or number of edges), into the running maximum.
template <int OP, class A>
__device__ inline void take_max(A& best, int32_t& aux, A v, int32_t aux_v) {
  if constexpr (OP == kMax && sizeof(A) == 4) {
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(best) : "f"(best), "f"(v));
    return;
  }
  const bool better = v > best || (v != v && best == best);
  if constexpr (OP == kMaxFirst) {
    // Groups and pieces are merged in any order of edges: of equal values the first slot wins.
    const bool same = v == best || (v != v && best != best);
    if (better || (same && static_cast<uint32_t>(aux_v) < static_cast<uint32_t>(aux))) aux = aux_v;
  } else if constexpr (OP == kMaxCount) {
    aux = better ? aux_v : aux + (v == best ? aux_v : 0);
  }
  if (better) best = v;
}

// Workspace of the pieces: acc_t [num_pieces, F] and, for max and min, int32 [num_pieces, F].
struct Pieces {
  void* value;
  int32_t* aux;
};

// Stores the finished values of one row.
template <class T, int OP, int VEC>
__device__ inline void store_row(const SpmmArgs& p, int64_t row, int64_t f, acc_t<T> (&acc)[VEC], int32_t (&aux)[VEC],
                                 int64_t degree) {
  using A = acc_t<T>;
  if constexpr (is_max(OP)) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      acc[i] = degree == 0 ? static_cast<A>(p.empty) : p.negate ? -acc[i] : acc[i];
      if constexpr (OP != kMax) {
        int32_t value = degree == 0 && OP == kMaxFirst ? -1 : aux[i];
        if (OP == kMaxFirst && value >= 0 && p.a.perm) value = p.a.perm[value];
        p.aux[row * p.width + f + i] = value;
      }
    }
  } else if (p.mean && degree > 0) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) acc[i] /= static_cast<A>(degree);
  }
  store_vector<VEC>(static_cast<T*>(p.out) + row * p.width + f, acc);
}

template <class T, int OP, int W, int VEC, int TPR>
__global__ void __launch_bounds__(kBlock) spmm_kernel(const SpmmArgs p, const Pieces pieces) {
  using A = acc_t<T>;
  constexpr int G = kWarp / TPR;
  const int64_t item_id = (int64_t{blockIdx.x} * kBlock + threadIdx.x) / kWarp;
  if (item_id >= p.a.num_items) return;
  const int lane = threadIdx.x % kWarp, group = lane / TPR, t = lane % TPR;
  const int64_t f = (int64_t{blockIdx.y} * TPR + t) * VEC;
  const bool active = f < p.width;
  const int4 item = __ldg(reinterpret_cast<const int4*>(p.a.schedule) + item_id);
  const int row = item.x, begin = item.y, end = item.z;

  const T* x = static_cast<const T*>(p.x) + f;
  const T* weight = static_cast<const T*>(p.weight);
  const int64_t head = W == kPerHead && active ? f / (p.width / p.heads) : 0;
  const A sign = p.negate ? -1 : 1;

  A acc[VEC], self[VEC];
  int32_t aux[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    acc[i] = is_max(OP) ? -std::numeric_limits<A>::infinity() : A{0};
    self[i] = 0;
    aux[i] = OP == kMaxFirst ? begin : 0;
  }
  if constexpr (OP == kSumWhereEqual || OP == kSumAndDot)
    if (active) load_vector<VEC>(self, static_cast<const T*>(p.self) + row * p.width + f);

  for (int base = begin; base < end; base += kWarp) {
    const int mine = base + lane, count = min(kWarp, end - base);
    int col = 0, id = 0;
    A w_mine = 0;
    if (mine < end) {
      col = __ldg(p.a.col + mine);
      if (W != kNone || OP == kSumWhereFirst) id = p.a.perm ? __ldg(p.a.perm + mine) : mine;
      if (W == kScalar) w_mine = to_acc(__ldg(weight + id));
    }
    // The group's edge number k of these 32. `whole`: there are 32, so that nothing needs a check and loads can be hoisted.
    auto take_edge = [&](int k, bool whole) {
      const int64_t source = int64_t{__shfl_sync(kAllLanes, col, k)} * p.width;
      const int edge = W != kNone || OP == kSumWhereFirst ? __shfl_sync(kAllLanes, id, k) : 0;
      A w = W == kScalar ? __shfl_sync(kAllLanes, w_mine, k) : A{1};
      A partial = 0;
      if (active && (whole || k < count)) {
        A v[VEC], full[VEC];
        load_vector<VEC>(v, x + source);
        if constexpr (W == kPerHead) w = to_acc(__ldg(weight + int64_t{edge} * p.heads + head));
        if constexpr (W == kPerElement) load_vector<VEC>(full, weight + int64_t{edge} * p.width + f);
        auto weight_of = [&](int i) { return W == kPerElement ? full[i] : w; };
        if constexpr (OP == kSum || OP == kSumAndDot) {
#pragma unroll
          for (int i = 0; i < VEC; ++i) {
            acc[i] = W == kNone ? acc[i] + v[i] : acc[i] + weight_of(i) * v[i];
            if (OP == kSumAndDot) partial += self[i] * v[i];
          }
        } else if constexpr (is_max(OP)) {
#pragma unroll
          for (int i = 0; i < VEC; ++i) {
            const A message = W == kNone ? v[i] : round_to<T>(weight_of(i) * v[i]);
            take_max<OP>(acc[i], aux[i], sign * message, OP == kMaxFirst ? base + k : 1);
          }
        } else if constexpr (OP == kSumWhereEqual) {
          A value[VEC];
          load_vector<VEC>(value, static_cast<const T*>(p.value) + source + f);
#pragma unroll
          for (int i = 0; i < VEC; ++i) {
            const A message = W == kNone ? self[i] : round_to<T>(weight_of(i) * self[i]);
            if (message == value[i]) acc[i] += W == kNone ? v[i] : weight_of(i) * v[i];
          }
        } else {
          int32_t arg[VEC];
          load_ints<VEC>(arg, p.arg + source + f);
#pragma unroll
          for (int i = 0; i < VEC; ++i)
            if (arg[i] == edge) acc[i] += W == kNone ? v[i] : weight_of(i) * v[i];
        }
      }
      if constexpr (OP == kSumAndDot) {
        // Lanes of one head are neighbours and their number is a power of two (can_fuse_dot).
        const int lanes = W == kPerHead ? static_cast<int>(p.width / p.heads) / VEC : TPR;
        for (int o = 1; o < lanes; o <<= 1) partial += __shfl_xor_sync(kAllLanes, partial, o);
        if (active && k < count && t % lanes == 0)
          static_cast<T*>(p.dot)[int64_t{edge} * p.heads + head] = from_acc<T>(partial);
      }
    };
    if (count == kWarp) {
#pragma unroll 8
      for (int j = 0; j < kWarp; j += G) take_edge(j + group, true);
    } else {
#pragma unroll 4
      for (int j = 0; j < kWarp; j += G) {
        if (j >= count) break;
        take_edge(j + group, false);
      }
    }
  }

#pragma unroll
  for (int o = TPR; o < kWarp; o <<= 1) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const A other = __shfl_xor_sync(kAllLanes, acc[i], o);
      if constexpr (is_max(OP)) {
        const int32_t other_aux = __shfl_xor_sync(kAllLanes, aux[i], o);
        take_max<OP>(acc[i], aux[i], other, other_aux);
      } else {
        acc[i] += other;
      }
    }
  }
  if (group != 0 || !active) return;
  if (item_id < p.a.num_pieces) {
    const int64_t at = item_id * p.width + f;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      static_cast<A*>(pieces.value)[at + i] = acc[i];
      if (is_max(OP) && OP != kMax) pieces.aux[at + i] = aux[i];
    }
  } else {
    store_row<T, OP, VEC>(p, row, f, acc, aux, end - begin);
  }
}

// A block per 8 pieces. For each row that begins among them its warps share the row's pieces, so that a row of very many pieces
// is not added up by one warp alone; the order is fixed.
template <class T, int OP>
__global__ void __launch_bounds__(kBlock) combine_kernel(const SpmmArgs p, const Pieces pieces) {
  using A = acc_t<T>;
  constexpr int kWarps = kBlock / kWarp;
  __shared__ A shared_acc[kWarps][kWarp];
  __shared__ int32_t shared_aux[kWarps][kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int4* items = reinterpret_cast<const int4*>(p.a.schedule);
  const int64_t begin = int64_t{blockIdx.x} * kWarps, end = min(begin + kWarps, p.a.num_pieces);
  for (int64_t first = begin; first < end; ++first) {
    const int4 item = __ldg(items + first);
    if (item.w <= 0) continue;
    const int64_t degree = __ldg(items + first + item.w - 1).z - item.y;
    const int sharers = min(item.w, kWarps);
    for (int64_t f0 = 0; f0 < p.width; f0 += kWarp) {
      const int64_t f = f0 + lane;
      A acc[1] = {is_max(OP) ? -std::numeric_limits<A>::infinity() : A{0}};
      int32_t aux[1] = {OP == kMaxFirst ? std::numeric_limits<int32_t>::max() : 0};
      if (f < p.width && warp < sharers) {
#pragma unroll 4
        for (int64_t piece = first + warp; piece < first + item.w; piece += kWarps) {
          const A other = static_cast<const A*>(pieces.value)[piece * p.width + f];
          if constexpr (is_max(OP))
            take_max<OP>(acc[0], aux[0], other, OP == kMax ? 0 : pieces.aux[piece * p.width + f]);
          else
            acc[0] += other;
        }
      }
      shared_acc[warp][lane] = acc[0];
      shared_aux[warp][lane] = aux[0];
      __syncthreads();
      if (warp == 0 && f < p.width) {
        for (int other = 1; other < sharers; ++other) {
          if constexpr (is_max(OP))
            take_max<OP>(acc[0], aux[0], shared_acc[other][lane], shared_aux[other][lane]);
          else
            acc[0] += shared_acc[other][lane];
        }
        store_row<T, OP, 1>(p, item.x, f, acc, aux, degree);
      }
      __syncthreads();
    }
  }
}

template <class T, int OP, int W, int VEC, int TPR>
void launch_spmm(const SpmmArgs& p, const Pieces& pieces, cudaStream_t stream) {
  const dim3 grid(blocks_for(p.a.num_items * kWarp), static_cast<unsigned>((p.width + TPR * VEC - 1) / (TPR * VEC)));
  spmm_kernel<T, OP, W, VEC, TPR><<<grid, kBlock, 0, stream>>>(p, pieces);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (p.a.num_pieces > 0) {
    combine_kernel<T, OP><<<blocks_for(p.a.num_pieces * kWarp), kBlock, 0, stream>>>(p, pieces);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

// The fewest lanes that cover the row, so that the others can take further edges. Only the plain sum has all of them.
template <class T, int OP, int W>
void launch_lanes(const SpmmArgs& p, bool vectors, const Pieces& pieces, cudaStream_t stream) {
  constexpr int V = kVec<T>;
  const int64_t lanes = (p.width + V - 1) / V;
  if (!vectors) {
    if constexpr (OP == kSum)
      if (p.width <= 8) return launch_spmm<T, OP, W, 1, 8>(p, pieces, stream);
    return launch_spmm<T, OP, W, 1, 32>(p, pieces, stream);
  }
  if constexpr (OP == kSum)
    if (lanes <= 4) return launch_spmm<T, OP, W, V, 4>(p, pieces, stream);
  if (lanes > 8 && lanes <= 16) return launch_spmm<T, OP, W, V, 16>(p, pieces, stream);
  if (lanes <= 8) return launch_spmm<T, OP, W, V, 8>(p, pieces, stream);
  return launch_spmm<T, OP, W, V, 32>(p, pieces, stream);
}

template <class T, int OP>
void launch_weight(const SpmmArgs& p, const Pieces& pieces, cudaStream_t stream) {
  const int64_t segment = p.width / p.heads;
  const bool vectors = p.width % kVec<T> == 0 && aligned16(p.x) && (p.mode != kHeadWeight || segment % kVec<T> == 0) &&
                       (p.mode != kElementWeight || aligned16(p.weight)) && aligned16(p.self) && aligned16(p.value) &&
                       aligned16(p.arg);
  if constexpr (OP == kSumAndDot) {  // never without weights; full weights are not fused
    if (p.heads == 1) return launch_lanes<T, OP, kScalar>(p, vectors, pieces, stream);
    return launch_lanes<T, OP, kPerHead>(p, vectors, pieces, stream);
  } else {
    if (p.mode == kNoWeight) return launch_lanes<T, OP, kNone>(p, vectors, pieces, stream);
    if (p.mode == kElementWeight) return launch_lanes<T, OP, kPerElement>(p, vectors, pieces, stream);
    if (p.heads == 1) return launch_lanes<T, OP, kScalar>(p, vectors, pieces, stream);
    return launch_lanes<T, OP, kPerHead>(p, vectors, pieces, stream);
  }
}

template <class T>
void launch_op(const SpmmArgs& p, const Pieces& pieces, cudaStream_t stream) {
  switch (p.op) {
    case kSum:
      return launch_weight<T, kSum>(p, pieces, stream);
    case kMax:
      return launch_weight<T, kMax>(p, pieces, stream);
    case kMaxFirst:
      return launch_weight<T, kMaxFirst>(p, pieces, stream);
    case kMaxCount:
      return launch_weight<T, kMaxCount>(p, pieces, stream);
    case kSumWhereEqual:
      return launch_weight<T, kSumWhereEqual>(p, pieces, stream);
    case kSumWhereFirst:
      return launch_weight<T, kSumWhereFirst>(p, pieces, stream);
    case kSumAndDot:
      return launch_weight<T, kSumAndDot>(p, pieces, stream);
  }
}

// One translation unit per dtype (spmm_cuda_*.cu), so that they compile in parallel.
#define GNNFAST_SPMM_EXTERN(PREFIX, T) PREFIX template void launch_op<T>(const SpmmArgs&, const Pieces&, cudaStream_t);

}  // namespace gnnfast
