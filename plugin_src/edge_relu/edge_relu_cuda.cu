// CUDA kernels of edge_relu: a reducer for common/walk.cuh. Lanes hold VEC features of one row; of each edge they read the row
// of a node, and the edge's own or which of its features were kept, and backward they write the edge's gradient as they pass.
#include <torch/csrc/stable/library.h>

#include "common/vec.cuh"
#include "common/walk.cuh"
#include "edge_relu.h"

namespace gnnfast {
namespace {

// `pieces`: the sums of pieces of rows, [num_pieces, F] in the accumulation type.
template <class T, bool BACKWARD, int VEC, int TPR>
struct ReluSum {
  using A = acc_t<T>;
  static constexpr int kTpr = TPR, kFlight = 4, kColumns = kFlight > TPR ? kFlight / TPR : 1;
  static constexpr bool kReadAhead = TPR < kWarp, kHot = true;

  struct State {
    A acc[VEC];
  };

  const EdgeReluArgs& p;
  const int lane;
  const int64_t f;
  const bool active;
  A* const pieces;
  State now;

  __device__ ReluSum(const EdgeReluArgs& p, A* pieces, int lane, int64_t f, bool active)
      : p(p), lane(lane), f(f), active(active), pieces(pieces) {}

  __device__ State& state() { return now; }
  __device__ void merge(const State& other) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) now.acc[i] += other.acc[i];
  }

  __device__ void start(int, int) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) now.acc[i] = 0;
  }

  struct Edges {
    int col[kColumns], id[kColumns];

    template <int LANES>
    __device__ void read(const ReluSum& m, int first, int end) {
#pragma unroll
      for (int u = 0; u < kColumns; ++u) {
        const int slot = first + u * LANES + m.lane % LANES;
        col[u] = id[u] = 0;
        if (slot < end) {
          col[u] = __ldg(m.p.a.col + slot);
          id[u] = m.p.a.perm ? __ldg(m.p.a.perm + slot) : slot;
        }
      }
    }
  };

  template <int LANES, bool WHOLE>
  __device__ void take(int j, int group, int count, int, const Edges& edges) {
    constexpr int G = LANES / TPR;
    Raw<T, VEC> gathered[kFlight], of_edge[kFlight];
    uint32_t kept[kFlight];
    int64_t id[kFlight];
    auto exists = [&](int c) { return WHOLE || (j + c) * G + group < count; };
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      // An edge that does not exist is read as the last one that does, so that loads need no branch; what is read is not used.
      const int wanted = (j + c) * G + group, k = WHOLE ? wanted : max(min(wanted, count - 1), 0);
      const int64_t col = from_lane<LANES, TPR>(edges.col, k, c);
      id[c] = from_lane<LANES, TPR>(edges.id, k, c);
      gathered[c].load(static_cast<const T*>(p.x) + col * p.width + f);
      if constexpr (BACKWARD)
        kept[c] = __ldg(p.kept + (id[c] * p.width + f) / VEC);
      else
        of_edge[c].load(static_cast<const T*>(p.w) + id[c] * p.width + f);
    }
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      if (!exists(c)) continue;
      A found[VEC];
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const A v = gathered[c].get(i);
        if constexpr (BACKWARD) {
          found[i] = kept[c] >> i & 1 ? v : A{0};
        } else {
          const A sum = v + of_edge[c].get(i);
          found[i] = sum <= 0 ? A{0} : sum;  // NaN stays
          bits |= sum <= 0 ? 0 : 1u << i;
        }
        now.acc[i] += found[i];
      }
      if (!active) continue;
      if constexpr (BACKWARD) {
        if (p.to_w) store_vector<VEC>(static_cast<T*>(p.to_w) + id[c] * p.width + f, found);
      } else {
        if (p.kept) p.kept[(id[c] * p.width + f) / VEC] = static_cast<uint8_t>(bits);
      }
    }
  }

  __device__ void store_row(int64_t row, int64_t) { store_vector<VEC>(static_cast<T*>(p.out) + row * p.width + f, now.acc); }

  __device__ void store_piece(int64_t piece) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) pieces[piece * p.width + f + i] = now.acc[i];
  }

  // One feature of what store_piece has stored.
  __device__ State load_piece(int64_t piece) const {
    State found;
    found.acc[0] = pieces[piece * p.width + f];
    return found;
  }
};

