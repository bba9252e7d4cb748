// Entry of the CPU kernels, which are compiled once per instruction set (see CMakeLists.txt).
#pragma once

#include "spmm_coo_args.h"

namespace gnnfast {
#define GNNFAST_DECLARE(ISA)                                                                       \
  namespace ISA {                                                                                  \
  int64_t spmm_coo_rows(const SpmmCooArgs& args, DType dtype, int64_t row_begin, int64_t row_end); \
  }
GNNFAST_DECLARE(baseline)
GNNFAST_DECLARE(avx2)
GNNFAST_DECLARE(avx512)
#undef GNNFAST_DECLARE
}  // namespace gnnfast
