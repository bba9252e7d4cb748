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
  Pieces pieces{};
  std::optional<Tensor> value, aux;  // freed in stream order when this returns
  if (const int64_t numel = args.a.num_pieces * args.width) {
    value = make_empty(x, {numel}, acc_dtype(x.scalar_type()));
    pieces.value = value->mutable_data_ptr();
    if (args.op == kMaxFirst || args.op == kMaxCount) aux = make_empty(x, {numel}, ScalarType::Int);
    pieces.aux = aux ? aux->mutable_data_ptr<int32_t>() : nullptr;
  }
  dispatch_cuda(dtype_of("x", x), [&](auto type) { launch_op<typename decltype(type)::type>(args, pieces, launch.stream); });
}

bool Cuda::can_fuse_dot(const SpmmArgs& args, ScalarType dtype) {
  const int64_t vec = 16 / (dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : 2);
  if (args.width % vec || !aligned16(args.x) || !aligned16(args.self)) return false;
  // A dot product over several slabs is added up in its own dtype; 16-bit ones would be rounded each time.
  if (args.width > kWarp * vec && (args.heads > 1 || vec == 8)) return false;
  // Each head must be a power of two of whole lanes.
  const int64_t segment = args.width / args.heads, lanes = segment / vec;
  return args.heads == 1 || (args.mode == kHeadWeight && segment % vec == 0 && (lanes & (lanes - 1)) == 0);
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("spmm", TORCH_BOX(&spmm<Cuda>));
  m.impl("spmm_max", TORCH_BOX(&spmm_max<Cuda>));
  m.impl("spmm_where", TORCH_BOX(&spmm_where<Cuda>));
  m.impl("spmm_backward", TORCH_BOX(&spmm_backward<Cuda>));
}

}  // namespace gnnfast
