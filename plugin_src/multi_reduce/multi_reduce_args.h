// Several reductions of the same rows with one gather (as PNA takes them, Corso et al., NeurIPS 2020): sums, means, maxima,
// minima, variances and standard deviations of  m[e, f] = x[col[e], f] + shift[i, f]  over the edges e of row i. The shift is
// the same for all edges of a row, so that no message exists. A is in CSR as for SpMM (spmm/spmm_args.h).
//
//   out[i, k, f] = reduction kinds[k] of m[e, f]; 0 in rows without edges. A variance is the mean of squares less the square of
//                  the mean, here those of x; a deviation is its root, and 0 for variances up to kLeast, as PyG has it
//
// Of several edges that attain an extremum each gets an even share of its gradient, and where it is 0 so does the 0 that
// torch.scatter_reduce starts from. The backward pass has two steps. Rows by themselves: what each gives its edges,
//
//   linear = (sum of mean's g + deg * sum's g - mean * square') / deg       square = square' / deg
//   square' = 2 * var's g + std's g / std                                   share = extremum's g / (ties + (extremum == 0))
//
// and then over the transposed matrix, with self the row's own x, over the edges to rows i:
//
//   to_x = sum of  linear[i] + self * square[i] + (self == max[i] ? share of max[i]) + (self == min[i] ? share of min[i])
//
// Slots of a row are added in a fixed order. float32 and float64.
//
// Bytes that must move: forward per edge 4 (col) and F * sizeof(T), which separate reductions read once each; backward per edge
// 4 and up to 6 rows of F * sizeof(T).
#pragma once

#include "common/types.h"

namespace gnnfast {

enum ReduceKind : int { kKindSum, kKindMean, kKindMax, kKindMin, kKindVar, kKindStd };
constexpr int kMostKinds = 16;
constexpr double kLeastVariance = 1e-5;

// Which rows a node's block of arrays has, -1: none; as few as the kinds need. `rows` is their number.
struct ReduceLayout {
  int count;
  int kinds[kMostKinds];
  int mean, most, least, kept_rows;             // of `kept`: mean of x if variances need it, maximum and minimum of x
  int most_ties, least_ties, ties_rows;         // of `ties`
  int linear, square, most_at, least_at, rows;  // of `shares`; extrema have two, their value and the share
};

struct MultiReduceArgs {
  Csr a;
  ReduceLayout layout;
  int64_t width;      // F
  const void* x;      // [num_cols, F]
  const void* shift;  // [num_rows, F] or null
  void* out;          // [num_rows, K, F]
  void* kept;         // [num_rows, kept_rows, F], or null: no gradient will be asked for
  int32_t* ties;      // [num_rows, ties_rows, F], likewise
};

// Where `shares` has row `which` of a node: at which * plane + node * stride. A node's rows are neighbours on a GPU; on a CPU
// each kind has an array of its own, which a cache holds longer.
struct ShareStrides {
  int64_t plane, node;
};

// The first step back.
struct ReduceSharesArgs {
  ReduceLayout layout;
  int64_t num_rows, width;
  const int32_t* rowptr;
  const void *grad, *out;  // [num_rows, K, F]
  const void* kept;
  const int32_t* ties;
  ShareStrides strides;
  void* shares;    // [num_rows, rows, F]
  void* to_shift;  // [num_rows, F] or null
};

// The second, over the transposed matrix.
struct ReduceBackwardArgs {
  Csr a;
  ReduceLayout layout;
  int64_t width;
  const void* x;  // [num_rows, F]
  ShareStrides strides;
  const void* shares;  // [num_cols, rows, F]
  void* to_x;          // [num_rows, F]
};

// The same for messages that exist, each of which goes to one row.
struct ReduceEdgesArgs {
  ReduceLayout layout;
  int64_t num_edges, num_rows, width;
  const void* index;  // [E], int32 or int64: rows; one out of range counts as none
  bool index64;
  const void* x;  // [E, F]
  ShareStrides strides;
  const void* shares;  // [num_rows, rows, F]
  void* to_x;          // [E, F]
};

}  // namespace gnnfast
