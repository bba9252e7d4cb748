// CPU SpMM. Forward reductions keep a block of features of one output row in registers and walk the row's edges once per block;
// products and sums are rounded separately and in edge order (the file is compiled without contraction to FMA), so that float
// and double results equal a sequential scatter bit for bit. Backward reductions walk a row's edges once and add into a row
// buffer.
#include "spmm_cpu_kernel.h"
#include "common/simd.h"

namespace gnnfast::GNNFAST_ISA {
namespace {

// Beside SpmmArgs::mode: a weight for each head, and blocks that hold vectors of several heads, none of them of two.
constexpr int kVectorWeight = -1;

// N vectors of L features each; the last one begins at feature f0 + last, so that it may overlap the one before: both then hold
// the same sums, and any width of at least L needs no narrower rest, which would be another walk over the edges.
template <class T, int OP, int W, int L, int N>
inline void reduce_block(const SpmmArgs& p, int64_t row, int64_t f0, int64_t last = (N - 1) * L) {
  using V = vec_t<T, L>;
  using Mask = decltype(V{} > V{});
  using A = acc_t<T>;
  using Slot = decltype(Mask{}[0] + 0);
  const T* x = static_cast<const T*>(p.x) + f0;
  const T* weight = static_cast<const T*>(p.weight);
  constexpr bool kHead = W == kHeadWeight || W == kHeadPlus, kElement = W == kElementWeight || W == kElementPlus;
  constexpr bool kPlus = W == kHeadPlus || W == kElementPlus;
  const int64_t width = p.width, heads = p.heads;
  if constexpr (kHead) weight += f0 / (width / heads);
  if constexpr (kElement) weight += f0;
  const int32_t *col = p.a.col, *perm = p.a.perm;
  const int64_t begin = p.a.rowptr[row], end = p.a.rowptr[row + 1];
  auto at = [last](int n) { return n == N - 1 ? last : int64_t{n} * L; };
  const A sign = p.negate ? -1 : 1, plus = static_cast<A>(p.plus);

  uint32_t head_of[N];
  if constexpr (W == kVectorWeight)
    for (int n = 0; n < N; ++n) head_of[n] = static_cast<uint32_t>(f0 + n * L) / static_cast<uint32_t>(width / heads);
  V acc[N];
  Mask aux[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    acc[n] = V{} + (OP == kSum ? A{0} : -static_cast<A>(__builtin_inf()));
    aux[n] = Mask{} + static_cast<Slot>(OP == kMaxFirst ? begin : 0);
  }
  // The last edges of all have none ahead of them; a comparison for each edge costs a quarter of the time at 16 features.
  const int64_t last_ahead = p.a.num_edges - kPrefetch;
  for (int64_t e = begin, reach = kPrefetch; e < end; reach = 0) {
    for (const int64_t stop = reach && last_ahead < end ? last_ahead : end; e < stop; ++e) {
      const T* source = x + col[e] * width;
      const int64_t next = e + reach;
      const T* ahead = x + col[next] * width;
      if constexpr (kHead || W == kVectorWeight)
        if (perm) __builtin_prefetch(weight + perm[next] * heads);
#pragma GCC unroll 8
      for (int n = 0; n < N; n += 64 / static_cast<int>(L * sizeof(T)) + (L * sizeof(T) > 64)) {
        __builtin_prefetch(ahead + at(n));
        if constexpr (kElement) __builtin_prefetch(weight + (perm ? perm[next] : next) * heads + at(n));
      }
      const int64_t id = W != kNoWeight && perm ? perm[e] : e;
      const A w = kHead ? load(weight + id * heads) : A{1};
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        V v = load_vector<L>(source + at(n));
        if constexpr (W != kNoWeight) {
          V of_edge = V{} + w;
          if constexpr (kElement) of_edge = load_vector<L>(weight + id * heads + at(n));
          if constexpr (W == kVectorWeight) of_edge = V{} + load(weight + id * heads + head_of[n]);
          v = kPlus ? v + plus * of_edge : of_edge * v;
        }
        if constexpr (OP == kSum) {
          acc[n] += v;
        } else {
          if constexpr (W != kNoWeight && sizeof(T) < sizeof(A))  // the framework compares messages of the features' dtype
            v = round_vector<L, T>(v);
          v = sign * v;
          if constexpr (OP == kMax) {  // only one operation waits for the edge before
            acc[n] = v > acc[n] ? v : acc[n];
            aux[n] |= v != v;
            continue;
          }
          const Mask better = (v > acc[n]) | ((v != v) & (acc[n] == acc[n]));
          if constexpr (OP == kMaxFirst) aux[n] = better ? Mask{} + static_cast<Slot>(e) : aux[n];
          if constexpr (OP == kMaxCount) aux[n] = better ? Mask{} + Slot{1} : aux[n] - (v == acc[n]);
          acc[n] = better ? v : acc[n];
        }
      }
    }
  }

