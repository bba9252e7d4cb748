// SDDMM (sampled dense-dense matrix product): a dot product per edge and head.
//
//   out[e, h] = sum over the features f of head h of  a[i, f] * b[j, f]      for every edge e = (row i, column j)
//
// `op` can restrict the sum to the features at which the edge attained the maximum of its row (weight gradient of max and min):
//   kDotWhereEqual   weight[e, h] * b[j, f] == value[i, f]; NaN where value is
//   kDotWhereFirst   arg[i, f] == e
// Edges come as CSR (rows are then held while columns are gathered) or as COO in the user's order. Always deterministic.
#pragma once

#include "common/types.h"

namespace gnnfast {

enum SddmmOp : int { kDot, kDotWhereEqual, kDotWhereFirst };

struct SddmmArgs {
  Csr m;               // CSR; when m.rowptr is null, COO:
  const void* row;     // [E], int32 or int64
  const void* column;  // [E]
  bool index64;        // row and column are int64
  int64_t num_cols;    // COO only, as m.num_rows: an edge with an id out of range gets 0
  SddmmOp op;
  int64_t width, heads;  // F, H
  const void* a;         // [num_rows, F]
  const void* b;         // [num_cols, F]
  const void* weight;    // [E, H], kDotWhereEqual only
  const void* value;     // [num_rows, F]
  const int32_t* arg;    // [num_rows, F]
  void* out;             // [E, H]
};

}  // namespace gnnfast
