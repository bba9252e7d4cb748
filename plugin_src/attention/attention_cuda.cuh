// CUDA attention with additive scores: one walk over the edges. A lane computes the coefficients of its head itself, from
// scores that are few enough to stay in the L2 cache, and keeps a running maximum, by which it scales what it has when that
// grows.
//
// Bytes that must move, per edge: once a slab 4 (col), 4 (perm, with dropout) and the scores of the slab's heads, 4 bytes each;
// and F * sizeof(T) (gather).
#pragma once

#include "attention_args.h"
#include "common/math.cuh"
#include "common/walk.cuh"
#include "kept_edges.cuh"

namespace gnnfast {

// `pieces`: the states of pieces of rows, [num_pieces, F + 2 H] in the accumulation type.
template <class T, int VEC, int TPR>
struct Attend {
  using A = acc_t<T>;
  static constexpr int kTpr = TPR, kFlight = 4, kColumns = kFlight > TPR ? kFlight / TPR : 1;
  static constexpr bool kReadAhead = TPR < kWarp, kHot = true;

  struct State {
    A acc[VEC];
    A most, sum;

    // What other edges gave, whose coefficients were computed with another maximum.
    __device__ void merge(const State& other) {
      A mine, theirs;
      merge_most(most, other.most, mine, theirs);
      sum = mine * sum + theirs * other.sum;
#pragma unroll
      for (int i = 0; i < VEC; ++i) acc[i] = mine * acc[i] + theirs * other.acc[i];
    }
  };

  const AttentionArgs& p;
  const int lane;
  const int64_t f, head;
  const bool active;
  A* const pieces;
  const char* x;
  const uint32_t row_bytes, kept;
  const A slope;
  A own;
  State now;

  __device__ Attend(const AttentionArgs& p, A* pieces, int lane, int64_t f, bool active)
      : p(p),
        lane(lane),
        f(f),
        head(f / (p.width / p.heads)),
        active(active),
        pieces(pieces),
        x(static_cast<const char*>(p.x) + f * sizeof(T)),
        row_bytes(static_cast<uint32_t>(p.width * sizeof(T))),
        kept(p.seed ? kept_of_65536(p.dropout) : 0),
        slope(static_cast<A>(p.slope)) {
    asm volatile("" : "+l"(x));  // else the sum is made again for each edge
  }

  __device__ State& state() { return now; }
  __device__ void merge(const State& other) { now.merge(other); }

  __device__ void start(int row, int) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) now.acc[i] = 0;
    now.most = -INFINITY;
    now.sum = 0;
    own = to_acc(__ldg(static_cast<const T*>(p.own) + int64_t{row} * p.heads + head));
  }

  using Edges = KeptEdges<kColumns>;

  template <int LANES, bool WHOLE>
  __device__ void take(int j, int group, int count, int, const Edges& edges) {
    constexpr int G = LANES / TPR;
    A s[kFlight];
    Raw<T, VEC> v[kFlight];
    bool keep[kFlight];
    auto exists = [&](int c) { return WHOLE || (j + c) * G + group < count; };
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      // An edge that does not exist is read as the last one that does, so that loads need no branch; what is read is not used.
      const int wanted = (j + c) * G + group, k = WHOLE ? wanted : max(min(wanted, count - 1), 0);
      const uint64_t col = static_cast<uint32_t>(from_lane<LANES, TPR>(edges.col, k, c));
      keep[c] = !p.seed || (from_lane<LANES, TPR>(edges.keep, k, c) >> head & 1);
      v[c].load(reinterpret_cast<const T*>(x + col * row_bytes));
      s[c] = to_acc(__ldg(static_cast<const T*>(p.other) + col * p.heads + head));
    }
    A top = now.most;
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      s[c] += own;
      s[c] = s[c] > 0 ? s[c] : rounded_product(slope, s[c]);
      if (exists(c)) top = max(top, s[c]);
    }
    if (top > now.most) {
      const A less = now.most == -INFINITY ? A{0} : fast_exp(now.most - top);
#pragma unroll
      for (int i = 0; i < VEC; ++i) now.acc[i] *= less;
      now.sum *= less, now.most = top;
    }
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      if (!exists(c)) continue;
      const A share = s[c] == -INFINITY ? A{0} : fast_exp(s[c] - now.most);  // NaN stays, and infinity becomes it
      now.sum += share;
      const A kept_share = keep[c] ? share : A{0};
