#include "spmm_cuda.cuh"

namespace gnnfast {
GNNFAST_SPMM_EXTERN(, float)
}  // namespace gnnfast
