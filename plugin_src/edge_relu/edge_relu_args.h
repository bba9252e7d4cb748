// Sums of messages that are a node's features plus an edge's, after a ReLU (GINE, Hu et al., ICLR 2020): no message exists.
//
//   out[i, f] = sum over the edges e = (row i, column j) of  relu(x[j, f] + w[e, f])
//
// Where messages were not 0 is kept for the backward pass, a byte for `unit` features, so that neither x nor w is needed there.
// That gives both gradients in one walk over the transposed matrix; with g the gradient of out, over the edges e = (row i,
// column j) of the transpose, which go from i to j:
//
//   to_w[e, f] = kept[e, f] ? g[j, f] : 0          to_x[i, f] = sum over e of  to_w[e, f]
//
// Slots of a row are added in a fixed order: results do not vary from run to run. NaN passes through, as in torch.
//
// Bytes that must move, per edge: 4 (col), 4 (perm), F / unit (kept), and F * sizeof(T) each for the gathered row and for w or
// to_w.
#pragma once

#include "common/types.h"

namespace gnnfast {

struct EdgeReluArgs {
  Csr a;
  bool backward;
  int64_t width, unit;  // F; bit f % unit of kept[e, f / unit] is that of a feature
  const void* x;        // [num_cols, F], gathered; backward the gradients g
  const void* w;        // [E, F] by edge id, forward only
  uint8_t* kept;        // [E, F / unit] by edge id, forward or null
  void* out;            // [num_rows, F]
  void* to_w;           // [E, F] by edge id, or null; backward only
};

}  // namespace gnnfast
