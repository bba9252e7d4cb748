// CUDA attention with scores of two feature rows: one walk over the edges forward and two backward, or one for
// kAdditive, which adds what destinations get by atomics. The
// lanes of a head are neighbours and a power of two of them; those beyond the head's features repeat the last ones and count
// for nothing.
//
// Bytes that must move, per edge: 4 (col), 4 (perm, with dropout) once a slab; two gathers of F * sizeof(T), of which
// kAdditive, and kGatv2 except to columns, need one alone; and to columns 16 (stats) a head. kGatv2Edges reads F * sizeof(T) of
// the edge itself in each walk, and writes as much to rows.
#pragma once

#include "attention/kept_edges.cuh"
#include "common/math.cuh"
#include "common/vec.cuh"
#include "common/walk.cuh"
#include "pair_attention_args.h"

namespace gnnfast {

// Edges whose gathers are in flight together, for so many bytes of a row a lane, and blocks a multiprocessor should hold. More
// warps hide more than more edges, even where a few registers spill, but for dot products, which hold two rows and gather two.
// H200, reddit-size, 1 x 128, ms to columns (kAdditive): 3 blocks and 2 edges 15.4, 2 blocks and 4 edges 17.2, 2 and 2 21, with
// 4 features a lane 27; to rows (kGatv2): 3 blocks 15.4, 2 blocks 19.0.
template <int SCORE, int ROLE, int BYTES>
constexpr int kPairFlight = SCORE == kGatv2 && ROLE == kPairForward && BYTES <= 16 ? 4 : 2;
template <class T, int SCORE, int ROLE, int N>
constexpr int kPairBlocks =
    sizeof(T) == 8        ? 2
    : N * sizeof(T) <= 16 ? (ROLE == kPairForward && !has_att(SCORE) ? 4 : 3)
                          : (ROLE == kPairForward || SCORE == kAdditive || (ROLE == kPairToRows && SCORE == kGatv2) ? 3 : 2);

// A lane holds NV vectors of VEC features of one head, `lanes_of_head` vectors apart, so that loads of a warp are of whole
// lines. More features a lane are fewer lanes an edge, and with them shuffles and exponentials.
template <class T, int SCORE, int ROLE, int VEC, int NV, int TPR>
struct Pair {
  using A = acc_t<T>;
  static constexpr int N = VEC * NV;
  static constexpr int kTpr = TPR, kFlight = kPairFlight<SCORE, ROLE, N* static_cast<int>(sizeof(T))>;
  static constexpr int kColumns = 1;
  static constexpr bool kReadAhead = TPR < kWarp, kHot = true;
  static constexpr bool kOneGather = SCORE == kAdditive || (has_att(SCORE) && ROLE != kPairToColumns);
  static constexpr bool kOfEdges = SCORE == kGatv2Edges;
  static constexpr bool kGathersTo = ROLE != kPairForward && SCORE != kAdditive, kGathersOut = ROLE != kPairToRows || kOfEdges;
  static constexpr int kTo = kGathersTo ? N : 1, kOut = kGathersOut ? N : 1;

  struct State {
    A out[kOut], to[kTo];
    A most, sum;  // of coefficients; backward what scores get (kAdditive)

    // What other edges gave, whose coefficients were computed with another maximum.
    __device__ void merge(const State& other) {
      A mine = 1, theirs = 1;
      if (ROLE == kPairForward) merge_most(most, other.most, mine, theirs);
      sum = mine * sum + theirs * other.sum;
#pragma unroll
      for (int i = 0; i < kOut; ++i) out[i] = mine * out[i] + theirs * other.out[i];
#pragma unroll
      for (int i = 0; i < kTo; ++i) to[i] += other.to[i];
    }
  };

  const PairArgs& p;
  const int lane, lanes_of_head;
  const int64_t f, head;
  const bool active;
  A* const pieces;
  const int64_t offset, apart;  // of the lane's first vector in a row, and of the next from it, in bytes
  const uint32_t row_bytes, kept;
  const A slope, scale;
  A own[N], own_with[N], att[N], own_score = 0;
  A stats[4];
  State now;

