#include "spmm_cuda.cuh"

namespace gnnfast {
GNNFAST_SPMM_EXTERN(, __half)
}  // namespace gnnfast
