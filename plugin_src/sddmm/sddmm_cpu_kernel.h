// Entry of the CPU kernels, which are compiled once per instruction set (see CMakeLists.txt).
#pragma once

#include "sddmm_args.h"

namespace gnnfast {
#define GNNFAST_DECLARE(ISA)                                                                  \
  namespace ISA {                                                                             \
  void sddmm_rows(const SddmmArgs& args, DType dtype, int64_t row_begin, int64_t row_end);    \
  void sddmm_edges(const SddmmArgs& args, DType dtype, int64_t edge_begin, int64_t edge_end); \
  }
GNNFAST_DECLARE(baseline)
GNNFAST_DECLARE(avx2)
GNNFAST_DECLARE(avx512)
#undef GNNFAST_DECLARE
}  // namespace gnnfast
