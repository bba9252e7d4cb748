#include "attention_cuda.cuh"

namespace gnnfast {
GNNFAST_ATTENTION_EXTERN(, __half)
}  // namespace gnnfast
