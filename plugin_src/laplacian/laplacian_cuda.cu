// CUDA Laplacian: kernels over the edges for the degrees, for the weights and the largest of them, and for its scale, by
// atomics.
#include <torch/csrc/stable/library.h>

#include <limits>

#include "common/atomics.cuh"
#include "common/ids.cuh"
#include "graph/loops.cuh"
#include "laplacian.h"

namespace gnnfast {
namespace {

template <class T, class I>
struct Edges {
  const I *source, *target;
  const int32_t* ids;  // [kept]
  int64_t kept, size;
  T* degree;                    // [N]
  typename Key<T>::type* most;  // of the largest weight
};

template <class T, class I>
__global__ void __launch_bounds__(kBlock) degree_kernel(const LaplacianArgs p, const Edges<T, I> edges, longlong2* complaint) {
  const int64_t k = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (k >= edges.kept) return;
  const int64_t e = edges.ids[k], from = edges.source[e], to = edges.target[e];
  const bool good = inside(from, p.num_nodes);
  if (!good || !inside(to, p.num_nodes)) return complain(complaint, good ? to : from, p.num_nodes);
  atomicAdd(edges.degree + from, p.weight ? static_cast<const T*>(p.weight)[e] : T{1});
}

template <class T>
__device__ inline T factor(T degree, Normalization normalization) {
  const T inverse = normalization == kSymmetric ? rsqrt(degree) : 1 / degree;
  return inverse == std::numeric_limits<T>::infinity() ? T{0} : inverse;
}

template <class T, class I>
__global__ void __launch_bounds__(kBlock) weigh_kernel(const LaplacianArgs p, const Edges<T, I> edges) {
  const int64_t k = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  typename Key<T>::type key = 0;
  if (k < edges.size) {
    const int64_t e = k < edges.kept ? edges.ids[k] : 0;
    const int64_t from = k < edges.kept ? static_cast<int64_t>(edges.source[e]) : k - edges.kept;
    const int64_t to = k < edges.kept ? static_cast<int64_t>(edges.target[e]) : from;
    T w = 0;
    if (k >= edges.kept) {
      w = p.normalization == kNone ? edges.degree[from] : T{1};
    } else if (inside(from, p.num_nodes) && inside(to, p.num_nodes)) {
      w = p.weight ? static_cast<const T*>(p.weight)[e] : T{1};
      if (p.normalization != kNone) w = factor(edges.degree[from], p.normalization) * w;
      if (p.normalization == kSymmetric) w *= factor(edges.degree[to], p.normalization);
      w = -w;
    }
    static_cast<T*>(p.out)[k] = w;
    p.out_edges[k] = from, p.out_edges[edges.size + k] = to;
    key = to_key(w);
  }
  if (p.lambda_max) return;
  for (int o = kWarp / 2; o > 0; o /= 2) key = max(key, __shfl_xor_sync(kAllLanes, key, o));
  if (threadIdx.x % kWarp == 0) raise_to(edges.most, key);
}

template <class T, class I>
__global__ void __launch_bounds__(kBlock) scale_kernel(const LaplacianArgs p, const Edges<T, I> edges) {
  const int64_t k = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (k >= edges.size) return;
  const T most = p.lambda_max ? static_cast<T>(*p.lambda_max) : 2 * from_key(*edges.most);
  T* out = static_cast<T*>(p.out) + k;
  const T scaled = 2 * *out / most, finite = scaled == std::numeric_limits<T>::infinity() ? T{0} : scaled;
  *out = k < edges.kept ? finite : finite - 1;
}

template <class T, class I>
void run(const LaplacianArgs& p, Edges<T, I> edges, const Tensor& edge_index, cudaStream_t stream) {
  if (edges.size == 0) return;
  // Both in one, so that there is one memset; the key first, which is as wide.
  const Tensor scratch = make_empty(edge_index, {(p.num_nodes + 1) * static_cast<int64_t>(sizeof(T))}, ScalarType::Byte);
  STD_CUDA_CHECK(cudaMemsetAsync(scratch.mutable_data_ptr(), 0, scratch.numel(), stream));
  edges.most = static_cast<typename Key<T>::type*>(scratch.mutable_data_ptr());
  edges.degree = static_cast<T*>(scratch.mutable_data_ptr()) + 1;
  if (edges.kept > 0) {
    degree_kernel<<<blocks_for(edges.kept), kBlock, 0, stream>>>(p, edges, complaints());
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  weigh_kernel<<<blocks_for(edges.size), kBlock, 0, stream>>>(p, edges);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  scale_kernel<<<blocks_for(edges.size), kBlock, 0, stream>>>(p, edges);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

std::tuple<Tensor, Tensor> laplacian_listed(const Tensor& edge_index, const OptTensor& weight, int64_t num_nodes,
                                            int64_t normalization, std::optional<double> lambda_max, ScalarType dtype) {
  auto fill = [dtype](LaplacianArgs& args, const Tensor& edges, auto type, auto make) {
    using I = typename decltype(type)::type;
    const Launch launch(edges);
    const I* source = static_cast<const I*>(args.edges);
    WithoutLoops found(edges);
    found.select(source, launch.stream);
    const int64_t kept = found.kept();
    make(kept);
    auto of = [&](auto zero) {
      using T = decltype(zero);
      const Edges<T, I> of_list{source, source + args.num_edges, found.ids(), kept, kept + args.num_nodes, nullptr, nullptr};
      run<T, I>(args, of_list, edges, launch.stream);
    };
    dtype == ScalarType::Float ? of(float{}) : of(double{});
  };
  return run_laplacian(edge_index, weight, num_nodes, normalization, lambda_max, dtype, fill);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) { m.impl("laplacian_listed", TORCH_BOX(&laplacian_listed)); }

}  // namespace gnnfast
