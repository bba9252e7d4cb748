// The schedule of a CSR matrix for the CUDA kernels: rows and pieces of rows as work items of three sizes (common/types.h),
// after the degree bins of Accel-GCN (Xie et al., ICCAD 2023). Rows keep the given order within a section, except that those
// for a warp or less are sorted by length within windows of 4,096: rows that share a warp, and warps that share a block, then
// take about equally long, and none waits for another.
//
//   order [num_rows] int32 (optional): the rows in launch order; id order without it.
//
// Returns items [num_rows + E / longest + 1, 4] int32, of which the first layout[0] are used, and layout [4] int64 on the
// device: items, pieces, items for a block, items for a warp; the last item holds it once more. coo_to_formats (convert.h)
// makes schedules of which nobody waits to hear how long they are.
#pragma once

#include "common/csr.h"

namespace gnnfast {

constexpr int kShortRow = 32;         // edges of a row that a few lanes take
constexpr int kMostWarpEdges = 1024;  // edges of a row that a warp takes

// Edges that a warp takes: few enough that the device's resident warps get several items each and that a small graph does not
// wait for one warp, many enough to be worth starting.
inline int64_t warp_edges(int64_t num_edges) {
  const int64_t fewest = std::min<int64_t>(std::max<int64_t>(num_edges / 4096, kShortRow), 128);
  return std::min<int64_t>(std::max<int64_t>(num_edges / 16384, fewest), kMostWarpEdges);
}

// Edges that a block takes; longer rows are cut.
inline int64_t block_edges(int64_t num_edges) { return std::max<int64_t>(8 * warp_edges(num_edges), 1024); }

}  // namespace gnnfast
