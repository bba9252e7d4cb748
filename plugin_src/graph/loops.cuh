// The edges of a list that are no loops (CUDA).
#pragma once

#include <thrust/iterator/counting_iterator.h>

#include <cub/device/device_select.cuh>

#include "common/launch.cuh"

namespace gnnfast {

template <class I>
struct IsNoLoop {
  const I *source, *target;
  __device__ bool operator()(int32_t e) const { return source[e] != target[e]; }
};

// Their ids, in order, and `kept`, how many there are, for which the host waits. An empty tensor if there are no edges.
template <class I>
Tensor ids_without_loops(const Tensor& edge_index, const I* edges, int64_t* kept, cudaStream_t stream) {
  const int64_t num_edges = edge_index.size(1);
  Tensor ids = make_empty(edge_index, {num_edges ? num_edges + 1 : 0}, ScalarType::Int);  // and their number
  *kept = 0;
  if (num_edges == 0) return ids;
  int32_t *id = ids.mutable_data_ptr<int32_t>(), found = 0;
  const thrust::counting_iterator<int32_t> all(0);
  const IsNoLoop<I> is_none{edges, edges + num_edges};
  const int32_t size = static_cast<int32_t>(num_edges);
  size_t bytes = 0;
  STD_CUDA_CHECK(cub::DeviceSelect::If(nullptr, bytes, all, id, id + num_edges, size, is_none, stream));
  const Tensor scratch = make_empty(edge_index, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  STD_CUDA_CHECK(cub::DeviceSelect::If(scratch.mutable_data_ptr(), bytes, all, id, id + num_edges, size, is_none, stream));
  STD_CUDA_CHECK(cudaMemcpyAsync(&found, id + num_edges, sizeof found, cudaMemcpyDeviceToHost, stream));
  STD_CUDA_CHECK(cudaStreamSynchronize(stream));
  *kept = found;
  return ids;
}

}  // namespace gnnfast