  __device__ Pair(const PairArgs& p, A* pieces, int lane, int lanes_of_head, int64_t f, bool active)
      : p(p),
        lane(lane),
        lanes_of_head(lanes_of_head),
        f(f),
        head(f / (p.width / p.heads)),
        active(active),
        pieces(pieces),
        offset(f * static_cast<int64_t>(sizeof(T))),
        apart(int64_t{lanes_of_head} * VEC * static_cast<int64_t>(sizeof(T))),
        row_bytes(static_cast<uint32_t>(p.width * sizeof(T))),
        kept(p.seed ? kept_of_65536(p.dropout) : 0),
        slope(static_cast<A>(p.slope)),
        scale(p.seed ? static_cast<A>(kept_scale(p.dropout)) : A{1}) {
    if constexpr (has_att(SCORE)) load_row(att, p.att, 0);
  }

  __device__ int64_t feature(int i) const { return f + int64_t{i / VEC} * lanes_of_head * VEC + i % VEC; }

  // The lane's features of a row.
  __device__ void load_row(A (&v)[N], const void* from, int64_t row) const {
    const char* at = static_cast<const char*>(from) + row * row_bytes + offset;
#pragma unroll
    for (int k = 0; k < NV; ++k)
      load_vector<VEC>(reinterpret_cast<A(&)[VEC]>(v[k * VEC]), reinterpret_cast<const T*>(at + k * apart));
  }

  __device__ void store_features(void* to, int64_t row, const A (&v)[N]) const { store_at(to, row * row_bytes + offset, v); }

  // Of which the first is so many bytes away.
  __device__ void store_at(void* to, int64_t bytes, const A (&v)[N]) const {
    char* at = static_cast<char*>(to) + bytes;
#pragma unroll
    for (int k = 0; k < NV; ++k)
      store_vector<VEC>(reinterpret_cast<T*>(at + k * apart), reinterpret_cast<const A(&)[VEC]>(v[k * VEC]));
  }

  __device__ State& state() { return now; }
  __device__ void merge(const State& other) { now.merge(other); }

