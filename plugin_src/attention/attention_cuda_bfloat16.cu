#include "attention_cuda.cuh"

namespace gnnfast {
GNNFAST_ATTENTION_EXTERN(, __nv_bfloat16)
}  // namespace gnnfast
