// CPU SDDMM: a vectorised dot product per edge and head.
#include "sddmm_cpu_kernel.h"
#include "common/simd.h"

namespace gnnfast::GNNFAST_ISA {
namespace {

template <class T, int OP>
inline void dot_edge(const SddmmArgs& p, int64_t segment, int64_t row, int64_t column, int64_t id) {
  using A = acc_t<T>;
  const T *a = static_cast<const T*>(p.a) + row * p.width, *b = static_cast<const T*>(p.b) + column * p.width;
  for (int64_t h = 0; h < p.heads; ++h) {
    A sum = 0;
    const int64_t begin = h * segment, end = begin + segment;
    if constexpr (OP == kDot) {
      sum = dot(a + begin, b + begin, segment);
    } else {
      for (int64_t f = begin; f < end; ++f) {
        const A share = load(a + f) * load(b + f);
        if constexpr (OP == kDotWhereEqual) {
          const A w = load(static_cast<const T*>(p.weight) + id * p.heads + h);
          sum += share_of_best(round_to<T>(w * load(b + f)), load(static_cast<const T*>(p.value) + row * p.width + f), share);
        } else {
          sum += p.arg[row * p.width + f] == id ? share : A{0};
        }
      }
    }
    store(static_cast<T*>(p.out) + id * p.heads + h, sum);
  }
}

// Dot products of rows that fit the registers: N vectors of L features, P of them a head.
template <class T, int L, int N, int P>
void dot_vectors(const SddmmArgs& p, int64_t row_begin, int64_t row_end) {
  using V = vec_t<T, L>;
  constexpr int kHeads = N / P, kWidth = N * L;
  const int32_t *col = p.m.col, *perm = p.m.perm;
  const int64_t last_slot = p.m.num_edges - 1;
  T* out = static_cast<T*>(p.out);
  for (int64_t row = row_begin; row < row_end; ++row) {
    V mine[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) mine[n] = load_vector<L>(static_cast<const T*>(p.a) + row * kWidth + n * L);
    for (int64_t e = p.m.rowptr[row]; e < p.m.rowptr[row + 1]; ++e) {
      const int64_t next = e + kPrefetch < last_slot ? e + kPrefetch : last_slot, id = perm ? perm[e] : e;
      const T* b = static_cast<const T*>(p.b) + int64_t{col[e]} * kWidth;
      prefetch_row<kWidth>(static_cast<const T*>(p.b) + int64_t{col[next]} * kWidth);
      if (perm) __builtin_prefetch(out + int64_t{perm[next]} * kHeads, 1);
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        V product{};
#pragma GCC unroll 8
        for (int n = h * P; n < (h + 1) * P; ++n) product += mine[n] * load_vector<L>(b + n * L);
        store(out + id * kHeads + h, add_lanes(product));
      }
    }
  }
}

// Of heads of D features, fewer than a vector has.
template <class T, int D>
void dot_narrow(const SddmmArgs& p, int64_t row_begin, int64_t row_end) {
  const int32_t *col = p.m.col, *perm = p.m.perm;
  const int64_t last_slot = p.m.num_edges - 1, heads = p.heads;
  T* out = static_cast<T*>(p.out);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* a = static_cast<const T*>(p.a) + row * heads * D;
    for (int64_t e = p.m.rowptr[row]; e < p.m.rowptr[row + 1]; ++e) {
      const int64_t next = e + kPrefetch < last_slot ? e + kPrefetch : last_slot, id = perm ? perm[e] : e;
      const T* b = static_cast<const T*>(p.b) + int64_t{col[e]} * heads * D;
      if (perm) __builtin_prefetch(out + int64_t{perm[next]} * heads, 1);
      for (int64_t h = 0; h < heads; ++h) {
        acc_t<T> sum = 0;
#pragma GCC unroll 4
        for (int d = 0; d < D; ++d) sum += load(a + h * D + d) * load(b + h * D + d);
        store(out + id * heads + h, sum);
      }
    }
  }
}

template <class T, int OP>
void dot_rows(const SddmmArgs& p, int64_t row_begin, int64_t row_end) {
  const int64_t segment = p.width / p.heads;
  if constexpr (OP == kDot) {
    auto run = [&](auto l, auto n, auto of_head) { dot_vectors<T, l.value, n.value, of_head.value>(p, row_begin, row_end); };
    if (with_vectors<T>(p.width, p.heads, run)) return;
    switch (segment) {  // 6 ns an edge by the loop below, 1.5 so
      case 1:
        return dot_narrow<T, 1>(p, row_begin, row_end);
      case 2:
        return dot_narrow<T, 2>(p, row_begin, row_end);
      case 4:
        return dot_narrow<T, 4>(p, row_begin, row_end);
    }
  }
  for (int64_t row = row_begin; row < row_end; ++row)
    for (int64_t e = p.m.rowptr[row]; e < p.m.rowptr[row + 1]; ++e)
      dot_edge<T, OP>(p, segment, row, p.m.col[e], p.m.perm ? p.m.perm[e] : e);
}

template <class T, class I>
void dot_edges(const SddmmArgs& p, int64_t edge_begin, int64_t edge_end) {
  const int64_t segment = p.width / p.heads;
  for (int64_t e = edge_begin; e < edge_end; ++e) {
    const int64_t row = static_cast<const I*>(p.row)[e], column = static_cast<const I*>(p.column)[e];
    if (row >= 0 && row < p.m.num_rows && column >= 0 && column < p.num_cols)
      dot_edge<T, kDot>(p, segment, row, column, e);
    else
      for (int64_t h = 0; h < p.heads; ++h) store(static_cast<T*>(p.out) + e * p.heads + h, acc_t<T>{0});
  }
}

}  // namespace

void sddmm_rows(const SddmmArgs& p, DType dtype, int64_t row_begin, int64_t row_end) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    switch (p.op) {
      case kDot:
        return dot_rows<T, kDot>(p, row_begin, row_end);
      case kDotWhereEqual:
        return dot_rows<T, kDotWhereEqual>(p, row_begin, row_end);
      case kDotWhereFirst:
        return dot_rows<T, kDotWhereFirst>(p, row_begin, row_end);
    }
  });
}

void sddmm_edges(const SddmmArgs& p, DType dtype, int64_t edge_begin, int64_t edge_end) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    p.index64 ? dot_edges<T, int64_t>(p, edge_begin, edge_end) : dot_edges<T, int32_t>(p, edge_begin, edge_end);
  });
}

}  // namespace gnnfast::GNNFAST_ISA
