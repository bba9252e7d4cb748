// Entry of the CPU kernels, which are compiled once per instruction set (see CMakeLists.txt).
#pragma once

#include "attention_args.h"

namespace gnnfast {

constexpr int64_t kAttentionTile = 128;  // edges whose coefficients are kept at a time

// Numbers of the accumulation type that a thread needs.
static inline int64_t attention_scratch(const AttentionArgs& p) { return kAttentionTile * p.heads + p.width + 3 * p.heads; }

#define GNNFAST_DECLARE(ISA)                                                                                       \
  namespace ISA {                                                                                                  \
  void attention_items(const AttentionArgs& args, DType dtype, int64_t row_begin, int64_t row_end, void* scratch); \
  void attention_dots(const AttentionDotsArgs& args, DType dtype, int64_t row_begin, int64_t row_end);             \
  }
GNNFAST_DECLARE(baseline)
GNNFAST_DECLARE(avx2)
GNNFAST_DECLARE(avx512)
#undef GNNFAST_DECLARE
}  // namespace gnnfast
