// Entries of the CPU kernels, which are compiled once per instruction set (see CMakeLists.txt).
#pragma once

#include "multi_reduce_args.h"

namespace gnnfast {
#define GNNFAST_DECLARE(ISA)                                                                                        \
  namespace ISA {                                                                                                   \
  void multi_reduce_rows(const MultiReduceArgs& args, DType dtype, int64_t row_begin, int64_t row_end);             \
  void multi_reduce_shares_rows(const ReduceSharesArgs& args, DType dtype, int64_t row_begin, int64_t row_end);     \
  void multi_reduce_backward_rows(const ReduceBackwardArgs& args, DType dtype, int64_t row_begin, int64_t row_end); \
  void multi_reduce_edges_range(const ReduceEdgesArgs& args, DType dtype, int64_t edge_begin, int64_t edge_end);    \
  }
GNNFAST_DECLARE(baseline)
GNNFAST_DECLARE(avx2)
GNNFAST_DECLARE(avx512)
#undef GNNFAST_DECLARE
}  // namespace gnnfast
