// CUDA kernels of edge_relu: a reducer for common/walk.cuh. Lanes hold VEC features of one row; of each edge they read the row
// of a node, and the edge's own or which of its features were kept, and backward they write the edge's gradient as they pass.
#include <torch/csrc/stable/library.h>

#include "common/lane.cuh"
#include "common/vec.cuh"
#include "edge_relu.h"

namespace gnnfast {
namespace {

// `pieces`: the sums of pieces of rows, [num_pieces, F] in the accumulation type.
template <class T, bool BACKWARD, int VEC, int TPR>
struct ReluSum : Lane<TPR, 4, true> {
  using Base = Lane<TPR, 4, true>;
  using A = acc_t<T>;

  struct State {
    A acc[VEC];
  };

  const EdgeReluArgs& p;
  A* const pieces;
  State now;

  __device__ ReluSum(const EdgeReluArgs& p, A* pieces, const LaneFeatures& own) : Base(p.a, own), p(p), pieces(pieces) {}

  __device__ State& state() { return now; }
  __device__ void merge(const State& other) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) now.acc[i] += other.acc[i];
  }

  __device__ void start(int, int) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) now.acc[i] = 0;
  }

  template <int LANES, bool WHOLE>
  __device__ void take(int j, int group, int count, int, const typename Base::Edges& edges) {
    constexpr int kFlight = Base::kFlight;
    Raw<T, VEC> gathered[kFlight], of_edge[kFlight];
    uint32_t kept[kFlight];
    int64_t ids[kFlight];
    this->template edges_of_step<LANES, WHOLE>(j, group, count, edges, [&](int c, int64_t col, int64_t id) {
      ids[c] = id;
      gathered[c].load(static_cast<const T*>(p.x) + col * p.width + this->f);
      if constexpr (BACKWARD)
        kept[c] = __ldg(p.kept + (id * p.width + this->f) / VEC);
      else
        of_edge[c].load(static_cast<const T*>(p.w) + id * p.width + this->f);
    });
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      if (!Base::template exists<LANES, WHOLE>(j, group, count, c)) continue;
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
      if (!this->active) continue;
      if constexpr (BACKWARD) {
        if (p.to_w) store_vector<VEC>(static_cast<T*>(p.to_w) + ids[c] * p.width + this->f, found);
      } else {
        if (p.kept) p.kept[(ids[c] * p.width + this->f) / VEC] = static_cast<uint8_t>(bits);
      }
    }
  }

  __device__ void store_row(int64_t row, int64_t) {
    store_vector<VEC>(static_cast<T*>(p.out) + row * p.width + this->f, now.acc);
  }

  __device__ void store_piece(int64_t piece) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) pieces[piece * p.width + this->f + i] = now.acc[i];
  }

  // One feature of what store_piece has stored.
  __device__ State load_piece(int64_t piece) const {
    State found;
    found.acc[0] = pieces[piece * p.width + this->f];
    return found;
  }
};

template <class T, bool BACKWARD, int VEC, int TPR>
__global__ void __launch_bounds__(kBlock, sizeof(T) == 8 ? 2 : 4)
    edge_relu_kernel(const EdgeReluArgs p, acc_t<T>* pieces, int slab_lanes, int short_rows) {
  ReluSum<T, BACKWARD, VEC, TPR> mine(p, pieces, features_of_lane<VEC, TPR>(p.width, slab_lanes));
  walk_items(mine, p.a, short_rows);
}

template <class T>
__global__ void __launch_bounds__(kBlock) edge_relu_combine_kernel(const EdgeReluArgs p, acc_t<T>* pieces) {
  using R = ReluSum<T, false, 1, kWarp>;
  auto make = [&](int64_t f) { return R(p, pieces, {static_cast<int>(threadIdx.x) % kWarp, f, true}); };
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

template <class T, bool BACKWARD, int VEC>
void launch_width(const EdgeReluArgs& p, acc_t<T>* pieces, cudaStream_t stream) {
  for_lanes<VEC>(p.width, [&](auto tpr, int slab_lanes, int slabs) {
    launch_edge_relu<T, BACKWARD, VEC, decltype(tpr)::value>(p, pieces, slab_lanes, slabs, stream);
  });
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
      p.unit > 1 ? launch_width<T, BACKWARD, kVec<T>>(p, at, launch.stream)
                 : launch_width<T, BACKWARD, 1>(p, at, launch.stream);
    };
    p.backward ? of_role(Int<1>{}) : of_role(Int<0>{});
  });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("edge_relu", TORCH_BOX(&edge_relu<Cuda>));
  m.impl("edge_relu_backward", TORCH_BOX(&edge_relu_backward<Cuda>));
}

}  // namespace gnnfast
