// CUDA kernels of edge_gate: a reducer for common/walk.cuh. Lanes hold VEC features of one row and what the row itself gives;
// of each edge they read what its other end and the edge give.
#include <torch/csrc/stable/library.h>

#include "activate.h"
#include "common/lane.cuh"
#include "common/vec.cuh"
#include "edge_gate.h"

namespace gnnfast {
namespace {

__device__ inline float reciprocal(float v) { return __fdividef(1.f, v); }  // off by at most one unit for v in [1, 3]
__device__ inline double reciprocal(double v) { return 1 / v; }

// What functions of exp(-|v|) are made of: e, 1 / (1 + e), and 1 - 1 / (1 + e) without a difference that cancels.
template <class A>
struct Logistic {
  A e, large, small;
};

struct Scalar {
  template <class A>
  static __device__ A absolute(A v) {
    return v < 0 ? -v : v;
  }
  template <class A>
  static __device__ Logistic<A> logistic(A minus_absolute) {
    const A e = exp(minus_absolute), large = reciprocal(1 + e);
    return {e, large, e * large};
  }
  template <class A>
  static __device__ A hyperbolic_tangent(A v, const Logistic<A>&) {
    return tanh(v);
  }
  // Of 0 <= e <= 1: twice the area tangent of e / (2 + e), which is at most 1/3. log1p takes twice the time.
  static __device__ float log_one_plus(float e) {
    const float s = e * reciprocal(2 + e), z = s * s;
    float y = 1.f / 15;
#pragma unroll
    for (int k = 6; k >= 0; --k) y = y * z + 1.f / (2 * k + 1);
    return 2 * s * y;
  }
  static __device__ double log_one_plus(double e) { return log1p(e); }
};

template <int ACT, int VEC, class T>
__device__ inline void activate_all(T (&v)[VEC], T (&slope)[VEC]) {
#pragma unroll
  for (int i = 0; i < VEC; ++i) v[i] = activate<Scalar>(static_cast<Activation>(ACT), v[i], slope[i]);
}

// One branch for all of a lane's features.
template <int VEC, class T>
__device__ inline void activate_all(Activation act, T (&v)[VEC], T (&slope)[VEC]) {
  switch (act) {
    case kRelu:
      return activate_all<kRelu>(v, slope);
    case kSigmoid:
      return activate_all<kSigmoid>(v, slope);
    case kTanh:
      return activate_all<kTanh>(v, slope);
    case kSoftplus:
      return activate_all<kSoftplus>(v, slope);
    case kSilu:
      return activate_all<kSilu>(v, slope);
    case kAbs:
      return activate_all<kAbs>(v, slope);
    default:
      return activate_all<kIdentity>(v, slope);
  }
}

enum Walk { kForward, kToDst, kToSrc };

// PLAIN: each factor has a src, may have a shift, and nothing else. Registers for what there might be cost half of the warps.
template <Walk WALK, int COUNT, bool PLAIN>
constexpr int kGateFlight = !PLAIN                           ? 1
                            : COUNT == 1 && WALK == kForward ? 4
                                                             : 2;

// `pieces`: the sums of pieces of rows, [kSums, num_pieces, F]; `to_weight`: for each slab of features, [E].
template <class T, Walk WALK, int COUNT, bool PLAIN, int VEC, int TPR>
struct GateSum : Lane<TPR, kGateFlight<WALK, COUNT, PLAIN>, true, PLAIN> {
  using Base = Lane<TPR, kGateFlight<WALK, COUNT, PLAIN>, true, PLAIN>;
  // To destinations: those of shift and scale.
  static constexpr int kSums = WALK == kForward ? 1 : WALK == kToDst && !PLAIN ? 2 * COUNT : COUNT;

  struct State {
    T acc[kSums][VEC];
  };

  const EdgeGateArgs& p;
  T *const pieces, *const to_weight;
  State now;
  T src[COUNT][VEC], scale[COUNT][VEC], shift[COUNT][VEC], grad[VEC];  // what the row gives

  __device__ GateSum(const EdgeGateArgs& p, T* pieces, T* to_weight, const LaneFeatures& own)
      : Base(p.a, own), p(p), pieces(pieces), to_weight(to_weight) {}

  __device__ State& state() { return now; }

  __device__ void merge(const State& other) {
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int i = 0; i < VEC; ++i) now.acc[s][i] += other.acc[s][i];
  }

