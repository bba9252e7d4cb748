#include "attention_cuda.cuh"

namespace gnnfast {
GNNFAST_ATTENTION_EXTERN(, float)
}  // namespace gnnfast
