// Rows of nodes at the ends of edges.
//
//   out[e, f] = a[row[e], f]                       kGather, which is an op of its own
//   out[e, f] = a[row[e], f] + b[column[e], f]     kAdd; - kSubtract; * kMultiply
//
// A row of nodes is read where an edge needs it, and only what is asked for is written. Always deterministic. An edge with an
// id out of range is an error on a CPU; on a GPU it is complained of (common/ids.cuh), and gets zeros.
#pragma once

#include "common/types.h"

namespace gnnfast {

enum EndsOp : int64_t { kAdd, kSubtract, kMultiply, kGather };

struct EndsArgs {
  EndsOp op;
  const void* row;     // [E], int32 or int64
  const void* column;  // [E], likewise
  bool index64;        // they are int64
  int64_t num_edges, num_rows, num_cols, width;
  const void* a;  // [num_rows, F]
  const void* b;  // [num_cols, F]
  void* out;      // [E, F]
};

}  // namespace gnnfast
