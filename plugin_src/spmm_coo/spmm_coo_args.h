// SpMM over unsorted COO (the paper's GAS: gather, apply edge, scatter; fuseGNN, Chen et al., ICCAD 2020, Algorithms 1 and 2).
//
//   out[i, f] = reduce over the edges e with row[e] == i of  weight[e, f / (F / H)] * x[column[e], f]
//
// Needs no conversion, so it is the choice for a graph that is seen once. On CUDA rows are updated by atomics, so that sums
// vary from run to run in the last bits; on the CPU each thread owns a range of rows and adds in edge order. An edge
// with an id out of range counts as none on CUDA, where ids are the user's own memory and not checked before (common/ids.cuh);
// on the CPU it is an error, so that nobody need look at the ids before. Rows without edges get 0. With `self`, also dot[e, h]
// = <self[row], x[column]>: Algorithm 2, both gradients at once. A mean returns the degrees too, by which its backward pass
// divides the rows that it gathers (x_degree).
#pragma once

#include <cstddef>

#include "common/types.h"

namespace gnnfast {

enum CooOp : int { kCooSum, kCooMax, kCooSumAndDot };

struct SpmmCooArgs {
  CooOp op;
  bool mean, negate;
  const void* row;     // [E], int32 or int64
  const void* column;  // [E], or null: the ids of the edges
  bool index64;        // row and column are int64
  int64_t num_edges, num_rows, num_cols, width, heads;
  const void* weight;       // [E, H] or null
  const void* x;            // [num_cols, F]
  const void* self;         // [num_rows, F]
  void* out;                // [num_rows, F] in the accumulation type; the kernels begin by zeroing it
  int32_t* degree;          // [num_rows], likewise; mean only
  const int32_t* x_degree;  // [num_cols] or null: row j of x counts as x[j] / max(x_degree[j], 1)
  void* dot;                // [E, H]
  size_t out_bytes;
};

}  // namespace gnnfast
