// CUDA attention with additive scores: one walk over the edges forward, one backward. A lane computes the coefficients of its
// head itself, from scores that are few enough to stay in the L2 cache, and keeps a running maximum, by which it scales what it
// has when that grows.
//
// Bytes that must move, per edge: once a slab 4 (col), 4 (perm, with dropout) and the scores of the slab's heads, 4 bytes each,
// backward 16; and F * sizeof(T) (gather).
#pragma once

#include "attention_args.h"
#include "common/math.cuh"
#include "common/walk.cuh"
#include "kept_edges.cuh"

namespace gnnfast {

// `pieces`: the states of pieces of rows, [num_pieces, 2 F + 3 H] in the accumulation type.
template <class T, int ROLE, int VEC, int TPR>
struct Attend {
  using A = acc_t<T>;
  static constexpr int kTpr = TPR, kFlight = 4, kColumns = kFlight > TPR ? kFlight / TPR : 1;
  static constexpr bool kReadAhead = TPR < kWarp, kHot = true;
  static constexpr int kPositive = ROLE == kInfer ? 1 : VEC;

  struct State {
    A acc[VEC], positive[kPositive];
    A most, sum, positive_sum;  // backward: sum of p * 1' * D in `sum`

    // What other edges gave, whose coefficients were computed with another maximum.
    __device__ void merge(const State& other) {
      A mine = 1, theirs = 1;
      if (ROLE != kBackward) merge_most(most, other.most, mine, theirs);
      sum = mine * sum + theirs * other.sum;
      positive_sum = mine * positive_sum + theirs * other.positive_sum;
#pragma unroll
      for (int i = 0; i < VEC; ++i) acc[i] = mine * acc[i] + theirs * other.acc[i];
#pragma unroll
      for (int i = 0; i < kPositive; ++i) positive[i] = mine * positive[i] + theirs * other.positive[i];
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
#pragma unroll
    for (int i = 0; i < kPositive; ++i) now.positive[i] = 0;
    now.most = -INFINITY;
    now.sum = now.positive_sum = 0;
    own = to_acc(__ldg(static_cast<const T*>(p.own) + int64_t{row} * p.heads + head));
  }

  using Edges = KeptEdges<kColumns>;

  template <int LANES, bool WHOLE>
  __device__ void take(int j, int group, int count, int, const Edges& edges) {
    constexpr int G = LANES / TPR;
    A raw[kFlight], stats[kFlight][4];
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
      if constexpr (ROLE == kBackward)
        load_four(stats[c], static_cast<const A*>(p.other) + (col * p.heads + head) * 4);
      else
        raw[c] = to_acc(__ldg(static_cast<const T*>(p.other) + col * p.heads + head));
    }
    if constexpr (ROLE != kBackward) {
      A top = now.most;
#pragma unroll
      for (int c = 0; c < kFlight; ++c) {
        raw[c] += own;
        const A s = raw[c] > 0 ? raw[c] : slope * raw[c];
        if (exists(c)) top = max(top, s);
      }
      if (top > now.most) {
        const A less = now.most == -INFINITY ? A{0} : fast_exp(now.most - top);
#pragma unroll
        for (int i = 0; i < VEC; ++i) now.acc[i] *= less;
#pragma unroll
        for (int i = 0; i < kPositive; ++i) now.positive[i] *= less;
        now.sum *= less, now.positive_sum *= less, now.most = top;
      }
    }
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      if (ROLE == kBackward) raw[c] = own + stats[c][0];
      const A s = raw[c] > 0 ? raw[c] : slope * raw[c];
      A share;
      if constexpr (ROLE == kBackward) {
        share = fast_exp(s - stats[c][1]) * stats[c][2];
        if (exists(c)) now.sum += share * (raw[c] > 0 ? A{1} : slope) * stats[c][3];
      } else {
        share = s == -INFINITY ? A{0} : fast_exp(s - now.most);  // NaN stays, and infinity becomes it
        if (exists(c)) now.sum += share;
        if (ROLE == kTrain && exists(c)) now.positive_sum += raw[c] > 0 ? share : A{0};
      }
      if (!keep[c]) share = 0;
      const A positive = raw[c] > 0 ? share : A{0};
      if (exists(c)) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const A e = v[c].get(i);
          now.acc[i] += share * e;
          if constexpr (ROLE != kInfer) now.positive[i] += positive * e;
        }
      }
    }
  }

  __device__ void store_row(int64_t row, int64_t degree) {
    const A keep = p.seed ? static_cast<A>(kept_scale(p.dropout)) : A{1};
    const A over = ROLE == kBackward ? A{1} : degree > 0 ? A{1} / now.sum : A{0};
#pragma unroll
    for (int i = 0; i < VEC; ++i) now.acc[i] *= over * keep;
    store_vector<VEC>(static_cast<T*>(p.out) + row * p.width + f, now.acc);
    if constexpr (ROLE != kInfer) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) now.positive[i] *= over * keep;
      store_vector<VEC>(static_cast<T*>(p.positive) + row * p.width + f, now.positive);
      if (f % (p.width / p.heads) != 0) return;
      A* stats = static_cast<A*>(p.stats);
      if constexpr (ROLE == kBackward) {
        stats[row * p.heads + head] = now.sum;
      } else {
        const A four[4] = {own, degree > 0 ? now.most : A{0}, over, now.positive_sum * over};
#pragma unroll
        for (int i = 0; i < 4; ++i) stats[(row * p.heads + head) * 4 + i] = four[i];
      }
    }
  }

  __device__ A* piece_at(int64_t piece) const { return pieces + piece * (2 * p.width + 3 * p.heads); }

  __device__ void store_piece(int64_t piece) {
    A* at = piece_at(piece);
#pragma unroll
    for (int i = 0; i < VEC; ++i) at[f + i] = now.acc[i];
#pragma unroll
    for (int i = 0; i < kPositive; ++i) at[p.width + f + i] = now.positive[i];
    if (f % (p.width / p.heads) != 0) return;
    at += 2 * p.width + 3 * head;
    at[0] = now.most, at[1] = now.sum, at[2] = now.positive_sum;
  }

  // One feature of what store_piece has stored.
  __device__ State load_piece(int64_t piece) const {
    const A *at = piece_at(piece), *of_head = at + 2 * p.width + 3 * head;
    State found;
    found.acc[0] = at[f];
    found.positive[0] = ROLE == kInfer ? A{0} : at[p.width + f];
    found.most = of_head[0], found.sum = of_head[1], found.positive_sum = of_head[2];
    return found;
  }
};

