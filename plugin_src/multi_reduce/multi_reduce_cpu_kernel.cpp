// CPU kernels of multi_reduce: all reductions of a block of features of one row stay in registers while its edges are walked,
// in their order.
#include "multi_reduce_cpu_kernel.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/simd.h"
#include "reduce_row.h"

namespace gnnfast::GNNFAST_ISA {
namespace {

// L features at a time (reduce_row.h).
template <class T_, int L>
struct Lanes {
  using T = T_;
  using V = vec_t<T, L>;
  using Mask = decltype(V{} > V{});
  static V load(const T* p) { return load_vector<L>(p); }
  static void store(T* p, const V& v) { store_vector<L>(p, v); }
  static V count(const int32_t* p) {
    V found{};
    for (int i = 0; i < L; ++i) found[i] = static_cast<T>(p[i]);
    return found;
  }
  static void store_count(int32_t* p, const Mask& v) {
    for (int i = 0; i < L; ++i) p[i] = static_cast<int32_t>(v[i]);
  }
  static V root(V v) {
    for (int i = 0; i < L; ++i) v[i] = std::sqrt(v[i]);
    return v;
  }
};

// Takes v into the running maximum, or minimum, and counts who attains it. NaN wins.
template <bool LEAST, bool TRAIN, class V, class Mask>
inline void take(V& best, Mask& ties, const V& v) {
  // Not "no better", which holds for a NaN on either side, and no NaN so far.
  const Mask better = ~(LEAST ? v >= best : v <= best) & (best == best);
  if (TRAIN) ties = better ? Mask{} + 1 : ties - (v == best);  // a mask is -1 where it holds
  best = better ? v : best;
}

// N vectors of L features from f on; `TRAIN`: with what the backward pass wants.
template <class T, int L, int N, bool TRAIN>
inline void reduce_block(const MultiReduceArgs& p, int64_t row, int64_t f) {
  using Io = Lanes<T, L>;
  using V = typename Io::V;
  const ReduceLayout& l = p.layout;
  const T* x = static_cast<const T*>(p.x) + f;
  const int64_t begin = p.a.rowptr[row], end = p.a.rowptr[row + 1], last = p.a.num_edges - 1, width = p.width;
  V sum[N]{}, square[N]{}, most[N], least[N];
  typename Io::Mask most_ties[N]{}, least_ties[N]{};
  for (int n = 0; n < N; ++n) {
    most[n] = V{} - std::numeric_limits<T>::infinity();
    least[n] = V{} + std::numeric_limits<T>::infinity();
  }
  for (int64_t e = begin; e < end; ++e) {
    prefetch_row<N * L>(x + p.a.col[e + kPrefetch < last ? e + kPrefetch : last] * width);
    const T* source = x + p.a.col[e] * width;
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      const V v = load_vector<L>(source + n * L);
      sum[n] += v;
      square[n] += v * v;
      take<false, TRAIN>(most[n], most_ties[n], v);
      take<true, TRAIN>(least[n], least_ties[n], v);
    }
  }
  const T degree = static_cast<T>(end - begin);
  T* out = static_cast<T*>(p.out) + row * l.count * width + f;
  for (int n = 0; n < N; ++n) {
    const V shift = p.shift ? Io::load(static_cast<const T*>(p.shift) + row * width + f + n * L) : V{};
    const RowStatistics<V> found{sum[n], square[n], most[n], least[n]};
    for (int k = 0; k < l.count; ++k)
      Io::store(out + k * width + n * L, begin == end ? V{} : reduced<Io>(l.kinds[k], found, degree, shift));
    if constexpr (TRAIN) {
      T* kept = static_cast<T*>(p.kept) + row * l.kept_rows * width + f + n * L;
      int32_t* ties = p.ties + row * l.ties_rows * width + f + n * L;
      if (l.mean >= 0) Io::store(kept + l.mean * width, begin == end ? V{} : found.sum / degree);
      if (l.most >= 0) Io::store(kept + l.most * width, most[n]), Io::store_count(ties + l.most_ties * width, most_ties[n]);
      if (l.least >= 0)
        Io::store(kept + l.least * width, least[n]), Io::store_count(ties + l.least_ties * width, least_ties[n]);
    }
  }
}

// Adds what the `parts` of the shares give.
template <class T, int L, int N>
inline void backward_block(const ReduceBackwardArgs& p, const ReduceLayout& parts, bool first, int64_t row, int64_t f) {
  using V = vec_t<T, L>;
  const int64_t width = p.width, stride = p.strides.node, plane = p.strides.plane, last = p.a.num_edges - 1;
  const T* all = static_cast<const T*>(p.shares) + f;
  T* to_x = static_cast<T*>(p.to_x) + row * width + f;
  V acc[N], self[N];
  for (int n = 0; n < N; ++n) {
    acc[n] = first ? V{} : load_vector<L>(to_x + n * L);
    self[n] = load_vector<L>(static_cast<const T*>(p.x) + row * width + f + n * L);
  }
  for (int64_t e = p.a.rowptr[row]; e < p.a.rowptr[row + 1]; ++e) {
    const T *shares = all + p.a.col[e] * stride, *ahead = all + p.a.col[e + kPrefetch < last ? e + kPrefetch : last] * stride;
    for (const int at : {parts.linear, parts.square, parts.most_at, parts.least_at})
      if (at >= 0) prefetch_row<N * L>(ahead + at * plane);
    for (const int at : {parts.most_at, parts.least_at})
      if (at >= 0) prefetch_row<N * L>(ahead + (at + 1) * plane);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      acc[n] += share_of_edge(parts, self[n], [&](int which) { return load_vector<L>(shares + which * plane + n * L); });
  }
  for (int n = 0; n < N; ++n) store_vector<L>(to_x + n * L, acc[n]);
}

// float or double
template <class F>
inline void dispatch_wide(DType dtype, const F& f) {
  dtype == kDouble ? f(Type<double>{}) : f(Type<float>{});
}

}  // namespace

