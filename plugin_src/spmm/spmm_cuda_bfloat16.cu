#include "spmm_cuda.cuh"

namespace gnnfast {
GNNFAST_SPMM_EXTERN(, __nv_bfloat16)
}  // namespace gnnfast
