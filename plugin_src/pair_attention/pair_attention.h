// Checks and allocation of the ops of pair attention, for both devices. The contract is in pair_attention_args.h.
#pragma once

#include <tuple>

#include "attention/attention.h"
#include "pair_attention_args.h"

namespace gnnfast {

// On CUDA a lane loads 16 bytes: else a warp might not hold a head.
inline Tensor aligned(const Tensor& t) {
  const bool fits = !t.is_cuda() || reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  return fits ? t : torch::stable::clone(t);
}

inline Tensor check_rows(const char* name, const Tensor& t, int64_t rows, const Tensor& key) {
  check_dtype(name, t, key.scalar_type());
  check_same_device(name, t, key);
  Tensor found = check_features(name, t, rows);
  check_size(name, found, 1, key.size(1));
  return aligned(found);
}

// Sets what all passes have in common.
template <class Device>
PairArgs pair_args(const Tensor& key, int64_t heads, const OptTensor& att, double slope, double dropout, const OptTensor& seed,
                   const OptTensor& edge = std::nullopt) {
  PairArgs args{};
  args.score = edge ? kGatv2Edges : att ? kGatv2 : kScaledDot;
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
  if (edge) {
    GNNFAST_CHECK(att.has_value() && key.element_size() >= 4, "edge goes with att, in float32 and float64");
    args.edge = edge->const_data_ptr();
  }
  return args;
}

// out [M, F] and, with `train`, stats [M, H, 4], else empty. With `att` [F] GATv2, whose values are the keys, and to whose
// scores `edge` [E, F], if given, is added, else dot products.
template <class Device>
std::tuple<Tensor, Tensor> pair_attention(GNNFAST_GRAPH_PARAMS, const Tensor& query_, const Tensor& key_,
                                          const OptTensor& value_, const OptTensor& att_, const OptTensor& edge_, int64_t heads,
                                          double slope, double dropout, const OptTensor& seed, bool train) {
  const Tensor key = aligned(check_features("key", key_, -1)), query = check_rows("query", query_, rowptr.numel() - 1, key);
  GNNFAST_CHECK(att_.has_value() != value_.has_value(), "exactly one of att and value is needed");
  const OptTensor att = att_ ? OptTensor(aligned(*att_)) : att_;
  const Tensor value = value_ ? check_rows("value", *value_, key.size(0), key) : key;
  const OptTensor edge = edge_ ? OptTensor(check_rows("edge", *edge_, col.numel(), key)) : edge_;
  PairArgs args = pair_args<Device>(key, heads, att, slope, dropout, seed, edge);
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

// The gradients of queries, keys and values; for GATv2 of queries and keys, and rows [M + N, F], or [M, F] with `edge`, whose
// sum is that of att; and that of edge, else empty. The first matrix is that of the forward pass, the second its transpose.
template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> pair_attention_backward(GNNFAST_BOTH_PARAMS, const Tensor& query_,
                                                                   const Tensor& key_, const OptTensor& value_,
                                                                   const OptTensor& att_, const OptTensor& edge_,
                                                                   const Tensor& out_, const Tensor& stats, const Tensor& grad_,
                                                                   int64_t heads, double slope, double dropout,
                                                                   const OptTensor& seed) {
  const Tensor key = aligned(check_features("key", key_, rowptr_t.numel() - 1));
  const Tensor query = check_rows("query", query_, rowptr.numel() - 1, key),
               grad = check_rows("grad", grad_, query.size(0), key), out = check_rows("out", out_, query.size(0), key);
  GNNFAST_CHECK(att_.has_value() != value_.has_value(), "exactly one of att and value is needed");
  const OptTensor att = att_ ? OptTensor(aligned(*att_)) : att_;
  const Tensor value = value_ ? check_rows("value", *value_, key.size(0), key) : key;
  const OptTensor edge = edge_ ? OptTensor(check_rows("edge", *edge_, col.numel(), key)) : edge_;
  PairArgs args = pair_args<Device>(key, heads, att, slope, dropout, seed, edge);
  const Tensor packed = attention_dots<Device>(out, grad, stats, heads);
  args.stats = packed.const_data_ptr();
  auto rows = [&](int64_t n) { return make_empty(key, {n, args.width}, key.scalar_type()); };
  Tensor to_query = rows(query.size(0)), to_key = rows(key.size(0)), to_edge = rows(edge ? edge->size(0) : 0),
         third = rows(edge  ? query.size(0)
                      : att ? query.size(0) + key.size(0)
                            : key.size(0));
  args.a = check_csr(rowptr, col, perm, schedule, layout, key);
  args.role = kPairToRows;
  args.own = query.const_data_ptr();
  args.own_with = grad.const_data_ptr();
  args.other = key.const_data_ptr();
  args.with = value.const_data_ptr();
  args.to_own = to_query.mutable_data_ptr();
  args.to_edge = to_edge.mutable_data_ptr();
  args.product = third.mutable_data_ptr();
  if (to_query.numel() > 0) Device::pair_attention(args, key);
  args.a = check_csr(rowptr_t, col_t, perm_t, schedule_t, layout_t, key);
  args.role = kPairToColumns;
  args.own = key.const_data_ptr();
  args.own_with = value.const_data_ptr();
  args.other = query.const_data_ptr();
  args.with = grad.const_data_ptr();
  args.to_own = to_key.mutable_data_ptr();
  args.out = att ? to_key.mutable_data_ptr() : third.mutable_data_ptr();
  args.product = static_cast<char*>(third.mutable_data_ptr()) + to_query.numel() * static_cast<int64_t>(key.element_size());
  if (to_key.numel() > 0) Device::pair_attention(args, key);
  return {to_query, to_key, third, to_edge};
}

// Additive scores (attention/attention_args.h): the gradients of dst, src and x, over both matrices as above; with `atomics`,
// on CUDA, over the transpose alone, and that of dst is then not the same from run to run.
template <class Device>
std::tuple<Tensor, Tensor, Tensor> attention_backward(GNNFAST_BOTH_PARAMS, const Tensor& dst_, const Tensor& src_,
                                                      const Tensor& x_, const Tensor& out_, const Tensor& stats,
                                                      const Tensor& grad_, double slope, double dropout, const OptTensor& seed,
                                                      bool atomics) {
  const Tensor x = aligned(check_features("x", x_, rowptr_t.numel() - 1)),
               grad = check_rows("grad", grad_, rowptr.numel() - 1, x);
  const Tensor out = check_rows("out", out_, grad.size(0), x), src = check_scores("src", src_, x.size(0), x),
               dst = check_scores("dst", dst_, grad.size(0), x);
  const int64_t heads = src.size(1);
  check_size("dst", dst, 1, heads);
  PairArgs args = pair_args<Device>(x, heads, std::nullopt, slope, dropout, seed);
  const Tensor packed = attention_dots<Device>(out, grad, stats, heads);
  args.score = kAdditive;
  args.stats = packed.const_data_ptr();
  atomics = atomics && x.is_cuda();
  auto scores = [&](const Tensor& like, bool wide) {
    const ScalarType type = wide ? acc_dtype(x.scalar_type()) : x.scalar_type();
    // Zeros where sums are added up, and where there is nothing to walk over.
    return wide || args.width == 0 ? make_zeros(x, {like.size(0), heads}, type) : make_empty(x, {like.size(0), heads}, type);
  };
  Tensor to_dst = scores(dst, atomics), to_src = scores(src, false),
         to_x = make_empty(x, {x.size(0), args.width}, x.scalar_type());
  if (!atomics && grad.numel() > 0) {
    args.a = check_csr(rowptr, col, perm, schedule, layout, x);
    args.role = kPairToRows;
    args.own = dst.const_data_ptr();
    args.own_with = grad.const_data_ptr();
    args.other = x.const_data_ptr();
    args.with = src.const_data_ptr();
    args.to_own = to_dst.mutable_data_ptr();
    Device::pair_attention(args, x);
  }
  args.a = check_csr(rowptr_t, col_t, perm_t, schedule_t, layout_t, x);
  args.role = kPairToColumns;
  args.own = src.const_data_ptr();
  args.own_with = x.const_data_ptr();
  args.other = args.with = grad.const_data_ptr();
  args.to_own = to_src.mutable_data_ptr();
  args.to_other = atomics ? to_dst.mutable_data_ptr() : nullptr;
  args.out = to_x.mutable_data_ptr();
  if (to_x.numel() > 0) Device::pair_attention(args, x);
  return {to_dst.scalar_type() == x.scalar_type() ? to_dst : torch::stable::to(to_dst, x.scalar_type()), to_src, to_x};
}

}  // namespace gnnfast
