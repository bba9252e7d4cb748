// COO to CSR: a stable counting (CPU) or radix (CUDA) sort by row, linear in the number of edges.
//
//   rowptr [num_rows + 1] int32, col [E] int32: column of each slot; perm [E] int32: the edge id of each slot. Within a row,
//   slots ascend by edge id. With `both` the transpose is made as well: what a new small graph takes is the host's time.
//
// On a CPU (coo_to_csr) perm is empty where the rows came sorted, so that slots are edge ids, and the caller reads the facts
// [4] int64, the least and the greatest row and column, and raises the error if one is outside (gnnfast/ops/convert.py). On
// CUDA (coo_to_formats) nothing waits for the device: an edge with an id outside is left out (its slot lies behind those of all
// rows, its column is 0) and complained of (common/ids.cuh), so that kernels may run over the result before anybody has looked,
// and of the schedule the host knows only how long it can be. There `loops` gives each of the min(num_rows, num_cols) nodes one
// edge to itself, with the ids from E on; edges that were loops are left out.
//
// loops_listed: edge_index [2, E], without its loops if these are to be removed, in order, and then a loop at each of
// num_nodes nodes; int64. Ids may be anything. On CUDA it waits for the number of loops, as PyG does, if these are removed.
//
// csr_rows (CUDA): the row of each of num_slots slots, the first of which is rowptr[0]; rowptr [num_rows + 1], as its dtype.
#pragma once

#include "common/dtype.h"

namespace gnnfast {

struct CooArgs {
  const void* row;     // [E], int32 or int64
  const void* column;  // [E]
  ScalarType index;
  int64_t num_edges, num_rows, num_cols;
};

constexpr int64_t kMaxIndex = 2147483647;         // graph arrays are int32
constexpr int64_t kMaxEdges = kMaxIndex - 65535;  // kernels count slots in int32, up to a block's edges ahead

inline CooArgs check_coo_input(const Tensor& row, const Tensor& column, int64_t num_rows, int64_t num_cols) {
  check_dim("row", row, 1);
  check_dim("column", column, 1);
  check_dtype("column", column, row.scalar_type());
  check_size("column", column, 0, row.size(0));
  check_same_device("column", column, row);
  GNNFAST_CHECK(num_rows >= 0 && num_cols >= 0, "the number of nodes must not be negative, got ", num_rows, " and ", num_cols);
  GNNFAST_CHECK(row.size(0) < kMaxEdges && num_rows < kMaxIndex && num_cols < kMaxIndex,
                "graphs of 2^31 - 1 nodes or 2^31 - 2^16 edges or more are not supported, got ", row.size(0), " edges, ",
                num_rows, " rows, ", num_cols, " columns");
  return {row.const_data_ptr(), column.const_data_ptr(), row.scalar_type(), row.size(0), num_rows, num_cols};
}

inline Tensor check_listed(const Tensor& edge_index, int64_t num_nodes) {
  check_dim("edge_index", edge_index, 2);
  check_size("edge_index", edge_index, 0, 2);
  GNNFAST_CHECK(num_nodes >= 0, "the number of nodes must not be negative, got ", num_nodes);
  return as_contiguous(edge_index);
}

}  // namespace gnnfast
