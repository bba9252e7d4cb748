// CUDA kernels of softmax_reduce: reducers for common/walk.cuh, whose lanes hold VEC features of one row, with the maximum so
// far and sums that are corrected where it grows; and a thread for each element of messages that exist.
#include <torch/csrc/stable/library.h>

#include "common/lane.cuh"
#include "common/math.cuh"
#include "softmax_reduce.h"

namespace gnnfast {
namespace {

template <int VEC, class T, class Args>
__device__ inline void load_temperature(T (&t)[VEC], const Args& p, int64_t f) {
#pragma unroll
  for (int i = 0; i < VEC; ++i) t[i] = static_cast<T>(p.scale);
  if (p.t) load_vector<VEC>(t, static_cast<const T*>(p.t) + f);
}

// A sum of weights, or weighted rows, less by a factor. Where the factor is 0 the sum may already have left the finite numbers.
template <class T>
__device__ inline T lessened(T sum, T factor) {
  return factor == 0 && sum == sum ? T{0} : sum * factor;
}

// `pieces`: most, total and sum of pieces of rows, [3, num_pieces, F].
template <class T, int VEC, int TPR>
struct SoftmaxSum : Lane<TPR, 4, false> {
  using Base = Lane<TPR, 4, false>;
  using Args = SoftmaxReduceArgs;
  struct State {
    T most[VEC], total[VEC], sum[VEC];
  };

  const Args& p;
  T* const pieces;
  State now;
  T t[VEC];

  __device__ SoftmaxSum(const Args& p, T* pieces, const LaneFeatures& own) : Base(p.a, own), p(p), pieces(pieces) {
    load_temperature<VEC>(t, p, own.f);
  }

  __device__ State& state() { return now; }

  __device__ void start(int, int) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      now.most[i] = -std::numeric_limits<T>::infinity();
      now.total[i] = now.sum[i] = 0;
    }
  }

  __device__ void merge(const State& other) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      T mine, theirs;
      merge_most(now.most[i], other.most[i], mine, theirs);
      now.total[i] = lessened(now.total[i], mine) + lessened(other.total[i], theirs);
      now.sum[i] = lessened(now.sum[i], mine) + lessened(other.sum[i], theirs);
    }
  }

  template <int LANES, bool WHOLE>
  __device__ void take(int j, int group, int count, int, const typename Base::Edges& edges) {
    constexpr int kFlight = Base::kFlight;
    Raw<T, VEC> gathered[kFlight];
    this->template edges_of_step<LANES, WHOLE>(j, group, count, edges, [&](int c, int64_t col, int64_t) {
      gathered[c].load(static_cast<const T*>(p.x) + col * p.width + this->f);
    });
    // Edges that do not exist were read as the last one that does, whose score changes no maximum of a row that has edges left.
    if (!Base::template exists<LANES, WHOLE>(j, group, count, 0)) return;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      T top = now.most[i];
#pragma unroll
      for (int c = 0; c < kFlight; ++c) top = max(top, rounded_product(t[i], gathered[c].get(i)));
      const T kept = now.most[i] == top ? T{1} : fast_exp(now.most[i] - top);
      const T base = top == -std::numeric_limits<T>::infinity() ? T{0} : top;  // scores so far of minus infinity weigh nothing
      now.most[i] = top;
      now.total[i] = lessened(now.total[i], kept), now.sum[i] = lessened(now.sum[i], kept);
#pragma unroll
      for (int c = 0; c < kFlight; ++c) {
        if (!Base::template exists<LANES, WHOLE>(j, group, count, c)) continue;
        const T v = gathered[c].get(i), weight = fast_exp(rounded_product(t[i], v) - base);
        now.total[i] += weight;
        now.sum[i] += weight * v;
      }
    }
  }

  __device__ void store_row(int64_t row, int64_t degree) {
    const int64_t at = row * p.width + this->f;
    const bool none = degree == 0;
    T out[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      out[i] = none ? T{0} : now.sum[i] / now.total[i];
      now.most[i] = none ? T{0} : now.most[i];
      now.total[i] = none ? T{1} : now.total[i];
    }
    store_vector<VEC>(static_cast<T*>(p.out) + at, out);
    if (!p.most) return;
    store_vector<VEC>(static_cast<T*>(p.most) + at, now.most);
    store_vector<VEC>(static_cast<T*>(p.total) + at, now.total);
  }

  __device__ int64_t at(int plane, int64_t piece) const { return (plane * p.a.num_pieces + piece) * p.width + this->f; }

  __device__ void store_piece(int64_t piece) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      pieces[at(0, piece) + i] = now.most[i];
      pieces[at(1, piece) + i] = now.total[i];
      pieces[at(2, piece) + i] = now.sum[i];
    }
  }

  // One feature of what store_piece has stored.
  __device__ State load_piece(int64_t piece) const {
    State found;
    found.most[0] = pieces[at(0, piece)];
    found.total[0] = pieces[at(1, piece)];
    found.sum[0] = pieces[at(2, piece)];
    return found;
  }
};

// `pieces`: the two sums of pieces of rows, [2, num_pieces, F].
template <class T, int VEC, int TPR>
struct SoftmaxBack : Lane<TPR, 2, false> {
  using Base = Lane<TPR, 2, false>;
  using Args = SoftmaxBackwardArgs;
  struct State {
    T direct[VEC], tilted[VEC];
  };

  const Args& p;
  T* const pieces;
  State now;
  T t[VEC], self[VEC];

  __device__ SoftmaxBack(const Args& p, T* pieces, const LaneFeatures& own) : Base(p.a, own), p(p), pieces(pieces) {
    load_temperature<VEC>(t, p, own.f);
  }

