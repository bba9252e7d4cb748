// Checks and allocation of the ops of edge_relu, for both devices. The contract is in edge_relu_args.h.
#pragma once

#include "common/csr.h"
#include "edge_relu_args.h"

namespace gnnfast {

// Features whose bits are in one byte: those that a CUDA lane loads at once, where rows are whole loads.
inline int64_t kept_unit(const Tensor& x) {
  const int64_t vec = 16 / static_cast<int64_t>(x.element_size());
  return x.is_cuda() && x.size(1) % vec == 0 ? vec : 1;
}

// For loads of 16 bytes.
inline Tensor edge_relu_rows_of(const char* name, const Tensor& t, int64_t rows, int64_t width, const Tensor& ref) {
  check_dtype(name, t, ref.scalar_type());
  check_same_device(name, t, ref);
  const Tensor found = check_features(name, t, rows);
  check_size(name, found, 1, width);
  const bool fits = !found.is_cuda() || reinterpret_cast<uintptr_t>(found.const_data_ptr()) % 16 == 0;
  return fits ? found : torch::stable::clone(found);
}

// out [M, F] and, with `train`, what the backward pass wants, [E, F / unit] bytes, else empty.
template <class Device>
std::tuple<Tensor, Tensor> edge_relu(GNNFAST_GRAPH_PARAMS, const Tensor& x_, const Tensor& w_, bool train) {
  check_dim("x", x_, 2);
  EdgeReluArgs args{};
  args.a = check_csr(rowptr, col, perm, schedule, layout, x_);
  args.width = x_.size(1);
  const Tensor x = edge_relu_rows_of("x", x_, -1, args.width, x_),
               w = edge_relu_rows_of("w", w_, args.a.num_edges, args.width, x_);
  args.unit = kept_unit(x);
  args.x = x.const_data_ptr();
  args.w = w.const_data_ptr();
  Tensor out = make_empty(x, {args.a.num_rows, args.width}, x.scalar_type());
  Tensor kept = make_empty(x, {train ? args.a.num_edges : 0, args.width / args.unit}, ScalarType::Byte);
  args.kept = train ? kept.mutable_data_ptr<uint8_t>() : nullptr;
  args.out = out.mutable_data_ptr();
  if (out.numel() > 0) Device::edge_relu(args, x);
  return {out, kept};
}

// Over the transposed matrix: the gradients of x and w, the latter empty without `need_w`.
template <class Device>
std::tuple<Tensor, Tensor> edge_relu_backward(GNNFAST_GRAPH_PARAMS, const Tensor& kept_, const Tensor& grad_, bool need_w) {
  check_dim("grad", grad_, 2);
  EdgeReluArgs args{};
  args.a = check_csr(rowptr, col, perm, schedule, layout, grad_);
  args.backward = true;
  args.width = grad_.size(1);
  const Tensor grad = edge_relu_rows_of("grad", grad_, -1, args.width, grad_),
               kept = check_features("kept", kept_, args.a.num_edges);
  args.unit = kept_unit(grad);
  check_dtype("kept", kept, ScalarType::Byte);
  check_same_device("kept", kept, grad);
  check_size("kept", kept, 1, args.width / args.unit);
  args.x = grad.const_data_ptr();
  args.kept = const_cast<uint8_t*>(kept.const_data_ptr<uint8_t>());
  Tensor to_x = make_empty(grad, {args.a.num_rows, args.width}, grad.scalar_type());
  const int64_t edges = need_w ? args.a.num_edges : 0;
  Tensor to_w = may_leave_out(args.a) ? make_zeros(grad, {edges, args.width}, grad.scalar_type())
                                      : make_empty(grad, {edges, args.width}, grad.scalar_type());
  args.out = to_x.mutable_data_ptr();
  args.to_w = need_w ? to_w.mutable_data_ptr() : nullptr;
  if (to_x.numel() > 0) Device::edge_relu(args, grad);
  return {to_x, to_w};
}

}  // namespace gnnfast