  T* out = static_cast<T*>(p.out) + row * width + f0;
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    if constexpr (OP == kSum) {
      if (p.mean && end > begin) acc[n] = acc[n] / static_cast<A>(end - begin);
      if (p.scale) acc[n] = acc[n] * static_cast<A>(p.scale[row]);
    } else {
      if constexpr (OP == kMax) acc[n] = aux[n] ? V{} + static_cast<A>(__builtin_nan("")) : acc[n];
      acc[n] = end > begin ? sign * acc[n] : V{} + static_cast<A>(p.empty);
      if (p.finite) {
        const A infinity = static_cast<A>(__builtin_inf());
        const Mask infinite = (acc[n] == infinity) | (acc[n] == -infinity);
        acc[n] = infinite ? V{} : acc[n];
        if constexpr (OP == kMaxFirst) aux[n] = infinite ? Mask{} - Slot{1} : aux[n];
      }
    }
    store_vector<L>(out + at(n), acc[n]);
    if constexpr (OP == kMaxFirst || OP == kMaxCount)
      for (int l = 0; l < L; ++l) {
        int64_t value = aux[n][l];
        if (OP == kMaxFirst) value = end == begin || value < 0 ? -1 : perm ? perm[value] : value;
        if (OP == kMaxCount) value = (value > 1 ? value : 1) + (p.count_zero && acc[n][l] == 0);
        p.aux[row * width + f0 + at(n) + l] = static_cast<int32_t>(value);
      }
  }
}

// As many of the next `left` >= L features as fit the registers, `N` vectors of them at most. Returns how many those are.
template <class T, int OP, int W, int L, int N>
inline int64_t reduce_vectors(const SpmmArgs& p, int64_t row, int64_t f, int64_t left) {
  if constexpr (N > 1)
    if (left <= (N - 1) * L) return reduce_vectors<T, OP, W, L, N - 1>(p, row, f, left);
  const int64_t taken = left < N * L ? left : N * L;
  reduce_block<T, OP, W, L, N>(p, row, f, taken - L);
  return taken;
}

// Vectors of L features, or of half as many for as long as a row, or a head of it, has fewer: two of them then hold it, and the
// edges are walked once.
template <class T, int OP, int W, int L = kLanes<acc_t<T>>>
void reduce_rows(const SpmmArgs& p, int64_t row_begin, int64_t row_end) {
  // Each number of vectors is compiled: what is rare has fewer.
  constexpr bool kOften = OP == kSum && sizeof(T) == sizeof(acc_t<T>) && W != kHeadPlus && W != kElementPlus;
  constexpr int kMost = L == kLanes<acc_t<T>> ? (kOften ? 8 : 4) : W == kVectorWeight ? 4 : L > 1 ? 2 : 1;
  const int64_t segment = W == kHeadWeight || W == kHeadPlus ? p.width / p.heads : p.width;  // a block lies within one head
  if constexpr (L > 1 && W != kVectorWeight)
    if (segment < L) return reduce_rows<T, OP, W, L / 2>(p, row_begin, row_end);
  if constexpr (W == kHeadWeight && OP == kSum && L * sizeof(acc_t<T>) >= 16)
    if (p.heads > 1 && segment % L == 0 && segment < kMost * L)
      return reduce_rows<T, OP, kVectorWeight, L>(p, row_begin, row_end);
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t head = 0; head < p.width; head += segment) {
      for (int64_t f = 0; f < segment;) {
        const int64_t left = segment - f;
        if (left >= L)
          f += reduce_vectors<T, OP, W, L, kMost>(p, row, head + f, left);
        else  // a vector that ends with the segment
          reduce_block<T, OP, W, L, 1>(p, row, head + segment - L), f = segment;
      }
    }
  }
}

