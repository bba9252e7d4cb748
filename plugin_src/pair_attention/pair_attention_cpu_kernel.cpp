// CPU attention with scores of two feature rows, and the backward pass of additive ones: the scores of some edges of a row side
// by side in a buffer, so that the exponentials are vectors, and then these edges, whose rows are still in the cache, once
// more.
#include "pair_attention_cpu_kernel.h"

#include <limits>

#include "attention/random.h"
#include "common/simd.h"
#include "common/vector_math.h"

namespace gnnfast::GNNFAST_ISA {
namespace {

// What is done once for each edge and head, or once for each row: the same machine code whatever the vectors of Pair.
#define GNNFAST_ONCE __attribute__((noinline))

template <class T, bool ADDITIVE>
struct Row {
  using A = acc_t<T>;
  const PairArgs& p;
  const int64_t heads, width, segment;
  const A slope, scale;
  const uint32_t kept;
  A *share, *dots;               // [kPairTile, H]
  A *own, *out, *to;             // [F]
  A *most, *sum, *rescale;       // [H]; backward `sum` is what scores get (ADDITIVE)
  const T* own_with = nullptr;   // [F]
  const A* stats = nullptr;      // [H, 4], of the row
  const T* own_score = nullptr;  // [H] (ADDITIVE)

  Row(const PairArgs& args, A* scratch)
      : p(args),
        heads(args.heads),
        width(args.width),
        segment(args.width / args.heads),
        slope(static_cast<A>(args.slope)),
        scale(args.seed ? static_cast<A>(kept_scale(args.dropout)) : A{1}),
        kept(args.seed ? kept_of_65536(args.dropout) : 0) {
    share = scratch, dots = share + kPairTile * heads;
    own = dots + kPairTile * heads, out = own + width, to = out + width;
    most = to + width, sum = most + heads, rescale = sum + heads;
  }

  // The sum of the two parts of an additive score, and what it is multiplied by.
  A raw_score(int64_t slot, int64_t h) const {
    const int64_t other = p.a.col[slot] * heads + h;
    return load(own_score + h) + (p.role == kPairToRows ? load(static_cast<const T*>(p.with) + other)
                                                        : static_cast<const A*>(p.stats)[other * 4 + 1]);
  }
  A slope_at(int64_t slot, int64_t h) const { return raw_score(slot, h) > 0 ? A{1} : slope; }

  GNNFAST_ONCE void begin(int64_t row) {
    const T* from = static_cast<const T*>(p.own) + row * (ADDITIVE ? heads : width);
    own_score = from;
    own_with = static_cast<const T*>(p.own_with) + row * width;
    stats = static_cast<const A*>(p.stats) + row * heads * 4;
    for (int64_t f = 0; f < width; ++f) {
      if (!ADDITIVE) own[f] = load(from + f);
      out[f] = to[f] = 0;
    }
    for (int64_t h = 0; h < heads; ++h) most[h] = -std::numeric_limits<A>::infinity(), sum[h] = 0;
  }

  // From scores to what edges count, in `share`, and to gradients of the scores, in `dots`.
  GNNFAST_ONCE void coefficients(int64_t first, int64_t count) {
    const A inf = std::numeric_limits<A>::infinity();
    auto of_edge = [&](int64_t k) {
      return p.role == kPairToRows ? stats : static_cast<const A*>(p.stats) + p.a.col[first + k] * heads * 4;
    };
    if (p.role == kPairForward) {
      for (int64_t h = 0; h < heads; ++h) rescale[h] = most[h];
      for (int64_t k = 0; k < count; ++k)
        for (int64_t h = 0; h < heads; ++h) most[h] = share[k * heads + h] > most[h] ? share[k * heads + h] : most[h];
      bool grown = false;
      for (int64_t h = 0; h < heads; ++h) {
        grown |= rescale[h] != most[h] && rescale[h] != -inf;
        rescale[h] = rescale[h] == most[h] ? A{0} : rescale[h] - most[h];
      }
      if (grown) {
        exp_all(rescale, heads);
        for (int64_t h = 0; h < heads; ++h) {
          sum[h] *= rescale[h];
          for (int64_t f = h * segment; f < (h + 1) * segment; ++f) out[f] *= rescale[h];
        }
      }
    }
    for (int64_t k = 0; k < count; ++k)
      for (int64_t h = 0; h < heads; ++h) {
        A& s = share[k * heads + h];
        if (p.role != kPairForward)
          s -= of_edge(k)[h * 4];
        else if (most[h] == inf)
          s = std::numeric_limits<A>::quiet_NaN();
        else if (s != -inf)
          s -= most[h];
      }
    exp_all(share, count * heads);
    for (int64_t h = 0; h < heads && p.role == kPairForward; ++h) {
      A of_tile = 0;
      for (int64_t k = 0; k < count; ++k) of_tile += share[k * heads + h];
      sum[h] += of_tile;
    }
    const A of_score = p.score == kScaledDot ? slope : A{1};
    for (int64_t k = 0; k < count; ++k) {
      uint32_t mask = ~uint32_t{0};
      if (p.seed) {
        const int64_t edge = p.a.perm ? p.a.perm[first + k] : first + k;
        mask = kept_heads(static_cast<uint64_t>(*p.seed), static_cast<uint32_t>(edge), static_cast<int>(heads), kept);
      }
      for (int64_t h = 0; h < heads; ++h) {
        A &s = share[k * heads + h], &d = dots[k * heads + h];
        const A keep = p.seed ? (mask >> h & 1 ? scale : A{0}) : A{1};
        if (p.role == kPairForward) {
          s *= keep;
        } else {
          const A* of = of_edge(k) + h * 4;
          s *= of[2];
          d = s * (keep * d - of[3]) * (ADDITIVE ? slope_at(first + k, h) : of_score);
          s *= keep;
          if (ADDITIVE) sum[h] += d;
        }
      }
    }
  }