  __device__ const T* rows(int k, int part) const { return static_cast<const T*>(p.factors[k].parts[part]); }
  __device__ bool has(int k, int part) const { return PLAIN && part != kShift ? part == kSrc : rows(k, part) != nullptr; }
  static constexpr __device__ int sum_of(int k, bool of_scale) { return PLAIN ? k : 2 * k + of_scale; }

  __device__ void start(int row, int) {
    const int64_t at = int64_t{row} * p.width + this->f;
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int i = 0; i < VEC; ++i) now.acc[s][i] = 0;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      if constexpr (WALK == kToSrc) {
        if (has(k, kSrc)) load_vector<VEC>(src[k], rows(k, kSrc) + at);
      } else {
        if (has(k, kScale)) load_vector<VEC>(scale[k], rows(k, kScale) + at);
        if (has(k, kShift)) load_vector<VEC>(shift[k], rows(k, kShift) + at);
      }
    }
    if constexpr (WALK == kToDst) load_vector<VEC>(grad, static_cast<const T*>(p.grad) + at);
  }

  // What an edge gives, by itself or by its other end.
  struct Given {
    Raw<T, VEC> src, scale, shift, edge;
  };

  template <int LANES, bool WHOLE>
  __device__ void take(int j, int group, int count, int, const typename Base::Edges& edges) {
    constexpr int kFlight = Base::kFlight;
    Given given[kFlight][COUNT];
    Raw<T, VEC> far_grad[kFlight];
    T weight[kFlight];
    int64_t ids[kFlight];
    this->template edges_of_step<LANES, WHOLE>(j, group, count, edges, [&](int c, int64_t col, int64_t id) {
      const int64_t far = col * p.width + this->f;
      ids[c] = id;
#pragma unroll
      for (int k = 0; k < COUNT; ++k) {
        if constexpr (WALK == kToSrc) {
          if (has(k, kScale)) given[c][k].scale.load(rows(k, kScale) + far);
          if (has(k, kShift)) given[c][k].shift.load(rows(k, kShift) + far);
        } else {
          if (has(k, kSrc)) given[c][k].src.load(rows(k, kSrc) + far);
        }
        if (has(k, kEdge)) given[c][k].edge.load(rows(k, kEdge) + id * p.width + this->f);
      }
      if constexpr (WALK == kToSrc) far_grad[c].load(static_cast<const T*>(p.grad) + far);
      weight[c] = p.weight ? __ldg(static_cast<const T*>(p.weight) + id) : T{1};
    });
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      T value[COUNT][VEC], slope[COUNT][VEC];
#pragma unroll
      for (int k = 0; k < COUNT; ++k) {
        const Given& of = given[c][k];
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          T z = 0;
          if (has(k, kSrc)) {
            z = WALK == kToSrc ? src[k][i] : of.src.get(i);
            if (has(k, kScale)) z *= WALK == kToSrc ? of.scale.get(i) : scale[k][i];
          }
          if (has(k, kShift)) z += WALK == kToSrc ? of.shift.get(i) : shift[k][i];
          if (has(k, kEdge)) z += of.edge.get(i);
          value[k][i] = z;
        }
        activate_all(p.factors[k].act, value[k], slope[k]);
      }
      const bool exists = Base::template exists<LANES, WHOLE>(j, group, count, c);
      if (WALK == kToDst && to_weight) {  // lanes that share an edge add up theirs
        T dot = 0;
#pragma unroll
        for (int i = 0; i < VEC; ++i) dot += grad[i] * value[0][i] * (COUNT == 2 ? value[COUNT - 1][i] : T{1});
        if (!this->active) dot = 0;
#pragma unroll
        for (int o = 1; o < TPR; o <<= 1) dot += __shfl_xor_sync(kAllLanes, dot, o);
        if (exists && this->lane % TPR == 0) to_weight[ids[c]] = dot;
      }
      if (!exists) continue;
      if constexpr (WALK == kForward) {
#pragma unroll
        for (int i = 0; i < VEC; ++i)
          now.acc[0][i] += weight[c] * (COUNT == 2 ? value[0][i] * value[COUNT - 1][i] : value[0][i]);
      } else {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
          T d[VEC];
#pragma unroll
          for (int i = 0; i < VEC; ++i) {
            d[i] = (WALK == kToSrc ? far_grad[c].get(i) : grad[i]) * weight[c];
            if (COUNT == 2) d[i] *= value[COUNT - 1 - k][i];
            d[i] = passed(p.factors[k].act, slope[k][i], d[i]);
            if constexpr (WALK == kToSrc) {
              now.acc[k][i] += has(k, kScale) ? d[i] * given[c][k].scale.get(i) : d[i];
            } else {
              now.acc[sum_of(k, false)][i] += d[i];
              if (!PLAIN && has(k, kSrc)) now.acc[sum_of(k, true)][i] += d[i] * given[c][k].src.get(i);
            }
          }
          if constexpr (WALK == kToDst) {
            T* to_edge = static_cast<T*>(p.factors[k].grads[kEdge]);
            if (!PLAIN && to_edge && this->active) store_vector<VEC>(to_edge + ids[c] * p.width + this->f, d);
          }
        }
      }
    }
  }

  __device__ void store_row(int64_t row, int64_t degree) {
    const int64_t at = row * p.width + this->f;
    auto put = [&](void* to, const T(&v)[VEC]) {
      if (to) store_vector<VEC>(static_cast<T*>(to) + at, v);
    };
    if constexpr (WALK == kForward) {
      if (p.mean && degree > 0) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) now.acc[0][i] /= static_cast<T>(degree);
      }
      put(p.out, now.acc[0]);
    } else {
#pragma unroll
      for (int k = 0; k < COUNT; ++k) {
        if constexpr (WALK == kToSrc) {
          put(p.factors[k].grads[kSrc], now.acc[k]);
        } else {
          put(p.factors[k].grads[kShift], now.acc[sum_of(k, false)]);
          if (!PLAIN) put(p.factors[k].grads[kScale], now.acc[sum_of(k, true)]);
        }
      }
    }
  }

  __device__ int64_t at(int sum, int64_t piece) const { return (sum * p.a.num_pieces + piece) * p.width + this->f; }

  __device__ void store_piece(int64_t piece) {
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int i = 0; i < VEC; ++i) pieces[at(s, piece) + i] = now.acc[s][i];
  }

  // One feature of what store_piece has stored.
  __device__ State load_piece(int64_t piece) const {
    State found;
#pragma unroll
    for (int s = 0; s < kSums; ++s) found.acc[s][0] = pieces[at(s, piece)];
    return found;
  }
};