// Blocks a multiprocessor should hold: as many as fit without spilling registers.
template <class T, int ROLE>
constexpr int kAttending = sizeof(T) == 8   ? 2
                           : ROLE == kInfer ? 4
                                            : 3;

template <class T, int ROLE, int VEC, int TPR>
__global__ void __launch_bounds__(kBlock, (kAttending<T, ROLE>))
    attention_kernel(const AttentionArgs p, acc_t<T>* pieces, int slab_lanes, int short_rows) {
  // Lanes without features of their own repeat the last ones, so that no load needs a check, and store nothing.
  const int lane = threadIdx.x % kWarp, t = lane % TPR;
  const int64_t wanted = (int64_t{blockIdx.y} * slab_lanes + t) * VEC;
  const bool active = t < slab_lanes && wanted < p.width;
  const int64_t f = active ? wanted : min((int64_t{blockIdx.y} + 1) * slab_lanes * VEC, p.width) - VEC;
  Attend<T, ROLE, VEC, TPR> mine(p, pieces, lane, f, active);
  walk_items(mine, p.a, short_rows);
}

template <class T, int ROLE>
__global__ void __launch_bounds__(kBlock) attention_combine_kernel(const AttentionArgs p, acc_t<T>* pieces) {
  using R = Attend<T, ROLE, 1, kWarp>;
  auto make = [&](int64_t f) { return R(p, pieces, threadIdx.x % kWarp, f, true); };
  combine_items<R>(p.a, p.width, make, [&](const R& row, int64_t piece) { return row.load_piece(piece); });
}

