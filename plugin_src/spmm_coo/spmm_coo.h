// Checks and allocation of the SpMM over COO, for both devices. The contract is in spmm_coo_args.h.
#pragma once

#include "common/csr.h"
#include "spmm_coo_args.h"

namespace gnnfast {

inline SpmmCooArgs check_coo(const Tensor& row, const OptTensor& column, const OptTensor& weight, const Tensor& x,
                             const OptTensor& x_degree, int64_t num_rows) {
  SpmmCooArgs args{};
  GNNFAST_CHECK(num_rows >= 0, "num_rows must not be negative, got ", num_rows);
  check_dim("row", row, 1);
  check_same_device("row", row, x);
  args.row = row.const_data_ptr();
  if (column) {
    check_dtype("column", *column, row.scalar_type());
    check_size("column", *column, 0, row.size(0));
    args.column = column->const_data_ptr();
  } else {
    GNNFAST_CHECK(!weight, "without columns there are no weights");
    check_size("x", x, 0, row.size(0));
  }
  args.index64 = row.scalar_type() == ScalarType::Long;
  args.num_edges = row.size(0);
  args.num_rows = num_rows;
  args.num_cols = x.size(0);
  args.width = x.size(1);
  args.heads = 1;
  args.x = x.const_data_ptr();
  args.x_degree = check_index("degree", x_degree, x);
  if (x_degree) check_size("degree", *x_degree, 0, args.num_cols);
  if (weight) {
    check_dtype("weight", *weight, x.scalar_type());
    check_same_device("weight", *weight, x);
    check_size("weight", *weight, 0, args.num_edges);
    args.heads = weight->dim() == 2 ? weight->size(1) : 1;
    GNNFAST_CHECK(weight->dim() <= 2 && args.heads > 0 && args.width % args.heads == 0, "weight of shape ", shape_str(*weight),
                  " does not divide the ", args.width, " features into heads");
    args.weight = weight->const_data_ptr();
  }
  return args;
}

template <class Device>
std::tuple<Tensor, Tensor> run_coo(SpmmCooArgs& args, const Tensor& x) {
  Tensor out = make_empty(x, {args.num_rows, args.width}, acc_dtype(x.scalar_type()));
  Tensor degree = make_empty(x, {args.mean ? args.num_rows : 0}, ScalarType::Int);
  args.out = out.mutable_data_ptr();
  args.degree = degree.mutable_data_ptr<int32_t>();
  args.out_bytes = static_cast<size_t>(out.numel() * out.element_size());
  if (args.num_rows > 0) Device::spmm_coo(args, x);  // of no features too: a mean has degrees all the same
  return {out.scalar_type() == x.scalar_type() ? out : torch::stable::to(out, x.scalar_type()), degree};
}

// reduce: 0 sum, 1 mean, 2 max, 3 min. Without columns, edge e takes row e of x. Returns the result, and the degrees
// [num_rows] of a mean (else [0]).
template <class Device>
std::tuple<Tensor, Tensor> spmm_coo(const Tensor& row_, const OptTensor& column_, const OptTensor& weight_, const Tensor& x_,
                                    int64_t num_rows, int64_t reduce, const OptTensor& x_degree) {
  const Tensor x = check_features("x", x_, -1);
  const Tensor row = as_contiguous(row_);
  const OptTensor column = column_ ? OptTensor(as_contiguous(*column_)) : column_;
  const OptTensor weight = weight_ ? OptTensor(as_contiguous(*weight_)) : weight_;
  GNNFAST_CHECK(reduce >= 0 && reduce <= 3, "reduce must be 0 to 3, got ", reduce);
  SpmmCooArgs args = check_coo(row, column, weight, x, x_degree, num_rows);
  args.op = reduce >= 2 ? kCooMax : kCooSum;
  args.mean = reduce == 1;
  args.negate = reduce == 3;
  return run_coo<Device>(args, x);
}

template <class Device>
std::tuple<Tensor, Tensor> spmm_coo_backward(const Tensor& row_, const Tensor& column_, const Tensor& weight_,
                                             const Tensor& self_, const Tensor& grad_, const OptTensor& x_degree) {
  const Tensor grad = check_features("grad", grad_, -1), self = check_features("self", self_, -1);
  const Tensor row = as_contiguous(row_), column = as_contiguous(column_);
  const Tensor weight = as_contiguous(weight_);
  check_dtype("self", self, grad.scalar_type());
  check_size("self", self, 1, grad.size(1));
  SpmmCooArgs args = check_coo(row, column, weight, grad, x_degree, self.size(0));
  Tensor dot = torch::stable::empty_like(weight);
  args.op = kCooSumAndDot;
  args.self = self.const_data_ptr();
  args.dot = dot.mutable_data_ptr();
  const bool runs = args.num_rows * args.num_cols * args.width > 0;
  if (!runs || !grad.is_cuda()) dot = torch::stable::zero_(dot);  // the CPU kernel does not visit edges out of range
  return {std::get<0>(run_coo<Device>(args, grad)), dot};
}

}  // namespace gnnfast
