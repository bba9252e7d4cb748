// Checks and allocation of the ops of softmax_reduce, for both devices. The contract is in softmax_reduce_args.h.
#pragma once

#include "common/csr.h"
#include "softmax_reduce_args.h"

namespace gnnfast {

// Rows of features of `ref`'s dtype and device; loads of GPUs are of 16 bytes.
inline Tensor softmax_rows_of(const char* name, const Tensor& t, int64_t rows, const Tensor& ref) {
  check_dtype(name, t, ref.scalar_type());
  check_same_device(name, t, ref);
  const Tensor found = check_features(name, t, rows);
  check_size(name, found, 1, ref.size(1));
  const bool fits = !found.is_cuda() || reinterpret_cast<uintptr_t>(found.const_data_ptr()) % 16 == 0;
  return fits ? found : torch::stable::clone(found);
}

inline Tensor softmax_temperature(const OptTensor& t, const Tensor& x) {
  check_dim("x", x, 2);
  GNNFAST_CHECK(x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::Double,
                "softmax_reduce takes float32 and float64, got ", torch::headeronly::toString(x.scalar_type()));
  if (!t) return x;
  check_dim("t", *t, 1);
  check_size("t", *t, 0, x.size(1));
  check_dtype("t", *t, x.scalar_type());
  check_same_device("t", *t, x);
  const Tensor found = as_contiguous(*t);
  return !found.is_cuda() || reinterpret_cast<uintptr_t>(found.const_data_ptr()) % 16 == 0 ? found
                                                                                           : torch::stable::clone(found);
}

// out [M, F] and, with `train`, most and total [M, F], else empty.
template <class Device>
std::tuple<Tensor, Tensor, Tensor> softmax_reduce(GNNFAST_GRAPH_PARAMS, const Tensor& x_, const OptTensor& t_, double scale,
                                                  bool train) {
  const Tensor t = softmax_temperature(t_, x_), x = softmax_rows_of("x", x_, -1, x_);
  SoftmaxReduceArgs args{};
  args.a = check_csr(rowptr, col, perm, schedule, layout, x);
  args.width = x.size(1);
  args.x = x.const_data_ptr();
  args.t = t_ ? t.const_data_ptr() : nullptr;
  args.scale = scale;
  const int64_t rows = args.a.num_rows, kept = train ? rows : 0;
  Tensor out = make_empty(x, {rows, args.width}, x.scalar_type());
  Tensor most = make_empty(x, {kept, args.width}, x.scalar_type()), total = make_empty(x, {kept, args.width}, x.scalar_type());
  args.out = out.mutable_data_ptr();
  args.most = train ? most.mutable_data_ptr() : nullptr;
  args.total = train ? total.mutable_data_ptr() : nullptr;
  if (out.numel() > 0) Device::softmax_reduce(args, x);
  return {out, most, total};
}

// to_x and, with `need_t`, to_t, else empty; of what `args` says where rows go.
template <class Device>
std::tuple<Tensor, Tensor> softmax_reduce_grads(SoftmaxBackwardArgs& args, const Tensor& x_, const OptTensor& t_, double scale,
                                                const Tensor& most_, const Tensor& share_, const Tensor& out_, bool need_t) {
  const Tensor t = softmax_temperature(t_, x_), x = softmax_rows_of("x", x_, args.num_rows, x_);
  const Tensor most = softmax_rows_of("most", most_, -1, x), share = softmax_rows_of("share", share_, most.size(0), x),
               out = softmax_rows_of("out", out_, most.size(0), x);
  args.num_cols = most.size(0);
  args.width = x.size(1);
  args.x = x.const_data_ptr();
  args.t = t_ ? t.const_data_ptr() : nullptr;
  args.scale = scale;
  args.most = most.const_data_ptr();
  args.share = share.const_data_ptr();
  args.out = out.const_data_ptr();
  Tensor to_x = make_empty(x, {args.num_rows, args.width}, x.scalar_type());
  Tensor to_t = make_empty(x, {need_t ? args.num_rows : 0, args.width}, x.scalar_type());
  args.to_x = to_x.mutable_data_ptr();
  args.to_t = need_t ? to_t.mutable_data_ptr() : nullptr;
  if (to_x.numel() > 0) Device::softmax_reduce_backward(args, x);
  return {to_x, to_t};
}

// Over the transposed matrix.
template <class Device>
std::tuple<Tensor, Tensor> softmax_reduce_backward(GNNFAST_GRAPH_PARAMS, const Tensor& x, const OptTensor& t, double scale,
                                                   const Tensor& most, const Tensor& share, const Tensor& out, bool need_t) {
  SoftmaxBackwardArgs args{};
  args.a = check_csr(rowptr, col, perm, schedule, layout, x);
  args.num_rows = args.a.num_rows;
  return softmax_reduce_grads<Device>(args, x, t, scale, most, share, out, need_t);
}

// Of messages x [E, F] that exist and go to the rows `index`.
template <class Device>
std::tuple<Tensor, Tensor> softmax_reduce_edges(const Tensor& index_, const Tensor& x, const OptTensor& t, double scale,
                                                const Tensor& most, const Tensor& share, const Tensor& out, bool need_t) {
  check_dim("index", index_, 1);
  const Tensor index = as_contiguous(index_);
  SoftmaxBackwardArgs args{};
  args.index64 = index.scalar_type() == ScalarType::Long;
  if (!args.index64) check_dtype("index", index, ScalarType::Int);
  check_same_device("index", index, x);
  args.index = index.const_data_ptr();
  args.num_rows = index.size(0);
  return softmax_reduce_grads<Device>(args, x, t, scale, most, share, out, need_t);
}

}  // namespace gnnfast