template <class T, bool BACKWARD, int VEC, int TPR>
__global__ void __launch_bounds__(kBlock, sizeof(T) == 8 ? 2 : 4)
    edge_relu_kernel(const EdgeReluArgs p, acc_t<T>* pieces, int slab_lanes, int short_rows) {
  // Lanes without features of their own repeat the last ones, so that no load needs a check, and store nothing.
  const int lane = threadIdx.x % kWarp, t = lane % TPR;
  const int64_t wanted = (int64_t{blockIdx.y} * slab_lanes + t) * VEC;
  const bool active = t < slab_lanes && wanted < p.width;
  const int64_t f = active ? wanted : min((int64_t{blockIdx.y} + 1) * slab_lanes * VEC, p.width) - VEC;
  ReluSum<T, BACKWARD, VEC, TPR> mine(p, pieces, lane, f, active);
  walk_items(mine, p.a, short_rows);
}

template <class T>
__global__ void __launch_bounds__(kBlock) edge_relu_combine_kernel(const EdgeReluArgs p, acc_t<T>* pieces) {
  using R = ReluSum<T, false, 1, kWarp>;
  auto make = [&](int64_t f) { return R(p, pieces, threadIdx.x % kWarp, f, true); };
  combine_items<R>(p.a, p.width, make, [&](const R& row, int64_t piece) { return row.load_piece(piece); });
}

template <class T, bool BACKWARD, int VEC, int TPR>
void launch_edge_relu(const EdgeReluArgs& p, acc_t<T>* pieces, int slab_lanes, int slabs, cudaStream_t stream) {
  const ItemGrid grid = item_grid<TPR>(p.a);
  const dim3 blocks(grid.blocks, static_cast<unsigned>(slabs));
  edge_relu_kernel<T, BACKWARD, VEC, TPR><<<blocks, kBlock, 0, stream>>>(p, pieces, slab_lanes, grid.short_rows);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (p.a.num_pieces > 0) {
    edge_relu_combine_kernel<T><<<blocks_for(p.a.num_pieces * kWarp), kBlock, 0, stream>>>(p, pieces);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

// The fewest lanes that cover a slab, so that the others can take further edges. Rows are cut into slabs only where they are
// longer than a warp's loads: what is read most, the rows of edges, no cache holds.
template <class T, bool BACKWARD, int VEC>
void launch_lanes(const EdgeReluArgs& p, acc_t<T>* pieces, cudaStream_t stream) {
  const int64_t lanes = (p.width + VEC - 1) / VEC;
  const int slabs = static_cast<int>((lanes + kWarp - 1) / kWarp), slab = static_cast<int>((lanes + slabs - 1) / slabs);
  if (slab <= 8) return launch_edge_relu<T, BACKWARD, VEC, 8>(p, pieces, slab, slabs, stream);
  if constexpr (VEC > 1)
    if (slab <= 16) return launch_edge_relu<T, BACKWARD, VEC, 16>(p, pieces, slab, slabs, stream);
  return launch_edge_relu<T, BACKWARD, VEC, 32>(p, pieces, slab, slabs, stream);
}

}  // namespace

void Cuda::edge_relu(const EdgeReluArgs& p, const Tensor& x) {
  const Launch launch(x);
  std::optional<Tensor> pieces;  // freed in stream order when this returns
  if (p.a.num_pieces > 0) pieces = make_empty(x, {p.a.num_pieces * p.width}, acc_dtype(x.scalar_type()));
  dispatch_cuda(dtype_of("x", x), [&](auto type) {
    using T = typename decltype(type)::type;
    acc_t<T>* at = pieces ? static_cast<acc_t<T>*>(pieces->mutable_data_ptr()) : nullptr;
    auto of_role = [&](auto backward) {
      constexpr bool BACKWARD = decltype(backward)::value;
      p.unit > 1 ? launch_lanes<T, BACKWARD, kVec<T>>(p, at, launch.stream)
                 : launch_lanes<T, BACKWARD, 1>(p, at, launch.stream);
    };
    p.backward ? of_role(Int<1>{}) : of_role(Int<0>{});
  });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("edge_relu", TORCH_BOX(&edge_relu<Cuda>));
  m.impl("edge_relu_backward", TORCH_BOX(&edge_relu_backward<Cuda>));
}

}  // namespace gnnfast
