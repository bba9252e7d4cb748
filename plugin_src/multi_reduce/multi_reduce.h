// Checks and allocation of the ops of multi_reduce, for both devices. The contract is in multi_reduce_args.h.
#pragma once

#include "common/csr.h"
#include "multi_reduce_args.h"

namespace gnnfast {

inline ReduceLayout reduce_layout(const std::vector<int64_t>& kinds) {
  GNNFAST_CHECK(!kinds.empty() && kinds.size() <= kMostKinds, "there must be 1 to ", kMostKinds, " reductions, got ",
                kinds.size());
  ReduceLayout layout{};
  bool met[kKindStd + 1] = {};
  for (const int64_t kind : kinds) {
    GNNFAST_CHECK(0 <= kind && kind <= kKindStd, "a reduction must be 0 to ", int{kKindStd}, ", got ", kind);
    layout.kinds[layout.count++] = static_cast<int>(kind);
    met[kind] = true;
  }
  auto next = [](int& rows, bool there, int size = 1) { return there ? (rows += size) - size : -1; };
  const bool squares = met[kKindVar] || met[kKindStd];
  layout.mean = next(layout.kept_rows, squares);
  layout.most = next(layout.kept_rows, met[kKindMax]);
  layout.least = next(layout.kept_rows, met[kKindMin]);
  layout.most_ties = next(layout.ties_rows, met[kKindMax]);
  layout.least_ties = next(layout.ties_rows, met[kKindMin]);
  layout.linear = next(layout.rows, squares || met[kKindSum] || met[kKindMean]);
  layout.square = next(layout.rows, squares);
  layout.most_at = next(layout.rows, met[kKindMax], 2);
  layout.least_at = next(layout.rows, met[kKindMin], 2);
  return layout;
}

inline ShareStrides share_strides(const ReduceLayout& layout, const Tensor& shares, int64_t width) {
  if (shares.is_cuda()) return {width, layout.rows * width};
  return {shares.size(0) * width, width};
}

// Rows of features of `ref`'s dtype and device.
inline Tensor reduce_rows_of(const char* name, const Tensor& t, int64_t rows, int64_t width, const Tensor& ref) {
  GNNFAST_CHECK(ref.scalar_type() == ScalarType::Float || ref.scalar_type() == ScalarType::Double,
                "multi_reduce takes float32 and float64, got ", torch::headeronly::toString(ref.scalar_type()));
  check_dtype(name, t, ref.scalar_type());
  check_same_device(name, t, ref);
  const Tensor found = check_features(name, t, rows);
  check_size(name, found, 1, width);
  const bool fits = !found.is_cuda() || reinterpret_cast<uintptr_t>(found.const_data_ptr()) % 16 == 0;
  return fits ? found : torch::stable::clone(found);  // loads are of 16 bytes
}

// out [M, K F] and, with `train`, what the backward pass wants: kept [M, kept_rows F] and ties [M, ties_rows F], else empty.
template <class Device>
std::tuple<Tensor, Tensor, Tensor> multi_reduce(GNNFAST_GRAPH_PARAMS, const Tensor& x_, const OptTensor& shift_,
                                                std::vector<int64_t> kinds, bool train) {
  check_dim("x", x_, 2);
  MultiReduceArgs args{};
  args.layout = reduce_layout(kinds);
  args.width = x_.size(1);
  const Tensor x = reduce_rows_of("x", x_, -1, args.width, x_);
  args.a = check_csr(rowptr, col, perm, schedule, layout, x);
  const int64_t rows = args.a.num_rows, width = args.width;
  const Tensor shift = shift_ ? reduce_rows_of("shift", *shift_, rows, width, x) : x;
  args.x = x.const_data_ptr();
  args.shift = shift_ ? shift.const_data_ptr() : nullptr;
  Tensor out = make_empty(x, {rows, args.layout.count * width}, x.scalar_type());
  Tensor kept = make_empty(x, {train ? rows : 0, args.layout.kept_rows * width}, x.scalar_type());
  Tensor ties = make_empty(x, {train ? rows : 0, args.layout.ties_rows * width}, ScalarType::Int);
  args.out = out.mutable_data_ptr();
  args.kept = train ? kept.mutable_data_ptr() : nullptr;
  args.ties = train ? ties.mutable_data_ptr<int32_t>() : nullptr;
  if (out.numel() > 0) Device::multi_reduce(args, x);
  return {out, kept, ties};
}

// What each row gives its edges, [M, rows F], and the gradient of the shift, empty unless `need_shift`.
template <class Device>
std::tuple<Tensor, Tensor> multi_reduce_shares(const Tensor& rowptr, const Tensor& grad_, const Tensor& out_,
                                               const Tensor& kept_, const Tensor& ties_, std::vector<int64_t> kinds,
                                               bool need_shift) {
  check_dim("grad", grad_, 2);
  ReduceSharesArgs args{};
  args.layout = reduce_layout(kinds);
  args.num_rows = rowptr.numel() - 1;
  GNNFAST_CHECK(grad_.size(1) % args.layout.count == 0, "grad of shape ", shape_str(grad_), " is not of ", args.layout.count,
                " reductions");
  const int64_t rows = args.num_rows, width = args.width = grad_.size(1) / args.layout.count;
  const Tensor grad = reduce_rows_of("grad", grad_, rows, args.layout.count * width, grad_),
               out = reduce_rows_of("out", out_, rows, args.layout.count * width, grad),
               kept = reduce_rows_of("kept", kept_, rows, args.layout.kept_rows * width, grad), ties = as_contiguous(ties_);
  check_dtype("ties", ties, ScalarType::Int);
  check_same_device("ties", ties, grad);
  GNNFAST_CHECK(ties.numel() == rows * args.layout.ties_rows * width, "ties has shape ", shape_str(ties));
  args.rowptr = check_index("rowptr", rowptr, grad);
  args.grad = grad.const_data_ptr();
  args.out = out.const_data_ptr();
  args.kept = kept.const_data_ptr();
  args.ties = ties.const_data_ptr<int32_t>();
  Tensor shares = make_empty(grad, {rows, args.layout.rows * width}, grad.scalar_type());
  Tensor to_shift = make_empty(grad, {need_shift ? rows : 0, width}, grad.scalar_type());
  args.strides = share_strides(args.layout, shares, width);
  args.shares = shares.mutable_data_ptr();
  args.to_shift = need_shift ? to_shift.mutable_data_ptr() : nullptr;
  if (shares.numel() > 0) Device::multi_reduce_shares(args, grad);
  return {shares, to_shift};
}

// Over the transposed matrix: the gradient of x, [N, F].
template <class Device>
Tensor multi_reduce_backward(GNNFAST_GRAPH_PARAMS, const Tensor& x_, const Tensor& shares_, std::vector<int64_t> kinds) {
  check_dim("x", x_, 2);
  ReduceBackwardArgs args{};
  args.layout = reduce_layout(kinds);
  args.width = x_.size(1);
  const Tensor x = reduce_rows_of("x", x_, rowptr.numel() - 1, args.width, x_),
               shares = reduce_rows_of("shares", shares_, -1, args.layout.rows * args.width, x);
  args.a = check_csr(rowptr, col, perm, schedule, layout, x);
  args.x = x.const_data_ptr();
  args.strides = share_strides(args.layout, shares, args.width);
  args.shares = shares.const_data_ptr();
  Tensor to_x = make_empty(x, {args.a.num_rows, args.width}, x.scalar_type());
  args.to_x = to_x.mutable_data_ptr();
  if (to_x.numel() > 0) Device::multi_reduce_backward(args, x);
  return to_x;
}

// The gradient of messages x [E, F] that exist and go to the rows `index`.
template <class Device>
Tensor multi_reduce_edges(const Tensor& index_, const Tensor& x_, const Tensor& shares_, std::vector<int64_t> kinds) {
  check_dim("x", x_, 2);
  check_dim("index", index_, 1);
  ReduceEdgesArgs args{};
  args.layout = reduce_layout(kinds);
  args.width = x_.size(1);
  const Tensor index = as_contiguous(index_), x = reduce_rows_of("x", x_, index.size(0), args.width, x_),
               shares = reduce_rows_of("shares", shares_, -1, args.layout.rows * args.width, x);
  args.index64 = index.scalar_type() == ScalarType::Long;
  if (!args.index64) check_dtype("index", index, ScalarType::Int);
  check_same_device("index", index, x);
  args.num_edges = index.size(0);
  args.num_rows = shares.size(0);
  args.index = index.const_data_ptr();
  args.x = x.const_data_ptr();
  args.strides = share_strides(args.layout, shares, args.width);
  args.shares = shares.const_data_ptr();
  Tensor to_x = make_empty(x, {args.num_edges, args.width}, x.scalar_type());
  args.to_x = to_x.mutable_data_ptr();
  if (to_x.numel() > 0) Device::multi_reduce_edges(args, x);
  return to_x;
}

}  // namespace gnnfast
