// Edges that attain a maximum together: how many they are, and what they get of its gradient. What one edge attains alone is
// known from the forward pass, so that rows are walked again only where edges tie.
//
// Bytes that must move backward, per row and feature: 4 (aux) + sizeof(T) (grad), twice, and a sector for the atomic; both
// gathers of a walk over the transposed matrix, which deterministic algorithms take, move 2 * sizeof(T) per edge and feature
// (reddit-size, F = 128: 16.8 ms).
#include "common/lane.cuh"
#include "common/vec.cuh"
#include "spmm.h"

namespace gnnfast {
namespace {

template <class A>
__device__ inline bool is_number(A v) {
  return v - v == 0;
}

template <class T>
__device__ inline acc_t<T> weight_at(const TiesArgs& p, int64_t edge, int64_t f) {
  return to_acc(__ldg(static_cast<const T*>(p.weight) + edge * p.heads + f / (p.width / p.heads)));
}

// Adds values that lie side by side, of which most are 0 or none is.
template <int N>
__device__ inline void add_all(float* at, const float (&v)[N]) {
#if __CUDA_ARCH__ >= 900
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      if (v[i] != 0 || v[i + 1] != 0 || v[i + 2] != 0 || v[i + 3] != 0)
        atomicAdd(reinterpret_cast<float4*>(at + i), make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]));
    return;
  }
#endif
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (v[i] != 0) atomicAdd(at + i, v[i]);
}
template <int N>
__device__ inline void add_all(double* at, const double (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (v[i] != 0) atomicAdd(at + i, v[i]);
}

// Lanes hold VEC features of a row. Those that want nothing look for 0 and have no share, so that it does not matter if they
// find it.
template <class T, int VEC, int TPR, bool GIVE>
struct Ties : Lane<TPR, 4, true, false> {
  using Base = Lane<TPR, 4, true, false>;
  using A = acc_t<T>;
  struct State {
    int32_t count[VEC];
  };

  const TiesArgs& p;
  int32_t* const pieces;  // counts [num_pieces, F]
  State now;
  A best[VEC], share[VEC];
  bool wanted, idle;

  __device__ Ties(const TiesArgs& p, int32_t* pieces, const LaneFeatures& own) : Base(p.a, own), p(p), pieces(pieces) {}

  __device__ void start(int row, int) {
    const int64_t at = int64_t{row} * p.width + this->f;
    int32_t aux[VEC];
    Raw<T, VEC> value, grad;
    load_ints<VEC>(aux, p.aux + at);
    value.load(static_cast<const T*>(p.value) + at);
    if constexpr (GIVE) grad.load(static_cast<const T*>(p.grad) + at);
    wanted = false;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      now.count[i] = 0;
      const A of_row = GIVE ? grad.get(i) : A{1};
      const bool wants = this->active && (aux[i] >= 0 || (GIVE && !is_number(of_row)));
      best[i] = wants ? value.get(i) : A{0};
      share[i] = wants ? of_row / static_cast<A>(max(aux[i], 1)) : A{0};
      wanted |= wants;
    }
    idle = !__any_sync(kAllLanes, wanted);
  }

  template <int LANES, bool WHOLE>
  __device__ void take(int j, int group, int count, int, const typename Base::Edges& edges) {
    constexpr int kFlight = Base::kFlight;
    Raw<T, VEC> x[kFlight];
    int64_t column[kFlight], id[kFlight];
    this->template edges_of_step<LANES, WHOLE>(j, group, count, edges, [&](int c, int64_t col, int64_t edge) {
      column[c] = col, id[c] = edge;
      if (wanted) x[c].load(static_cast<const T*>(p.x) + col * p.width + this->f);
    });
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      if (!wanted || !Base::template exists<LANES, WHOLE>(j, group, count, c)) continue;
      A given[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const A weight = p.weight ? weight_at<T>(p, id[c], this->f + i) : A{1};
        const A message = p.weight ? round_to<T>(weight * x[c].get(i)) : x[c].get(i);
        if constexpr (GIVE)
          given[i] = share_of_best(message, best[i], weight * share[i]);
        else
          now.count[i] += message == best[i];
      }
      if constexpr (GIVE) add_all(static_cast<A*>(p.out) + column[c] * p.width + this->f, given);
    }
  }

  __device__ State& state() { return now; }
  __device__ void merge(const State& other) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) now.count[i] += other.count[i];
  }
  __device__ void store_row(int64_t row, int64_t) {
    if constexpr (GIVE) return;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      int32_t& aux = p.aux[row * p.width + this->f + i];
      if (aux >= 0) aux = max(aux + now.count[i], 1);
    }
  }
  __device__ void store_piece(int64_t piece) {
    if constexpr (GIVE) return;
#pragma unroll
    for (int i = 0; i < VEC; ++i) pieces[piece * p.width + this->f + i] = now.count[i];
  }
  __device__ State load_piece(int64_t piece) const { return {{pieces[piece * p.width + this->f]}}; }
};

template <class T, int VEC, int TPR>
using Count = Ties<T, VEC, TPR, false>;
template <class T, int VEC, int TPR>
using Give = Ties<T, VEC, TPR, true>;

// A thread for each row and feature, of those whose maximum is of one column, or one slot.
template <class T>
__global__ void __launch_bounds__(kBlock) give_alone_kernel(const TiesArgs p) {
  const int64_t at = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (at >= p.a.num_rows * p.width) return;
  const int32_t id = ~__ldg(p.aux + at);
  acc_t<T> share = to_acc(__ldg(static_cast<const T*>(p.grad) + at));
  if (id < 0 || (p.value && !is_number(share))) return;
  const int64_t f = row_and_feature(at, p.width).y;
  const int32_t column = p.weight || !p.value ? __ldg(p.a.col + id) : id;
  if (p.weight) share *= weight_at<T>(p, p.a.perm ? __ldg(p.a.perm + id) : id, f);
  atomicAdd(static_cast<acc_t<T>*>(p.out) + int64_t{column} * p.width + f, share);
}

template <template <class, int, int> class R, class T>
void walk_ties(const TiesArgs& p, int32_t* pieces, cudaStream_t stream) {
  const bool whole = p.width % kVec<T> == 0 && aligned16(p.x) && aligned16(p.value) && (!p.grad || aligned16(p.grad));
  whole ? launch_lanes<R, T, kVec<T>>(p, pieces, stream) : launch_lanes<R, T, 1>(p, pieces, stream);
}

}  // namespace

void Cuda::count_ties(const TiesArgs& p, const Tensor& x) {
  const Launch launch(x);
  std::optional<Tensor> pieces;  // freed in stream order when this returns
  if (p.a.num_pieces > 0) pieces = make_empty(x, {p.a.num_pieces * p.width}, ScalarType::Int);
  dispatch_cuda(dtype_of("x", x), [&](auto type) {
    walk_ties<Count, typename decltype(type)::type>(p, pieces ? pieces->mutable_data_ptr<int32_t>() : nullptr, launch.stream);
  });
}

void Cuda::spmm_max_backward(const TiesArgs& args, const Tensor& x) {
  const Launch launch(x);
  dispatch_cuda(dtype_of("x", x), [&](auto type) {
    using T = typename decltype(type)::type;
    give_alone_kernel<T><<<blocks_for(args.a.num_rows * args.width), kBlock, 0, launch.stream>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    TiesArgs p = args;
    p.a.num_pieces = 0;  // nothing is left to be combined
    if (p.value) walk_ties<Give, T>(p, nullptr, launch.stream);
  });
}

}  // namespace gnnfast
