// SpMM over a CSR matrix as torch has it: its own pointers, columns and values, of which nothing is made or kept (CUDA only).
//
//   out[i, f] = sum over the slots s of row i of  value[s] * x[col[s], f]        (mean: over max(slots of row i, 1))
//
// For small matrices, where the host decides: one launch or two, no conversion, no zeroing. Each row is added up in an order
// that does not vary, so results are the same from run to run. A slot whose column is out of range counts as none
// (common/ids.cuh). Without a gradient.
#pragma once

#include "common/dtype.h"

namespace gnnfast {

struct SpmmCsrArgs {
  const void *rowptr, *col;  // [M + 1], [E], both int32 or int64
  const void* value;         // [E]
  const void* x;             // [num_cols, F]
  void* out;                 // [M, F]
  int64_t num_edges, num_rows, num_cols, width;
  bool mean;
};

// Returns the result, for which `args` are set.
inline Tensor check_spmm_csr(SpmmCsrArgs& args, const Tensor& rowptr, const Tensor& col, const Tensor& value, const Tensor& x,
                             bool mean) {
  check_dim("rowptr", rowptr, 1);
  check_dim("col", col, 1);
  check_dim("value", value, 1);
  GNNFAST_CHECK(rowptr.size(0) > 0, "rowptr must have at least one element");
  check_dtype("col", col, rowptr.scalar_type());
  check_dtype("value", value, x.scalar_type());
  check_size("value", value, 0, col.size(0));
  GNNFAST_CHECK(x.numel() == 0 || x.const_data_ptr(), "the storage of x was emptied");
  for (const auto& [name, t] : {std::pair{"rowptr", &rowptr}, {"col", &col}, {"value", &value}}) check_same_device(name, *t, x);
  Tensor out = make_empty(x, {rowptr.size(0) - 1, x.size(1)}, x.scalar_type());
  args = {rowptr.const_data_ptr(),
          col.const_data_ptr(),
          value.const_data_ptr(),
          x.const_data_ptr(),
          out.mutable_data_ptr(),
          col.size(0),
          out.size(0),
          x.size(0),
          x.size(1),
          mean};
  return out;
}

}  // namespace gnnfast
