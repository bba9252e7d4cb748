// How CUDA kernels that reduce over the edges of a row go over the work items of a schedule (graph/schedule.h): long rows and
// pieces of them get a block of 8 warps, others a warp, rows of at most 32 edges a group of TPR lanes. TPR lanes hold the
// features of one row and gather from one edge at a time; the groups that share an item take its edges in turn.
//
// A reducer R, which one lane holds, says what is done with an edge:
//   R::kTpr            lanes of a group
//   R::kFlight         edges whose gathers are in flight together
//   R::kColumns        registers of column ids a lane, so that a batch has kFlight edges for each group
//   R::kReadAhead      whether a batch of indices is read before the gathers of the one before it
//   R::kHot            worth a variant that does not check whether an edge exists
//   R::Edges           what a lane reads of the edges of a batch; read<LANES>(R, first slot, end)
//   R::active          whether the lane has features of its own
//   start(row, begin)  a new item
//   take<LANES, WHOLE>(j, group, count, first slot, Edges)   the group's edges j .. j + kFlight - 1 of a batch of `count`
//   R::State, state()  the partial result, a plain struct of 32-bit words; merge(State) adds that of other edges
//   store_row(row, degree), store_piece(piece)
//   idle               not each has it, the same for a whole warp: start() has found that the item's edges need no look
// Orders of merging are fixed by the graph, so results vary neither from run to run nor with the order of the schedule.
#pragma once

#include <type_traits>

#include "launch.cuh"

namespace gnnfast {

__device__ inline int largest_of_warp(int v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, v);
#else  // Turing
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2) v = max(v, __shfl_xor_sync(kAllLanes, v, apart));
  return v;
#endif
}

constexpr int kMostShortRows = 8;  // short rows a warp takes, one for each group of lanes after another

// What the lane that read edge k of a batch holds of it. With several registers a lane, edge c of a step is in register c /
// TPR, or in one before it if k was moved to the last edge.
template <int LANES, int TPR, int N, class V>
__device__ inline V from_lane(const V (&held)[N], int k, int c) {
  V found = __shfl_sync(kAllLanes, held[0], k, LANES);
#pragma unroll
  for (int u = 1; u <= c / TPR && u < N; ++u) {
    const V other = __shfl_sync(kAllLanes, held[u], k, LANES);
    if (k / LANES == u) found = other;
  }
  return found;
}

template <class R, class = void>
constexpr bool kMayIdle = false;
template <class R>
constexpr bool kMayIdle<R, std::void_t<decltype(R::idle)>> = true;

// Takes the slots [begin, end), which LANES lanes share: their groups take every (LANES / TPR)-th slot. Items of one warp can
// differ in length; `longest` is the length of the longest.
template <int LANES, class R>
__device__ inline void walk(R& mine, int lane, int begin, int end, int longest) {
  constexpr int G = LANES / R::kTpr, kBatch = LANES * R::kColumns, kSteps = R::kTpr * R::kColumns;
  if constexpr (kMayIdle<R>)
    if (mine.idle) return;
  const int group = lane % LANES / R::kTpr;
  typename R::Edges now, next;
  if (R::kReadAhead) now.template read<LANES>(mine, begin, end);
  for (int base = 0; base < longest; base += kBatch) {
    if (!R::kReadAhead) now.template read<LANES>(mine, begin + base, end);
    if (R::kReadAhead && base + kBatch < longest) next.template read<LANES>(mine, begin + base + kBatch, end);
    const int count = end - begin - base;
    const bool whole = LANES == kWarp ? count >= kBatch : __all_sync(kAllLanes, count >= kBatch);
#pragma unroll 1
    for (int j = 0; j < kSteps; j += R::kFlight) {
      if (!whole && base + j * G >= longest) break;
      if (R::kHot && whole)
        mine.template take<LANES, true>(j, group, count, begin + base, now);
      else
        mine.template take<LANES, false>(j, group, count, begin + base, now);
    }
    if (R::kReadAhead) now = next;
  }
}

template <class R>
constexpr int kStateWords = sizeof(typename R::State) / sizeof(uint32_t);

template <class State>
__device__ inline uint32_t& word(State& state, int i) {
  return reinterpret_cast<uint32_t*>(&state)[i];
}

// Combines the groups of a warp, which shared an item.
template <class R>
__device__ inline void merge_groups(R& mine) {
#pragma unroll
  for (int o = R::kTpr; o < kWarp; o <<= 1) {
    typename R::State other;
#pragma unroll
    for (int i = 0; i < kStateWords<R>; ++i) word(other, i) = __shfl_xor_sync(kAllLanes, word(mine.state(), i), o);
    mine.merge(other);
  }
}

