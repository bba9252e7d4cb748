// CSR arguments of an op: their parameters and their checks.
#pragma once

#include <vector>

#include "device.h"

namespace gnnfast {

// Every CSR op takes the matrix it runs over and, for the autograd formulas in Python, its transpose, which kernels ignore.
#define GNNFAST_GRAPH_PARAMS                                                                                              \
  const Tensor &rowptr, const Tensor &col, const OptTensor &perm, const OptTensor &schedule, std::vector<int64_t> layout, \
      const OptTensor & /*rowptr_t*/, const OptTensor & /*col_t*/, const OptTensor & /*perm_t*/,                          \
      const OptTensor & /*schedule_t*/, std::vector<int64_t> /*layout_t*/

// The same for ops that run over both.
#define GNNFAST_BOTH_PARAMS                                                                                               \
  const Tensor &rowptr, const Tensor &col, const OptTensor &perm, const OptTensor &schedule, std::vector<int64_t> layout, \
      const Tensor &rowptr_t, const Tensor &col_t, const OptTensor &perm_t, const OptTensor &schedule_t,                  \
      std::vector<int64_t> layout_t

inline Csr check_csr(const Tensor& rowptr, const Tensor& col, const OptTensor& perm, const OptTensor& schedule,
                     const std::vector<int64_t>& layout, const Tensor& ref) {
  Csr a{};
  a.rowptr = check_index("rowptr", rowptr, ref);
  a.col = check_index("col", col, ref);
  a.perm = check_index("perm", perm, ref);
  a.schedule = check_index("schedule", schedule, ref);
  a.num_rows = rowptr.numel() - 1;
  a.num_edges = col.numel();
  GNNFAST_CHECK(a.num_rows >= 0, "rowptr must have at least one element");
  if (perm) check_size("perm", *perm, 0, a.num_edges);
  GNNFAST_CHECK(!ref.is_cuda() || (schedule && layout.size() >= 4), "CUDA kernels need the schedule of gnnfast.Graph");
  if (schedule && layout.size() >= 4) {
    a.num_items = layout[0], a.num_pieces = layout[1], a.num_block_items = layout[2], a.num_warp_items = layout[3];
    a.slab = layout.size() > 4 ? layout[4] : 0;
    const int64_t last = schedule->size(0) - 1;
    a.counts = layout.size() > 5 && layout[5] && last >= 0 ? a.schedule + 4 * last : nullptr;
    GNNFAST_CHECK(0 <= a.num_pieces && a.num_pieces <= a.num_block_items && a.num_warp_items >= 0 &&
                      a.num_block_items + a.num_warp_items <= a.num_items && (a.counts || a.num_items * 4 <= schedule->numel()),
                  "the layout does not fit a schedule of shape ", shape_str(*schedule));
  }
  return a;
}

// Whether edges may have been left out of the matrix, so that no kernel visits their slots (graph/convert.h): what is written
// by slot must then be zero before.
inline bool may_leave_out(const Csr& a) { return a.counts || a.num_rows == 0; }

// The same for kernels that take the numbers of items from the host alone.
inline Csr check_exact_csr(const Tensor& rowptr, const Tensor& col, const OptTensor& perm, const OptTensor& schedule,
                           const std::vector<int64_t>& layout, const Tensor& ref) {
  const Csr a = check_csr(rowptr, col, perm, schedule, layout, ref);
  GNNFAST_CHECK(!a.counts, "this op needs a schedule of known size: Graph.args(exact=True)");
  return a;
}

}  // namespace gnnfast
