// Entry of the CPU kernels, which are compiled once per instruction set (see CMakeLists.txt).
#pragma once

#include "pair_attention_args.h"

namespace gnnfast {

constexpr int64_t kPairTile = 64;  // edges whose coefficients are kept at a time

// Numbers of the accumulation type that a thread needs.
static inline int64_t pair_scratch(const PairArgs& p) { return 2 * kPairTile * p.heads + 3 * p.width + 3 * p.heads; }

#define GNNFAST_DECLARE(ISA)                                                                             \
  namespace ISA {                                                                                        \
  void pair_items(const PairArgs& args, DType dtype, int64_t row_begin, int64_t row_end, void* scratch); \
  }
GNNFAST_DECLARE(baseline)
GNNFAST_DECLARE(avx2)
GNNFAST_DECLARE(avx512)
#undef GNNFAST_DECLARE
}  // namespace gnnfast
