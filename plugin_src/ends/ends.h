// Checks and allocation of the ops of ends, for both devices. The contract is in ends_args.h.
#pragma once

#include "common/device.h"
#include "ends_args.h"

namespace gnnfast {

inline void check_ids(const char* name, const Tensor& ids, const Tensor& nodes) {
  check_dim(name, ids, 1);
  check_same_device(name, ids, nodes);
  GNNFAST_CHECK(ids.size(0) == 0 || nodes.size(0) > 0, name, " has ids, and there are no nodes");
  GNNFAST_CHECK(ids.scalar_type() == ScalarType::Int || ids.scalar_type() == ScalarType::Long, "ids must be int32 or int64");
}

template <class Device>
Tensor gather_ends(const Tensor& row_, const Tensor& a_) {
  const Tensor a = check_features("a", a_, -1), row = as_contiguous(row_);
  check_ids("row", row, a);
  Tensor out = make_empty(a, {row.size(0), a.size(1)}, a.scalar_type());
  const bool index64 = row.scalar_type() == ScalarType::Long;
  if (out.numel() > 0)
    Device::ends({kGather, row.const_data_ptr(), nullptr, index64, row.size(0), a.size(0), 0, a.size(1), a.const_data_ptr(),
                  nullptr, out.mutable_data_ptr()},
                 a);
  return out;
}

template <class Device>
Tensor combine_ends(const Tensor& row_, const Tensor& column_, const Tensor& a_, const Tensor& b_, int64_t op) {
  const Tensor a = check_features("a", a_, -1), b = check_features("b", b_, -1);
  const Tensor row = as_contiguous(row_), column = as_contiguous(column_);
  check_dtype("b", b, a.scalar_type());
  check_same_device("b", b, a);
  check_size("b", b, 1, a.size(1));
  check_ids("row", row, a);
  check_ids("column", column, b);
  check_dtype("column", column, row.scalar_type());
  check_size("column", column, 0, row.size(0));
  GNNFAST_CHECK(op >= kAdd && op <= kMultiply, "op must be 0, 1 or 2, got ", op);
  Tensor out = make_empty(a, {row.size(0), a.size(1)}, a.scalar_type());
  const bool index64 = row.scalar_type() == ScalarType::Long;
  if (out.numel() > 0)
    Device::ends({static_cast<EndsOp>(op), row.const_data_ptr(), column.const_data_ptr(), index64, row.size(0), a.size(0),
                  b.size(0), a.size(1), a.const_data_ptr(), b.const_data_ptr(), out.mutable_data_ptr()},
                 a);
  return out;
}

}  // namespace gnnfast
