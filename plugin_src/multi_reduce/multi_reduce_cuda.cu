// CUDA kernels of multi_reduce: reducers for common/walk.cuh, whose lanes hold VEC features of one row, and a thread for each
// feature of a row by itself.
#include <torch/csrc/stable/library.h>

#include "common/lane.cuh"
#include "common/vec.cuh"
#include "multi_reduce.h"
#include "reduce_row.h"
#include "spmm/spmm_cuda.cuh"

namespace gnnfast {
namespace {

// Workspace of the pieces of long rows: `values` [4, num_pieces, F] and `ties` [2, num_pieces, F].
template <class T>
struct ReducePieces {
  T* values;
  int32_t* ties;
};

template <class T, int VEC, int TPR>
struct Statistics : Lane<TPR, 4, false> {
  using Base = Lane<TPR, 4, false>;
  struct State {
    T sum[VEC], square[VEC], most[VEC], least[VEC];  // least is that of -x
    int32_t most_ties[VEC], least_ties[VEC];
  };

  const MultiReduceArgs& p;
  const ReducePieces<T> pieces;
  State now;

  __device__ Statistics(const MultiReduceArgs& p, ReducePieces<T> pieces, const LaneFeatures& own)
      : Base(p.a, own), p(p), pieces(pieces) {}

  __device__ State& state() { return now; }

  __device__ void start(int, int) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      now.sum[i] = now.square[i] = 0;
      now.most[i] = now.least[i] = -std::numeric_limits<T>::infinity();
      now.most_ties[i] = now.least_ties[i] = 0;
    }
  }

  __device__ void merge(const State& other) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      now.sum[i] += other.sum[i];
      now.square[i] += other.square[i];
      take_max<kMaxCount>(now.most[i], now.most_ties[i], other.most[i], other.most_ties[i]);
      take_max<kMaxCount>(now.least[i], now.least_ties[i], other.least[i], other.least_ties[i]);
    }
  }

  template <int LANES, bool WHOLE>
  __device__ void take(int j, int group, int count, int, const typename Base::Edges& edges) {
    Raw<T, VEC> gathered[Base::kFlight];
    this->template edges_of_step<LANES, WHOLE>(j, group, count, edges, [&](int c, int64_t col, int64_t) {
      gathered[c].load(static_cast<const T*>(p.x) + col * p.width + this->f);
    });
#pragma unroll
    for (int c = 0; c < Base::kFlight; ++c) {
      if (!Base::template exists<LANES, WHOLE>(j, group, count, c)) continue;
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const T v = gathered[c].get(i);
        now.sum[i] += v;
        now.square[i] += v * v;
        take_max<kMaxCount>(now.most[i], now.most_ties[i], v, 1);
        take_max<kMaxCount>(now.least[i], now.least_ties[i], -v, 1);
      }
    }
  }

  __device__ void store_row(int64_t row, int64_t degree) {
    const ReduceLayout& l = p.layout;
    const int64_t width = p.width;
    T shift[VEC], values[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) shift[i] = 0;
    if (p.shift) load_vector<VEC>(shift, static_cast<const T*>(p.shift) + row * width + this->f);
    T* out = static_cast<T*>(p.out) + row * l.count * width + this->f;
    for (int k = 0; k < l.count; ++k) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const RowStatistics<T> found{now.sum[i], now.square[i], now.most[i], -now.least[i]};
        values[i] = degree == 0 ? T{0} : reduced<One<T>>(l.kinds[k], found, static_cast<T>(degree), shift[i]);
      }
      store_vector<VEC>(out + k * width, values);
    }
    if (!p.kept) return;
    T* kept = static_cast<T*>(p.kept) + row * l.kept_rows * width + this->f;
    int32_t* ties = p.ties + row * l.ties_rows * width + this->f;
    auto keep_extremum = [&](int at, int ties_at, T sign, const T(&best)[VEC], const int32_t (&count)[VEC]) {
      if (at < 0) return;
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        values[i] = sign * best[i];
        ties[ties_at * width + i] = count[i];
      }
      store_vector<VEC>(kept + at * width, values);
    };
    keep_extremum(l.most, l.most_ties, 1, now.most, now.most_ties);
    keep_extremum(l.least, l.least_ties, -1, now.least, now.least_ties);
    if (l.mean < 0) return;
