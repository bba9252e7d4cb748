// Checks and allocation of the SpMM ops, for both devices. The contract is in spmm_args.h.
#pragma once

#include "common/csr.h"
#include "sddmm/sddmm.h"
#include "spmm_args.h"

namespace gnnfast {

// Sets width, heads, weight; the weight is copied if it is not contiguous, so the caller keeps what is returned.
inline OptTensor check_weight(SpmmArgs& args, const OptTensor& weight, const Tensor& x) {
  args.width = x.size(1);
  args.heads = 1;
  args.mode = kNoWeight;
  if (!weight) return weight;
  Tensor w = as_contiguous(*weight);
  check_dtype("weight", w, x.scalar_type());
  check_same_device("weight", w, x);
  GNNFAST_CHECK(w.dim() == 1 || w.dim() == 2, "weight must be [num_edges] or [num_edges, heads], got ", shape_str(w));
  check_size("weight", w, 0, args.a.num_edges);
  args.heads = w.dim() == 2 ? w.size(1) : 1;
  GNNFAST_CHECK(args.heads > 0 && args.width % args.heads == 0, "weight of shape ", shape_str(w), " has ", args.heads,
                " heads, which do not divide the ", args.width, " features");
  args.mode = args.heads > 1 && args.heads == args.width ? kElementWeight : kHeadWeight;
  args.weight = w.const_data_ptr();
  return w;
}

inline Tensor empty_like_rows(const Tensor& x, int64_t rows, ScalarType dtype) {
  return make_empty(x, {rows, x.size(1)}, dtype);
}

template <class Device>
Tensor spmm(GNNFAST_GRAPH_PARAMS, const OptTensor& weight, const OptTensor& /*weight_t*/, const Tensor& x_, bool mean,
            const OptTensor& scale) {
  const Tensor x = check_features("x", x_, -1);
  SpmmArgs args{};
  args.a = check_csr(rowptr, col, perm, schedule, layout, x);
  const OptTensor w = check_weight(args, weight, x);
  args.op = kSum;
  args.mean = mean;
  if (scale) {
    check_dtype("scale", *scale, ScalarType::Double);
    check_same_device("scale", *scale, x);
    check_dim("scale", *scale, 1);
    check_size("scale", *scale, 0, args.a.num_rows);
    GNNFAST_CHECK(scale->is_contiguous(), "scale must be contiguous");
    args.scale = scale->const_data_ptr<double>();
  }
  args.x = x.const_data_ptr();
  Tensor out = empty_like_rows(x, args.a.num_rows, x.scalar_type());
  args.out = out.mutable_data_ptr();
  if (out.numel() > 0) Device::spmm(args, x);
  return out;
}

inline void set_empty(SpmmArgs& args, std::optional<double> empty) {
  args.empty = empty.value_or(0.0);
  args.finite = !empty;
}

// ties: 0 no aux, 1 first edge, 2 count, 3 count as torch's scatter_reduce(include_self=False) does: the 0 that it starts from
// is left out of the result, but counted where the result equals it. 4, 5 and 6, on CUDA: 1, 2 and 3 with SpmmArgs::alone.
// Without `empty` rows without edges hold 0 and so does what is infinite, which nothing counts as attaining.
template <class Device>
std::tuple<Tensor, Tensor> spmm_max(GNNFAST_GRAPH_PARAMS, const OptTensor& weight, const Tensor& x_, bool minimum, int64_t ties,
                                    std::optional<double> empty) {
  const Tensor x = check_features("x", x_, -1);
  const int64_t most = x.is_cuda() ? 6 : 3;
  GNNFAST_CHECK(ties >= 0 && ties <= most, "ties must be between 0 and ", most, ", got ", ties);
  SpmmArgs args{};
  args.a = check_csr(rowptr, col, perm, schedule, layout, x);
  const OptTensor w = check_weight(args, weight, x);
  args.alone = ties > 3;
  const int64_t rule = args.alone ? ties - 3 : ties;
  args.op = static_cast<SpmmOp>(kMax + std::min<int64_t>(rule, 2));
  GNNFAST_CHECK(empty || rule < 2, "without empty, ties must be 0, or 1 or 4: the first edge takes the gradient; got ", ties);
  args.count_zero = rule == 3;
  args.negate = minimum;
  set_empty(args, empty);
  args.x = x.const_data_ptr();
  Tensor out = empty_like_rows(x, args.a.num_rows, x.scalar_type());
  Tensor aux = empty_like_rows(x, ties ? args.a.num_rows : 0, ScalarType::Int);
  args.out = out.mutable_data_ptr();
  args.aux = ties ? aux.mutable_data_ptr<int32_t>() : nullptr;
  if (out.numel() > 0) Device::spmm(args, x);
  return {out, aux};
}

// What spmm_max with ties > 3 gives x [num_cols, F], in the type that it is accumulated in; `value` and `aux` are its results.
// With ties = 4, x and value are not needed.
template <class Device>
Tensor spmm_max_backward(GNNFAST_GRAPH_PARAMS, const OptTensor& weight, const OptTensor& x_, const Tensor& grad_,
                         const OptTensor& value_, const Tensor& aux, int64_t num_cols) {
  const int64_t rows = rowptr.numel() - 1;
  const Tensor grad = check_features("grad", grad_, rows);
  GNNFAST_CHECK(x_.has_value() == value_.has_value() && num_cols >= 0, "x and value are needed together, and num_cols");
  const Tensor x = x_ ? check_features("x", *x_, num_cols) : grad, value = x_ ? check_features("value", *value_, rows) : grad;
  SpmmArgs args{};
  args.a = check_csr(rowptr, col, perm, schedule, layout, grad);
  const OptTensor w = check_weight(args, weight, grad);
  for (const Tensor* t : {&x, &value}) {
    check_dtype("x and value", *t, grad.scalar_type());
    check_same_device("x and value", *t, grad);
    check_size("x and value", *t, 1, args.width);
  }
  int32_t* kept = const_cast<int32_t*>(check_index("aux", aux, grad));
  check_size("aux", aux, 0, rows);
  check_size("aux", aux, 1, args.width);
  Tensor out = make_zeros(grad, {num_cols, args.width}, acc_dtype(grad.scalar_type()));
  const TiesArgs ties{args.a,
                      args.width,
                      args.heads,
                      args.weight,
                      x_ ? x.const_data_ptr() : nullptr,
                      x_ ? value.const_data_ptr() : nullptr,
                      kept,
                      grad.const_data_ptr(),
                      out.mutable_data_ptr()};
  if (grad.numel() > 0 && args.a.num_edges > 0) Device::spmm_max_backward(ties, grad);
  return out;
}

// What spmm_plus and spmm_plus_max have in common.
inline OptTensor check_plus(SpmmArgs& args, const Tensor& weight, const Tensor& x, bool minus) {
  const OptTensor w = check_weight(args, weight, x);
  args.mode = args.mode == kElementWeight ? kElementPlus : kHeadPlus;
  args.plus = minus ? -1 : 1;
  args.x = x.const_data_ptr();
  return w;
}

// Sums, or means, of x[col] + weight, or x[col] - weight.
template <class Device>
Tensor spmm_plus(GNNFAST_GRAPH_PARAMS, const Tensor& weight, const Tensor& x_, bool minus, bool mean) {
  const Tensor x = check_features("x", x_, -1);
  SpmmArgs args{};
  args.a = check_csr(rowptr, col, perm, schedule, layout, x);
  const OptTensor w = check_plus(args, weight, x, minus);
  args.op = kSum;
  args.mean = mean;
  Tensor out = empty_like_rows(x, args.a.num_rows, x.scalar_type());
  args.out = out.mutable_data_ptr();
  if (out.numel() > 0) Device::spmm(args, x);
  return out;
}

// Their maxima, or minima, and with `train` the first edge that attains each.
template <class Device>
std::tuple<Tensor, Tensor> spmm_plus_max(GNNFAST_GRAPH_PARAMS, const Tensor& weight, const Tensor& x_, bool minus, bool minimum,
                                         bool train, std::optional<double> empty) {
  const Tensor x = check_features("x", x_, -1);
  SpmmArgs args{};
  args.a = check_csr(rowptr, col, perm, schedule, layout, x);
  const OptTensor w = check_plus(args, weight, x, minus);
  args.op = train ? kMaxFirst : kMax;
  args.negate = minimum;
  set_empty(args, empty);
  Tensor out = empty_like_rows(x, args.a.num_rows, x.scalar_type());
  Tensor aux = empty_like_rows(x, train ? args.a.num_rows : 0, ScalarType::Int);
  args.out = out.mutable_data_ptr();
  args.aux = train ? aux.mutable_data_ptr<int32_t>() : nullptr;
  if (out.numel() > 0) Device::spmm(args, x);
  return {out, aux};
}

// Gradient of spmm_max for x, over the transposed matrix: `value` [num_cols, F] and `self`, the x of the forward pass, give
// kSumWhereEqual, `arg` kSumWhereFirst.
template <class Device>
Tensor spmm_where(GNNFAST_GRAPH_PARAMS, const OptTensor& weight, const OptTensor& self_, const Tensor& grad_,
                  const OptTensor& value_, const OptTensor& arg) {
  const Tensor grad = check_features("grad", grad_, -1);
  GNNFAST_CHECK(value_.has_value() != arg.has_value(), "exactly one of value and arg is needed");
  GNNFAST_CHECK(!value_ || self_, "value needs self");
  const Tensor self = value_ ? check_features("self", *self_, rowptr.numel() - 1) : grad;
  SpmmArgs args{};
  args.a = check_csr(rowptr, col, perm, schedule, layout, grad);
  const OptTensor w = check_weight(args, weight, grad);
  args.op = value_ ? kSumWhereEqual : kSumWhereFirst;
  args.x = grad.const_data_ptr();
  args.self = self.const_data_ptr();
  const Tensor value = value_ ? check_features("value", *value_, grad.size(0)) : grad;
  args.value = value.const_data_ptr();
  args.arg = check_index("arg", arg, grad);
  Tensor out = empty_like_rows(grad, args.a.num_rows, grad.scalar_type());
  args.out = out.mutable_data_ptr();
  if (out.numel() > 0) Device::spmm(args, grad);
  return out;
}

// Both gradients of spmm (sum) over the transposed matrix: out = A^T(weight) grad and dot[e, h] = <self[row], grad[col]>, the
// gradient for the weights. One gather where the device can fuse them, else SpMM and SDDMM. `inverse` [E] int32, of perm, lets
// the device write the dot products in order.
template <class Device>
std::tuple<Tensor, Tensor> spmm_backward(GNNFAST_GRAPH_PARAMS, const Tensor& weight, const Tensor& self_, const Tensor& grad_,
                                         const OptTensor& inverse) {
  const Tensor grad = check_features("grad", grad_, -1);
  const Tensor self = check_features("self", self_, rowptr.numel() - 1);
  check_dtype("self", self, grad.scalar_type());
  SpmmArgs args{};
  args.a = check_csr(rowptr, col, perm, schedule, layout, grad);
  const OptTensor w = check_weight(args, weight, grad);
  args.x = grad.const_data_ptr();
  args.self = self.const_data_ptr();
  Tensor out = empty_like_rows(grad, args.a.num_rows, grad.scalar_type());
  Tensor dot = w->dim() == 1 ? make_empty(*w, {w->size(0)}, w->scalar_type())
                             : make_empty(*w, {w->size(0), w->size(1)}, w->scalar_type());
  if (may_leave_out(args.a)) dot = torch::stable::zero_(dot);
  args.out = out.mutable_data_ptr();
  args.dot = dot.mutable_data_ptr();
  if (grad.size(1) == 0) return {out, torch::stable::zero_(dot)};
  if (Device::can_fuse_dot(args, grad.scalar_type())) {
    args.op = kSumAndDot;
    args.inverse = check_index("inverse", inverse, grad);
    if (inverse) check_size("inverse", *inverse, 0, args.a.num_edges);
    if (out.numel() > 0) Device::spmm(args, grad);
  } else {
    args.op = kSum;
    if (out.numel() > 0) Device::spmm(args, grad);
    if (dot.numel() > 0 && args.a.num_rows > 0)
      Device::sddmm(sddmm_args(args.a, args.width, args.heads, self, grad, dot), grad);
  }
  return {out, dot};
}

}  // namespace gnnfast
