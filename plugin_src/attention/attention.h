// Checks and allocation of the attention ops, for both devices. The contract is in attention_args.h.
#pragma once

#include <tuple>

#include "attention_args.h"
#include "common/csr.h"
#include "random.h"

namespace gnnfast {

inline const int64_t* check_seed(const Tensor& seed, int64_t heads, double dropout) {
  check_dtype("seed", seed, ScalarType::Long);
  GNNFAST_CHECK(seed.numel() == 1, "seed must have one element, got shape ", shape_str(seed));
  GNNFAST_CHECK(0 <= dropout && dropout < 1, "dropout must be in [0, 1), got ", dropout);
  GNNFAST_CHECK(heads <= kMostDropHeads, "dropout is drawn for at most ", kMostDropHeads, " heads, got ", heads);
  return seed.const_data_ptr<int64_t>();
}

inline AttentionArgs attention_args(const Csr& a, const Tensor& x, int64_t heads, double slope, double dropout,
                                    const OptTensor& seed) {
  AttentionArgs args{};
  args.a = a;
  args.width = x.size(1);
  args.heads = heads;
  args.slope = slope;
  args.dropout = dropout;
  GNNFAST_CHECK(heads > 0 && x.size(1) % heads == 0, heads, " heads do not divide the ", x.size(1), " features");
  GNNFAST_CHECK(seed.has_value() == (dropout > 0), "dropout needs a seed, and nothing else does");
  if (seed) {
    check_same_device("seed", *seed, x);
    args.seed = check_seed(*seed, heads, dropout);
  }
  args.x = x.const_data_ptr();
  return args;
}

inline Tensor check_scores(const char* name, const Tensor& t, int64_t rows, const Tensor& x) {
  check_dtype(name, t, x.scalar_type());
  check_same_device(name, t, x);
  return check_features(name, t, rows);
}

// out [M, F] and, with `train`, stats [M, H, 4], else empty.
template <class Device>
std::tuple<Tensor, Tensor> attention(GNNFAST_GRAPH_PARAMS, const Tensor& dst_, const Tensor& src_, const Tensor& x_,
                                     double slope, double dropout, const OptTensor& seed, bool train) {
  const Tensor x = check_features("x", x_, -1);
  const Csr a = check_csr(rowptr, col, perm, schedule, layout, x);
  const Tensor dst = check_scores("dst", dst_, a.num_rows, x), src = check_scores("src", src_, x.size(0), x);
  const int64_t heads = dst.size(1);
  check_size("src", src, 1, heads);
  AttentionArgs args = attention_args(a, x, heads, slope, dropout, seed);
  args.own = dst.const_data_ptr();
  args.other = src.const_data_ptr();
  Tensor out = make_empty(x, {a.num_rows, args.width}, x.scalar_type());
  Tensor stats = make_empty(x, {train ? a.num_rows : 0, heads, 4}, acc_dtype(x.scalar_type()));
  args.out = out.mutable_data_ptr();
  args.stats = train ? stats.mutable_data_ptr() : nullptr;
  if (out.numel() > 0) Device::attention(args, x);
  return {out, stats};
}

// What a backward pass wants to know of rows: the stats, checked, with D.
template <class Device>
Tensor attention_dots(const Tensor& out, const Tensor& grad, const Tensor& stats_, int64_t heads) {
  const Tensor stats = as_contiguous(stats_);
  check_dtype("stats", stats, acc_dtype(out.scalar_type()));
  check_same_device("stats", stats, out);
  GNNFAST_CHECK(stats.numel() == out.size(0) * heads * 4, "stats has shape ", shape_str(stats));
  Tensor packed = make_empty(out, {out.size(0), heads, 4}, stats.scalar_type());
  const AttentionDotsArgs args{out.size(0),
                               out.size(1),
                               heads,
                               out.const_data_ptr(),
                               grad.const_data_ptr(),
                               stats.const_data_ptr(),
                               packed.mutable_data_ptr()};
  if (out.numel() > 0) Device::attention_dots(args, out);
  return packed;
}

// Which edges and heads a seed keeps: [E, H], bool.
template <class Device>
Tensor attention_keep(const Tensor& seed, int64_t num_edges, int64_t heads, double dropout) {
  GNNFAST_CHECK(num_edges >= 0 && heads >= 0, "num_edges and heads must not be negative, got ", num_edges, " and ", heads);
  AttentionKeepArgs args{num_edges, heads, dropout, check_seed(seed, heads, dropout)};
  Tensor out = make_empty(seed, {num_edges, heads}, ScalarType::Bool);
  args.out = out.mutable_data_ptr<bool>();
  if (out.numel() > 0) Device::attention_keep(args, seed);
  return out;
}

}  // namespace gnnfast