#pragma unroll
    for (int i = 0; i < VEC; ++i) values[i] = degree == 0 ? T{0} : now.sum[i] / static_cast<T>(degree);
    store_vector<VEC>(kept + l.mean * width, values);
  }

  __device__ int64_t at(int plane, int64_t piece) const { return (plane * p.a.num_pieces + piece) * p.width + this->f; }

  __device__ void store_piece(int64_t piece) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      pieces.values[at(0, piece) + i] = now.sum[i];
      pieces.values[at(1, piece) + i] = now.square[i];
      pieces.values[at(2, piece) + i] = now.most[i];
      pieces.values[at(3, piece) + i] = now.least[i];
      pieces.ties[at(0, piece) + i] = now.most_ties[i];
      pieces.ties[at(1, piece) + i] = now.least_ties[i];
    }
  }

  // One feature of what store_piece has stored.
  __device__ State load_piece(int64_t piece) const {
    State found;
    found.sum[0] = pieces.values[at(0, piece)];
    found.square[0] = pieces.values[at(1, piece)];
    found.most[0] = pieces.values[at(2, piece)];
    found.least[0] = pieces.values[at(3, piece)];
    found.most_ties[0] = pieces.ties[at(0, piece)];
    found.least_ties[0] = pieces.ties[at(1, piece)];
    return found;
  }
};

// Two edges in flight: of each a lane holds up to six vectors.
template <class T, int VEC, int TPR>
struct ShareSum : Lane<TPR, 2, false> {
  using Base = Lane<TPR, 2, false>;
  struct State {
    T acc[VEC];
  };

  const ReduceBackwardArgs& p;
  const ReducePieces<T> pieces;
  State now;
  T self[VEC];

  __device__ ShareSum(const ReduceBackwardArgs& p, ReducePieces<T> pieces, const LaneFeatures& own)
      : Base(p.a, own), p(p), pieces(pieces) {}

  __device__ State& state() { return now; }

  __device__ void start(int row, int) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) now.acc[i] = 0;
    load_vector<VEC>(self, static_cast<const T*>(p.x) + int64_t{row} * p.width + this->f);
  }

  __device__ void merge(const State& other) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) now.acc[i] += other.acc[i];
  }

  template <int LANES, bool WHOLE>
  __device__ void take(int j, int group, int count, int, const typename Base::Edges& edges) {
    const ReduceLayout& l = p.layout;
    Raw<T, VEC> linear[Base::kFlight], square[Base::kFlight], best[2][Base::kFlight], share[2][Base::kFlight];
    const int64_t width = p.width, stride = l.rows * width;
    this->template edges_of_step<LANES, WHOLE>(j, group, count, edges, [&](int c, int64_t col, int64_t) {
      const T* shares = static_cast<const T*>(p.shares) + col * stride + this->f;
      if (l.linear >= 0) linear[c].load(shares + l.linear * width);
      if (l.square >= 0) square[c].load(shares + l.square * width);
      auto load_extremum = [&](int which, int at) {
        if (at < 0) return;
        best[which][c].load(shares + at * width);
        share[which][c].load(shares + (at + 1) * width);
      };
      load_extremum(0, l.most_at);
      load_extremum(1, l.least_at);
    });
#pragma unroll
    for (int c = 0; c < Base::kFlight; ++c) {
      if (!Base::template exists<LANES, WHOLE>(j, group, count, c)) continue;
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        if (l.linear >= 0) now.acc[i] += linear[c].get(i);
        if (l.square >= 0) now.acc[i] += self[i] * square[c].get(i);
        if (l.most_at >= 0) now.acc[i] += share_of(self[i], best[0][c].get(i), share[0][c].get(i));
        if (l.least_at >= 0) now.acc[i] += share_of(self[i], best[1][c].get(i), share[1][c].get(i));
      }
    }
  }

  __device__ void store_row(int64_t row, int64_t) {
    store_vector<VEC>(static_cast<T*>(p.to_x) + row * p.width + this->f, now.acc);
  }

  __device__ void store_piece(int64_t piece) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) pieces.values[piece * p.width + this->f + i] = now.acc[i];
  }

  __device__ State load_piece(int64_t piece) const {
    State found;
    found.acc[0] = pieces.values[piece * p.width + this->f];
    return found;
  }
};

