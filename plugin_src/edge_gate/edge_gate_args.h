// Sums of messages that are one or two activations of what both ends of an edge, and the edge itself, give: gates
// (ResGatedGraphConv, Bresson and Laurent, 2017; CGConv, Xie and Grossman, 2018; FiLMConv, Brockschmidt, ICML 2020). No message
// exists.
//
//   z_k[e, f] = scale_k[i, f] * src_k[j, f] + shift_k[i, f] + edge_k[e, f] + sum over d of attr_k[e, d] * matrix_k[d, f]
//                                                                                    for the edge e from j to i
//   out[i, f] = sum, or mean, over the edges e to i of  weight[e] * act_1(z_1[e, f]) * act_2(z_2[e, f])
//
// A factor need not have each of these, there may be one factor alone, and no weight. Backward, with g the gradient of the sum
// and d_k[e, f] = g[i, f] * weight[e] * act_k'(z_k) * (the other factor), computed again from the same rows in two walks:
//
//   over the matrix, whose rows are destinations:     to_shift_k[i] = sum of d_k     to_scale_k[i] = sum of d_k * src_k[j]
//                                                     to_edge_k[e] = d_k
//                                                     to_weight[e] = sum over f of g[i, f] * act_1 * act_2
//                                                     to_matrix_k[d, f] = sum over e of attr_k[e, d] * d_k[e, f]
//   over the transpose, whose rows are sources:       to_src_k[j] = sum of d_k * scale_k[i]
//
// Slots of a row are added in a fixed order: results do not vary from run to run.
//
// Features of edges that get no gradient need not be multiplied before: attr is read where a product would be written and read.
//
// Bytes that must move, per edge: 4 (col), 4 (perm, if there are rows of edges), D * sizeof(T) for each attr, and F * sizeof(T)
// for each src and each edge; over the transpose for g and each scale, shift and edge.
#pragma once

#include "common/types.h"

namespace gnnfast {

// gnnfast.types.ACTIVATIONS. softplus is v itself above 20, as in torch.
enum Activation : int { kIdentity, kRelu, kSigmoid, kTanh, kSoftplus, kSilu, kAbs };

enum GatePart : int { kSrc, kScale, kShift, kEdge, kAttr, kMatrix, kParts };
constexpr int kMostFactors = 2;
// What an array is, in the arguments of the ops: kParts * factor + GatePart, or this.
constexpr int kWeightRole = kMostFactors * kParts;

struct GateFactor {
  const void*
      parts[kParts];    // src [N, F], scale and shift [M, F], edge [E, F] and attr [E, D] by edge id, matrix [D, F]; or null
  void* grads[kParts];  // of the same shapes, or null; src over the transpose, the others over the matrix, attr never
  int64_t depth;        // D
  Activation act;
};

struct EdgeGateArgs {
  Csr a;
  bool backward, transposed, mean;  // transposed: rows are sources; mean: forward only
  int64_t width;                    // F
  int count;                        // factors
  GateFactor factors[kMostFactors];
  const void* weight;  // [E] by edge id, or null
  void* to_weight;     // the same
  const void* grad;    // [M, F], backward only
  void* out;           // [M, F], forward only
};

}  // namespace gnnfast
