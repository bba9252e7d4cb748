// Every constant of the CUDA SpMM that was set by a measurement, beside it. How rows are cut into work items is tuned in
// graph/schedule.h, how items are given to warps in common/walk.cuh.
#pragma once

#include "common/launch.cuh"
#include "spmm_args.h"

namespace gnnfast {

// How a lane finds the weight of its features.
enum CudaWeight : int { kNone, kScalar, kPerHead, kPerElement };

// Ops worth more code: the others always check whether an edge exists, and have fewer variants.
constexpr bool is_hot(int op) { return op <= kMaxCount || op == kSumAndDot; }

// Edges whose gathers are in flight together. Two where a lane also holds, for each gather, what it compares with or a weight
// for each feature: registers are then what is scarce.
template <int OP, int W>
constexpr int kSpmmFlight = OP == kSumWhereEqual || OP == kSumWhereFirst || W == kPerElement ? 2 : 4;

// Whether the next batch of indices is read before the gathers of this one: else its latency adds to theirs. Wide rows have
// enough gathers a batch to hide it, and the registers are better spent on them (reddit-size, F = 128: 6.8 against 7.4 ms).
template <int TPR>
constexpr bool kSpmmReadAhead = TPR < kWarp;

// Blocks a multiprocessor should hold: as many as fit without spilling registers.
template <class T, int OP, int W, int TPR>
constexpr int kSpmmResident = sizeof(T) == 8                                                ? 2
                              : OP == kSum && sizeof(T) == 4 && TPR < kWarp && W <= kScalar ? 5
                                                                                            : 4;

// Features, in bytes, that one pass over the edges covers. Of rows of whole cache lines 256 bytes: half of the lanes then
// gather from one edge and half from another, and more of X stays in L2 (F = 128, forward: 3.7 against 4.0 ms on ppa, 0.54
// against 0.60 on amazon0601; 128 bytes are about as fast, 64 slower). Other rows would share a sector between two passes: 512
// bytes.
inline int64_t slab_bytes(const SpmmArgs& p, int64_t row_bytes) {
  if (p.op == kSumAndDot) return 512;  // each pass would add to the dot products
  if (p.a.slab > 0) return p.a.slab;
  return row_bytes % 128 == 0 ? 256 : 512;
}

// Edges from which weights and dot products are put in the order of the slots by a kernel of their own. In the SpMM each of
// them would be a sector of its own, read or written while gathers flush the cache; alone, and if the edges are sorted at all,
// they are consecutive in many places at once, which the cache holds (reddit-size, F = 128, sum and both gradients: 22.1
// -> 15.6 ms).
constexpr int64_t kPermuteFirst = 1 << 17;

}  // namespace gnnfast
