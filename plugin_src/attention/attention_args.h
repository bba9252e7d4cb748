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
// Backward, with g the gradient of out, D[i, h] = <out[i], g[i]> over head h, and 1' = (raw > 0 ? 1 : slope): a walk over the
// columns (kAdditive in pair_attention/pair_attention_args.h) gives
//   to raw:  p * (keep * <x[j], g[i]> - D[i]) * 1'     by edge, and its sum over the column, which is that to src[j]
//   to x[j]: sum over e of p * keep * g[i]
// and the sum of the first over rows is that to dst[i]. Sums over whole rows would do without a product per edge, but lose
// digits where features are large and coefficients near one.
// Rows without edges get 0. Rows whose scores are all -inf, or that hold +inf or NaN, are NaN, as in
// torch.softmax.
#pragma once

#include "common/types.h"

namespace gnnfast {

struct AttentionArgs {
  Csr a;
  int64_t width, heads;  // F, H
  double slope, dropout;
  const int64_t* seed;  // [1], on the device; or null
  const void* own;      // [num_rows, H]: dst
  const void* other;    // [num_cols, H]: src
  const void* x;        // [num_cols, F]
  void* out;            // [num_rows, F]
  void* stats;          // [num_rows, H, 4] in the accumulation type: max, dst, 1 / sum, nothing; or null
};

// D of each row and head, which is put with the stats. Rows without edges get 0, whatever their features are.
struct AttentionDotsArgs {
  int64_t num_rows, width, heads;
  const void *out, *grad;  // [num_rows, F]
  const void* stats;       // [num_rows, H, 4]
  void* packed;            // [num_rows, H, 4]: stats with D
};

// keep as it is drawn, whether it is 0 or not.
struct AttentionKeepArgs {
  int64_t num_edges, heads;
  double dropout;
  const int64_t* seed;
  bool* out;  // [E, H]
};

}  // namespace gnnfast
