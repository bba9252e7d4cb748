// CPU kernels of multi_reduce: all reductions of a block of features of one row stay in registers while its edges are walked,
// in their order.
#include "multi_reduce_cpu_kernel.h"

#include <limits>

#include "common/simd.h"
#include "reduce_row.h"

namespace gnnfast::GNNFAST_ISA {
namespace {

constexpr int kPrefetch = 8;  // edges ahead

// Takes v into the running maximum, or minimum, and counts who attains it. NaN wins.
template <bool LEAST, class V, class Mask>
inline void take(V& best, Mask& ties, const V& v) {
  const Mask better = (LEAST ? v < best : v > best) | ((v != v) & (best == best));
  ties = better ? Mask{} + 1 : ties - (v == best);  // a mask is -1 where it holds
  best = better ? v : best;
}

// N vectors of L features from f on.
template <class T, int L, int N>
inline void reduce_block(const MultiReduceArgs& p, int64_t row, int64_t f) {
  using V = vec_t<T, L>;
  using Mask = decltype(V{} > V{});
  const ReduceLayout& l = p.layout;
  const T* x = static_cast<const T*>(p.x) + f;
  const int64_t begin = p.a.rowptr[row], end = p.a.rowptr[row + 1], last = p.a.num_edges - 1, width = p.width;
  V sum[N]{}, square[N]{}, most[N], least[N];
  Mask most_ties[N]{}, least_ties[N]{};
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
      take<false>(most[n], most_ties[n], v);
      take<true>(least[n], least_ties[n], v);
    }
  }
  const T degree = static_cast<T>(end - begin);
  const T* shift = p.shift ? static_cast<const T*>(p.shift) + row * width + f : nullptr;
  T* out = static_cast<T*>(p.out) + row * l.count * width + f;
  T* kept = p.kept ? static_cast<T*>(p.kept) + row * l.kept_rows * width + f : nullptr;
  int32_t* ties = p.ties ? p.ties + row * l.ties_rows * width + f : nullptr;
  for (int n = 0; n < N; ++n) {
    for (int i = 0; i < L; ++i) {
      const int64_t at = n * L + i;
      const RowStatistics<T> found{sum[n][i], square[n][i], most[n][i], least[n][i]};
      const T moved = shift ? shift[at] : T{0};
      for (int k = 0; k < l.count; ++k) out[k * width + at] = begin == end ? T{0} : reduced(l.kinds[k], found, degree, moved);
      if (!kept) continue;
      if (l.mean >= 0) kept[l.mean * width + at] = begin == end ? T{0} : found.sum / degree;
      if (l.most >= 0) kept[l.most * width + at] = found.most, ties[l.most_ties * width + at] = most_ties[n][i];
      if (l.least >= 0) kept[l.least * width + at] = found.least, ties[l.least_ties * width + at] = least_ties[n][i];
    }
  }
}

template <class T, int L, int N>
inline void backward_block(const ReduceBackwardArgs& p, int64_t row, int64_t f) {
  using V = vec_t<T, L>;
  const ReduceLayout& l = p.layout;
  const int64_t width = p.width, stride = l.rows * width;
  V acc[N]{}, self[N];
  for (int n = 0; n < N; ++n) self[n] = load_vector<L>(static_cast<const T*>(p.x) + row * width + f + n * L);
  for (int64_t e = p.a.rowptr[row]; e < p.a.rowptr[row + 1]; ++e) {
    const T* shares = static_cast<const T*>(p.shares) + p.a.col[e] * stride + f;
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      acc[n] += share_of_edge(l, self[n], [&](int which) { return load_vector<L>(shares + which * width + n * L); });
  }
  for (int n = 0; n < N; ++n) store_vector<L>(static_cast<T*>(p.to_x) + row * width + f + n * L, acc[n]);
}

// Calls block(Int<L>, Int<N>, f) for blocks of N vectors of L features, the widest that fit.
template <class T, int N, class F>
inline void for_blocks(int64_t width, const F& block) {
  constexpr int L = kLanes<T>;
  int64_t f = 0;
  for (; f + N * L <= width; f += N * L) block(Int<L>{}, Int<N>{}, f);
  for (; f + L <= width; f += L) block(Int<L>{}, Int<1>{}, f);
  if constexpr (L > 4)
    for (; f + 4 <= width; f += 4) block(Int<4>{}, Int<1>{}, f);
  for (; f < width; ++f) block(Int<1>{}, Int<1>{}, f);
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
      for_blocks<T, 2>(p.width, [&](auto lanes, auto vectors, int64_t f) {
        reduce_block<T, decltype(lanes)::value, decltype(vectors)::value>(p, row, f);
      });
  });
}

void multi_reduce_shares_rows(const ReduceSharesArgs& p, DType dtype, int64_t row_begin, int64_t row_end) {
  dispatch_wide(dtype, [&](auto type) {
    for (int64_t row = row_begin; row < row_end; ++row)
      for (int64_t f = 0; f < p.width; ++f) share_out<typename decltype(type)::type>(p, row, f);
  });
}

void multi_reduce_backward_rows(const ReduceBackwardArgs& p, DType dtype, int64_t row_begin, int64_t row_end) {
  dispatch_wide(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t row = row_begin; row < row_end; ++row)
      for_blocks<T, 4>(p.width, [&](auto lanes, auto vectors, int64_t f) {
        backward_block<T, decltype(lanes)::value, decltype(vectors)::value>(p, row, f);
      });
  });
}

void multi_reduce_edges_range(const ReduceEdgesArgs& p, DType dtype, int64_t begin, int64_t end) {
  dispatch_wide(dtype, [&](auto type) {
    for (int64_t at = begin; at < end; ++at) edge_backward<typename decltype(type)::type>(p, at);
  });
}

}  // namespace gnnfast::GNNFAST_ISA
