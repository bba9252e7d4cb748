#include <torch/csrc/stable/library.h>

#include "common/ids.cuh"
#include "common/launch.cuh"
#include "degrees.h"

namespace gnnfast {
namespace {

template <class T, class I>
__global__ void __launch_bounds__(kBlock)
    count_kernel(const I* index, int64_t num_members, int64_t num_groups, T* out, longlong2* complaint) {
  const int64_t e = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (e >= num_members) return;
  const int64_t i = index[e];
  if (!inside(i, num_groups)) return complain(complaint, i, num_groups);
  atomicAdd(out + i, T{1});
}

template <class T>
__global__ void __launch_bounds__(kBlock) at_least_one_kernel(int64_t num_groups, T* out) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i < num_groups) out[i] = max(out[i], T{1});
}

Tensor degrees(const Tensor& index, int64_t num_groups, ScalarType dtype) {
  return run_degrees(index, num_groups, dtype, [num_groups](const Tensor& ids, const Tensor& out, auto type, auto zero) {
    const Launch launch(ids);
    const auto* id = static_cast<const typename decltype(type)::type*>(ids.const_data_ptr());
    auto* degree = static_cast<decltype(zero)*>(out.mutable_data_ptr());
    const int64_t num_members = ids.size(0);
    if (num_groups > 0) STD_CUDA_CHECK(cudaMemsetAsync(degree, 0, num_groups * sizeof zero, launch.stream));
    if (num_members > 0) {
      count_kernel<<<blocks_for(num_members), kBlock, 0, launch.stream>>>(id, num_members, num_groups, degree, complaints());
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
    if (num_groups > 0) {
      at_least_one_kernel<<<blocks_for(num_groups), kBlock, 0, launch.stream>>>(num_groups, degree);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) { m.impl("degrees", TORCH_BOX(&degrees)); }

}  // namespace gnnfast
