#include "attention_cuda.cuh"

#include <torch/csrc/stable/library.h>

#include "attention.h"

namespace gnnfast {

GNNFAST_ATTENTION_EXTERN(extern, float)
GNNFAST_ATTENTION_EXTERN(extern, double)
GNNFAST_ATTENTION_EXTERN(extern, __half)
GNNFAST_ATTENTION_EXTERN(extern, __nv_bfloat16)

namespace {

__global__ void __launch_bounds__(kBlock) keep_kernel(const AttentionKeepArgs p) {
  const int64_t e = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (e >= p.num_edges) return;
  const uint32_t kept = kept_heads(*p.seed, static_cast<uint32_t>(e), static_cast<int>(p.heads), kept_of_65536(p.dropout));
  for (int64_t h = 0; h < p.heads; ++h) p.out[e * p.heads + h] = kept >> h & 1;
}

}  // namespace

void Cuda::attention(const AttentionArgs& args, const Tensor& x) {
  const Launch launch(x);
  std::optional<Tensor> pieces;  // freed in stream order when this returns
  if (args.a.num_pieces > 0)
    pieces = make_empty(x, {args.a.num_pieces * (args.width + 2 * args.heads)}, acc_dtype(x.scalar_type()));
  dispatch_cuda(dtype_of("x", x), [&](auto type) {
    using T = typename decltype(type)::type;
    launch_attention<T>(args, pieces ? static_cast<acc_t<T>*>(pieces->mutable_data_ptr()) : nullptr, launch.stream);
  });
}

void Cuda::attention_dots(const AttentionDotsArgs& args, const Tensor& out) {
  const Launch launch(out);
  dispatch_cuda(dtype_of("out", out),
                [&](auto type) { launch_attention_dots<typename decltype(type)::type>(args, launch.stream); });
}

void Cuda::attention_keep(const AttentionKeepArgs& args, const Tensor& seed) {
  const Launch launch(seed);
  keep_kernel<<<blocks_for(args.num_edges), kBlock, 0, launch.stream>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("attention", TORCH_BOX(&attention<Cuda>));
  m.impl("attention_keep", TORCH_BOX(&attention_keep<Cuda>));
}

}  // namespace gnnfast