// `values` and `ties`: how many planes of the pieces there are.
template <template <class, int, int> class R, class Args>
void launch_walk(const Args& p, const Tensor& x, int values, int ties) {
  const Launch launch(x);
  std::optional<Tensor> of_values, of_ties;  // freed in stream order when this returns
  const int64_t numel = p.a.num_pieces * p.width;
  if (numel) of_values = make_empty(x, {values * numel}, x.scalar_type());
  if (numel && ties) of_ties = make_empty(x, {ties * numel}, ScalarType::Int);
  auto run = [&](auto type) {
    using T = typename decltype(type)::type;
    const ReducePieces<T> pieces{of_values ? static_cast<T*>(of_values->mutable_data_ptr()) : nullptr,
                                 of_ties ? of_ties->mutable_data_ptr<int32_t>() : nullptr};
    p.width % kVec<T> == 0 ? launch_lanes<R, T, kVec<T>>(p, pieces, launch.stream)
                           : launch_lanes<R, T, 1>(p, pieces, launch.stream);
  };
  dtype_of("x", x) == kDouble ? run(Type<double>{}) : run(Type<float>{});
}

template <class T>
__global__ void __launch_bounds__(kBlock) shares_kernel(const ReduceSharesArgs p) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= p.num_rows * p.width) return;
  const longlong2 at = row_and_feature(i, p.width);
  share_out<One<T>>(p, at.x, at.y);
}

template <class T>
__global__ void __launch_bounds__(kBlock) edges_kernel(const ReduceEdgesArgs p) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= p.num_edges * p.width) return;
  const longlong2 at = row_and_feature(i, p.width);
  edge_backward<One<T>>(p, at.x, at.y);
}

}  // namespace

void Cuda::multi_reduce(const MultiReduceArgs& p, const Tensor& x) { launch_walk<Statistics>(p, x, 4, 2); }

void Cuda::multi_reduce_backward(const ReduceBackwardArgs& p, const Tensor& x) { launch_walk<ShareSum>(p, x, 1, 0); }

void Cuda::multi_reduce_shares(const ReduceSharesArgs& p, const Tensor& grad) {
  const Launch launch(grad);
  const unsigned grid = blocks_for(p.num_rows * p.width);
  const bool wide = dtype_of("grad", grad) == kDouble;
  (wide ? shares_kernel<double> : shares_kernel<float>)<<<grid, kBlock, 0, launch.stream>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void Cuda::multi_reduce_edges(const ReduceEdgesArgs& p, const Tensor& x) {
  const Launch launch(x);
  const unsigned grid = blocks_for(p.num_edges * p.width);
  const bool wide = dtype_of("x", x) == kDouble;
  (wide ? edges_kernel<double> : edges_kernel<float>)<<<grid, kBlock, 0, launch.stream>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("multi_reduce", TORCH_BOX(&multi_reduce<Cuda>));
  m.impl("multi_reduce_shares", TORCH_BOX(&multi_reduce_shares<Cuda>));
  m.impl("multi_reduce_backward", TORCH_BOX(&multi_reduce_backward<Cuda>));
  m.impl("multi_reduce_edges", TORCH_BOX(&multi_reduce_edges<Cuda>));
}

}  // namespace gnnfast