// kSumAndDot of rows that fit the registers: N vectors of L features, each head of P of them.
template <class T, int L, int N, int P>
void sum_and_dot_rows(const SpmmArgs& p, int64_t row_begin, int64_t row_end) {
  using V = vec_t<T, L>;
  constexpr int kHeads = N / P, kWidth = N * L;
  const T *x = static_cast<const T*>(p.x), *weight = static_cast<const T*>(p.weight);
  const int32_t *col = p.a.col, *perm = p.a.perm;
  const int64_t last_slot = p.a.num_edges - 1;
  for (int64_t row = row_begin; row < row_end; ++row) {
    V acc[N], mine[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      acc[n] = V{};
      mine[n] = load_vector<L>(static_cast<const T*>(p.self) + row * kWidth + n * L);
    }
    for (int64_t e = p.a.rowptr[row]; e < p.a.rowptr[row + 1]; ++e) {
      const int64_t next = e + kPrefetch < last_slot ? e + kPrefetch : last_slot, id = perm ? perm[e] : e;
      const T* source = x + int64_t{col[e]} * kWidth;
      prefetch_row<kWidth>(x + int64_t{col[next]} * kWidth);
      if (perm) {
        __builtin_prefetch(weight + int64_t{perm[next]} * kHeads);
        __builtin_prefetch(static_cast<T*>(p.dot) + int64_t{perm[next]} * kHeads, 1);
      }
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        const V w = V{} + load(weight + id * kHeads + h);
        V product{};
#pragma GCC unroll 8
        for (int n = h * P; n < (h + 1) * P; ++n) {
          const V v = load_vector<L>(source + n * L);
          product += mine[n] * v;
          acc[n] += w * v;
        }
        store(static_cast<T*>(p.dot) + id * kHeads + h, add_lanes(product));
      }
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store_vector<L>(static_cast<T*>(p.out) + row * kWidth + n * L, acc[n]);
  }
}

// Gradients of maxima without weights: N vectors of L features from f on.
template <class T, int OP, int L, int N>
inline void where_block(const SpmmArgs& p, int64_t row, int64_t f) {
  using V = vec_t<T, L>;
  using Mask = decltype(V{} > V{});
  const int64_t width = p.width, last = p.a.num_edges - 1;
  const T *x = static_cast<const T*>(p.x) + f, *value = static_cast<const T*>(p.value) + f;
  const int32_t* arg = OP == kSumWhereFirst ? p.arg + f : nullptr;
  V acc[N]{}, self[N]{};
  if constexpr (OP == kSumWhereEqual)
    for (int n = 0; n < N; ++n) self[n] = load_vector<L>(static_cast<const T*>(p.self) + row * width + f + n * L);
  for (int64_t e = p.a.rowptr[row]; e < p.a.rowptr[row + 1]; ++e) {
    const int64_t source = p.a.col[e] * width, ahead = p.a.col[e + kPrefetch < last ? e + kPrefetch : last] * width;
    prefetch_row<N * L>(x + ahead);
    OP == kSumWhereEqual ? prefetch_row<N * L>(value + ahead) : prefetch_row<N * L>(arg + ahead);
    const int32_t id = p.a.perm ? p.a.perm[e] : static_cast<int32_t>(e);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const V share = load_vector<L>(x + source + n * L);
      if constexpr (OP == kSumWhereEqual) {  // share_of_best
        const V best = load_vector<L>(value + source + n * L);
        acc[n] += self[n] == best ? share : best == best ? 0 * share : best;
      } else {
        Mask first{};
        for (int i = 0; i < L; ++i) first[i] = arg[source + n * L + i];
        acc[n] += first == id ? share : V{};
      }
    }
  }
  for (int n = 0; n < N; ++n) store_vector<L>(static_cast<T*>(p.out) + row * width + f + n * L, acc[n]);
}

template <class T, int OP>
void where_rows(const SpmmArgs& p, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row)
    for_overlapping_blocks<T, 4>(p.width, [&](auto lanes, auto vectors, int64_t f, int64_t) {
      where_block<T, OP, decltype(lanes)::value, decltype(vectors)::value>(p, row, f);
    });
}

