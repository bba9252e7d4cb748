#include "spmm_cuda.cuh"

namespace gnnfast {
GNNFAST_SPMM_EXTERN(, double)
}  // namespace gnnfast
