// CPU attention: the coefficients of some edges of a row side by side in a buffer, so that the exponentials are vectors, and
// then a walk over these edges for a block of features in registers.
#include "attention_cpu_kernel.h"

#include <limits>

#include "common/simd.h"
#include "common/vector_math.h"
#include "random.h"

namespace gnnfast::GNNFAST_ISA {
namespace {

template <class T>
struct Attend {
  using A = acc_t<T>;
  const AttentionArgs& p;
  const int64_t heads;
  const A slope, scale;
  const uint32_t kept;
  A* share;                // [kAttentionTile, H]: scores and then coefficients of edges
  A* acc;                  // [F]
  A *most, *sum;           // [H]
  A* tile_sum;             // [H]: of these edges alone, so that a long row is no long chain of additions
  const T* own = nullptr;  // [H], of the row

  Attend(const AttentionArgs& args, A* scratch)
      : p(args),
        heads(args.heads),
        slope(static_cast<A>(args.slope)),
        scale(args.seed ? static_cast<A>(kept_scale(args.dropout)) : A{1}),
        kept(args.seed ? kept_of_65536(args.dropout) : 0) {
    share = scratch, acc = share + kAttentionTile * heads;
    most = acc + p.width, sum = most + heads, tile_sum = sum + heads;
  }

  // The scores of `count` edges into `share`.
  void scores(int64_t first, int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
      const T* other = static_cast<const T*>(p.other) + p.a.col[first + k] * heads;
      for (int64_t h = 0; h < heads; ++h) {
        const A v = load(own + h) + load(other + h);
        share[k * heads + h] = v > 0 ? v : slope * v;
      }
    }
  }

  void find_most(int64_t count) {
    for (int64_t k = 0; k < count; ++k)
      for (int64_t h = 0; h < heads; ++h) most[h] = share[k * heads + h] > most[h] ? share[k * heads + h] : most[h];
  }

  // From scores to coefficients, which are still to be divided by their sum.
  void coefficients(int64_t first, int64_t count) {
    const A inf = std::numeric_limits<A>::infinity();
    for (int64_t k = 0; k < count; ++k)
      for (int64_t h = 0; h < heads; ++h) {
        const A s = share[k * heads + h];
        share[k * heads + h] = most[h] == inf ? std::numeric_limits<A>::quiet_NaN() : s == -inf ? s : s - most[h];
      }
    exp_all(share, count * heads);
    for (int64_t h = 0; h < heads; ++h) tile_sum[h] = 0;
    for (int64_t k = 0; k < count; ++k) {
      A* s = share + k * heads;
      for (int64_t h = 0; h < heads; ++h) tile_sum[h] += s[h];
      if (!p.seed) continue;
      const int64_t edge = p.a.perm ? p.a.perm[first + k] : first + k;
      const uint32_t mask =
          kept_heads(static_cast<uint64_t>(*p.seed), static_cast<uint32_t>(edge), static_cast<int>(heads), kept);
      for (int64_t h = 0; h < heads; ++h) s[h] *= mask >> h & 1 ? scale : A{0};
    }
    for (int64_t h = 0; h < heads; ++h) sum[h] += tile_sum[h];
  }

  // Adds the edges' features f0 .. f0 + N L - 1, each vector of which lies within one head.
  template <int L, int N>
  void add(int64_t first, int64_t count, int64_t f0) {
    using V = vec_t<T, L>;
    const int32_t* col = p.a.col + first;
    const T* x = static_cast<const T*>(p.x) + f0;
    const int64_t segment = p.width / heads, last = p.a.num_edges - 1 - first;
    int64_t head[N];
    V total[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      head[n] = (f0 + n * L) / segment;
      total[n] = V{};
    }
    for (int64_t k = 0; k < count; ++k) {
      const T* source = x + col[k] * p.width;
      const T* ahead = x + col[k + kPrefetch < last ? k + kPrefetch : last] * p.width;
#pragma GCC unroll 8
      for (int n = 0; n < N; n += 64 / static_cast<int>(L * sizeof(T)) + (L * sizeof(T) > 64))
        __builtin_prefetch(ahead + n * L);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        const V v = load_vector<L>(source + n * L);
        total[n] += share[k * heads + head[n]] * v;
      }
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store_vector<L>(acc + f0 + n * L, load_vector<L>(acc + f0 + n * L) + total[n]);
  }

