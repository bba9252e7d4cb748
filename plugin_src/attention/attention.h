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

// Sets what both passes have in common. `x` is what is gathered.
inline AttentionArgs attention_args(const Csr& a, AttentionRole role, const Tensor& x, int64_t heads, double slope,
                                    double dropout, const OptTensor& seed) {
  AttentionArgs args{};
  args.a = a;
  args.role = role;
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

// out [M, F]; with `train` positive [M, F] and stats [M, H, 4], else empty ones.
template <class Device>
std::tuple<Tensor, Tensor, Tensor> attention(GNNFAST_GRAPH_PARAMS, const Tensor& dst_, const Tensor& src_, const Tensor& x_,
                                             double slope, double dropout, const OptTensor& seed, bool train) {
  const Tensor x = check_features("x", x_, -1);
  const Csr a = check_csr(rowptr, col, perm, schedule, layout, x);
  const Tensor dst = check_scores("dst", dst_, a.num_rows, x), src = check_scores("src", src_, x.size(0), x);
  const int64_t heads = dst.size(1);
  check_size("src", src, 1, heads);
  AttentionArgs args = attention_args(a, train ? kTrain : kInfer, x, heads, slope, dropout, seed);
  args.own = dst.const_data_ptr();
  args.other = src.const_data_ptr();
  const int64_t kept = train ? a.num_rows : 0;
  Tensor out = make_empty(x, {a.num_rows, args.width}, x.scalar_type());
  Tensor positive = make_empty(x, {kept, args.width}, x.scalar_type());
  Tensor stats = make_empty(x, {kept, heads, 4}, acc_dtype(x.scalar_type()));
  args.out = out.mutable_data_ptr();
  args.positive = positive.mutable_data_ptr();
  args.stats = stats.mutable_data_ptr();
  if (out.numel() > 0) Device::attention(args, x);
  return {out, positive, stats};
}

// The gradients of dst, src and x, over the transpose of the matrix of the forward pass.
template <class Device>
std::tuple<Tensor, Tensor, Tensor> attention_backward(GNNFAST_GRAPH_PARAMS, const Tensor& src_, const Tensor& x_,
                                                      const Tensor& out_, const Tensor& positive_, const Tensor& stats_,
                                                      const Tensor& grad_, double slope, double dropout,
                                                      const OptTensor& seed) {
  const Tensor x = check_features("x", x_, rowptr.numel() - 1), grad = check_features("grad", grad_, -1);
  const Tensor out = check_scores("out", out_, grad.size(0), x),
               positive = check_scores("positive", positive_, grad.size(0), x);
  const Tensor src = check_scores("src", src_, x.size(0), x), stats = as_contiguous(stats_);
  const Csr a = check_csr(rowptr, col, perm, schedule, layout, x);
  const int64_t heads = src.size(1), width = x.size(1), num_dst = grad.size(0);
  const ScalarType wide = acc_dtype(x.scalar_type());
  check_dtype("grad", grad, x.scalar_type());
  check_dtype("stats", stats, wide);
  for (const Tensor* t : {&grad, &out, &positive}) check_size("the gradient, out or positive", *t, 1, width);
  GNNFAST_CHECK(stats.numel() == num_dst * heads * 4, "stats has shape ", shape_str(stats));
  AttentionArgs args = attention_args(a, kBackward, grad, heads, slope, dropout, seed);
  Tensor packed = make_empty(x, {num_dst, heads, 4}, wide);
  Tensor to_dst = make_empty(x, {num_dst, heads}, x.scalar_type()),
         to_src = make_empty(x, {a.num_rows, heads}, x.scalar_type());
  Tensor to_x = make_empty(x, {a.num_rows, width}, x.scalar_type());
  if (width == 0) return {torch::stable::zero_(to_dst), torch::stable::zero_(to_src), to_x};
  AttentionRowsArgs rows{num_dst, width, heads, slope};
  auto finish = [&](const Tensor& of, const Tensor& positive_of, const Tensor& with, const Tensor& of_heads, Tensor& to) {
    rows.out = of.const_data_ptr();
    rows.positive = positive_of.const_data_ptr();
    rows.with = with.const_data_ptr();
    rows.stats = of_heads.const_data_ptr();
    rows.grad = to.mutable_data_ptr();
    if (to.numel() > 0) Device::attention_rows(rows, x);
  };
  rows.packed = packed.mutable_data_ptr();
  finish(out, positive, grad, stats, to_dst);
  Tensor positive_t = make_empty(x, {a.num_rows, width}, x.scalar_type()), sums = make_empty(x, {a.num_rows, heads}, wide);
  args.own = src.const_data_ptr();
  args.other = packed.const_data_ptr();
  args.out = to_x.mutable_data_ptr();
  args.positive = positive_t.mutable_data_ptr();
  args.stats = sums.mutable_data_ptr();
  if (to_x.numel() > 0) Device::attention(args, x);
  rows.num_rows = a.num_rows;
  rows.rowptr = a.rowptr;
  rows.packed = nullptr;
  finish(to_x, positive_t, x, sums, to_src);
  return {to_dst, to_src, to_x};
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
