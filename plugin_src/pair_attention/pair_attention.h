// Checks and allocation of the ops of pair attention, for both devices. The contract is in pair_attention_args.h.
#pragma once

#include <tuple>

#include "attention/attention.h"
#include "pair_attention_args.h"

namespace gnnfast {

inline Tensor check_rows(const char* name, const Tensor& t, int64_t rows, const Tensor& key) {
  check_dtype(name, t, key.scalar_type());
  check_same_device(name, t, key);
  Tensor found = check_features(name, t, rows);
  check_size(name, found, 1, key.size(1));
  return found;
}

// Sets what all passes have in common.
template <class Device>
PairArgs pair_args(const Tensor& key, int64_t heads, const OptTensor& att, double slope, double dropout,
                   const OptTensor& seed) {
  PairArgs args{};
  args.score = att ? kGatv2 : kScaledDot;
  args.width = key.size(1);
  args.heads = heads;
  args.slope = slope;
  args.dropout = dropout;
  GNNFAST_CHECK(heads > 0 && args.width % heads == 0, heads, " heads do not divide the ", args.width, " features");
  const int64_t features = args.width / heads, most = Device::most_pair_features(key, features);
  GNNFAST_CHECK(most < 0 || features <= most, features, " features a head are more than the ", most, " that a warp holds");
  GNNFAST_CHECK(seed.has_value() == (dropout > 0), "dropout needs a seed, and nothing else does");
  if (seed) {
    check_same_device("seed", *seed, key);
    args.seed = check_seed(*seed, heads, dropout);
  }
  if (att) {
    check_dtype("att", *att, key.scalar_type());
    check_same_device("att", *att, key);
    GNNFAST_CHECK(att->numel() == args.width && att->is_contiguous(), "att must be contiguous, with a number for each of the ",
                  args.width, " features, got shape ", shape_str(*att));
    args.att = att->const_data_ptr();
  }
  return args;
}

// out [M, F] and, with `train`, stats [M, H, 4], else empty. With `att` [F] GATv2, whose values are the keys, else dot
// products.
template <class Device>
std::tuple<Tensor, Tensor> pair_attention(GNNFAST_GRAPH_PARAMS, const Tensor& query_, const Tensor& key_,
                                          const OptTensor& value_, const OptTensor& att, int64_t heads, double slope,
                                          double dropout, const OptTensor& seed, bool train) {
  const Tensor key = check_features("key", key_, -1), query = check_rows("query", query_, rowptr.numel() - 1, key);
  GNNFAST_CHECK(att.has_value() != value_.has_value(), "exactly one of att and value is needed");
  const Tensor value = value_ ? check_rows("value", *value_, key.size(0), key) : key;
  PairArgs args = pair_args<Device>(key, heads, att, slope, dropout, seed);
  args.a = check_csr(rowptr, col, perm, schedule, layout, key);
  args.role = kPairForward;
  args.own = query.const_data_ptr();
  args.other = key.const_data_ptr();
  args.with = value.const_data_ptr();
  Tensor out = make_empty(key, {args.a.num_rows, args.width}, key.scalar_type());
  Tensor stats = make_empty(key, {train ? args.a.num_rows : 0, heads, 4}, acc_dtype(key.scalar_type()));
  args.out = out.mutable_data_ptr();
  args.new_stats = train ? stats.mutable_data_ptr() : nullptr;
  if (out.numel() > 0) Device::pair_attention(args, key);
  return {out, stats};
}

// [E, H], for what a walk over the columns writes by edge, or by slot. Many numbers are written several times faster in order.
inline Tensor make_edges(PairArgs& args, const Tensor& like, int64_t heads, bool by_slot) {
  Csr& a = args.a;
  args.by_slot = by_slot;
  if (by_slot && !args.seed) a.perm = nullptr;  // nobody reads it
  return may_leave_out(a) ? torch::stable::new_zeros(like, {a.num_edges, heads})
                          : make_empty(like, {a.num_edges, heads}, like.scalar_type());
}

// Dot products: what is kept by edge [E, H], or with `by_slot` by slot of the transpose, of which queries get the sum with
// keys, and the gradients of keys and values. GATv2: the gradients of queries and keys, and rows [M + N, F] whose sum is that
// of att. The first matrix is that of the forward pass, the second its transpose.
template <class Device>
std::tuple<Tensor, Tensor, Tensor> pair_attention_backward(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                                                           const OptTensor& schedule, std::vector<int64_t> layout,
                                                           const Tensor& rowptr_t, const Tensor& col_t, const OptTensor& perm_t,
                                                           const OptTensor& schedule_t, std::vector<int64_t> layout_t,
                                                           const Tensor& query_, const Tensor& key_, const OptTensor& value_,
                                                           const OptTensor& att, const Tensor& out_, const Tensor& stats,
                                                           const Tensor& grad_, int64_t heads, double slope, double dropout,
                                                           const OptTensor& seed, bool by_slot) {
  const Tensor key = check_features("key", key_, rowptr_t.numel() - 1);
  const Tensor query = check_rows("query", query_, rowptr.numel() - 1, key),
               grad = check_rows("grad", grad_, query.size(0), key), out = check_rows("out", out_, query.size(0), key);
  GNNFAST_CHECK(att.has_value() != value_.has_value(), "exactly one of att and value is needed");
  const Tensor value = value_ ? check_rows("value", *value_, key.size(0), key) : key;
  PairArgs args = pair_args<Device>(key, heads, att, slope, dropout, seed);
  const Tensor packed = attention_dots<Device>(out, grad, stats, heads);
  args.stats = packed.const_data_ptr();
  auto rows = [&](int64_t n) { return make_empty(key, {n, args.width}, key.scalar_type()); };
  Tensor first = rows(att ? query.size(0) : 0);
  Tensor to_key = rows(key.size(0)), third = rows(att ? query.size(0) + key.size(0) : key.size(0));
  if (first.numel() > 0) {
    args.a = check_csr(rowptr, col, perm, schedule, layout, key);
    args.role = kPairToRows;
    args.own = query.const_data_ptr();
    args.own_with = grad.const_data_ptr();
    args.other = args.with = key.const_data_ptr();
    args.to_own = first.mutable_data_ptr();
    args.product = third.mutable_data_ptr();
    Device::pair_attention(args, key);
  }
  args.a = check_csr(rowptr_t, col_t, perm_t, schedule_t, layout_t, key);
  if (!att) first = make_edges(args, key, heads, by_slot);
  args.role = kPairToColumns;
  args.own = key.const_data_ptr();
  args.own_with = value.const_data_ptr();
  args.other = query.const_data_ptr();
  args.with = grad.const_data_ptr();
  args.to_own = to_key.mutable_data_ptr();
  args.edges = att ? nullptr : first.mutable_data_ptr();
  args.out = att ? to_key.mutable_data_ptr() : third.mutable_data_ptr();
  args.product = static_cast<char*>(third.mutable_data_ptr()) + first.numel() * static_cast<int64_t>(key.element_size());
  if (to_key.numel() > 0) Device::pair_attention(args, key);
  return {first, to_key, third};
}

// Additive scores (attention/attention_args.h), over the transpose of the matrix of the forward pass: what raw scores get by
// edge [E, H], or with `by_slot` by slot of this matrix, and the gradients of src and x.
template <class Device>
std::tuple<Tensor, Tensor, Tensor> attention_backward(GNNFAST_GRAPH_PARAMS, const Tensor& src_, const Tensor& x_,
                                                      const Tensor& out_, const Tensor& stats, const Tensor& grad_,
                                                      double slope, double dropout, const OptTensor& seed, bool by_slot) {
  const Tensor x = check_features("x", x_, rowptr.numel() - 1), grad = check_rows("grad", grad_, -1, x);
  const Tensor out = check_rows("out", out_, grad.size(0), x), src = check_scores("src", src_, x.size(0), x);
  const int64_t heads = src.size(1);
  PairArgs args = pair_args<Device>(x, heads, std::nullopt, slope, dropout, seed);
  const Tensor packed = attention_dots<Device>(out, grad, stats, heads);
  args.a = check_csr(rowptr, col, perm, schedule, layout, x);
  args.score = kAdditive;
  args.role = kPairToColumns;
  Tensor by_edge = make_edges(args, x, heads, by_slot), to_src = make_empty(x, {x.size(0), heads}, x.scalar_type());
  Tensor to_x = make_empty(x, {x.size(0), args.width}, x.scalar_type());
  if (args.width == 0) return {torch::stable::zero_(by_edge), torch::stable::zero_(to_src), to_x};
  args.own = src.const_data_ptr();
  args.own_with = x.const_data_ptr();
  args.other = args.with = grad.const_data_ptr();
  args.stats = packed.const_data_ptr();
  args.to_own = to_src.mutable_data_ptr();
  args.edges = by_edge.mutable_data_ptr();
  args.out = to_x.mutable_data_ptr();
  if (to_x.numel() > 0) Device::pair_attention(args, x);
  return {by_edge, to_src, to_x};
}

}  // namespace gnnfast