  __device__ void start(int row, int) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) now.out[i] = 0;
#pragma unroll
    for (int i = 0; i < kTo; ++i) now.to[i] = 0;
    now.most = -INFINITY, now.sum = 0;
    if constexpr (SCORE == kAdditive)
      own_score = to_acc(__ldg(static_cast<const T*>(p.own) + row * p.heads + head));
    else
      load_row(own, p.own, row);
    if constexpr (ROLE != kPairForward) load_row(own_with, p.own_with, row);
    if constexpr (ROLE == kPairToRows) {
      load_four(stats, static_cast<const A*>(p.stats) + (row * p.heads + head) * 4);
    }
  }

  using Edges = KeptEdges<kColumns, kOfEdges>;

  // The sum over the lanes of a head, each of which gets it.
  template <int N>
  __device__ void sum_head(A (&v)[N]) const {
    for (int o = 1; o < lanes_of_head; o <<= 1) {
#pragma unroll
      for (int c = 0; c < N; ++c) v[c] += __shfl_xor_sync(kAllLanes, v[c], o);
    }
  }

  template <int LANES, bool WHOLE>
  __device__ void take(int j, int group, int count, int, const Edges& edges) {
    constexpr int G = LANES / TPR;
    A s[kFlight], dot[kFlight], four[kFlight][4];
    Raw<T, VEC> other[kFlight][NV], with[kFlight][NV], of_edge[kFlight][NV];
    bool keep[kFlight];
    int cols[kFlight];
    int64_t edge_at[kFlight];  // bytes
    auto exists = [&](int c) { return WHOLE || (j + c) * G + group < count; };
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      // An edge that does not exist is read as the last one that does, so that loads need no branch; what is read is not used.
      const int wanted = (j + c) * G + group, k = WHOLE ? wanted : max(min(wanted, count - 1), 0);
      const uint64_t col = static_cast<uint32_t>(from_lane<LANES, TPR>(edges.col, k, c));
      keep[c] = !p.seed || (from_lane<LANES, TPR>(edges.keep, k, c) >> head & 1);
      cols[c] = static_cast<int>(col);
      if constexpr (kOfEdges) edge_at[c] = int64_t{from_lane<LANES, TPR>(edges.ids, k, c)} * row_bytes + offset;
      const int64_t at = static_cast<int64_t>(col * row_bytes) + offset;
#pragma unroll
      for (int k = 0; k < NV; ++k) {
        other[c][k].load(reinterpret_cast<const T*>(static_cast<const char*>(p.other) + at + k * apart));
        if constexpr (!kOneGather)
          with[c][k].load(reinterpret_cast<const T*>(static_cast<const char*>(p.with) + at + k * apart));
        if constexpr (kOfEdges)
          of_edge[c][k].load(reinterpret_cast<const T*>(static_cast<const char*>(p.edge) + edge_at[c] + k * apart));
      }
      if constexpr (SCORE == kAdditive && ROLE == kPairToRows)
        four[c][1] = to_acc(__ldg(static_cast<const T*>(p.with) + col * p.heads + head));
      if constexpr (ROLE == kPairToColumns) load_four(four[c], static_cast<const A*>(p.stats) + (col * p.heads + head) * 4);
    }
    auto of_other = [&](int c, int i) { return other[c][i / VEC].get(i % VEC); };
    auto raw_of = [&](int c, int i) {
      A raw = own[i] + of_other(c, i);
      if constexpr (kOfEdges) raw += of_edge[c][i / VEC].get(i % VEC);
      return raw;
    };
    auto value = [&](int c, int i) { return kOneGather ? of_other(c, i) : with[c][i / VEC].get(i % VEC); };
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      s[c] = dot[c] = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if constexpr (SCORE == kScaledDot) {
          s[c] += own[i] * of_other(c, i);
        } else if constexpr (has_att(SCORE)) {
          const A raw = raw_of(c, i);
          s[c] += att[i] * (raw > 0 ? raw : slope * raw);
        }
        if (ROLE != kPairForward) dot[c] += own_with[i] * value(c, i);
      }
      if (!active) s[c] = dot[c] = 0;
    }
    if constexpr (SCORE != kAdditive) sum_head(s);
    if (ROLE != kPairForward) sum_head(dot);
    A to_raw[kFlight];
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      to_raw[c] = SCORE == kScaledDot ? slope : A{1};
      // After the sum, so that each pass gets the same bits.
      if constexpr (SCORE == kScaledDot) s[c] = rounded_product(slope, s[c]);
      if constexpr (SCORE == kAdditive) {
        const A raw = own_score + four[c][1];
        if (!(raw > 0)) to_raw[c] = slope;
        s[c] = rounded_product(to_raw[c], raw);
      }
    }
    if constexpr (ROLE == kPairForward) {
      A top = now.most;
#pragma unroll
      for (int c = 0; c < kFlight; ++c)
        if (exists(c)) top = max(top, s[c]);
      if (top > now.most) {
        const A less = now.most == -INFINITY ? A{0} : fast_exp(now.most - top);
#pragma unroll
        for (int i = 0; i < kOut; ++i) now.out[i] *= less;
        now.sum *= less, now.most = top;
      }
    }
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      if (!exists(c)) continue;
      if constexpr (ROLE == kPairForward) {
        const A share = s[c] == -INFINITY ? A{0} : fast_exp(s[c] - now.most);  // NaN stays, and infinity becomes it
        now.sum += share;
        const A kept_share = keep[c] ? share : A{0};
#pragma unroll
        for (int i = 0; i < N; ++i) now.out[i] += kept_share * value(c, i);
      } else {
        const A* of_row = ROLE == kPairToRows ? stats : four[c];
        const A share = fast_exp(s[c] - of_row[0]) * of_row[2];
        const A kept_share = keep[c] ? share * scale : A{0};
        const A ds = (kept_share * dot[c] - share * of_row[3]) * to_raw[c];
        if constexpr (SCORE == kAdditive) now.sum += ds;
        if constexpr (SCORE == kAdditive && ROLE == kPairToColumns)
          if (p.to_other && active && f % (p.width / p.heads) == 0)
            atomicAdd(static_cast<A*>(p.to_other) + int64_t{cols[c]} * p.heads + head, ds);
        A to_edge[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if constexpr (ROLE == kPairToColumns) now.out[i] += kept_share * value(c, i);
          if constexpr (has_att(SCORE)) {
            const A raw = raw_of(c, i), d = ds * (raw > 0 ? A{1} : slope);
            now.to[i] += d;
            if constexpr (kOfEdges && ROLE == kPairToRows) now.out[i] += d * raw, to_edge[i] = d * att[i];
          } else if constexpr (kGathersTo) {
            now.to[i] += ds * of_other(c, i);
          }
        }
        if constexpr (kOfEdges && ROLE == kPairToRows)
          if (active) store_at(p.to_edge, edge_at[c], to_edge);
      }
    }
  }

  __device__ void store_row(int64_t row, int64_t degree) {
    if constexpr (ROLE == kPairForward) {
      const A over = degree > 0 ? A{1} / now.sum : A{0};
#pragma unroll
      for (int i = 0; i < kOut; ++i) now.out[i] *= over * scale;
      if (p.new_stats && f % (p.width / p.heads) == 0) {
        A* at = static_cast<A*>(p.new_stats) + (row * p.heads + head) * 4;
        at[0] = degree > 0 ? now.most : A{0}, at[2] = over, at[1] = at[3] = 0;
      }
    } else {
      if constexpr (has_att(SCORE)) {
        A product[kTo];
#pragma unroll
        for (int i = 0; i < kTo; ++i) {
          product[i] = kOfEdges ? now.out[i] : degree > 0 ? own[i] * now.to[i] : A{0};
          now.to[i] *= att[i];
          if (ROLE == kPairToColumns) now.out[i] += now.to[i];
        }
        if (!kOfEdges || ROLE == kPairToRows) store_features(p.product, row, product);
      }
      if constexpr (SCORE == kAdditive) {
        if (f % (p.width / p.heads) == 0) static_cast<T*>(p.to_own)[row * p.heads + head] = from_acc<T>(now.sum);
      } else if constexpr (ROLE == kPairToRows || SCORE == kScaledDot) {
        store_features(p.to_own, row, now.to);
      }
    }
    if constexpr (ROLE != kPairToRows) store_features(p.out, row, now.out);
  }

  __device__ A* piece_at(int64_t piece) const { return pieces + piece * (2 * p.width + 2 * p.heads); }

  __device__ void store_piece(int64_t piece) {
    A* at = piece_at(piece);
#pragma unroll
    for (int i = 0; i < kOut && kGathersOut; ++i) at[feature(i)] = now.out[i];
#pragma unroll
    for (int i = 0; i < kTo && kGathersTo; ++i) at[p.width + feature(i)] = now.to[i];
    if (f % (p.width / p.heads) != 0) return;
    at += 2 * p.width + 2 * head;
    at[0] = now.most, at[1] = now.sum;
  }

  // One feature of what store_piece has stored.
  __device__ State load_piece(int64_t piece) const {
    const A *at = piece_at(piece), *of_head = at + 2 * p.width + 2 * head;
    State found;
    found.out[0] = kGathersOut ? at[f] : A{0};
    found.to[0] = kGathersTo ? at[p.width + f] : A{0};
    found.most = of_head[0], found.sum = of_head[1];
    return found;
  }
};

