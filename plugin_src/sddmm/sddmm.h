// Checks and allocation of the SDDMM ops, for both devices. The contract is in sddmm_args.h.
#pragma once

#include "common/csr.h"
#include "sddmm_args.h"

namespace gnnfast {

inline SddmmArgs sddmm_args(const Csr& m, int64_t width, int64_t heads, const Tensor& a, const Tensor& b, const Tensor& out) {
  SddmmArgs args{};
  args.m = m;
  args.width = width;
  args.heads = heads;
  args.a = a.const_data_ptr();
  args.b = b.const_data_ptr();
  args.out = out.mutable_data_ptr();
  return args;
}

inline void check_heads(int64_t heads, int64_t width) {
  GNNFAST_CHECK(heads > 0 && width % heads == 0, "heads = ", heads, " must divide the ", width, " features");
}

template <class Device>
Tensor sddmm(GNNFAST_GRAPH_PARAMS, const Tensor& a_, const Tensor& b_, int64_t heads, const OptTensor& weight_,
             const OptTensor& value_, const OptTensor& arg) {
  const Tensor a = check_features("a", a_, rowptr.numel() - 1), b = check_features("b", b_, -1);
  check_dtype("b", b, a.scalar_type());
  check_size("b", b, 1, a.size(1));
  check_heads(heads, a.size(1));
  const Csr m = check_csr(rowptr, col, perm, schedule, layout, a);
  const bool zeroed = may_leave_out(m) || (arg && !a.is_cuda());  // the host writes at the edges that arg names
  Tensor out =
      zeroed ? make_zeros(a, {m.num_edges, heads}, a.scalar_type()) : make_empty(a, {m.num_edges, heads}, a.scalar_type());
  SddmmArgs args = sddmm_args(m, a.size(1), heads, a, b, out);
  args.op = value_ ? kDotWhereEqual : arg ? kDotWhereFirst : kDot;
  const Tensor value = value_ ? check_features("value", *value_, a.size(0)) : a;
  const Tensor weight = weight_ ? as_contiguous(*weight_) : out;
  GNNFAST_CHECK(!value_ || weight_, "sddmm with value needs the weight");
  GNNFAST_CHECK(weight.numel() == out.numel(), "weight of shape ", shape_str(weight), " does not fit ", heads, " heads");
  args.value = value.const_data_ptr();
  args.weight = weight.const_data_ptr();
  args.arg = check_index("arg", arg, a);
  if (out.numel() > 0 && m.num_rows > 0) Device::sddmm(args, a);
  return out;
}

template <class Device>
Tensor sddmm_coo(const Tensor& row_, const Tensor& column_, const Tensor& a_, const Tensor& b_, int64_t heads) {
  const Tensor a = check_features("a", a_, -1), b = check_features("b", b_, -1);
  const Tensor row = as_contiguous(row_), column = as_contiguous(column_);
  check_dtype("b", b, a.scalar_type());
  check_size("b", b, 1, a.size(1));
  check_heads(heads, a.size(1));
  check_dtype("column", column, row.scalar_type());
  check_size("column", column, 0, row.size(0));
  check_same_device("row", row, a);
  Tensor out = make_empty(a, {row.size(0), heads}, a.scalar_type());
  Csr m{};
  m.num_edges = row.size(0);
  m.num_rows = a.size(0);
  SddmmArgs args = sddmm_args(m, a.size(1), heads, a, b, out);
  args.num_cols = b.size(0);
  args.row = row.const_data_ptr();
  args.column = column.const_data_ptr();
  args.index64 = row.scalar_type() == ScalarType::Long;
  if (a.numel() == 0 || b.numel() == 0) return torch::stable::zero_(out);
  if (out.numel() > 0) Device::sddmm(args, a);
  return out;
}

}  // namespace gnnfast