  GNNFAST_ONCE void end(int64_t row, bool any) {
    if (p.role != kPairForward) finish(row, any);
    if (p.role != kPairToRows)
      for (int64_t h = 0; h < heads; ++h) {
        const A over = p.role != kPairForward ? A{1} : any ? 1 / sum[h] : A{0};
        T* at = static_cast<T*>(p.out) + row * width;
        for (int64_t f = h * segment; f < (h + 1) * segment; ++f) store(at + f, out[f] * over);
        if (!p.new_stats) continue;
        A* kept_stats = static_cast<A*>(p.new_stats) + (row * heads + h) * 4;
        kept_stats[0] = any ? most[h] : A{0}, kept_stats[2] = over, kept_stats[1] = kept_stats[3] = 0;
      }
  }

  void finish(int64_t row, bool any) {
    if constexpr (ADDITIVE) {
      for (int64_t h = 0; h < heads; ++h) store(static_cast<T*>(p.to_own) + row * heads + h, sum[h]);
      return;
    }
    const bool att = has_att(p.score);
    T *product = static_cast<T*>(p.product) + row * width, *to_own = static_cast<T*>(p.to_own) + row * width;
    if (p.score == kGatv2)
      for (int64_t f = 0; f < width; ++f) store(product + f, any ? own[f] * to[f] : A{0});
    else if (att && p.role == kPairToRows)
      for (int64_t f = 0; f < width; ++f) store(product + f, out[f]);
    for (int64_t f = 0; f < width && att; ++f) {
      to[f] *= load(static_cast<const T*>(p.att) + f);
      out[f] += to[f];  // which is stored to columns alone
    }
    if (p.role == kPairToRows || !att)
      for (int64_t f = 0; f < width; ++f) store(to_own + f, to[f]);
  }
};

// L features at a time, which divide those of a head.
template <class T, int SCORE, int L>
struct Pair : Row<T, SCORE == kAdditive> {
  using Base = Row<T, SCORE == kAdditive>;
  using typename Base::A;
  using V = vec_t<T, L>;
  using Base::dots, Base::heads, Base::out, Base::own, Base::own_with, Base::p, Base::segment, Base::share, Base::slope,
      Base::to, Base::width;
  const void* const gathered;  // [num_cols, F], of which `with` holds scores to rows (kAdditive)

  Pair(const PairArgs& args, A* scratch) : Base(args, scratch), gathered(SCORE == kAdditive ? args.other : args.with) {}

  const T* row_of(const void* from, int64_t column) const { return static_cast<const T*>(from) + column * width; }
  static V att_of(const PairArgs& p, int64_t f) { return load_vector<L>(static_cast<const T*>(p.att) + f); }
  int64_t edge_at(int64_t slot) const { return (p.a.perm ? p.a.perm[slot] : slot) * width; }

