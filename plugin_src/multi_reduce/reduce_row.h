// What is done with a row by itself, one feature at a time, on both devices.
#pragma once

#include <cmath>

#include "multi_reduce_args.h"

#if defined(__CUDACC__)
#define GNNFAST_ROW __host__ __device__ inline
#else
#define GNNFAST_ROW inline
#endif

namespace gnnfast {
namespace {  // compiled once per instruction set: no copy may stand in for another

// Of a row's x: sum, sum of squares, maximum, minimum.
template <class A>
struct RowStatistics {
  A sum, square, most, least;
};

// out[k] of a row with edges.
template <class A>
GNNFAST_ROW A reduced(int kind, const RowStatistics<A>& row, A degree, A shift) {
  if (kind == kKindSum) return row.sum + degree * shift;
  if (kind == kKindMax) return row.most + shift;
  if (kind == kKindMin) return row.least + shift;
  const A mean = row.sum / degree;
  if (kind == kKindMean) return mean + shift;
  const A variance = row.square / degree - mean * mean;
  if (kind == kKindVar) return variance;
  return variance <= static_cast<A>(kLeastVariance) ? A{0} : std::sqrt(variance);  // NaN stays
}

// The first step back for feature f of a row.
template <class T>
GNNFAST_ROW void share_out(const ReduceSharesArgs& p, int64_t row, int64_t f) {
  const ReduceLayout& l = p.layout;
  const int64_t width = p.width;
  const T *grad = static_cast<const T*>(p.grad) + row * l.count * width + f,
          *out = static_cast<const T*>(p.out) + row * l.count * width + f,
          *kept = static_cast<const T*>(p.kept) + row * l.kept_rows * width + f;
  const int32_t* ties = p.ties + row * l.ties_rows * width + f;
  T* shares = static_cast<T*>(p.shares) + row * l.rows * width + f;
  const T degree = static_cast<T>(p.rowptr[row + 1] - p.rowptr[row]), some = degree > 0 ? degree : T{1};
  T linear = 0, square = 0, of_most = 0, of_least = 0, most = 0, least = 0;
  for (int k = 0; k < l.count; ++k) {
    const T g = grad[k * width], value = out[k * width];
    switch (l.kinds[k]) {
      case kKindSum:
        linear += g * degree;
        break;
      case kKindMean:
        linear += g;
        break;
      case kKindMax:
        of_most += g, most = value;
        break;
      case kKindMin:
        of_least += g, least = value;
        break;
      case kKindVar:
        square += 2 * g;
        break;
      default:
        square += value > 0 ? g / value : T{0};
    }
  }
  T to_shift = linear;
  auto extremum = [&](int at, int kept_at, int ties_at, T g, T value) {
    if (at < 0) return;
    const T count = static_cast<T>(ties[ties_at * width]), share = g / (count + (value == 0));
    to_shift += value == value ? share * count : value;  // as share_of
    shares[at * width] = kept[kept_at * width];
    shares[(at + 1) * width] = share;
  };
  extremum(l.most_at, l.most, l.most_ties, of_most, most);
  extremum(l.least_at, l.least, l.least_ties, of_least, least);
  if (l.square >= 0) {
    linear -= kept[l.mean * width] * square;
    shares[l.square * width] = square / some;
  }
  if (l.linear >= 0) shares[l.linear * width] = linear / some;
  if (p.to_shift) static_cast<T*>(p.to_shift)[row * width + f] = degree > 0 ? to_shift : T{0};
}

// What goes to who attains an extremum `best`, of numbers or vectors of such. Where that is NaN torch counts no edge and gives
// each 0 times infinity.
template <class V>
GNNFAST_ROW V share_of(const V& self, const V& best, const V& share) {
  return self == best ? share : best == best ? 0 * share : best;
}

// What an edge gets of its row, whose shares load(which) gives.
template <class V, class Load>
GNNFAST_ROW V share_of_edge(const ReduceLayout& l, const V& self, const Load& load) {
  V found{};
  if (l.linear >= 0) found += load(l.linear);
  if (l.square >= 0) found += self * load(l.square);
  if (l.most_at >= 0) found += share_of(self, load(l.most_at), load(l.most_at + 1));
  if (l.least_at >= 0) found += share_of(self, load(l.least_at), load(l.least_at + 1));
  return found;
}

// Element `at` of the gradient of messages that exist.
template <class T>
GNNFAST_ROW void edge_backward(const ReduceEdgesArgs& p, int64_t at) {
  const int64_t edge = at / p.width, f = at % p.width;
  const int64_t row = p.index64 ? static_cast<const int64_t*>(p.index)[edge] : static_cast<const int32_t*>(p.index)[edge];
  const bool inside = static_cast<uint64_t>(row) < static_cast<uint64_t>(p.num_rows);
  const T* shares = static_cast<const T*>(p.shares) + (inside ? row : 0) * p.layout.rows * p.width + f;
  const T self = static_cast<const T*>(p.x)[at];
  static_cast<T*>(p.to_x)[at] =
      inside ? share_of_edge(p.layout, self, [&](int which) { return shares[which * p.width]; }) : T{0};
}

}  // namespace
}  // namespace gnnfast