#pragma unroll
      for (int i = 0; i < VEC; ++i) now.acc[i] += kept_share * v[c].get(i);
    }
  }

  __device__ void store_row(int64_t row, int64_t degree) {
    const A over = degree > 0 ? A{1} / now.sum : A{0}, scale = p.seed ? static_cast<A>(kept_scale(p.dropout)) : A{1};
#pragma unroll
    for (int i = 0; i < VEC; ++i) now.acc[i] *= over * scale;
    store_vector<VEC>(static_cast<T*>(p.out) + row * p.width + f, now.acc);
    if (!p.stats || f % (p.width / p.heads) != 0) return;
    A* at = static_cast<A*>(p.stats) + (row * p.heads + head) * 4;
    at[0] = degree > 0 ? now.most : A{0}, at[1] = own, at[2] = over, at[3] = 0;
  }

  __device__ A* piece_at(int64_t piece) const { return pieces + piece * (p.width + 2 * p.heads); }

  __device__ void store_piece(int64_t piece) {
    A* at = piece_at(piece);
#pragma unroll
    for (int i = 0; i < VEC; ++i) at[f + i] = now.acc[i];
    if (f % (p.width / p.heads) != 0) return;
    at += p.width + 2 * head;
    at[0] = now.most, at[1] = now.sum;
  }

  // One feature of what store_piece has stored.
  __device__ State load_piece(int64_t piece) const {
    const A *at = piece_at(piece), *of_head = at + p.width + 2 * head;
    State found;
    found.acc[0] = at[f];
    found.most = of_head[0], found.sum = of_head[1];
    return found;
  }
};

// Blocks a multiprocessor should hold: as many as fit without spilling registers.
template <class T, int VEC, int TPR>
__global__ void __launch_bounds__(kBlock, sizeof(T) == 8 ? 2 : 4)
    attention_kernel(const AttentionArgs p, acc_t<T>* pieces, int slab_lanes, int short_rows) {
  // Lanes without features of their own repeat the last ones, so that no load needs a check, and store nothing.
  const int lane = threadIdx.x % kWarp, t = lane % TPR;
  const int64_t wanted = (int64_t{blockIdx.y} * slab_lanes + t) * VEC;
  const bool active = t < slab_lanes && wanted < p.width;
  const int64_t f = active ? wanted : min((int64_t{blockIdx.y} + 1) * slab_lanes * VEC, p.width) - VEC;
  Attend<T, VEC, TPR> mine(p, pieces, lane, f, active);
  walk_items(mine, p.a, short_rows);
}

template <class T>
__global__ void __launch_bounds__(kBlock) attention_combine_kernel(const AttentionArgs p, acc_t<T>* pieces) {
  using R = Attend<T, 1, kWarp>;
  auto make = [&](int64_t f) { return R(p, pieces, threadIdx.x % kWarp, f, true); };
  combine_items<R>(p.a, p.width, make, [&](const R& row, int64_t piece) { return row.load_piece(piece); });
}