// All that a block does. `short_rows` is that of the launch.
template <class R>
__device__ inline void walk_items(R& mine, const Csr& a, int short_rows) {
  constexpr int kWarps = kBlock / kWarp, TPR = R::kTpr;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, t = lane % TPR;
  const int4* items = reinterpret_cast<const int4*>(a.schedule);
  const int4 counts = count_items(a);
  const bool for_block = blockIdx.x < a.num_block_items;
  const int64_t warp_id = (int64_t{blockIdx.x} - a.num_block_items) * kWarps + warp;
  if (for_block || warp_id < a.num_warp_items) {
    if (for_block ? blockIdx.x >= counts.z : warp_id >= counts.w) return;
    const int4 item = __ldg(items + (for_block ? blockIdx.x : counts.z + warp_id));
    int begin = item.y, end = item.z;
    if (for_block) {  // an equal, contiguous share for each warp, in whole batches if it is more than one
      const int even = (end - begin + kWarps - 1) / kWarps, unit = even > kWarp ? kWarp : kWarp / kWarps;
      const int share = (even + unit - 1) / unit * unit;
      begin = min(begin + warp * share, end);
      end = min(begin + share, end);
    }
    mine.start(item.x, begin);
    walk<kWarp>(mine, lane, begin, end, end - begin);
    merge_groups(mine);
    if (!for_block) {
      if (lane < TPR && mine.active) mine.store_row(item.x, item.z - item.y);
      return;
    }
    __shared__ uint32_t shared[kWarps * kStateWords<R> * TPR];
    if (lane < TPR) {
#pragma unroll
      for (int i = 0; i < kStateWords<R>; ++i) shared[(warp * kStateWords<R> + i) * TPR + t] = word(mine.state(), i);
    }
    __syncthreads();
    if (threadIdx.x >= TPR || !mine.active) return;
    for (int w = 1; w < kWarps; ++w) {
      typename R::State other;
#pragma unroll
      for (int i = 0; i < kStateWords<R>; ++i) word(other, i) = shared[(w * kStateWords<R> + i) * TPR + t];
      mine.merge(other);
    }
    if (blockIdx.x >= count_items(a).y)
      mine.store_row(item.x, item.z - item.y);
    else
      mine.store_piece(blockIdx.x);
    return;
  }

  const int64_t warp_blocks = (a.num_warp_items + kWarps - 1) / kWarps * kWarps;
  if (warp_id < warp_blocks) return;
  int64_t id = counts.z + counts.w + (warp_id - warp_blocks) * short_rows;
  const int64_t last = min(id + short_rows, int64_t{counts.x});
  auto item_at = [&](int64_t own) { return own < last ? __ldg(items + own) : make_int4(0, 0, 0, 0); };
  int4 next = item_at(id + lane / TPR);
  for (; id < last; id += kWarp / TPR) {
    const int64_t own = id + lane / TPR;
    const int4 item = next;
    next = item_at(own + kWarp / TPR);
    const int degree = item.z - item.y;
    mine.start(item.x, item.y);
    walk<TPR>(mine, lane, item.y, item.z, TPR == kWarp ? degree : largest_of_warp(degree));
    if (own < last && mine.active) mine.store_row(item.x, degree);
  }
}

// The rows of which some piece was stored by store_piece: a block per 8 pieces. For each row that begins among them its warps
// share the row's pieces, so that a row of very many pieces is not added up by one warp alone. `make(f)` gives a
// reducer of one feature, `load(reducer, piece)` its State of a piece.
template <class R, class Make, class Load>
__device__ inline void combine_items(const Csr& a, int64_t width, const Make& make, const Load& load) {
  constexpr int kWarps = kBlock / kWarp;
  __shared__ uint32_t shared[kWarps][kStateWords<R>][kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int4* items = reinterpret_cast<const int4*>(a.schedule);
  const int64_t begin = int64_t{blockIdx.x} * kWarps, end = min(begin + kWarps, int64_t{count_items(a).y});
  for (int64_t first = begin; first < end; ++first) {
    const int4 item = __ldg(items + first);
    if (item.w <= 0) continue;
    const int64_t degree = __ldg(items + first + item.w - 1).z - item.y;
    const int sharers = min(item.w, kWarps);
    for (int64_t f0 = 0; f0 < width; f0 += kWarp) {
      const int64_t f = min(f0 + lane, width - 1);
      R row = make(f);
      row.start(item.x, item.y);
      if (warp < sharers) {
#pragma unroll 4
        for (int64_t piece = first + warp; piece < first + item.w; piece += kWarps) row.merge(load(row, piece));
      }
#pragma unroll
      for (int i = 0; i < kStateWords<R>; ++i) shared[warp][i][lane] = word(row.state(), i);
      __syncthreads();
      if (warp == 0 && f0 + lane < width) {
        for (int w = 1; w < sharers; ++w) {
          typename R::State other;
#pragma unroll
          for (int i = 0; i < kStateWords<R>; ++i) word(other, i) = shared[w][i][lane];
          row.merge(other);
        }
        row.store_row(item.x, degree);
      }
      __syncthreads();
    }
  }
}

// Blocks of a launch, and the short rows that a warp takes. A small graph is spread over the device: its time is that of a
// chain of loads, so no warp should take several; and a warp of long short rows that starts last should not take much longer
// than the others (arxiv-size, F = 128: 0.13 -> 0.11 ms).
struct ItemGrid {
  unsigned blocks;
  int short_rows;
};

template <int TPR>
ItemGrid item_grid(const Csr& a) {
  constexpr int kWarps = kBlock / kWarp, kManyWarps = 65536;
  constexpr int kFewest = kWarp / TPR < kMostShortRows ? kWarp / TPR : kMostShortRows;
  const int64_t num_short = a.num_items - a.num_block_items - a.num_warp_items;
  int short_rows = kMostShortRows;
  while (short_rows > kFewest && num_short < int64_t{kManyWarps} * short_rows) short_rows /= 2;
  const int64_t warps = (num_short + short_rows - 1) / short_rows;
  const int64_t blocks = a.num_block_items + (a.num_warp_items + kWarps - 1) / kWarps + (warps + kWarps - 1) / kWarps;
  return {static_cast<unsigned>(blocks), short_rows};
}

}  // namespace gnnfast
