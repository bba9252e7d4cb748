#include "pair_attention_cuda.cuh"

namespace gnnfast {
GNNFAST_PAIR_EXTERN(, double)
}  // namespace gnnfast
