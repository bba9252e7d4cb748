// SpMM over CSR (the paper's GAR: gather, apply edge, reduce on chip; fuseGNN, Chen et al., ICCAD 2020, Algorithm 3).
//
//   out[i, f] = reduce over the edges e of row i of  weight[e, f / (F / H)] * x[col[e], f]
//
// or, on a CPU, of  x[col[e], f] + plus * weight[e, f / (F / H)]  with plus = 1 or -1, for kSum, kMax and kMaxFirst.
//
// A is `num_rows` x `num_cols` in CSR: rowptr [num_rows + 1], col [E], int32. perm [E] (optional) maps a CSR slot to the user's
// edge id, by which weight [E] or [E, H] and every edge-valued output are indexed; H divides F. Rows with no edge get 0 (sum,
// mean) or `empty` (max, min); with `finite` what is infinite of these holds 0, and no edge attains it. Slots of a row are
// added in order, one row has one owner, so results do not vary from run to run.
//
// `op` says what is reduced; the last three run over the transposed matrix in backward passes, where `self` are the features
// of the row's own node and x the output gradients that are gathered:
//   kSum                 sum, or mean when args.mean; row i times scale[i] where args.scale is given
//   kMax                 max, or min when args.negate; NaN wins
//   kMaxFirst            the same, aux[i, f] = user's id of the first edge that attains it (-1: none); with `alone`,
//                        which is CUDA's only, ~s where s is its slot (0: none)
//   kMaxCount            the same, aux[i, f] = number of edges that attain it, at least 1; with count_zero one more where it is
//                        0. With `alone` ~c where only edges of column c do, or with weights ~s where only that
//                        of slot s does, the value is no NaN, and no 0 is counted
//   kSumWhereEqual       sum over edges for which weight * self[i, f] == value[col, f], NaN where value is
//                        (gradient of max, ties share it)
//   kSumWhereFirst       sum over edges with arg[col, f] == e                          (gradient of max, first edge takes it)
//   kSumAndDot           sum, and dot[e, h] = <self[i], x[col]> over head h: both gradients of SpMM with one gather
#pragma once

#include "common/types.h"

namespace gnnfast {

enum SpmmOp : int { kSum, kMax, kMaxFirst, kMaxCount, kSumWhereEqual, kSumWhereFirst, kSumAndDot };
// None; [E, H] with D = F / H > 1; [E, F]; and the same two, added.
enum WeightMode : int { kNoWeight, kHeadWeight, kElementWeight, kHeadPlus, kElementPlus };

struct SpmmArgs {
  Csr a;
  SpmmOp op;
  WeightMode mode;
  bool mean, negate, count_zero, alone;
  bool finite;
  double empty;
  double plus;             // 0: weights multiply
  const double* scale;     // [num_rows] or null
  int64_t width, heads;    // F, H
  const void* weight;      // [E], [E, H]
  const void* x;           // [num_cols, F]
  void* out;               // [num_rows, F]
  int32_t* aux;            // [num_rows, F]
  const void* self;        // [num_rows, F]
  const void* value;       // [num_cols, F]
  const int32_t* arg;      // [num_cols, F]
  void* dot;               // [E, H], every element is written
  const int32_t* inverse;  // [E], user's edge id -> CSR slot, or null: dot is then written slot by slot, in any order
};

// CUDA only: how many edges tie; and gradients of maxima with `alone`, over the matrix itself: grad[i, f], times its weight,
// goes where aux says. Of kMaxCount, where edges tie, or grad or the value is no number, the row is walked again for these
// features, and each edge that attains the maximum gets grad / aux. Added by atomics, in the accumulation type.
struct TiesArgs {
  Csr a;
  int64_t width, heads;
  const void* weight;  // [E], [E, H] or null
  const void* x;       // [num_cols, F]; null, as value: gradients of kMaxFirst
  const void* value;   // [num_rows, F]
  int32_t* aux;        // [num_rows, F]
  const void* grad;    // [num_rows, F]
  void* out;           // [num_cols, F], zeros
};

}  // namespace gnnfast