void multi_reduce_rows(const MultiReduceArgs& p, DType dtype, int64_t row_begin, int64_t row_end) {
  dispatch_wide(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t row = row_begin; row < row_end; ++row)
      for_overlapping_blocks<T, 2>(p.width, [&](auto lanes, auto vectors, int64_t f, int64_t) {
        constexpr int L = decltype(lanes)::value, N = decltype(vectors)::value;
        p.kept ? reduce_block<T, L, N, true>(p, row, f) : reduce_block<T, L, N, false>(p, row, f);
      });
  });
}

void multi_reduce_shares_rows(const ReduceSharesArgs& p, DType dtype, int64_t row_begin, int64_t row_end) {
  dispatch_wide(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t row = row_begin; row < row_end; ++row)
      for_blocks<T, 1>(p.width, [&](auto lanes, auto, int64_t f) { share_out<Lanes<T, decltype(lanes)::value>>(p, row, f); });
  });
}

void multi_reduce_backward_rows(const ReduceBackwardArgs& p, DType dtype, int64_t row_begin, int64_t row_end) {
  // One kind after the other: together their arrays are more than a cache holds (13,752 nodes of 64 features: 25 ms, not 18).
  ReduceLayout none = p.layout, parts[3];
  none.linear = none.square = none.most_at = none.least_at = -1;
  std::fill_n(parts, 3, none);
  parts[0].linear = p.layout.linear, parts[0].square = p.layout.square;
  parts[1].most_at = p.layout.most_at;
  parts[2].least_at = p.layout.least_at;
  dispatch_wide(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    bool first = true;
    for (const ReduceLayout& part : parts) {
      if (part.linear < 0 && part.most_at < 0 && part.least_at < 0) continue;
      for (int64_t row = row_begin; row < row_end; ++row)
        for_blocks<T, 4>(p.width, [&](auto lanes, auto vectors, int64_t f) {
          backward_block<T, decltype(lanes)::value, decltype(vectors)::value>(p, part, first, row, f);
        });
      first = false;
    }
  });
}

void multi_reduce_edges_range(const ReduceEdgesArgs& p, DType dtype, int64_t edge_begin, int64_t edge_end) {
  dispatch_wide(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t edge = edge_begin; edge < edge_end; ++edge)
      for_blocks<T, 1>(p.width,
                       [&](auto lanes, auto, int64_t f) { edge_backward<Lanes<T, decltype(lanes)::value>>(p, edge, f); });
  });
}

}  // namespace gnnfast::GNNFAST_ISA