template <class T, int VEC, int TPR>
void launch_attention(const AttentionArgs& p, acc_t<T>* pieces, int slab_lanes, int slabs, cudaStream_t stream) {
  const ItemGrid grid = item_grid<TPR>(p.a);
  const dim3 blocks(grid.blocks, static_cast<unsigned>(slabs));
  attention_kernel<T, VEC, TPR><<<blocks, kBlock, 0, stream>>>(p, pieces, slab_lanes, grid.short_rows);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (p.a.num_pieces > 0) {
    attention_combine_kernel<T><<<blocks_for(p.a.num_pieces * kWarp), kBlock, 0, stream>>>(p, pieces);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

// The fewest lanes that cover a slab, so that the others can take further edges.
template <class T, int VEC>
void launch_lanes(const AttentionArgs& p, acc_t<T>* pieces, cudaStream_t stream) {
  const int64_t lanes = (p.width + VEC - 1) / VEC, row_bytes = p.width * static_cast<int64_t>(sizeof(T));
  // As slab_bytes in spmm_cuda.cuh.
  const int64_t bytes = p.a.slab > 0 ? p.a.slab : row_bytes % 128 == 0 ? 256 : 512;
  const int64_t most = std::min<int64_t>(std::max<int64_t>(bytes / (VEC * static_cast<int64_t>(sizeof(T))), 1), kWarp);
  const int slabs = static_cast<int>((lanes + most - 1) / most), slab = static_cast<int>((lanes + slabs - 1) / slabs);
  if constexpr (VEC == kVec<T> && sizeof(T) < 8) {
    if (slab <= 4) return launch_attention<T, VEC, 4>(p, pieces, slab, slabs, stream);
    if (slab <= 16 && slab > 8) return launch_attention<T, VEC, 16>(p, pieces, slab, slabs, stream);
  }
  if (slab <= 8) return launch_attention<T, VEC, 8>(p, pieces, slab, slabs, stream);
  return launch_attention<T, VEC, 32>(p, pieces, slab, slabs, stream);
}

template <class T>
void launch_attention(const AttentionArgs& p, acc_t<T>* pieces, cudaStream_t stream) {
  const bool fits = p.width / p.heads % kVec<T> == 0 && aligned16(p.x);
  if (fits) return launch_lanes<T, kVec<T>>(p, pieces, stream);
  return launch_lanes<T, 1>(p, pieces, stream);
}

// A dot product a row and head, by `lanes` lanes.
template <class T, int VEC>
__global__ void __launch_bounds__(kBlock) attention_dots_kernel(const AttentionDotsArgs p, int lanes) {
  using A = acc_t<T>;
  const int64_t thread = int64_t{blockIdx.x} * kBlock + threadIdx.x, pairs = p.num_rows * p.heads;
  const int64_t pair = min(thread / lanes, pairs - 1), segment = p.width / p.heads;
  const T *out = static_cast<const T*>(p.out) + pair * segment, *grad = static_cast<const T*>(p.grad) + pair * segment;
  A dot = 0;
  for (int64_t f = thread % lanes * VEC; f < segment; f += int64_t{lanes} * VEC) {
    A u[VEC], v[VEC];
    load_vector<VEC>(u, out + f);
    load_vector<VEC>(v, grad + f);
#pragma unroll
    for (int i = 0; i < VEC; ++i) dot += u[i] * v[i];
  }
  for (int o = 1; o < lanes; o <<= 1) dot += __shfl_xor_sync(kAllLanes, dot, o);
  if (thread % lanes != 0 || thread / lanes >= pairs) return;
  A four[4];
  load_four(four, static_cast<const A*>(p.stats) + pair * 4);
  four[3] = four[2] != 0 ? dot : A{0};
#pragma unroll
  for (int i = 0; i < 4; ++i) static_cast<A*>(p.packed)[pair * 4 + i] = four[i];
}

template <class T>
void launch_attention_dots(const AttentionDotsArgs& p, cudaStream_t stream) {
  const int64_t segment = p.width / p.heads;
  const bool fits = segment % kVec<T> == 0 && aligned16(p.out) && aligned16(p.grad);
  int lanes = 1;
  while (lanes < kWarp && lanes * (fits ? kVec<T> : 1) < segment) lanes *= 2;
  const unsigned blocks = blocks_for(p.num_rows * p.heads * lanes);
  if (fits)
    attention_dots_kernel<T, kVec<T>><<<blocks, kBlock, 0, stream>>>(p, lanes);
  else
    attention_dots_kernel<T, 1><<<blocks, kBlock, 0, stream>>>(p, lanes);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// One translation unit per dtype (attention_cuda_*.cu), so that they compile in parallel.
#define GNNFAST_ATTENTION_EXTERN(PREFIX, T)                                                \
  PREFIX template void launch_attention<T>(const AttentionArgs&, acc_t<T>*, cudaStream_t); \
  PREFIX template void launch_attention_dots<T>(const AttentionDotsArgs&, cudaStream_t);

}  // namespace gnnfast
