// CUDA GCN normalisation: a kernel over the edges that sums degrees and finds loops by atomics, and one over the edges and the
// loops to be added that weighs them. The k-th edge of the result is that of `ids`, if there are any, else the k-th of the
// list.
#include <torch/csrc/stable/library.h>

#include "common/ids.cuh"
#include "common/launch.cuh"
#include "common/vec.cuh"
#include "gcn_norm.h"
#include "graph/loops.cuh"

namespace gnnfast {
namespace {

// What the edges say of each node, all 0 to begin with.
template <class D>
struct Nodes {
  D* degree;              // without that of the loops where some are added
  int32_t *loops, *last;  // loops in the list, and the edge id of the last of them + 1; null where none are added
  int32_t* undetermined;  // set if it is not determined which weighs a node's; null: nobody asks

  // In one array, so that there is one allocation and one memset.
  static int64_t bytes(const GcnNormArgs& p) {
    return p.num_nodes * static_cast<int64_t>(sizeof(D) + (p.loops ? 2 * sizeof(int32_t) : 0));
  }
  Nodes(const GcnNormArgs& p, void* array, int32_t* undetermined) : degree(static_cast<D*>(array)), undetermined(undetermined) {
    loops = p.loops ? reinterpret_cast<int32_t*>(degree + p.num_nodes) : nullptr;
    last = p.loops ? loops + p.num_nodes : nullptr;
  }
};

template <class T, class I, class D>
__global__ void __launch_bounds__(kBlock) collect_kernel(const GcnNormArgs p, const Nodes<D> nodes, longlong2* complaint) {
  const int64_t e = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (e >= p.num_edges) return;
  const int64_t from = static_cast<const I*>(p.edges)[e], to = static_cast<const I*>(p.edges)[p.num_edges + e];
  const bool good = inside(from, p.num_nodes);
  if (!good || !inside(to, p.num_nodes)) {
    const bool taken_out = p.listed && p.loops && from == to;  // PyG looks at no such loop, but where it counts from the end
    if (!taken_out) return complain(complaint, good ? to : from, p.num_nodes);
    if (p.weight && nodes.undetermined) *nodes.undetermined = 1;
    return;
  }
  if (p.loops && from == to) {
    if (atomicAdd(nodes.loops + from, 1) > 0 && nodes.undetermined) *nodes.undetermined = 1;
    atomicMax(nodes.last + from, static_cast<int32_t>(e + 1));
  } else {
    atomicAdd(nodes.degree + (p.to_target ? to : from),
              p.weight ? static_cast<D>(to_acc(static_cast<const T*>(p.weight)[e])) : D{1});
  }
}

template <class T, class D>
__device__ inline acc_t<T> loop_of(const GcnNormArgs& p, const Nodes<D>& nodes, int64_t i) {
  const int32_t last = nodes.last[i];
  if (last == 0) return static_cast<acc_t<T>>(p.fill);
  return p.weight ? to_acc(static_cast<const T*>(p.weight)[last - 1]) : acc_t<T>{1};
}

// That of 0 is 0; that of a negative number NaN.
template <class T, class D>
__device__ inline acc_t<T> inverse_root(const GcnNormArgs& p, const Nodes<D>& nodes, int64_t i) {
  using A = acc_t<T>;
  const A degree = static_cast<A>(nodes.degree[i]) + (p.loops ? loop_of<T>(p, nodes, i) : A{0});
  return degree == 0 ? A{0} : rsqrt(degree);  // as torch's pow(-0.5)
}

template <class T, class I, class D>
__global__ void __launch_bounds__(kBlock) weigh_kernel(const GcnNormArgs p, const Nodes<D> nodes, int64_t size) {
  using A = acc_t<T>;
  const int64_t k = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (k >= size) return;
  const bool of_list = k < p.kept;
  const int64_t e = of_list && p.ids ? p.ids[k] : k;
  const int64_t from = of_list ? static_cast<int64_t>(static_cast<const I*>(p.edges)[e]) : k - p.kept;
  const int64_t to = of_list ? static_cast<int64_t>(static_cast<const I*>(p.edges)[p.num_edges + e]) : from;
  A w = 0;
  if (inside(from, p.num_nodes) && inside(to, p.num_nodes)) {
    if (p.loops && from == to)
      w = loop_of<T>(p, nodes, from) / static_cast<A>(p.listed ? 1 : nodes.loops[from] + 1);
    else
      w = p.weight ? to_acc(static_cast<const T*>(p.weight)[e]) : A{1};
    w = inverse_root<T>(p, nodes, from) * w * inverse_root<T>(p, nodes, to);
  }
  static_cast<T*>(p.out)[k] = from_acc<T>(w);
  if (p.loops) p.out_edges[k] = from, p.out_edges[size + k] = to;
}

template <class T, class I, class D>
void collect(const GcnNormArgs& p, const Nodes<D>& nodes, cudaStream_t stream) {
  if (p.num_nodes > 0) STD_CUDA_CHECK(cudaMemsetAsync(nodes.degree, 0, Nodes<D>::bytes(p), stream));
  if (p.num_edges == 0) return;
  collect_kernel<T, I, D><<<blocks_for(p.num_edges), kBlock, 0, stream>>>(p, nodes, complaints());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T, class I, class D>
void normalise(const GcnNormArgs& p, const Tensor& out, cudaStream_t stream) {
  const int64_t size = p.loops ? p.kept + p.num_nodes : p.num_edges;
  const Tensor made = make_empty(out, {p.collected ? 0 : Nodes<D>::bytes(p)}, ScalarType::Byte);
  const Nodes<D> nodes(p, p.collected ? p.collected : made.mutable_data_ptr(), nullptr);
  if (!p.collected) collect<T, I, D>(p, nodes, stream);
  weigh_kernel<T, I, D><<<blocks_for(size), kBlock, 0, stream>>>(p, nodes, size);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

std::tuple<Tensor, Tensor> gcn_norm_listed(const Tensor& edge_index, const OptTensor& weight, int64_t num_nodes,
                                           std::optional<double> fill, bool to_target, ScalarType dtype) {
  // Both until the kernels that read them are enqueued.
  std::optional<WithoutLoops> found;
  OptTensor collected;
  auto keep = [&](GcnNormArgs& args, const Tensor& edges, auto type) {
    using I = typename decltype(type)::type;
    const Launch launch(edges);
    found.emplace(edges);
    auto of = [&](auto weight_type, auto degree_type) {
      using D = decltype(degree_type);
      collected = make_empty(edges, {Nodes<D>::bytes(args)}, ScalarType::Byte);
      STD_CUDA_CHECK(cudaMemsetAsync(found->flag(), 0, sizeof(int32_t), launch.stream));
      collect<decltype(weight_type), I, D>(args, Nodes<D>(args, collected->mutable_data_ptr(), found->flag()), launch.stream);
    };
    if (!weight)
      of(float{}, int32_t{});
    else
      dtype == ScalarType::Float ? of(float{}, float{}) : of(double{}, double{});
    found->select(static_cast<const I*>(args.edges), launch.stream);
    GNNFAST_CHECK(!(weight && found->flagged()), "several loops of a node have weights: it is not determined which counts");
    args.kept = found->kept();
    args.ids = found->ids();
    args.collected = collected->mutable_data_ptr();
  };
  return run_gcn_norm_listed<Cuda>(edge_index, weight, num_nodes, fill, to_target, dtype, keep);
}

}  // namespace

void Cuda::gcn_norm(const GcnNormArgs& args, const Tensor& out) {
  const Launch launch(out);
  dispatch_cuda(dtype_of("weight", out), [&](auto type) {
    using T = typename decltype(type)::type;
    auto run = [&](auto index) {
      using I = typename decltype(index)::type;
      args.weight ? normalise<T, I, acc_t<T>>(args, out, launch.stream) : normalise<T, I, int32_t>(args, out, launch.stream);
    };
    args.index64 ? run(Type<int64_t>{}) : run(Type<int32_t>{});
  });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("gcn_norm_coo", TORCH_BOX(&gcn_norm_coo<Cuda>));
  m.impl("gcn_norm_listed", TORCH_BOX(&gcn_norm_listed));
}

}  // namespace gnnfast
