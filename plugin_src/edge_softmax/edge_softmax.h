// Checks and allocation of the edge softmax, for both devices. The contract is in edge_softmax_args.h.
#pragma once

#include <tuple>

#include "common/csr.h"
#include "edge_softmax_args.h"

namespace gnnfast {

// The result, and where `sums` are asked for those of it over each row.
template <class Device>
std::tuple<Tensor, Tensor> run_edge_softmax(const Csr& m, const Tensor* prob, const Tensor* grad, const OptTensor& score,
                                            const OptTensor& dst, const OptTensor& src, double slope, bool sums) {
  GNNFAST_CHECK(prob || score || dst || src, "edge_softmax needs scores of edges, destinations or sources");
  const Tensor& ref = prob ? *prob : score ? *score : dst ? *dst : *src;
  const int64_t heads = ref.size(1);
  EdgeSoftmaxArgs args{};
  args.m = m;
  args.heads = heads;
  args.slope = slope;
  auto pointer = [&](const char* name, const Tensor& t, int64_t rows) {
    check_dim(name, t, 2);
    if (rows >= 0) check_size(name, t, 0, rows);
    check_size(name, t, 1, heads);
    check_dtype(name, t, ref.scalar_type());
    check_same_device(name, t, ref);
    return t.const_data_ptr();
  };
  if (prob) args.prob = pointer("prob", *prob, m.num_edges);
  if (grad) args.grad = pointer("grad", *grad, m.num_edges);
  if (score) args.score = pointer("score", *score, m.num_edges);
  if (dst) args.dst = pointer("dst", *dst, m.num_rows);
  if (src) args.src = pointer("src", *src, -1);
  Tensor out = may_leave_out(m) ? make_zeros(ref, {m.num_edges, heads}, ref.scalar_type())
                                : make_empty(ref, {m.num_edges, heads}, ref.scalar_type());
  args.out = out.mutable_data_ptr();
  const ScalarType wide = acc_dtype(ref.scalar_type());
  Tensor to_dst = make_empty(ref, {sums ? m.num_rows : 0, heads}, wide);
  args.to_dst = sums ? to_dst.mutable_data_ptr() : nullptr;
  if (out.numel() > 0 && m.num_rows > 0)
    Device::edge_softmax(args, ref);
  else
    to_dst = torch::stable::zero_(to_dst);
  return {out, wide == ref.scalar_type() ? to_dst : torch::stable::to(to_dst, ref.scalar_type())};
}

inline OptTensor contiguous_or_none(const OptTensor& t) { return t ? OptTensor(as_contiguous(*t)) : t; }

template <class Device>
Tensor edge_softmax(GNNFAST_GRAPH_PARAMS, const OptTensor& score_, const OptTensor& dst_, const OptTensor& src_, double slope) {
  const OptTensor score = contiguous_or_none(score_), dst = contiguous_or_none(dst_), src = contiguous_or_none(src_);
  GNNFAST_CHECK(score || dst || src, "edge_softmax needs scores of edges, destinations or sources");
  const Csr m = check_csr(rowptr, col, perm, schedule, layout, score ? *score : dst ? *dst : *src);
  return std::get<0>(run_edge_softmax<Device>(m, nullptr, nullptr, score, dst, src, slope, false));
}

template <class Device>
std::tuple<Tensor, Tensor> edge_softmax_backward(GNNFAST_GRAPH_PARAMS, const Tensor& prob_, const Tensor& grad_,
                                                 const OptTensor& score_, const OptTensor& dst_, const OptTensor& src_,
                                                 double slope, bool sums) {
  const Tensor prob = as_contiguous(prob_), grad = as_contiguous(grad_);
  const OptTensor score = contiguous_or_none(score_), dst = contiguous_or_none(dst_), src = contiguous_or_none(src_);
  const Csr m = check_csr(rowptr, col, perm, schedule, layout, prob);
  return run_edge_softmax<Device>(m, &prob, &grad, score, dst, src, slope, sums);
}

}  // namespace gnnfast
