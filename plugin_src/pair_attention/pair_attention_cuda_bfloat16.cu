#include "pair_attention_cuda.cuh"

namespace gnnfast {
GNNFAST_PAIR_EXTERN(, __nv_bfloat16)
}  // namespace gnnfast
