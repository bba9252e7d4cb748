// SpMM with sparse features (Kim et al., IEEE Access 2022, Algorithm 2): X [N, width] is stored as CSR, the result is dense.
//
// A is M x N as in spmm/spmm_args.h with an optional weight per edge [E]; X is xrowptr [N + 1], xcol [stored], int32, and
// xval [stored]; no row of X holds a column twice. With G [M, width], the three ops are the derivatives of one trilinear form,
//
//   T(w, X, G) = sum over the edges e: j -> i and the stored entries (c, v) of row j of X of  w[e] * v * G[i, c]
//
//   kFeatures   dT/dG [M, width]: the product A X, or its rows divided by their degrees when args.mean
//   kValues     dT/dX [stored]:   over the transposed matrix, whose rows are those of X
//   kEdges      dT/dw [E]:        in the user's edge order
//
// so that gradients of gradients are the same ops again. Every sum is added up in a fixed order, without atomics.
#pragma once

#include "common/types.h"

namespace gnnfast {

enum SparseFeaturesOp : int { kFeatures, kValues, kEdges };

struct SparseFeaturesArgs {
  Csr a;
  SparseFeaturesOp op;
  bool mean;
  int64_t width, stored;
  const void* weight;      // [E] or null
  const int32_t* xrowptr;  // [N + 1]
  const int32_t* xcol;     // [stored]
  const void* xval;        // [stored]
  const void* grad;        // [M, width]
  void* out;
};

}  // namespace gnnfast