template <class T, int ROLE, int VEC, int TPR>
void launch_attention(const AttentionArgs& p, acc_t<T>* pieces, int slab_lanes, int slabs, cudaStream_t stream) {
  const ItemGrid grid = item_grid<TPR>(p.a);
  const dim3 blocks(grid.blocks, static_cast<unsigned>(slabs));
  attention_kernel<T, ROLE, VEC, TPR><<<blocks, kBlock, 0, stream>>>(p, pieces, slab_lanes, grid.short_rows);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (p.a.num_pieces > 0) {
    attention_combine_kernel<T, ROLE><<<blocks_for(p.a.num_pieces * kWarp), kBlock, 0, stream>>>(p, pieces);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

// The fewest lanes that cover a slab, so that the others can take further edges.
template <class T, int ROLE, int VEC>
void launch_lanes(const AttentionArgs& p, acc_t<T>* pieces, cudaStream_t stream) {
  const int64_t lanes = (p.width + VEC - 1) / VEC, row_bytes = p.width * static_cast<int64_t>(sizeof(T));
  // As slab_bytes in spmm_cuda.cuh.
  const int64_t bytes = p.a.slab > 0 ? p.a.slab : row_bytes % 128 == 0 ? 256 : 512;
  const int64_t most = std::min<int64_t>(std::max<int64_t>(bytes / (VEC * static_cast<int64_t>(sizeof(T))), 1), kWarp);
  const int slabs = static_cast<int>((lanes + most - 1) / most), slab = static_cast<int>((lanes + slabs - 1) / slabs);
  if constexpr (VEC == kVec<T> && sizeof(T) < 8) {
    if (slab <= 4) return launch_attention<T, ROLE, VEC, 4>(p, pieces, slab, slabs, stream);
    if (slab <= 16 && slab > 8) return launch_attention<T, ROLE, VEC, 16>(p, pieces, slab, slabs, stream);
  }
  if (slab <= 8) return launch_attention<T, ROLE, VEC, 8>(p, pieces, slab, slabs, stream);
  return launch_attention<T, ROLE, VEC, 32>(p, pieces, slab, slabs, stream);
}

template <class T, int ROLE>
void launch_vectors(const AttentionArgs& p, acc_t<T>* pieces, cudaStream_t stream) {
  const bool fits = p.width / p.heads % kVec<T> == 0 && aligned16(p.x);
  if (fits) return launch_lanes<T, ROLE, kVec<T>>(p, pieces, stream);
  return launch_lanes<T, ROLE, 1>(p, pieces, stream);
}

// ---- rows --------------------------------------------------------------------------------------------------------------
// Two dot products a row and head, by `lanes` lanes.
template <class T, int VEC>
__global__ void __launch_bounds__(kBlock) attention_rows_kernel(const AttentionRowsArgs p, int lanes) {
  using A = acc_t<T>;
  const int64_t thread = int64_t{blockIdx.x} * kBlock + threadIdx.x, pairs = p.num_rows * p.heads;
  const int64_t pair = min(thread / lanes, pairs - 1), segment = p.width / p.heads;
  const T *out = static_cast<const T*>(p.out) + pair * segment, *with = static_cast<const T*>(p.with) + pair * segment;
  const T* positive = static_cast<const T*>(p.positive) + pair * segment;
  A all = 0, some = 0;
  for (int64_t f = thread % lanes * VEC; f < segment; f += int64_t{lanes} * VEC) {
    A u[VEC], v[VEC], w[VEC];
    load_vector<VEC>(u, out + f);
    load_vector<VEC>(v, positive + f);
    load_vector<VEC>(w, with + f);
#pragma unroll
    for (int i = 0; i < VEC; ++i) all += u[i] * w[i], some += v[i] * w[i];
  }
  for (int o = 1; o < lanes; o <<= 1) {
    all += __shfl_xor_sync(kAllLanes, all, o);
    some += __shfl_xor_sync(kAllLanes, some, o);
  }
  if (thread % lanes != 0 || thread / lanes >= pairs) return;
  const A slope = static_cast<A>(p.slope), *stats = static_cast<const A*>(p.stats);
  A grad;
  if (p.packed) {
    A four[4];
    load_four(four, stats + pair * 4);
    const bool any = four[2] != 0;
    grad = any ? (1 - slope) * (some - all * four[3]) : A{0};
    four[3] = any ? all : A{0};
#pragma unroll
    for (int i = 0; i < 4; ++i) static_cast<A*>(p.packed)[pair * 4 + i] = four[i];
  } else {
    const int64_t row = pair / p.heads;
    grad = p.rowptr[row] < p.rowptr[row + 1] ? slope * all + (1 - slope) * some - stats[pair] : A{0};
  }
  static_cast<T*>(p.grad)[pair] = from_acc<T>(grad);
}

template <class T>
void launch_attention_rows(const AttentionRowsArgs& p, cudaStream_t stream) {
  const int64_t segment = p.width / p.heads;
  const bool fits = segment % kVec<T> == 0 && aligned16(p.out) && aligned16(p.positive) && aligned16(p.with);
  int lanes = 1;
  while (lanes < kWarp && lanes * (fits ? kVec<T> : 1) < segment) lanes *= 2;
  const unsigned blocks = blocks_for(p.num_rows * p.heads * lanes);
  if (fits)
    attention_rows_kernel<T, kVec<T>><<<blocks, kBlock, 0, stream>>>(p, lanes);
  else
    attention_rows_kernel<T, 1><<<blocks, kBlock, 0, stream>>>(p, lanes);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T>
void launch_attention(const AttentionArgs& p, acc_t<T>* pieces, cudaStream_t stream) {
  switch (p.role) {
    case kInfer:
      return launch_vectors<T, kInfer>(p, pieces, stream);
    case kTrain:
      return launch_vectors<T, kTrain>(p, pieces, stream);
    case kBackward:
      return launch_vectors<T, kBackward>(p, pieces, stream);
  }
}

// One translation unit per dtype (attention_cuda_*.cu), so that they compile in parallel.
#define GNNFAST_ATTENTION_EXTERN(PREFIX, T)                                                \
  PREFIX template void launch_attention<T>(const AttentionArgs&, acc_t<T>*, cudaStream_t); \
  PREFIX template void launch_attention_rows<T>(const AttentionRowsArgs&, cudaStream_t);

}  // namespace gnnfast