template <class T, int SCORE, int ROLE, int VEC, int NV, int TPR>
__global__ void __launch_bounds__(kBlock, (kPairBlocks<T, SCORE, ROLE, VEC * NV>))
    pair_kernel(const PairArgs p, acc_t<T>* pieces, int lanes_of_head, int short_rows) {
  // Lanes without features of their own repeat the last ones of a head, so that no load needs a check, and store nothing.
  const int lane = threadIdx.x % kWarp, t = lane % TPR;
  const int64_t segment = p.width / p.heads;
  const int64_t wanted_head = int64_t{blockIdx.y} * (TPR / lanes_of_head) + t / lanes_of_head;
  const int64_t head = min(wanted_head, p.heads - 1), of_head = int64_t{t % lanes_of_head} * VEC;
  const bool active = wanted_head < p.heads && of_head < segment;
  Pair<T, SCORE, ROLE, VEC, NV, TPR> mine(p, pieces, lane, lanes_of_head, head * segment + min(of_head, segment - VEC), active);
  walk_items(mine, p.a, short_rows);
}

template <class T, int SCORE, int ROLE>
__global__ void __launch_bounds__(kBlock) pair_combine_kernel(const PairArgs p, acc_t<T>* pieces) {
  using R = Pair<T, SCORE, ROLE, 1, 1, kWarp>;
  auto make = [&](int64_t f) { return R(p, pieces, threadIdx.x % kWarp, 1, f, true); };
  combine_items<R>(p.a, p.width, make, [&](const R& row, int64_t piece) { return row.load_piece(piece); });
}

