// CSR arguments of an op: their parameters and their checks.
#pragma once

#include "device.h"

namespace gnnfast {

// Every CSR op takes the matrix it runs over and, for the autograd formulas in Python, its transpose, which kernels ignore.
#define GNNFAST_GRAPH_PARAMS                                                                                     \
  const Tensor &rowptr, const Tensor &col, const OptTensor &perm, const OptTensor &schedule, int64_t num_pieces, \
      const OptTensor & /*rowptr_t*/, const OptTensor & /*col_t*/, const OptTensor & /*perm_t*/,                 \
      const OptTensor & /*schedule_t*/, int64_t /*num_pieces_t*/

inline Csr check_csr(const Tensor& rowptr, const Tensor& col, const OptTensor& perm, const OptTensor& schedule,
                     int64_t num_pieces, const Tensor& ref) {
  Csr a{};
  a.rowptr = check_index("rowptr", rowptr, ref);
  a.col = check_index("col", col, ref);
  a.perm = check_index("perm", perm, ref);
  a.schedule = check_index("schedule", schedule, ref);
  a.num_rows = rowptr.numel() - 1;
  a.num_edges = col.numel();
  STD_TORCH_CHECK(a.num_rows >= 0, "gnnfast: rowptr must have at least one element");
  if (perm) check_size("perm", *perm, 0, a.num_edges);
  STD_TORCH_CHECK(!ref.is_cuda() || schedule, "gnnfast: CUDA kernels need the schedule of gnnfast.Graph");
  a.num_items = schedule ? schedule->numel() / 4 : 0;
  a.num_pieces = num_pieces;
  return a;
}

}  // namespace gnnfast
