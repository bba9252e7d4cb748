// What reducers of common/walk.cuh have in common whose lanes hold VEC features of one row: which features a lane has, the
// edges it reads, how many lanes a row takes, and kernels for reducers that want no more.
#pragma once

#include "walk.cuh"

namespace gnnfast {

// Lanes without features of their own repeat the last ones, so that no load needs a check, and store nothing.
struct LaneFeatures {
  int lane;
  int64_t f;
  bool active;
};

template <int VEC, int TPR>
__device__ inline LaneFeatures features_of_lane(int64_t width, int slab_lanes) {
  const int lane = threadIdx.x % kWarp, t = lane % TPR;
  const int64_t wanted = (int64_t{blockIdx.y} * slab_lanes + t) * VEC;
  const bool active = t < slab_lanes && wanted < width;
  return {lane, active ? wanted : min((int64_t{blockIdx.y} + 1) * slab_lanes * VEC, width) - VEC, active};
}

// FLIGHT edges in flight. IDS: whether the numbers of edges are wanted, not only their columns. HOT: kHot in common/walk.cuh.
template <int TPR, int FLIGHT, bool IDS, bool HOT = true>
struct Lane {
  static_assert(FLIGHT <= TPR);
  static constexpr int kTpr = TPR, kFlight = FLIGHT, kColumns = 1;
  static constexpr bool kReadAhead = TPR < kWarp, kHot = HOT;

  const Csr& a;
  const int lane;
  const int64_t f;
  const bool active;

  __device__ Lane(const Csr& a, const LaneFeatures& own) : a(a), lane(own.lane), f(own.f), active(own.active) {}

  struct Edges {
    int col[1], id[1];

    template <int LANES>
    __device__ void read(const Lane& m, int first, int end) {
      const int slot = first + m.lane % LANES;
      const bool exists = slot < end;
      col[0] = exists ? __ldg(m.a.col + slot) : 0;
      if constexpr (IDS) id[0] = !exists ? 0 : m.a.perm ? __ldg(m.a.perm + slot) : slot;
    }
  };

  // Calls found(c, column, id) for the edges j .. j + kFlight - 1 of the group. One that does not exist is the last one that
  // does, so that loads need no branch; `exists` tells.
  template <int LANES, bool WHOLE, class F>
  __device__ void edges_of_step(int j, int group, int count, const Edges& edges, const F& found) const {
    constexpr int G = LANES / TPR;
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      const int wanted = (j + c) * G + group, k = WHOLE ? wanted : max(min(wanted, count - 1), 0);
      const int64_t col = from_lane<LANES, TPR>(edges.col, k, c);
      if constexpr (IDS)
        found(c, col, int64_t{from_lane<LANES, TPR>(edges.id, k, c)});
      else
        found(c, col, int64_t{0});
    }
  }

  template <int LANES, bool WHOLE>
  __device__ static bool exists(int j, int group, int count, int c) {
    return WHOLE || (j + c) * (LANES / TPR) + group < count;
  }
};

// Calls launch(Int<TPR>, lanes of a slab, slabs) with the fewest lanes that cover a row, so that the others can take further
// edges. Rows are cut into slabs only where they are longer than a warp's loads: what is read most no cache holds.
template <int VEC, class F>
void for_lanes(int64_t width, const F& launch) {
  const int64_t lanes = (width + VEC - 1) / VEC;
  const int slabs = static_cast<int>((lanes + kWarp - 1) / kWarp), slab = static_cast<int>((lanes + slabs - 1) / slabs);
  if (slab <= 8) return launch(Int<8>{}, slab, slabs);
  if constexpr (VEC > 1)
    if (slab <= 16) return launch(Int<16>{}, slab, slabs);
  return launch(Int<32>{}, slab, slabs);
}

// A kernel for each reducer R<T, VEC, TPR>, which is made of arguments, what there is for pieces of rows, and LaneFeatures.
template <template <class, int, int> class R, class T, int VEC, int TPR, class Args, class Pieces>
__global__ void __launch_bounds__(kBlock, sizeof(T) == 8 ? 2 : 3)
    lanes_kernel(const Args p, const Pieces pieces, int slab_lanes, int short_rows) {
  R<T, VEC, TPR> mine(p, pieces, features_of_lane<VEC, TPR>(p.width, slab_lanes));
  walk_items(mine, p.a, short_rows);
}

template <template <class, int, int> class R, class T, class Args, class Pieces>
__global__ void __launch_bounds__(kBlock) lanes_combine_kernel(const Args p, const Pieces pieces) {
  using One = R<T, 1, kWarp>;
  auto make = [&](int64_t f) { return One(p, pieces, {static_cast<int>(threadIdx.x) % kWarp, f, true}); };
  combine_items<One>(p.a, p.width, make, [&](const One& row, int64_t piece) { return row.load_piece(piece); });
}

template <template <class, int, int> class R, class T, int VEC, class Args, class Pieces>
void launch_lanes(const Args& p, const Pieces& pieces, cudaStream_t stream) {
  for_lanes<VEC>(p.width, [&](auto tpr, int slab_lanes, int slabs) {
    constexpr int TPR = decltype(tpr)::value;
    const ItemGrid grid = item_grid<TPR>(p.a);
    const dim3 blocks(grid.blocks, static_cast<unsigned>(slabs));
    lanes_kernel<R, T, VEC, TPR><<<blocks, kBlock, 0, stream>>>(p, pieces, slab_lanes, grid.short_rows);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  if (p.a.num_pieces > 0) {
    lanes_combine_kernel<R, T><<<blocks_for(p.a.num_pieces * kWarp), kBlock, 0, stream>>>(p, pieces);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

}  // namespace gnnfast
