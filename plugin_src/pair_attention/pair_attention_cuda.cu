#include "pair_attention_cuda.cuh"

#include <torch/csrc/stable/library.h>

#include "pair_attention.h"

namespace gnnfast {

GNNFAST_PAIR_EXTERN(extern, float)
GNNFAST_PAIR_EXTERN(extern, double)
GNNFAST_PAIR_EXTERN(extern, __half)
GNNFAST_PAIR_EXTERN(extern, __nv_bfloat16)

void Cuda::pair_attention(const PairArgs& args, const Tensor& ref) {
  const Launch launch(ref);
  std::optional<Tensor> pieces;  // freed in stream order when this returns
  if (args.a.num_pieces > 0)
    pieces = make_empty(ref, {args.a.num_pieces * (2 * args.width + 2 * args.heads)}, acc_dtype(ref.scalar_type()));
  dispatch_cuda(dtype_of("key", ref), [&](auto type) {
    using T = typename decltype(type)::type;
    launch_pair<T>(args, pieces ? static_cast<acc_t<T>*>(pieces->mutable_data_ptr()) : nullptr, launch.stream);
  });
}

int64_t Cuda::most_pair_features(const Tensor& ref, int64_t features) {
  const int64_t vec = 16 / (ref.scalar_type() == ScalarType::Double ? 8 : ref.scalar_type() == ScalarType::Float ? 4 : 2);
  return kWarp * (features % vec == 0 ? vec : 1);
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("pair_attention", TORCH_BOX(&pair_attention<Cuda>));
  m.impl("pair_attention_backward", TORCH_BOX(&pair_attention_backward<Cuda>));
  m.impl("attention_backward", TORCH_BOX(&attention_backward<Cuda>));
}

}  // namespace gnnfast