template <class T, int OP, int W>
void backward_rows(const SpmmArgs& p, int64_t row_begin, int64_t row_end) {
  using A = acc_t<T>;
  constexpr int L = kLanes<A>;
  const T *x = static_cast<const T*>(p.x), *weight = static_cast<const T*>(p.weight);
  const int64_t width = p.width, heads = W == kHeadWeight ? p.heads : 1, segment = width / heads;
  A* acc = new A[width];
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t f = 0; f < width; ++f) acc[f] = 0;
    const T* self = static_cast<const T*>(p.self) + row * width;
    for (int64_t e = p.a.rowptr[row]; e < p.a.rowptr[row + 1]; ++e) {
      const int64_t id = p.a.perm ? p.a.perm[e] : e, source = p.a.col[e] * width;
      for (int64_t h = 0; h < heads; ++h) {
        const A w = W != kHeadWeight ? A{1} : load(weight + id * heads + h);
        int64_t f = h * segment;
        const int64_t end = f + segment;
        if constexpr (W == kElementWeight) {  // kSumAndDot with a weight for each feature
          const T *mine = self, *taken = x + source, *by = weight + id * width;
          T* product = static_cast<T*>(p.dot) + id * width;
          for (; f + L <= end; f += L) {
            const auto v = load_vector<L>(taken + f);
            store_vector<L>(product + f, load_vector<L>(mine + f) * v);
            store_vector<L>(acc + f, load_vector<L>(acc + f) + load_vector<L>(by + f) * v);
          }
          for (; f < end; ++f) {
            store(product + f, load(mine + f) * load(taken + f));
            acc[f] += load(by + f) * load(taken + f);
          }
        } else if constexpr (OP == kSumAndDot) {
          store(static_cast<T*>(p.dot) + id * heads + h, dot(self + f, x + source + f, segment));
          for (; f + L <= end; f += L) store_vector<L>(acc + f, load_vector<L>(acc + f) + w * load_vector<L>(x + source + f));
        }
#pragma GCC ivdep  // acc is nobody else's
        for (; f < end; ++f) {
          A share = w * load(x + source + f);
          if constexpr (OP == kSumWhereEqual) {
            const A message = round_to<T>(w * load(self + f));
            share = share_of_best(message, load(static_cast<const T*>(p.value) + source + f), share);
          }
          if constexpr (OP == kSumWhereFirst) share = p.arg[source + f] == id ? share : A{0};
          acc[f] += share;
        }
      }
    }
    for (int64_t f = 0; f < width; ++f) store(static_cast<T*>(p.out) + row * width + f, acc[f]);
  }
  delete[] acc;
}

template <class T, int OP>
void dispatch_weight(const SpmmArgs& p, int64_t row_begin, int64_t row_end) {
  if constexpr (OP >= kSumWhereEqual) {
    if (p.mode == kElementWeight && OP == kSumAndDot)
      return backward_rows<T, kSumAndDot, kElementWeight>(p, row_begin, row_end);
    // Else full weights are heads of one feature.
    if constexpr (OP != kSumAndDot)  // which is never without weights
      if (p.mode == kNoWeight) return where_rows<T, OP>(p, row_begin, row_end);
    if constexpr (OP == kSumAndDot && sizeof(T) == sizeof(acc_t<T>)) {
      auto run = [&](auto l, auto n, auto of_head) {
        sum_and_dot_rows<T, l.value, n.value, of_head.value>(p, row_begin, row_end);
      };
      if (with_vectors<T>(p.width, p.heads, run)) return;
      if (p.heads == 1 && p.width == 1) return run(Int<1>{}, Int<1>{}, Int<1>{});
      if (p.heads == 1 && p.width == 2) return run(Int<2>{}, Int<1>{}, Int<1>{});
      if (p.heads == 1 && p.width == 4) return run(Int<4>{}, Int<1>{}, Int<1>{});
    }
    return backward_rows<T, OP, kHeadWeight>(p, row_begin, row_end);
  } else {
    switch (p.mode) {
      case kNoWeight:
        return reduce_rows<T, OP, kNoWeight>(p, row_begin, row_end);
      case kHeadWeight:
        return reduce_rows<T, OP, kHeadWeight>(p, row_begin, row_end);
      case kElementWeight:
        return reduce_rows<T, OP, kElementWeight>(p, row_begin, row_end);
      case kHeadPlus:
        if constexpr (OP != kMaxCount) return reduce_rows<T, OP, kHeadPlus>(p, row_begin, row_end);
        return;
      case kElementPlus:
        if constexpr (OP != kMaxCount) return reduce_rows<T, OP, kElementPlus>(p, row_begin, row_end);
        return;
    }
  }
}

}  // namespace

void spmm_rows(const SpmmArgs& p, DType dtype, int64_t row_begin, int64_t row_end) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    switch (p.op) {
      case kSum:
        return dispatch_weight<T, kSum>(p, row_begin, row_end);
      case kMax:
        return dispatch_weight<T, kMax>(p, row_begin, row_end);
      case kMaxFirst:
        return dispatch_weight<T, kMaxFirst>(p, row_begin, row_end);
      case kMaxCount:
        return dispatch_weight<T, kMaxCount>(p, row_begin, row_end);
      case kSumWhereEqual:
        return dispatch_weight<T, kSumWhereEqual>(p, row_begin, row_end);
      case kSumWhereFirst:
        return dispatch_weight<T, kSumWhereFirst>(p, row_begin, row_end);
      case kSumAndDot:
        return dispatch_weight<T, kSumAndDot>(p, row_begin, row_end);
    }
  });
}

}  // namespace gnnfast::GNNFAST_ISA