template <class T, Walk WALK, int COUNT, bool PLAIN, int VEC, int TPR>
__global__ void __launch_bounds__(kBlock, !PLAIN       ? (sizeof(T) == 8 || COUNT == 2 ? 2 : 3)
                                          : COUNT == 2 ? 3
                                                       : 4)
    edge_gate_kernel(const EdgeGateArgs p, T* pieces, T* to_weight, int slab_lanes, int short_rows) {
  T* of_slab = to_weight ? to_weight + blockIdx.y * p.a.num_edges : nullptr;
  GateSum<T, WALK, COUNT, PLAIN, VEC, TPR> mine(p, pieces, of_slab, features_of_lane<VEC, TPR>(p.width, slab_lanes));
  walk_items(mine, p.a, short_rows);
}

template <class T, Walk WALK, int COUNT, bool PLAIN>
__global__ void __launch_bounds__(kBlock) edge_gate_combine_kernel(const EdgeGateArgs p, T* pieces) {
  using R = GateSum<T, WALK, COUNT, PLAIN, 1, kWarp>;
  auto make = [&](int64_t f) { return R(p, pieces, nullptr, {static_cast<int>(threadIdx.x) % kWarp, f, true}); };
  combine_items<R>(p.a, p.width, make, [&](const R& row, int64_t piece) { return row.load_piece(piece); });
}

// A weight's gradient of each slab of features -> of all.
template <class T>
__global__ void __launch_bounds__(kBlock) add_slabs_kernel(const T* of_slabs, int slabs, int64_t num_edges, T* out) {
  const int64_t e = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (e >= num_edges) return;
  T sum = 0;
  for (int s = 0; s < slabs; ++s) sum += of_slabs[s * num_edges + e];
  out[e] = sum;
}

