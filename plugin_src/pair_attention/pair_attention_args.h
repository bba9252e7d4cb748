// Attention whose scores are computed from two feature rows: score, softmax, dropout and weighted sum over the edges of each
// row, of which nothing exists per edge (online softmax: Milakov and Gimelshein, 2018; the backward pass computes the
// coefficients again, as FlashAttention does, Dao et al., 2022).
//
//   kScaledDot: s[e, h] = slope * <query[i], key[j]>                       (Vaswani et al., 2017; Shi et al., 2021)
//   kGatv2:     s[e, h] = sum over f of head h of  att[f] * lrelu(query[i, f] + key[j, f])    (Brody et al., ICLR 2022)
//   kGatv2Edges: the same of query[i, f] + key[j, f] + edge[e, f]
//   p[e, h]   = exp(s[e, h] - max_i s) / sum_i exp(s - max_i s)
//   out[i, f] = sum over e of  p[e, h] * keep[e, h] * value[j, f]
//
// for every edge e = (row i, column j); lrelu(v) = v > 0 ? v : slope * v; keep as in attention/attention_args.h. For kGatv2 and
// kGatv2Edges, which is there for 32 and 64 bits, the values are the keys.
//
// Backward, with g the gradient of out, D[i, h] = <out[i], g[i]> over head h and ds = p * (keep * <value[j], g[i]> - D[i]):
//   to value[j]:  sum over e of p * keep * g[i]
//   kScaledDot: to query[i]: slope * sum of ds * key[j],  to key[j]: slope * sum of ds * query[i]
//   kGatv2:   slopes_i = sum of ds * lrelu'(query[i] + key[j]), and slopes_j over the edges of j;  to query[i]: att * slopes_i,
//             to key[j]: att * slopes_j and what values get,  to att: sum over i of query * slopes_i plus sum over j of
//             key * slopes_j, because lrelu(v) = lrelu'(v) * v
//   kGatv2Edges: the same, with edge[e] in the argument of lrelu', to edge[e]: att * ds * lrelu'(..),  to att: sum over e of
//             ds * lrelu(..), which the walk over rows adds up
//   kAdditive: the scores of attention/attention_args.h, whose walk forward is there: what dst and src get are sums of ds over
//             rows and columns
// Deterministic, except that `to_other` is summed by atomics. Rows without edges get 0. Rows whose scores are all -inf, or that
// hold +inf or NaN, are NaN, as in torch.softmax.
#pragma once

#include "common/types.h"

namespace gnnfast {

enum PairScore : int { kScaledDot, kGatv2, kGatv2Edges, kAdditive };
constexpr bool has_att(int score) { return score == kGatv2 || score == kGatv2Edges; }
enum PairRole : int {
  kPairForward,
  kPairToRows,     // over the same matrix: what queries get, or dst (kAdditive)
  kPairToColumns,  // over the transpose, whose rows are the columns: what keys and values get
};

struct PairArgs {
  Csr a;
  PairScore score;
  PairRole role;
  int64_t width, heads;  // F, H
  double slope, dropout;
  const int64_t* seed;   // [1], on the device; or null
  const void* att;       // [F], kGatv2 and kGatv2Edges
  const void* edge;      // [E, F] by edge id, kGatv2Edges
  const void* own;       // [num_rows, F]: query; to columns: key; [num_rows, H] (kAdditive): dst or src
  const void* own_with;  // [num_rows, F]: to rows: g; to columns: value
  const void* other;     // [num_cols, F]: key; to columns: query, or g (kAdditive)
  const void* with;      // [num_cols, F]: value; to columns: g; the same as `other` where that is what it is; to rows: src
                         // [num_cols, H] (kAdditive)
  const void* stats;     // backward, in the accumulation type, [destinations, H, 4]: max, dst (kAdditive), 1 / sum, D
  void* out;             // [num_rows, F]: out; to columns: to value, or to key (kGatv2)
  void* to_own;          // [num_rows, F], to rows: to query; to columns: to key (kScaledDot), or [num_rows, H] (kAdditive)
  void* to_other;        // [num_cols, H] in the accumulation type, to columns (kAdditive): what dst gets is added; or null
  void* to_edge;         // [E, F] by edge id, to rows (kGatv2Edges)
  void* product;         // [num_rows, F], 0 where there are no edges: backward (kGatv2) own * slopes, to rows (kGatv2Edges) the
                         // sum of ds * lrelu(..)
  void* new_stats;       // [num_rows, H, 4], forward, or null: as stats without D
};

}  // namespace gnnfast
