// Entry of the CPU kernels, which are compiled once per instruction set (see CMakeLists.txt).
#pragma once

#include "head_dots_args.h"

namespace gnnfast {
// `sums`: [parts, K, F] in the accumulation type, what each part of the rows adds to the gradient of a.
#define GNNFAST_DECLARE(ISA)                                                                                       \
  namespace ISA {                                                                                                  \
  void head_dots_rows(const HeadDotsArgs& args, DType dtype, int64_t row_begin, int64_t row_end);                  \
  void head_dots_backward_rows(const HeadDotsArgs& args, DType dtype, void* sums, int64_t part, int64_t row_begin, \
                               int64_t row_end);                                                                   \
  void head_dots_combine(const HeadDotsArgs& args, DType dtype, const void* sums, int64_t parts);                  \
  }
GNNFAST_DECLARE(baseline)
GNNFAST_DECLARE(avx2)
GNNFAST_DECLARE(avx512)
#undef GNNFAST_DECLARE
}  // namespace gnnfast
