// Checks and allocation of the ops on sparse features, for both devices. The contract is in sparse_features_args.h.
#pragma once

#include "common/csr.h"
#include "sparse_features_args.h"

namespace gnnfast {

// `ref` has the dtype and the device of all values.
inline SparseFeaturesArgs check_sparse_features(const Csr& a, SparseFeaturesOp op, const OptTensor& weight,
                                                const Tensor& xrowptr, const Tensor& xcol, const Tensor& ref) {
  SparseFeaturesArgs args{};
  args.a = a;
  args.op = op;
  args.xrowptr = check_index("xrowptr", xrowptr, ref);
  args.xcol = check_index("xcol", xcol, ref);
  args.stored = xcol.numel();
  GNNFAST_CHECK(xrowptr.numel() > 0, "xrowptr must have at least one element");
  if (op == kValues) check_size("xrowptr", xrowptr, 0, a.num_rows + 1);
  if (weight) {
    check_dim("weight", *weight, 1);
    check_size("weight", *weight, 0, a.num_edges);
    check_dtype("weight", *weight, ref.scalar_type());
    check_same_device("weight", *weight, ref);
    args.weight = weight->const_data_ptr();
  }
  return args;
}

inline OptTensor as_contiguous(const OptTensor& t) { return t ? OptTensor(as_contiguous(*t)) : t; }

inline Tensor check_values(const Tensor& xval, const Tensor& xcol) {
  check_dim("xval", xval, 1);
  check_size("xval", xval, 0, xcol.numel());
  return as_contiguous(xval);
}

template <class Device>
Tensor spmm_sparse_features(GNNFAST_GRAPH_PARAMS, const OptTensor& weight_, const Tensor& xrowptr, const Tensor& xcol,
                            const Tensor& xval_, int64_t width, bool mean) {
  const Tensor xval = check_values(xval_, xcol);
  const OptTensor weight = as_contiguous(weight_);
  GNNFAST_CHECK(width >= 0 && width <= 2147483647, "width must be from 0 to 2^31 - 1, got ", width);
  SparseFeaturesArgs args =
      check_sparse_features(check_exact_csr(rowptr, col, perm, schedule, layout, xval), kFeatures, weight, xrowptr, xcol, xval);
  args.mean = mean;
  args.width = width;
  args.xval = xval.const_data_ptr();
  Tensor out = make_empty(xval, {args.a.num_rows, width}, xval.scalar_type());
  args.out = out.mutable_data_ptr();
  if (out.numel() > 0) Device::sparse_features(args, xval);
  return out;
}

template <class Device>
Tensor spmm_sparse_features_values(GNNFAST_GRAPH_PARAMS, const OptTensor& weight_, const Tensor& xrowptr, const Tensor& xcol,
                                   const Tensor& grad_) {
  const Tensor grad = check_features("grad", grad_, -1);
  const OptTensor weight = as_contiguous(weight_);
  SparseFeaturesArgs args =
      check_sparse_features(check_exact_csr(rowptr, col, perm, schedule, layout, grad), kValues, weight, xrowptr, xcol, grad);
  args.width = grad.size(1);
  args.grad = grad.const_data_ptr();
  Tensor out = make_empty(grad, {args.stored}, grad.scalar_type());
  args.out = out.mutable_data_ptr();
  if (out.numel() > 0) Device::sparse_features(args, grad);
  return out;
}

template <class Device>
Tensor spmm_sparse_features_edges(GNNFAST_GRAPH_PARAMS, const Tensor& xrowptr, const Tensor& xcol, const Tensor& xval_,
                                  const Tensor& grad_) {
  const Tensor grad = check_features("grad", grad_, rowptr.numel() - 1), xval = check_values(xval_, xcol);
  check_dtype("xval", xval, grad.scalar_type());
  check_same_device("xval", xval, grad);
  SparseFeaturesArgs args = check_sparse_features(check_exact_csr(rowptr, col, perm, schedule, layout, grad), kEdges,
                                                  std::nullopt, xrowptr, xcol, grad);
  args.width = grad.size(1);
  args.xval = xval.const_data_ptr();
  args.grad = grad.const_data_ptr();
  Tensor out = make_empty(grad, {args.a.num_edges}, grad.scalar_type());
  args.out = out.mutable_data_ptr();
  if (out.numel() > 0) Device::sparse_features(args, grad);
  return out;
}

#define GNNFAST_IMPL_SPARSE_FEATURES(m, Device)                                           \
  m.impl("spmm_sparse_features", TORCH_BOX(&spmm_sparse_features<Device>));               \
  m.impl("spmm_sparse_features_values", TORCH_BOX(&spmm_sparse_features_values<Device>)); \
  m.impl("spmm_sparse_features_edges", TORCH_BOX(&spmm_sparse_features_edges<Device>))

}  // namespace gnnfast
