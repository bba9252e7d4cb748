// What is done with a row by itself, on both devices. `Io` says how many features at a time: one, or those of a vector V.
#pragma once

#include <cmath>

#include "common/host_device.h"
#include "multi_reduce_args.h"

namespace gnnfast {
namespace {  // compiled once per instruction set: no copy may stand in for another

// One feature at a time.
template <class T_>
struct One {
  using T = T_;
  using V = T_;
  static GNNFAST_HOST_DEVICE V load(const T* p) { return *p; }
  static GNNFAST_HOST_DEVICE V count(const int32_t* p) { return static_cast<T>(*p); }
  static GNNFAST_HOST_DEVICE void store(T* p, V v) { *p = v; }
  static GNNFAST_HOST_DEVICE V root(V v) { return std::sqrt(v); }
};

// Of a row's x: sum, sum of squares, maximum, minimum.
template <class V>
struct RowStatistics {
  V sum, square, most, least;
};

// out[k] of a row with edges.
template <class Io>
GNNFAST_HOST_DEVICE typename Io::V reduced(int kind, const RowStatistics<typename Io::V>& row, typename Io::T degree,
                                           const typename Io::V& shift) {
  using V = typename Io::V;
  if (kind == kKindSum) return row.sum + degree * shift;
  if (kind == kKindMax) return row.most + shift;
  if (kind == kKindMin) return row.least + shift;
  const V mean = row.sum / degree;
  if (kind == kKindMean) return mean + shift;
  const V variance = row.square / degree - mean * mean;
  if (kind == kKindVar) return variance;
  return variance <= static_cast<typename Io::T>(kLeastVariance) ? V{} : Io::root(variance);  // NaN stays
}

// The first step back for the features from f on of a row.
template <class Io>
GNNFAST_HOST_DEVICE void share_out(const ReduceSharesArgs& p, int64_t row, int64_t f) {
  using T = typename Io::T;
  using V = typename Io::V;
  const ReduceLayout& l = p.layout;
  const int64_t width = p.width;
  const T *grad = static_cast<const T*>(p.grad) + row * l.count * width + f,
          *out = static_cast<const T*>(p.out) + row * l.count * width + f,
          *kept = static_cast<const T*>(p.kept) + row * l.kept_rows * width + f;
  const int32_t* ties = p.ties + row * l.ties_rows * width + f;
  T* shares = static_cast<T*>(p.shares) + row * p.strides.node + f;
  const int64_t plane = p.strides.plane;
  const T degree = static_cast<T>(p.rowptr[row + 1] - p.rowptr[row]), some = degree > 0 ? degree : T{1};
  V linear{}, square{}, of_most{}, of_least{}, most{}, least{};
  for (int k = 0; k < l.count; ++k) {
    const V g = Io::load(grad + k * width), value = Io::load(out + k * width);
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
        square += value > 0 ? g / value : V{};
    }
  }
  V to_shift = linear;
  auto extremum = [&](int at, int kept_at, int ties_at, const V& g, const V& value) {
    if (at < 0) return;
    const V count = Io::count(ties + ties_at * width), zero = value == 0 ? V{} + 1 : V{}, share = g / (count + zero);
    to_shift += value == value ? share * count : value;  // as share_of
    Io::store(shares + at * plane, Io::load(kept + kept_at * width));
    Io::store(shares + (at + 1) * plane, share);
  };
  extremum(l.most_at, l.most, l.most_ties, of_most, most);
  extremum(l.least_at, l.least, l.least_ties, of_least, least);
  if (l.square >= 0) {
    linear -= Io::load(kept + l.mean * width) * square;
    Io::store(shares + l.square * plane, square / some);
  }
  if (l.linear >= 0) Io::store(shares + l.linear * plane, linear / some);
  if (p.to_shift) Io::store(static_cast<T*>(p.to_shift) + row * width + f, degree > 0 ? to_shift : V{});
}

// What goes to who attains an extremum `best`, of numbers or vectors of such. Where that is NaN torch counts no edge and gives
// each 0 times infinity.
template <class V>
GNNFAST_HOST_DEVICE V share_of(const V& self, const V& best, const V& share) {
  return self == best ? share : best == best ? 0 * share : best;
}

// What an edge gets of its row, whose shares load(which) gives.
template <class V, class Load>
GNNFAST_HOST_DEVICE V share_of_edge(const ReduceLayout& l, const V& self, const Load& load) {
  V found{};
  if (l.linear >= 0) found += load(l.linear);
  if (l.square >= 0) found += self * load(l.square);
  if (l.most_at >= 0) found += share_of(self, load(l.most_at), load(l.most_at + 1));
  if (l.least_at >= 0) found += share_of(self, load(l.least_at), load(l.least_at + 1));
  return found;
}

// The row of an edge whose message exists; negative if it is out of range.
GNNFAST_HOST_DEVICE int64_t row_of(const ReduceEdgesArgs& p, int64_t edge) {
  const int64_t row = p.index64 ? static_cast<const int64_t*>(p.index)[edge] : static_cast<const int32_t*>(p.index)[edge];
  return static_cast<uint64_t>(row) < static_cast<uint64_t>(p.num_rows) ? row : -1;
}

// The gradient of its message's features from f on.
template <class Io>
GNNFAST_HOST_DEVICE void edge_backward(const ReduceEdgesArgs& p, int64_t edge, int64_t f) {
  using T = typename Io::T;
  using V = typename Io::V;
  const int64_t row = row_of(p, edge), at = edge * p.width + f;
  const T* shares = static_cast<const T*>(p.shares) + (row < 0 ? 0 : row) * p.strides.node + f;
  const V self = Io::load(static_cast<const T*>(p.x) + at);
  const V found =
      row < 0 ? V{} : share_of_edge(p.layout, self, [&](int which) { return Io::load(shares + which * p.strides.plane); });
  Io::store(static_cast<T*>(p.to_x) + at, found);
}

}  // namespace
}  // namespace gnnfast
