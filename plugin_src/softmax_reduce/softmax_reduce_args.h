// Sums of the rows of neighbours with weights that are the softmax of the same rows, for each feature by itself (DeeperGCN's
// aggregation, Li et al., arXiv:2006.07739). No weight of an edge exists.
//
//   s[e, f] = t[f] * x[j, f]     for the edges e = (row i, column j)
//   p[e, f] = exp(s[e, f] - most[i, f]) / total[i, f]       most: the maximum of s over the row, total: the sum of exponentials
//   out[i, f] = sum over e of  p[e, f] * x[j, f]; 0 in rows without edges
//
// Backward over the transpose, with share = grad / total, over the edges e from the row's node j to i:
//
//   d[e, f] = exp(s[e, f] - most[i, f]) * share[i, f]       to_x[j] = sum of  d * (1 + t * (x[j] - out[i]))
//                                                           to_t[j] = x[j] * sum of  d * (x[j] - out[i])
//
// Where |x| times the number of edges is more than the type holds, so may be a sum, which PyG divides before it is added up.
// s is rounded before the maximum is taken off, so that what cancels in one pass does so in the other. Slots of a row are added
// in a fixed order: results do not vary from run to run. float32 and float64.
//
// Bytes that must move, per edge: 4 (col) and F * sizeof(T) forward, three times as many backward.
#pragma once

#include "common/types.h"

namespace gnnfast {

struct SoftmaxReduceArgs {
  Csr a;
  int64_t width;  // F
  const void* x;  // [num_cols, F]
  const void* t;  // [F], or null: all are `scale`
  double scale;
  void* out;           // [num_rows, F]
  void *most, *total;  // [num_rows, F], or null: no gradient will be asked for
};

// The second over the transpose, or, with `index`, for messages x [E, F] that exist, each of which goes to one row.
struct SoftmaxBackwardArgs {
  Csr a;
  const void* index;  // [num_rows], int32 or int64, or null; one out of range counts as none
  bool index64;
  int64_t num_rows, num_cols, width;
  const void* x;  // [num_rows, F]
  const void* t;
  double scale;
  const void *most, *share, *out;  // [num_cols, F]
  void *to_x, *to_t;               // [num_rows, F]; to_t may be null
};

}  // namespace gnnfast
