// CPU kernels of edge_gate: what is summed of a block of features of one row stays in registers while its edges are walked, in
// their order.
#include "edge_gate_cpu_kernel.h"

#include "activate.h"
#include "common/simd.h"
#include "common/vector_math.h"

namespace gnnfast::GNNFAST_ISA {
namespace {

struct Vectors {
  template <class V>
  static V absolute(const V& v) {
    return gnnfast::GNNFAST_ISA::absolute(v);
  }
  template <class V>
  static Logistic<V> logistic(const V& minus_absolute) {
    return Logistic<V>(minus_absolute);
  }
  template <class V>
  static V hyperbolic_tangent(const V& v, const Logistic<V>& of) {
    return gnnfast::GNNFAST_ISA::hyperbolic_tangent(v, of);
  }
  template <class V>
  static V log_one_plus(const V& e) {
    return gnnfast::GNNFAST_ISA::log_one_plus(e);
  }
};

enum Walk { kForward, kToDst, kToSrc };

// N vectors of L features from f on, of COUNT factors. The first `done` of them were in another block.
template <class T, Walk WALK, int COUNT, bool PRODUCTS, int L, int N>
inline void gate_block(const EdgeGateArgs& p, int64_t row, int64_t f, int64_t done) {
  using V = vec_t<T, L>;
  constexpr int kFirstFar = WALK == kToSrc ? kScale : kSrc, kLastFar = WALK == kToSrc ? kShift : kSrc;
  const int64_t begin = p.a.rowptr[row], end = p.a.rowptr[row + 1], last = p.a.num_edges - 1, width = p.width;
  V sum[COUNT][N]{}, scaled[COUNT][N]{};
  auto only_new = [&](V v) {  // of what is added to what is there: neither what was, nor lanes of no feature, which may be NaN
    for (int64_t i = 0; i < done; ++i) v[i] = 0;
    for (int i = L; i < static_cast<int>(sizeof(V) / sizeof(T)); ++i) v[i] = 0;
    return v;
  };
  for (int64_t e = begin; e < end; ++e) {
    const int64_t col = p.a.col[e], ahead = p.a.col[e + kPrefetch < last ? e + kPrefetch : last] * width + f;
    const int64_t src = (WALK == kToSrc ? row : col) * width + f, dst = (WALK == kToSrc ? col : row) * width + f;
    const int64_t id = p.a.perm ? p.a.perm[e] : e, edge = id * width + f;
    const T weight = p.weight ? static_cast<const T*>(p.weight)[id] : T{1};
    V of_weight{};
    auto at = [&](int k, int part, int64_t place) {
      const T* rows = static_cast<const T*>(p.factors[k].parts[part]);
      return rows ? rows + place : nullptr;
    };
    for (int k = 0; k < COUNT; ++k)
      for (int part = kFirstFar; part <= kLastFar; ++part)
        if (const T* far = at(k, part, ahead)) prefetch_row<N * L>(far);
    const T* grad = static_cast<const T*>(p.grad) + dst;
    if (WALK == kToSrc) prefetch_row<N * L>(static_cast<const T*>(p.grad) + ahead);
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      V value[COUNT], slope[COUNT], of_src[COUNT];
#pragma GCC unroll 2
      for (int k = 0; k < COUNT; ++k) {
        V z{};
        if (const T* x = at(k, kSrc, src)) {
          z = of_src[k] = load_vector<L>(x + n * L);
          if (const T* scale = at(k, kScale, dst)) z *= load_vector<L>(scale + n * L);
        }
        if (const T* shift = at(k, kShift, dst)) z += load_vector<L>(shift + n * L);
        if (const T* of_edge = at(k, kEdge, edge)) z += load_vector<L>(of_edge + n * L);
        if (const T* attr = PRODUCTS ? at(k, kAttr, id * p.factors[k].depth) : nullptr) {
          const T* matrix = at(k, kMatrix, f + n * L);
          for (int64_t d = 0; d < p.factors[k].depth; ++d) z += attr[d] * load_vector<L>(matrix + d * width);
        }
        value[k] = activate<Vectors>(p.factors[k].act, z, slope[k]);
      }
      if constexpr (WALK == kForward) {
        sum[0][n] += weight * (COUNT == 2 ? value[0] * value[COUNT - 1] : value[0]);
        continue;
      }
      const V g = load_vector<L>(grad + n * L);
      if (WALK == kToDst && p.to_weight) of_weight += only_new(g * (COUNT == 2 ? value[0] * value[COUNT - 1] : value[0]));
#pragma GCC unroll 2
      for (int k = 0; k < COUNT; ++k) {
        const GateFactor& factor = p.factors[k];
        V d = g * weight;
        if constexpr (COUNT == 2) d *= value[1 - k];
        d = passed(factor.act, slope[k], d);
        if constexpr (WALK == kToSrc) {
          if (const T* scale = at(k, kScale, dst)) d *= load_vector<L>(scale + n * L);
        } else {
          if (factor.grads[kEdge]) store_vector<L>(static_cast<T*>(factor.grads[kEdge]) + edge + n * L, d);
          if (factor.grads[kScale]) scaled[k][n] += d * of_src[k];
          if (PRODUCTS && factor.grads[kMatrix]) {
            const T* attr = at(k, kAttr, id * factor.depth);
            T* to_matrix = static_cast<T*>(factor.grads[kMatrix]) + f + n * L;
            const V added = only_new(d);
            for (int64_t i = 0; i < factor.depth; ++i, to_matrix += width)
              store_vector<L>(to_matrix, load_vector<L>(to_matrix) + attr[i] * added);
          }
        }
        sum[k][n] += d;
      }
    }
    if (WALK == kToDst && p.to_weight) {
      T& to_weight = static_cast<T*>(p.to_weight)[id];
      to_weight = (f ? to_weight : 0) + add_lanes(of_weight);
    }
  }
  const int64_t place = row * width + f;
  auto put = [&](void* to, const V& v, int n) {
    if (to) store_vector<L>(static_cast<T*>(to) + place + n * L, v);
  };
  for (int n = 0; n < N; ++n) {
    if constexpr (WALK == kForward) {
      put(p.out, p.mean && end > begin ? sum[0][n] / static_cast<T>(end - begin) : sum[0][n], n);
    } else {
      for (int k = 0; k < COUNT; ++k) {
        put(p.factors[k].grads[WALK == kToSrc ? kSrc : kShift], sum[k][n], n);
        if (WALK == kToDst) put(p.factors[k].grads[kScale], scaled[k][n], n);
      }
    }
  }
}

template <class T, Walk WALK, int COUNT, bool PRODUCTS>
void gate_rows(const EdgeGateArgs& p, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row)
    for_overlapping_blocks<T, 2>(p.width, [&](auto lanes, auto vectors, int64_t f, int64_t done) {
      gate_block<T, WALK, COUNT, PRODUCTS, decltype(lanes)::value, decltype(vectors)::value>(p, row, f, done);
    });
}

template <class T, int COUNT, bool PRODUCTS>
void gate_rows_of(const EdgeGateArgs& p, int64_t row_begin, int64_t row_end) {
  const auto run = !p.backward    ? gate_rows<T, kForward, COUNT, PRODUCTS>
                   : p.transposed ? gate_rows<T, kToSrc, COUNT, PRODUCTS>
                                  : gate_rows<T, kToDst, COUNT, PRODUCTS>;
  run(p, row_begin, row_end);
}

}  // namespace

void edge_gate_rows(const EdgeGateArgs& p, DType dtype, int64_t row_begin, int64_t row_end) {
  bool products = false;
  for (int k = 0; k < p.count; ++k) products |= p.factors[k].parts[kAttr] != nullptr;
  auto run = [&](auto type) {
    using T = typename decltype(type)::type;
    const auto one = products ? gate_rows_of<T, 1, true> : gate_rows_of<T, 1, false>;
    const auto two = products ? gate_rows_of<T, 2, true> : gate_rows_of<T, 2, false>;
    (p.count == 2 ? two : one)(p, row_begin, row_end);
  };
  dtype == kDouble ? run(Type<double>{}) : run(Type<float>{});
}

}  // namespace gnnfast::GNNFAST_ISA