  // Scores into `share` and, backward, products with the gradient into `dots`.
  void scores(int64_t first, int64_t count) {
    const int64_t last = p.a.num_edges - 1;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t slot = first + k, slot_ahead = slot + kPrefetch < last ? slot + kPrefetch : last,
                    ahead = p.a.col[slot_ahead];
      const T *other = row_of(p.other, p.a.col[slot]), *with = row_of(gathered, p.a.col[slot]);
      for (int64_t f = 0; f < width; f += 64 / static_cast<int64_t>(sizeof(T))) {
        __builtin_prefetch(row_of(p.other, ahead) + f);
        if (gathered != p.other) __builtin_prefetch(row_of(gathered, ahead) + f);
        if constexpr (SCORE == kGatv2Edges) __builtin_prefetch(static_cast<const T*>(p.edge) + edge_at(slot_ahead) + f);
      }
      const T* of_edge = SCORE == kGatv2Edges ? static_cast<const T*>(p.edge) + edge_at(slot) : nullptr;
      for (int64_t h = 0, f = 0; h < heads; ++h) {
        V s{}, d{};
        for (const int64_t end = (h + 1) * segment; f < end; f += L) {
          if constexpr (has_att(SCORE)) {
            V raw = load_vector<L>(own + f) + load_vector<L>(other + f);
            if constexpr (SCORE == kGatv2Edges) raw += load_vector<L>(of_edge + f);
            s += att_of(p, f) * (raw > 0 ? raw : slope * raw);
          } else if constexpr (SCORE == kScaledDot) {
            s += load_vector<L>(own + f) * load_vector<L>(other + f);
          }
          if (p.role != kPairForward) d += load_vector<L>(own_with + f) * load_vector<L>(with + f);
        }
        if constexpr (SCORE == kAdditive)
          share[k * heads + h] = this->raw_score(slot, h) * this->slope_at(slot, h);
        else
          share[k * heads + h] = SCORE == kScaledDot ? slope * add_lanes(s) : add_lanes(s);
        if (p.role != kPairForward) dots[k * heads + h] = add_lanes(d);
      }
    }
  }

  // Adds the edges' features f0 .. f0 + N L - 1, each vector of which lies within one head.
  template <int N>
  void add(int64_t first, int64_t count, int64_t f0) {
    int64_t head[N];
    V values[N], others[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) head[n] = (f0 + n * L) / segment, values[n] = others[n] = V{};
    for (int64_t k = 0; k < count; ++k) {
      const int64_t column = p.a.col[first + k], at = SCORE == kGatv2Edges ? edge_at(first + k) + f0 : 0;
      const T *other = row_of(p.other, column) + f0, *with = row_of(gathered, column) + f0;
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        if (p.role != kPairToRows) values[n] += share[k * heads + head[n]] * load_vector<L>(with + n * L);
        if (p.role != kPairForward && SCORE != kAdditive) {
          const V e = load_vector<L>(other + n * L);
          const A ds = dots[k * heads + head[n]];
          if constexpr (has_att(SCORE)) {
            V raw = load_vector<L>(own + f0 + n * L) + e;
            if constexpr (SCORE == kGatv2Edges) raw += load_vector<L>(static_cast<const T*>(p.edge) + at + n * L);
            const V d = raw > 0 ? V{} + ds : V{} + slope * ds;
            others[n] += d;
            if constexpr (SCORE == kGatv2Edges)
              if (p.role == kPairToRows) {
                values[n] += d * raw;
                store_vector<L>(static_cast<T*>(p.to_edge) + at + n * L, d * att_of(p, f0 + n * L));
              }
          } else
            others[n] += ds * e;
        }
      }
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const int64_t f = f0 + n * L;
      store_vector<L>(out + f, load_vector<L>(out + f) + values[n]);
      store_vector<L>(to + f, load_vector<L>(to + f) + others[n]);
    }
  }

  void run(int64_t row) {
    const int64_t begin = p.a.rowptr[row], end = p.a.rowptr[row + 1];
    this->begin(row);
    for (int64_t first = begin; first < end; first += kPairTile) {
      const int64_t count = end - first < kPairTile ? end - first : kPairTile;
      scores(first, count);
      this->coefficients(first, count);
      int64_t f = 0;
      for (; f + 4 * L <= width; f += 4 * L) add<4>(first, count, f);
      for (; f < width; f += L) add<1>(first, count, f);
    }
    this->end(row, end > begin);
  }
};

template <class T, int SCORE, int L>
void run_rows(const PairArgs& p, int64_t row_begin, int64_t row_end, acc_t<T>* scratch) {
  if constexpr (L > 1)
    if (p.width / p.heads % L) return run_rows<T, SCORE, L / 2>(p, row_begin, row_end, scratch);
  Pair<T, SCORE, L> pair(p, scratch);
  for (int64_t row = row_begin; row < row_end; ++row) pair.run(row);
}

}  // namespace

void pair_items(const PairArgs& p, DType dtype, int64_t row_begin, int64_t row_end, void* scratch) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    acc_t<T>* room = static_cast<acc_t<T>*>(scratch);
    constexpr int L = kLanes<acc_t<T>>;
    switch (p.score) {
      case kScaledDot:
        return run_rows<T, kScaledDot, L>(p, row_begin, row_end, room);
      case kGatv2:
        return run_rows<T, kGatv2, L>(p, row_begin, row_end, room);
      case kGatv2Edges:
        if constexpr (sizeof(T) >= 4) run_rows<T, kGatv2Edges, L>(p, row_begin, row_end, room);
        return;
      case kAdditive:
        return run_rows<T, kAdditive, L>(p, row_begin, row_end, room);
    }
  });
}

}  // namespace gnnfast::GNNFAST_ISA