template <class T, int SCORE, int ROLE, int VEC, int NV, int TPR>
void launch_pairs(const PairArgs& p, acc_t<T>* pieces, int lanes_of_head, cudaStream_t stream) {
  const ItemGrid grid = item_grid<TPR>(p.a);
  const int64_t at_once = TPR / lanes_of_head;
  const dim3 blocks(grid.blocks, static_cast<unsigned>((p.heads + at_once - 1) / at_once));
  pair_kernel<T, SCORE, ROLE, VEC, NV, TPR><<<blocks, kBlock, 0, stream>>>(p, pieces, lanes_of_head, grid.short_rows);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (p.a.num_pieces > 0) {
    pair_combine_kernel<T, SCORE, ROLE><<<blocks_for(p.a.num_pieces * kWarp), kBlock, 0, stream>>>(p, pieces);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

// As many heads at a time as 256 bytes of a row hold, so that more of the gathered rows stay in L2 (slab_bytes in
// spmm_cuda.cuh; reddit-size, 4 x 32: 15.0 against 17.4 ms forward); more lanes for a head that needs them.
template <class T, int SCORE, int ROLE, int VEC, int NV>
void launch_pair_lanes(const PairArgs& p, acc_t<T>* pieces, cudaStream_t stream) {
  constexpr int64_t kSlab = 256 / (VEC * NV * static_cast<int64_t>(sizeof(T)));
  int lanes = 1;
  while (int64_t{lanes} * VEC * NV < p.width / p.heads) lanes *= 2;
  const int64_t wanted = std::max<int64_t>(lanes, std::min<int64_t>(kSlab, lanes * p.heads));
  if (wanted <= 8) return launch_pairs<T, SCORE, ROLE, VEC, NV, 8>(p, pieces, lanes, stream);
  if constexpr (VEC == kVec<T> && sizeof(T) < 8)
    if (wanted <= 16) return launch_pairs<T, SCORE, ROLE, VEC, NV, 16>(p, pieces, lanes, stream);
  return launch_pairs<T, SCORE, ROLE, VEC, NV, 32>(p, pieces, lanes, stream);
}

template <class T, int SCORE, int ROLE>
void launch_pair_vectors(const PairArgs& p, acc_t<T>* pieces, cudaStream_t stream) {
  const int64_t segment = p.width / p.heads, vectors = segment / kVec<T>;
  const bool fits = segment % kVec<T> == 0;
  if constexpr (sizeof(T) == 4 && SCORE != kGatv2Edges)  // 8 features a lane in all types but double
    if (fits && vectors > 1 && (vectors & (vectors - 1)) == 0)
      return launch_pair_lanes<T, SCORE, ROLE, kVec<T>, 2>(p, pieces, stream);
  if (fits) return launch_pair_lanes<T, SCORE, ROLE, kVec<T>, 1>(p, pieces, stream);
  return launch_pair_lanes<T, SCORE, ROLE, 1, 1>(p, pieces, stream);
}

template <class T, int SCORE>
void launch_pair_role(const PairArgs& p, acc_t<T>* pieces, cudaStream_t stream) {
  switch (p.role) {
    case kPairForward:
      if constexpr (SCORE != kAdditive) launch_pair_vectors<T, SCORE, kPairForward>(p, pieces, stream);
      return;
    case kPairToRows:
      return launch_pair_vectors<T, SCORE, kPairToRows>(p, pieces, stream);
    case kPairToColumns:
      return launch_pair_vectors<T, SCORE, kPairToColumns>(p, pieces, stream);
  }
}

template <class T>
void launch_pair(const PairArgs& p, acc_t<T>* pieces, cudaStream_t stream) {
  switch (p.score) {
    case kScaledDot:
      return launch_pair_role<T, kScaledDot>(p, pieces, stream);
    case kGatv2:
      return launch_pair_role<T, kGatv2>(p, pieces, stream);
    case kGatv2Edges:
      if constexpr (sizeof(T) >= 4) launch_pair_role<T, kGatv2Edges>(p, pieces, stream);
      return;
    case kAdditive:
      return launch_pair_role<T, kAdditive>(p, pieces, stream);
  }
}

// One translation unit per dtype (pair_attention_cuda_*.cu), so that they compile in parallel.
#define GNNFAST_PAIR_EXTERN(PREFIX, T) PREFIX template void launch_pair<T>(const PairArgs&, acc_t<T>*, cudaStream_t);

}  // namespace gnnfast
