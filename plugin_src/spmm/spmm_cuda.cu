#include <torch/csrc/stable/library.h>

#include "spmm.h"
#include "spmm_cuda.cuh"

namespace gnnfast {

GNNFAST_SPMM_EXTERN(extern, float)
GNNFAST_SPMM_EXTERN(extern, double)
GNNFAST_SPMM_EXTERN(extern, __half)
GNNFAST_SPMM_EXTERN(extern, __nv_bfloat16)

void Cuda::spmm(const SpmmArgs& args, const Tensor& x) {
  const Launch launch(x);
  const bool aux_needed = args.op == kMaxFirst || args.op == kMaxCount;
  const int64_t numel = args.a.num_pieces * args.width;
  Tensor value = torch::stable::new_empty(x, {numel}, acc_dtype(x.scalar_type()));
  Tensor aux = torch::stable::new_empty(x, {aux_needed ? numel : 0}, ScalarType::Int);
  const Pieces pieces{value.mutable_data_ptr(), aux.mutable_data_ptr<int32_t>()};
  dispatch_cuda(dtype_of("x", x), [&](auto type) { launch_op<typename decltype(type)::type>(args, pieces, launch.stream); });
}

bool Cuda::can_fuse_dot(const SpmmArgs& args, ScalarType dtype) {
  // One pass of the warp must cover the row, and each head a power of two of whole lanes.
  const int64_t vec = 16 / (dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : 2);
  const int64_t segment = args.width / args.heads, lanes = segment / vec;
  if (args.width % vec || args.width > kWarp * vec || !aligned16(args.x) || !aligned16(args.self)) return false;
  return args.heads == 1 || (args.mode == kHeadWeight && segment % vec == 0 && (lanes & (lanes - 1)) == 0);
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("spmm", TORCH_BOX(&spmm<Cuda>));
  m.impl("spmm_max", TORCH_BOX(&spmm_max<Cuda>));
  m.impl("spmm_where", TORCH_BOX(&spmm_where<Cuda>));
  m.impl("spmm_backward", TORCH_BOX(&spmm_backward<Cuda>));
}

}  // namespace gnnfast