  // All features, in the widest vectors that divide a head.
  template <int L>
  void add_all(int64_t first, int64_t count) {
    if constexpr (L > 1)
      if (p.width / heads % L) return add_all<L / 2>(first, count);
    int64_t f = 0;
    for (; f + 8 * L <= p.width; f += 8 * L) add<L, 8>(first, count, f);
    for (; f + 2 * L <= p.width; f += 2 * L) add<L, 2>(first, count, f);
    for (; f < p.width; f += L) add<L, 1>(first, count, f);
  }

  void run(int64_t row) {
    const int64_t begin = p.a.rowptr[row], end = p.a.rowptr[row + 1];
    own = static_cast<const T*>(p.own) + row * heads;
    for (int64_t f = 0; f < p.width; ++f) acc[f] = 0;
    for (int64_t h = 0; h < heads; ++h) most[h] = -std::numeric_limits<A>::infinity(), sum[h] = 0;
    const bool one = end - begin <= kAttentionTile;
    auto count = [&](int64_t first) { return end - first < kAttentionTile ? end - first : kAttentionTile; };
    for (int64_t first = begin; first < end; first += kAttentionTile) scores(first, count(first)), find_most(count(first));
    for (int64_t first = begin; first < end; first += kAttentionTile) {
      if (!one) scores(first, count(first));
      coefficients(first, count(first));
      add_all<kLanes<A>>(first, count(first));
    }
    write(row, end > begin);
  }

  void write(int64_t row, bool any) {
    const int64_t segment = p.width / heads;
    T* out = static_cast<T*>(p.out) + row * p.width;
    for (int64_t h = 0; h < heads; ++h) {
      const A over = any ? 1 / sum[h] : A{0};
      for (int64_t f = h * segment; f < (h + 1) * segment; ++f) store(out + f, acc[f] * over);
      if (!p.stats) continue;
      A* stats = static_cast<A*>(p.stats) + (row * heads + h) * 4;
      stats[0] = any ? most[h] : A{0}, stats[1] = load(own + h), stats[2] = over, stats[3] = 0;
    }
  }
};

}  // namespace

void attention_items(const AttentionArgs& p, DType dtype, int64_t row_begin, int64_t row_end, void* scratch) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Attend<T> attend(p, static_cast<acc_t<T>*>(scratch));
    for (int64_t row = row_begin; row < row_end; ++row) attend.run(row);
  });
}

namespace {

// In the widest vectors that divide a head, as pair attention adds up its products: gradients of scores are differences of
// both, and only 0 where they must be if both were rounded alike.
template <class T, int L = kLanes<acc_t<T>>>
acc_t<T> dot_of_head(const T* a, const T* b, int64_t n) {
  if constexpr (L > 1)
    if (n % L) return dot_of_head<T, L / 2>(a, b, n);
  vec_t<T, L> sum{};
  for (int64_t f = 0; f < n; f += L) sum += load_vector<L>(a + f) * load_vector<L>(b + f);
  return add_lanes(sum);
}

}  // namespace

void attention_dots(const AttentionDotsArgs& p, DType dtype, int64_t row_begin, int64_t row_end) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = acc_t<T>;
    const int64_t segment = p.width / p.heads;
    for (int64_t pair = row_begin * p.heads; pair < row_end * p.heads; ++pair) {
      const A* stats = static_cast<const A*>(p.stats) + pair * 4;
      const A found =
          dot_of_head(static_cast<const T*>(p.out) + pair * segment, static_cast<const T*>(p.grad) + pair * segment, segment);
      A* packed = static_cast<A*>(p.packed) + pair * 4;
      for (int i = 0; i < 3; ++i) packed[i] = stats[i];
      packed[3] = stats[2] != 0 ? found : A{0};
    }
  });
}

}  // namespace gnnfast::GNNFAST_ISA
