// Softmax over the edges of each row, per head (fuseGNN, Chen et al., ICCAD 2020, "graph processing" of GAT; the maximum of the
// row is subtracted, as in the online form of Milakov and Gimelshein, 2018).
//
//   raw[e, h] = score[e, h] + dst[i, h] + src[j, h]      for every edge e = (row i, column j); absent parts are 0
//   s[e, h]   = raw[e, h] > 0 ? raw[e, h] : slope * raw[e, h]
//   out[e, h] = exp(s[e, h] - max_i s) / sum_i exp(s - max_i s)
//
// Backward, with p the result and g its gradient:  out[e, h] = p * (g - sum_i p * g) * (raw[e, h] > 0 ? 1 : slope),
// which is the gradient of raw. Always deterministic. Rows whose scores are all -inf, or that hold +inf or NaN, are NaN, as in
// torch.softmax.
#pragma once

#include "common/types.h"

namespace gnnfast {

struct EdgeSoftmaxArgs {
  Csr m;
  int64_t heads;
  double slope;
  const void* score;  // [E, H] by edge id, or null
  const void* dst;    // [num_rows, H] or null
  const void* src;    // [num_cols, H] or null
  const void* prob;   // [E, H], backward only: then
  const void* grad;   // [E, H]
  void* out;          // [E, H]
  void* to_dst;       // [num_rows, H] in the accumulation type or null: the sums of `out` over each row; backward only
};

}  // namespace gnnfast
