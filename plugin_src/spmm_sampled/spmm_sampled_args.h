// Sampled SpMM (ES-SpMM, Lin et al., 2021, Algorithm 1): SpMM over at most `draw.width` edges of each row, which draw.h chooses
// inside the kernel. A row with no more edges than that is reduced exactly.
//
//   out[i, f] = scale_i * sum over draws e of row i of  weight[e, f / (F / H)] * x[col[e], f]
//
// scale_i is 1 / draws (mean), nnz / draws (rescale), which is what the sum over all edges is expected to be, or 1. Notation as
// in spmm/spmm_args.h.
//
// For a backward pass, kRandom alone, two more run over the same draws, which nothing stores; scale_i is in the gradient they
// get:
//   transposed   out[j, f] = sum over the drawn edges from j to i of  weight[e, ...] * x[i, f]
//   dot          dot[e, h] = <self[i], x[j]> over head h for drawn edges, 0 for the others
#pragma once

#include "draw.h"
#include "spmm/spmm_args.h"

namespace gnnfast {

struct SampledArgs {
  Csr a;  // the matrix of which each row is sampled; perm: slot -> index of weight and dot
  Csr t;  // transposed: its transpose; perm: slot of the transpose -> slot of a
  Draw draw;
  bool mean, rescale;
  int64_t width, heads;  // F, H
  const int32_t* order;  // CUDA: [num_rows], rows in launch order, or null
  const void* weight;    // [E], [E, H] or null
  const void* x;         // [columns, F]
  void* out;             // [rows, F]
  const void* self;      // dot: [rows, F]
  void* dot;             // dot: [E, H], zeros
};

// Where the draws are: slot[k] of the matrix is draw k - drawn[i] of row i, for drawn[i] <= k < drawn[i + 1].
struct DrawArgs {
  const int32_t *rowptr, *drawn;  // [num_rows + 1]
  int64_t num_rows;
  Draw draw;
  int32_t* slot;  // [drawn[num_rows]]
};

}  // namespace gnnfast
