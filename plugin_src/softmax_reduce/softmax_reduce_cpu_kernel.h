// Entries of the CPU kernels, which are compiled once per instruction set (see CMakeLists.txt).
#pragma once

#include "softmax_reduce_args.h"

namespace gnnfast {
#define GNNFAST_DECLARE(ISA)                                                                                           \
  namespace ISA {                                                                                                      \
  void softmax_reduce_rows(const SoftmaxReduceArgs& args, DType dtype, int64_t row_begin, int64_t row_end);            \
  void softmax_reduce_backward_rows(const SoftmaxBackwardArgs& args, DType dtype, int64_t row_begin, int64_t row_end); \
  }
GNNFAST_DECLARE(baseline)
GNNFAST_DECLARE(avx2)
GNNFAST_DECLARE(avx512)
#undef GNNFAST_DECLARE
}  // namespace gnnfast
