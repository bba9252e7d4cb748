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

// Their ids, in order.
class WithoutLoops {
 public:
  explicit WithoutLoops(const Tensor& edge_index)
      : num_edges_(edge_index.size(1)), ids_(make_empty(edge_index, {num_edges_ + 2}, ScalarType::Int)) {}

  // One more number on the device, for what else the host waits for. Set before select() is called.
  int32_t* flag() { return ids_.mutable_data_ptr<int32_t>() + num_edges_ + 1; }
  const int32_t* ids() const { return ids_.const_data_ptr<int32_t>(); }
  int64_t kept() const { return found_[0]; }
  bool flagged() const { return found_[1] != 0; }

  // Finds them, and waits for how many there are.
  template <class I>
  void select(const I* edges, cudaStream_t stream) {
    if (num_edges_ == 0) return;
    int32_t* id = ids_.mutable_data_ptr<int32_t>();
    const thrust::counting_iterator<int32_t> all(0);
    const IsNoLoop<I> is_none{edges, edges + num_edges_};
    const int32_t size = static_cast<int32_t>(num_edges_);
    size_t bytes = 0;
    STD_CUDA_CHECK(cub::DeviceSelect::If(nullptr, bytes, all, id, id + num_edges_, size, is_none, stream));
    const Tensor scratch = make_empty(ids_, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
    STD_CUDA_CHECK(cub::DeviceSelect::If(scratch.mutable_data_ptr(), bytes, all, id, id + num_edges_, size, is_none, stream));
    STD_CUDA_CHECK(cudaMemcpyAsync(found_, id + num_edges_, sizeof found_, cudaMemcpyDeviceToHost, stream));
    STD_CUDA_CHECK(cudaStreamSynchronize(stream));
  }

 private:
  const int64_t num_edges_;
  Tensor ids_;  // [num_edges], their number, the flag
  int32_t found_[2] = {0, 0};
};

}  // namespace gnnfast
