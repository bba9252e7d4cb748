// Scores of nodes: dot products of each head of a row with vectors that all rows share, as attention with additive scores needs
// them (GAT, Velickovic et al., ICLR 2018: a_src and a_dst), with one read of the rows.
//
//   out[k, i, h] = sum over the features f of head h of  x[i, f] * a[k, f]          k < K, K is 1 or 2
//
// Backward, with g the gradient of out:
//   to_x[i, f]  = sum over k of  g[k, i, h] * a[k, f]
//   to_a[k, f]  = sum over i of  g[k, i, h] * x[i, f]
//
// Without a and g, with K = 1: the sums of columns, which are the gradient of a bias.
//   to_a[f]     = sum over i of  x[i, f]
//
// Always deterministic.
#pragma once

#include "common/types.h"

namespace gnnfast {

struct HeadDotsArgs {
  int64_t num_rows, width, heads, vectors;  // N, F, H, K
  const void* x;                            // [N, F]
  const void* a;                            // [K, F], or null for sums of columns
  void* out;                                // [K, N, H]
  const void* grad;                         // [K, N, H], or null for sums of columns; backward only, as the others
  void* to_x;                               // [N, F] or null
  void* to_a;                               // [K, F]
};

}  // namespace gnnfast
