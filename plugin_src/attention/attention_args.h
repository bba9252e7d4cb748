// Attention over the edges of each row: score, softmax, dropout and weighted sum, of which nothing exists per edge (fuseGNN,
// Chen et al., ICCAD 2020, for GAT; the online softmax is that of Milakov and Gimelshein, 2018; the backward pass computes the
// coefficients again, as FlashAttention does, Dao et al., 2022).
//
//   raw[e, h] = dst[i, h] + src[j, h]                         for every edge e = (row i, column j)
//   s[e, h]   = raw > 0 ? raw : slope * raw                   (GAT, Velickovic et al., ICLR 2018)
//   p[e, h]   = exp(s[e, h] - max_i s) / sum_i exp(s - max_i s)
//   out[i, f] = sum over e of  p[e, h] * keep[e, h] * x[j, f],    h = f / (F / H)
//
// keep is 1, or with dropout 0 or 1 / (1 - dropout), drawn from `seed`, the edge's id and the head alone (random.h).
//
// Backward, with g the gradient of out, D[i, h] = <out[i], g[i]> over head h, and 1' = (raw > 0 ? 1 : slope):
//   to raw:  p * (keep * <x[j], g[i]> - D[i]) * 1'
//   to x[j]: sum over e of p * keep * g[i]
// Sums over a row or column of the first need no dot product per edge, as one side of it is the same for all: with sums over
// the edges of positive score ("positive"), of p * keep * x in the forward pass, of p * keep * g in the backward pass, and of
// p,
//   to dst[i]: (1 - slope) * (<positive_out[i], g[i]> - D[i] * positive_p[i]),      as those of all edges add up to 0
//   to src[j]: slope * <to_x[j], x[j]> + (1 - slope) * <positive_to_x[j], x[j]> - sum over e of p * 1' * D[i]
// Always deterministic. Rows without edges get 0. Rows whose scores are all -inf, or that hold +inf or NaN, are NaN, as in
// torch.softmax.
#pragma once

#include "common/types.h"

namespace gnnfast {

enum AttentionRole : int {
  kInfer,     // out
  kTrain,     // out, positive and stats
  kBackward,  // over the transpose: rows are sources; to_x as out, positive, and sums
};

struct AttentionArgs {
  Csr a;
  AttentionRole role;
  int64_t width, heads;  // F, H
  double slope, dropout;
  const int64_t* seed;  // [1], on the device; or null
  const void* own;      // [num_rows, H]: dst, backward src
  const void* other;    // [num_cols, H]: src; backward, in the accumulation type, [num_cols, H, 4]: dst, max, 1 / sum, D
  const void* x;        // [num_cols, F]; backward g
  void* out;            // [num_rows, F]
  void* positive;       // [num_rows, F]
  void* stats;  // in the accumulation type: forward [num_rows, H, 4]: dst, max, 1 / sum, positive p; backward [num_rows, H]
};

// What remains for the gradients of scores, a row and head at a time. Those without edges get 0, whatever their features are.
struct AttentionRowsArgs {
  int64_t num_rows, width, heads;
  double slope;
  const int32_t* rowptr;  // [num_rows + 1] of sources; null for destinations, whose stats tell whether they have edges
  const void* out;        // [num_rows, F]: out, or to_x
  const void* positive;   // [num_rows, F]
  const void* with;       // [num_rows, F]: g, or x
  const void* stats;      // what the kernel above has put there
  void* packed;           // [num_rows, H, 4]: stats with D, for destinations; else null
  void* grad;             // [num_rows, H]
};

// keep as it is drawn, whether it is 0 or not.
struct AttentionKeepArgs {
  int64_t num_edges, heads;
  double dropout;
  const int64_t* seed;
  bool* out;  // [E, H]
};

}  // namespace gnnfast
