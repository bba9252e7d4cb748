// Checks and allocation of the ops of head_dots, for both devices. The contract is in head_dots_args.h.
#pragma once

#include "common/device.h"
#include "head_dots_args.h"

namespace gnnfast {

inline HeadDotsArgs head_dots_args(const Tensor& x, const Tensor& a, int64_t heads) {
  check_dim("a", a, 2);
  check_size("a", a, 1, x.size(1));
  check_dtype("a", a, x.scalar_type());
  check_same_device("a", a, x);
  GNNFAST_CHECK(a.size(0) == 1 || a.size(0) == 2, "a must have 1 or 2 rows, got ", shape_str(a));
  GNNFAST_CHECK(heads > 0 && x.size(1) % heads == 0, "heads = ", heads, " must divide the ", x.size(1), " features");
  HeadDotsArgs args{};
  args.num_rows = x.size(0), args.width = x.size(1), args.heads = heads, args.vectors = a.size(0);
  args.x = x.const_data_ptr();
  args.a = a.const_data_ptr();
  return args;
}

template <class Device>
Tensor head_dots(const Tensor& x_, const Tensor& a_, int64_t heads) {
  const Tensor x = check_features("x", x_, -1), a = as_contiguous(a_);
  HeadDotsArgs args = head_dots_args(x, a, heads);
  if (args.width == 0) return make_zeros(x, {args.vectors, args.num_rows, heads}, x.scalar_type());
  Tensor out = make_empty(x, {args.vectors, args.num_rows, heads}, x.scalar_type());
  args.out = out.mutable_data_ptr();
  if (out.numel() > 0) Device::head_dots(args, x);
  return out;
}

// The gradients of x, empty without `need_x`, and of a.
template <class Device>
std::tuple<Tensor, Tensor> head_dots_backward(const Tensor& x_, const Tensor& a_, const Tensor& grad_, int64_t heads,
                                              bool need_x) {
  const Tensor x = check_features("x", x_, -1), a = as_contiguous(a_), grad = as_contiguous(grad_);
  HeadDotsArgs args = head_dots_args(x, a, heads);
  check_dtype("grad", grad, x.scalar_type());
  check_same_device("grad", grad, x);
  GNNFAST_CHECK(grad.dim() == 3 && grad.size(0) == args.vectors && grad.size(1) == args.num_rows && grad.size(2) == heads,
                "grad has shape ", shape_str(grad));
  args.grad = grad.const_data_ptr();
  Tensor to_x = make_empty(x, {need_x ? args.num_rows : 0, args.width}, x.scalar_type());
  Tensor to_a = make_empty(x, {args.vectors, args.width}, x.scalar_type());
  if (x.numel() == 0) return {to_x, torch::stable::zero_(to_a)};
  args.to_x = need_x ? to_x.mutable_data_ptr() : nullptr;
  args.to_a = to_a.mutable_data_ptr();
  Device::head_dots_backward(args, x);
  return {to_x, to_a};
}

template <class Device>
Tensor column_sums(const Tensor& x_) {
  const Tensor x = check_features("x", x_, -1);
  Tensor sums = make_empty(x, {x.size(1)}, x.scalar_type());
  if (x.numel() == 0) return torch::stable::zero_(sums);
  HeadDotsArgs args{};
  args.num_rows = x.size(0), args.width = x.size(1), args.heads = args.vectors = 1;
  args.x = x.const_data_ptr(), args.to_a = sums.mutable_data_ptr();
  Device::column_sums(args, x);
  return sums;
}

}  // namespace gnnfast
