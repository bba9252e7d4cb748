// CPU kernels of softmax_reduce: for a block of features of one row its edges are walked twice, for the maximum and for the
// sums, which takes half the exponentials of one walk that corrects itself; the second finds the rows in a cache.
#include "softmax_reduce_cpu_kernel.h"

#include <limits>

#include "common/simd.h"
#include "common/vector_math.h"

namespace gnnfast::GNNFAST_ISA {
namespace {

template <int L, class T, class Args>
inline vec_t<T, L> temperature(const Args& p, int64_t f) {
  return p.t ? load_vector<L>(static_cast<const T*>(p.t) + f) : vec_t<T, L>{} + static_cast<T>(p.scale);
}

// N vectors of L features from f on.
template <class T, int L, int N>
inline void reduce_block(const SoftmaxReduceArgs& p, int64_t row, int64_t f) {
  using V = vec_t<T, L>;
  const T* x = static_cast<const T*>(p.x) + f;
  const int64_t begin = p.a.rowptr[row], end = p.a.rowptr[row + 1], last = p.a.num_edges - 1, width = p.width;
  V t[N], most[N], total[N]{}, sum[N]{};
  for (int n = 0; n < N; ++n) {
    t[n] = temperature<L, T>(p, f + n * L);
    most[n] = V{} - std::numeric_limits<T>::infinity();
  }
  for (int64_t e = begin; e < end; ++e) {
    prefetch_row<N * L>(x + p.a.col[e + kPrefetch < last ? e + kPrefetch : last] * width);
    const T* source = x + p.a.col[e] * width;
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      const V s = t[n] * load_vector<L>(source + n * L);
      most[n] = s > most[n] ? s : most[n];  // NaN is met again below
    }
  }
  for (int64_t e = begin; e < end; ++e) {
    const T* source = x + p.a.col[e] * width;
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      const V v = load_vector<L>(source + n * L), s = t[n] * v, weight = exp_nonpositive(s - most[n]);
      total[n] += weight;
      sum[n] += weight * v;
    }
  }
  auto put = [&](void* to, const V& v, int n) { store_vector<L>(static_cast<T*>(to) + row * width + f + n * L, v); };
  for (int n = 0; n < N; ++n) {
    const bool none = begin == end;
    put(p.out, none ? V{} : sum[n] / total[n], n);
    if (p.most) put(p.most, none ? V{} : most[n], n), put(p.total, none ? V{} + 1 : total[n], n);
  }
}

template <class T, int L, int N>
inline void backward_block(const SoftmaxBackwardArgs& p, int64_t row, int64_t f) {
  using V = vec_t<T, L>;
  const int64_t width = p.width, place = row * width + f;
  V self[N], scaled[N], t[N], direct[N]{}, tilted[N]{};
  for (int n = 0; n < N; ++n) {
    t[n] = temperature<L, T>(p, f + n * L);
    self[n] = load_vector<L>(static_cast<const T*>(p.x) + place + n * L);
    scaled[n] = t[n] * self[n];
  }
  auto take = [&](int64_t col) {
    const int64_t at = col * width + f;
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      auto load = [&](const void* rows) { return load_vector<L>(static_cast<const T*>(rows) + at + n * L); };
      const V d = exp_nonpositive(scaled[n] - load(p.most)) * load(p.share);
      direct[n] += d;
      tilted[n] += d * (self[n] - load(p.out));
    }
  };
  bool some = true;  // else a node has no part in anything, whatever its features are
  if (p.index) {
    const int64_t col = p.index64 ? static_cast<const int64_t*>(p.index)[row] : static_cast<const int32_t*>(p.index)[row];
    some = 0 <= col && col < p.num_cols;
    if (some) take(col);
  } else {
    const int64_t begin = p.a.rowptr[row], end = p.a.rowptr[row + 1], last = p.a.num_edges - 1;
    some = begin < end;
    for (int64_t e = begin; e < end; ++e) {
      const int64_t ahead = p.a.col[e + kPrefetch < last ? e + kPrefetch : last] * width + f;
      prefetch_row<N * L>(static_cast<const T*>(p.most) + ahead);
      prefetch_row<N * L>(static_cast<const T*>(p.share) + ahead);
      prefetch_row<N * L>(static_cast<const T*>(p.out) + ahead);
      take(p.a.col[e]);
    }
  }
  for (int n = 0; n < N; ++n) {
    store_vector<L>(static_cast<T*>(p.to_x) + place + n * L, some ? direct[n] + t[n] * tilted[n] : V{});
    if (p.to_t) store_vector<L>(static_cast<T*>(p.to_t) + place + n * L, some ? self[n] * tilted[n] : V{});
  }
}

// Calls block(Type, lanes, vectors, row, f) for all features of the rows, which are float or double.
template <class F>
inline void for_row_blocks(DType dtype, int64_t width, int64_t row_begin, int64_t row_end, const F& block) {
  auto run = [&](auto type) {
    for (int64_t row = row_begin; row < row_end; ++row)
      for_overlapping_blocks<typename decltype(type)::type, 2>(
          width, [&](auto lanes, auto vectors, int64_t f, int64_t) { block(type, lanes, vectors, row, f); });
  };
  dtype == kDouble ? run(Type<double>{}) : run(Type<float>{});
}

}  // namespace

void softmax_reduce_rows(const SoftmaxReduceArgs& p, DType dtype, int64_t row_begin, int64_t row_end) {
  for_row_blocks(dtype, p.width, row_begin, row_end, [&](auto type, auto lanes, auto vectors, int64_t row, int64_t f) {
    reduce_block<typename decltype(type)::type, decltype(lanes)::value, decltype(vectors)::value>(p, row, f);
  });
}

void softmax_reduce_backward_rows(const SoftmaxBackwardArgs& p, DType dtype, int64_t row_begin, int64_t row_end) {
  for_row_blocks(dtype, p.width, row_begin, row_end, [&](auto type, auto lanes, auto vectors, int64_t row, int64_t f) {
    backward_block<typename decltype(type)::type, decltype(lanes)::value, decltype(vectors)::value>(p, row, f);
  });
}

}  // namespace gnnfast::GNNFAST_ISA