template <class T, Walk WALK, int COUNT, bool PLAIN, int VEC>
void launch_gate(const EdgeGateArgs& p, const Tensor& ref) {
  const Launch launch(ref);
  std::optional<Tensor> kept, of_slabs;  // freed in stream order when this returns
  for_lanes<VEC>(p.width, [&](auto tpr, int slab_lanes, int slabs) {
    constexpr int TPR = decltype(tpr)::value;
    T *pieces = nullptr, *to_weight = static_cast<T*>(p.to_weight);
    if (p.a.num_pieces > 0) {
      constexpr int64_t kSums = GateSum<T, WALK, COUNT, PLAIN, VEC, TPR>::kSums;
      kept = make_empty(ref, {kSums * p.a.num_pieces * p.width}, ref.scalar_type());
      pieces = static_cast<T*>(kept->mutable_data_ptr());
    }
    if (to_weight && slabs > 1) {
      of_slabs = make_zeros(ref, {slabs * p.a.num_edges}, ref.scalar_type());
      to_weight = static_cast<T*>(of_slabs->mutable_data_ptr());
    }
    const ItemGrid grid = item_grid<TPR>(p.a);
    const dim3 blocks(grid.blocks, static_cast<unsigned>(slabs));
    edge_gate_kernel<T, WALK, COUNT, PLAIN, VEC, TPR>
        <<<blocks, kBlock, 0, launch.stream>>>(p, pieces, to_weight, slab_lanes, grid.short_rows);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    if (pieces) {
      edge_gate_combine_kernel<T, WALK, COUNT, PLAIN>
          <<<blocks_for(p.a.num_pieces * kWarp), kBlock, 0, launch.stream>>>(p, pieces);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
    if (of_slabs && p.a.num_edges > 0) {
      add_slabs_kernel<T><<<blocks_for(p.a.num_edges), kBlock, 0, launch.stream>>>(to_weight, slabs, p.a.num_edges,
                                                                                   static_cast<T*>(p.to_weight));
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
  });
}

// Whether each row of features begins where a vector may be loaded.
bool has_whole_vectors(const EdgeGateArgs& p, int vec) {
  bool found = p.width % vec == 0 && aligned16(p.grad) && aligned16(p.out);
  for (int k = 0; k < p.count; ++k)
    for (int part = 0; part < kAttr; ++part)
      found = found && aligned16(p.factors[k].parts[part]) && aligned16(p.factors[k].grads[part]);
  return found;
}

bool is_plain(const EdgeGateArgs& p) {
  bool found = true;
  for (int k = 0; k < p.count; ++k) {
    const void* const* parts = p.factors[k].parts;
    found = found && parts[kSrc] && !parts[kScale] && !parts[kEdge];
  }
  return found;
}

template <class T, Walk WALK, int COUNT>
void launch_count(const EdgeGateArgs& p, const Tensor& ref) {
  if constexpr (sizeof(T) == 4)  // for float64, which arithmetic bounds, the code of vectors is not worth its size
    if (has_whole_vectors(p, kVec<T>))
      return is_plain(p) ? launch_gate<T, WALK, COUNT, true, kVec<T>>(p, ref)
                         : launch_gate<T, WALK, COUNT, false, kVec<T>>(p, ref);
  launch_gate<T, WALK, COUNT, false, 1>(p, ref);
}

template <class T, Walk WALK>
void launch_walk(const EdgeGateArgs& p, const Tensor& ref) {
  p.count == 1 ? launch_count<T, WALK, 1>(p, ref) : launch_count<T, WALK, 2>(p, ref);
}

}  // namespace

void Cuda::edge_gate(const EdgeGateArgs& p, const Tensor& ref) {
  for (int k = 0; k < p.count; ++k)
    GNNFAST_CHECK(!p.factors[k].parts[kAttr], "on a GPU products come as features of edges, not as attr and matrix");
  auto run = [&](auto type) {
    using T = typename decltype(type)::type;
    !p.backward    ? launch_walk<T, kForward>(p, ref)
    : p.transposed ? launch_walk<T, kToSrc>(p, ref)
                   : launch_walk<T, kToDst>(p, ref);
  };
  dtype_of("parts", ref) == kDouble ? run(Type<double>{}) : run(Type<float>{});
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("edge_gate", TORCH_BOX(&edge_gate<Cuda>));
  m.impl("edge_gate_backward", TORCH_BOX(&edge_gate_backward<Cuda>));
}

}  // namespace gnnfast
