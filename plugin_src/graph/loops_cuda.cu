// CUDA edge lists without their loops, and with one at each node. What they take on a small graph is the host's time: at most
// three launches and one wait, where torch's operations are a dozen launches and one wait.
#include <torch/csrc/stable/library.h>

#include "convert.h"
#include "loops.cuh"

namespace gnnfast {
namespace {

// The k-th edge of the result: that of `ids`, or with none the k-th, and then the loops.
template <class I>
__global__ void __launch_bounds__(kBlock)
    list_kernel(const I* edges, int64_t num_edges, const int32_t* ids, int64_t kept, int64_t size, int64_t* out) {
  const int64_t k = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (k >= size) return;
  const int64_t e = ids && k < kept ? ids[k] : k;
  out[k] = k < kept ? static_cast<int64_t>(edges[e]) : k - kept;
  out[size + k] = k < kept ? static_cast<int64_t>(edges[num_edges + e]) : k - kept;
}

template <class I>
Tensor list_loops(const Tensor& edge_index, int64_t num_nodes, bool remove) {
  const Launch launch(edge_index);
  const int64_t num_edges = edge_index.size(1);
  const I* edges = static_cast<const I*>(edge_index.const_data_ptr());
  std::optional<WithoutLoops> found;
  if (remove) found.emplace(edge_index).select(edges, launch.stream);
  const int64_t kept = found ? found->kept() : num_edges;
  const int64_t size = kept + num_nodes;
  Tensor made = make_empty(edge_index, {2, size}, ScalarType::Long);
  if (size > 0) {
    list_kernel<I><<<blocks_for(size), kBlock, 0, launch.stream>>>(edges, num_edges, found ? found->ids() : nullptr, kept, size,
                                                                   made.mutable_data_ptr<int64_t>());
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return made;
}

Tensor loops_listed(const Tensor& edge_index_, int64_t num_nodes, bool remove) {
  const Tensor edge_index = check_listed(edge_index_, num_nodes);
  GNNFAST_CHECK(edge_index.size(1) < kMaxEdges, "2^31 - 2^16 edges or more are not supported, got ", edge_index.size(1));
  Tensor made;
  dispatch_index("edge_index", edge_index.scalar_type(),
                 [&](auto type) { made = list_loops<typename decltype(type)::type>(edge_index, num_nodes, remove); });
  return made;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) { m.impl("loops_listed", TORCH_BOX(&loops_listed)); }

}  // namespace gnnfast
