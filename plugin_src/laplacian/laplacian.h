// The scaled Laplacian of ChebConv (Defferrard et al., NeurIPS 2016), as PyG's functions list it, in one call (CPU only):
//
//   2 L / lambda_max - I,   L = D - A,   I - D^(-1/2) A D^(-1/2)   or   I - D^(-1) A
//
// The edges are those that are no loops, in order, and then one loop at each node; D sums weights by the source. lambda_max is
// twice the largest weight of L unless given; weights of +inf are 0. The bits are those of PyG's twenty operations, one after
// the other.
#pragma once

#include "common/dtype.h"
#include "graph/loops.h"

namespace gnnfast {

enum Normalization { kNone, kSymmetric, kRandomWalk };

struct LaplacianArgs {
  const void* weight;  // [E] or null: ones
  int64_t num_nodes;
  Normalization normalization;
  std::optional<double> lambda_max;
  int64_t* out_edges;  // [2, kept + N]
  void* out;           // [kept + N]
};

}  // namespace gnnfast