  __device__ State& state() { return now; }

  __device__ void start(int row, int) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) now.direct[i] = now.tilted[i] = 0;
    load_vector<VEC>(self, static_cast<const T*>(p.x) + int64_t{row} * p.width + this->f);
  }

  __device__ void merge(const State& other) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) now.direct[i] += other.direct[i], now.tilted[i] += other.tilted[i];
  }

  template <int LANES, bool WHOLE>
  __device__ void take(int j, int group, int count, int, const typename Base::Edges& edges) {
    constexpr int kFlight = Base::kFlight;
    Raw<T, VEC> most[kFlight], share[kFlight], out[kFlight];
    this->template edges_of_step<LANES, WHOLE>(j, group, count, edges, [&](int c, int64_t col, int64_t) {
      const int64_t at = col * p.width + this->f;
      most[c].load(static_cast<const T*>(p.most) + at);
      share[c].load(static_cast<const T*>(p.share) + at);
      out[c].load(static_cast<const T*>(p.out) + at);
    });
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      if (!Base::template exists<LANES, WHOLE>(j, group, count, c)) continue;
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const T d = fast_exp(rounded_product(t[i], self[i]) - most[c].get(i)) * share[c].get(i);
        now.direct[i] += d;
        now.tilted[i] += d * (self[i] - out[c].get(i));
      }
    }
  }

  // A node without edges has no part in anything, whatever its features are.
  __device__ void store_row(int64_t row, int64_t degree) {
    const int64_t at = row * p.width + this->f;
    T found[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) found[i] = degree == 0 ? T{0} : now.direct[i] + t[i] * now.tilted[i];
    store_vector<VEC>(static_cast<T*>(p.to_x) + at, found);
    if (!p.to_t) return;
#pragma unroll
    for (int i = 0; i < VEC; ++i) found[i] = degree == 0 ? T{0} : self[i] * now.tilted[i];
    store_vector<VEC>(static_cast<T*>(p.to_t) + at, found);
  }

  __device__ int64_t at(int plane, int64_t piece) const { return (plane * p.a.num_pieces + piece) * p.width + this->f; }

  __device__ void store_piece(int64_t piece) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      pieces[at(0, piece) + i] = now.direct[i];
      pieces[at(1, piece) + i] = now.tilted[i];
    }
  }

  __device__ State load_piece(int64_t piece) const {
    State found;
    found.direct[0] = pieces[at(0, piece)];
    found.tilted[0] = pieces[at(1, piece)];
    return found;
  }
};

template <template <class, int, int> class R, class Args>
void launch_walk(const Args& p, const Tensor& x) {
  const Launch launch(x);
  std::optional<Tensor> kept;  // freed in stream order when this returns
  constexpr int64_t kPlanes = sizeof(typename R<float, 1, kWarp>::State) / sizeof(float);
  const int64_t numel = kPlanes * p.a.num_pieces * p.width;
  if (numel) kept = make_empty(x, {numel}, x.scalar_type());
  auto run = [&](auto type) {
    using T = typename decltype(type)::type;
    T* pieces = kept ? static_cast<T*>(kept->mutable_data_ptr()) : nullptr;
    p.width % kVec<T> == 0 ? launch_lanes<R, T, kVec<T>>(p, pieces, launch.stream)
                           : launch_lanes<R, T, 1>(p, pieces, launch.stream);
  };
  dtype_of("x", x) == kDouble ? run(Type<double>{}) : run(Type<float>{});
}

template <class T>
__global__ void __launch_bounds__(kBlock) softmax_reduce_edges_kernel(const SoftmaxBackwardArgs p) {
  const int64_t at = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (at >= p.num_rows * p.width) return;
  const longlong2 place_of = row_and_feature(at, p.width);
  const int64_t edge = place_of.x, f = place_of.y;
  const int64_t row = p.index64 ? static_cast<const int64_t*>(p.index)[edge] : static_cast<const int32_t*>(p.index)[edge];
  auto of = [](const void* rows, int64_t place) { return static_cast<const T*>(rows)[place]; };
  const T self = of(p.x, at), t = p.t ? of(p.t, f) : static_cast<T>(p.scale);
  T to_x = 0, to_t = 0;
  if (static_cast<uint64_t>(row) < static_cast<uint64_t>(p.num_cols)) {
    const int64_t place = row * p.width + f;
    const T direct = fast_exp(rounded_product(t, self) - of(p.most, place)) * of(p.share, place);
    const T tilted = direct * (self - of(p.out, place));
    to_x = direct + t * tilted, to_t = self * tilted;
  }
  static_cast<T*>(p.to_x)[at] = to_x;
  if (p.to_t) static_cast<T*>(p.to_t)[at] = to_t;
}

}  // namespace

void Cuda::softmax_reduce(const SoftmaxReduceArgs& p, const Tensor& x) { launch_walk<SoftmaxSum>(p, x); }

void Cuda::softmax_reduce_backward(const SoftmaxBackwardArgs& p, const Tensor& x) {
  if (!p.index) return launch_walk<SoftmaxBack>(p, x);
  const Launch launch(x);
  const bool wide = dtype_of("x", x) == kDouble;
  (wide ? softmax_reduce_edges_kernel<double>
        : softmax_reduce_edges_kernel<float>)<<<blocks_for(p.num_rows * p.width), kBlock, 0, launch.stream>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("softmax_reduce", TORCH_BOX(&softmax_reduce<Cuda>));
  m.impl("softmax_reduce_backward", TORCH_BOX(&softmax_reduce_backward<Cuda>));
  m.impl("softmax_reduce_edges", TORCH_BOX(&softmax_reduce_edges<Cuda>));
}

}  // namespace gnnfast
