// Softmax of values that belong to groups, as PyG's `softmax` writes it, with the same bits (CPU only). src is [E, ...], of
// which each column is normalised on its own; index [E] has the group of each row.
//
//   out[e, d] = exp(src[e, d] - m[g, d]) / (s[g, d] + 1e-16),   g = index[e],
//   m and s the maximum of src and the sum of the exponentials over the rows of a group, in order
//
// softmax_coo_backward: out[e, d] = p * (grad - sum_g p * grad), with p the result of the softmax.
#pragma once

#include "common/check.h"
#include "common/dtype.h"

namespace gnnfast {

struct SoftmaxCooArgs {
  const void* index;  // [E], int32 or int64
  int64_t num_rows, num_groups, width;
  const void *in, *grad;  // [E, width]: values; in the backward pass p, and the gradient
  void* out;              // [E, width]
};

}  // namespace gnnfast
