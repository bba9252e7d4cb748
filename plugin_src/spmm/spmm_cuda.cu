#include <torch/csrc/stable/library.h>

#include "common/permute.cuh"
#include "spmm.h"
#include "spmm_cuda.cuh"

namespace gnnfast {

GNNFAST_SPMM_EXTERN(extern, float)
GNNFAST_SPMM_EXTERN(extern, double)
GNNFAST_SPMM_EXTERN(extern, __half)
GNNFAST_SPMM_EXTERN(extern, __nv_bfloat16)

void Cuda::spmm(const SpmmArgs& args, const Tensor& x) {
  const Launch launch(x);
  SpmmArgs p = args;
  Pieces pieces{};
  std::optional<Tensor> value, aux, weight, dot;  // freed in stream order when this returns
  if (const int64_t numel = p.a.num_pieces * p.width) {
    value = make_empty(x, {numel}, acc_dtype(x.scalar_type()));
    pieces.value = value->mutable_data_ptr();
    if (p.op == kMaxFirst || p.op == kMaxCount) aux = make_empty(x, {numel}, ScalarType::Int);
    pieces.aux = aux ? aux->mutable_data_ptr<int32_t>() : nullptr;
  }
  // Whether the op needs the user's edge ids for nothing but weights and dot products.
  const bool by_slot = p.a.perm && p.a.num_edges >= kPermuteFirst && p.mode == kHeadWeight && p.weight && p.op != kMaxFirst &&
                       p.op != kSumWhereFirst && (p.op != kSumAndDot || p.inverse);
  dispatch_cuda(dtype_of("x", x), [&](auto type) {
    using T = typename decltype(type)::type;
    if (!by_slot) return launch_op<T>(p, pieces, launch.stream);
    const int64_t edges = p.a.num_edges, heads = p.heads;
    weight = make_empty(x, {edges * heads}, x.scalar_type());
    permute<T>(args.weight, args.a.perm, weight->mutable_data_ptr(), edges, heads, launch.stream);
    p.weight = weight->const_data_ptr();
    p.a.perm = nullptr;
    if (p.op == kSumAndDot) {
      dot = p.a.counts ? make_zeros(x, {edges * heads}, x.scalar_type()) : make_empty(x, {edges * heads}, x.scalar_type());
      p.dot = dot->mutable_data_ptr();
    }
    launch_op<T>(p, pieces, launch.stream);
    if (dot) permute<T>(p.dot, args.inverse, args.dot, edges, heads, launch.stream);
  });
  if (p.op == kMaxCount) count_ties({p.a, p.width, p.heads, p.weight, p.x, p.out, p.aux}, x);
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
  m.impl("spmm_max_backward", TORCH_BOX(&spmm_max_backward<Cuda>));
  m.impl("spmm_where", TORCH_BOX(&spmm_where<Cuda>));
  m.impl("spmm_backward", TORCH_BOX(&spmm_backward<Cuda>));
}

}  // namespace gnnfast
