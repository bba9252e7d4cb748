// CUDA softmax over groups: a thread has a number, and groups are reduced by atomics, within a warp first where all its rows
// are of one group: in sorted lists of large groups (readouts) 32 atomics of one address would follow each other. Numbers are
// read three times and written twice (forward), and the ids of their groups read three times; PyG's ten operations pass over
// them some fourteen times. On small graphs it is one call of the host in place of a dozen.
#include <torch/csrc/stable/library.h>

#include "common/ids.cuh"
#include "common/keys.cuh"
#include "common/launch.cuh"
#include "softmax_coo.h"

namespace gnnfast {
namespace {

enum Step { kMost, kExp, kDivide, kDot, kGradient };

template <class T>
struct Groups {
  typename Key<T>::type* most;  // [num_groups, width], of keys
  T* sum;                       // [num_groups, width]
};

// Whether the rows of a warp are all of one group, and each feature is at every width-th lane.
__device__ inline bool shares_group(int64_t group, int64_t width) {
  if (__activemask() != kAllLanes || width > kWarp / 2 || (width & (width - 1)) != 0) return false;
  return __all_sync(kAllLanes, group == __shfl_sync(kAllLanes, group, 0));
}

// Of one group: `v` of each feature over the warp, at the first lanes.
template <class V, class F>
__device__ inline V over_warp(V v, int64_t width, const F& both) {
  for (int o = kWarp / 2; o >= width; o /= 2) v = both(v, __shfl_xor_sync(kAllLanes, v, o));
  return v;
}

template <Step STEP, class T, class I>
__global__ void __launch_bounds__(kBlock) step_kernel(const SoftmaxCooArgs p, const Groups<T> groups, longlong2* complaint) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= p.num_rows * p.width) return;
  const longlong2 at = row_and_feature(i, p.width);
  const int64_t group = static_cast<const I*>(p.index)[at.x], column = group * p.width + at.y;
  const T* in = static_cast<const T*>(p.in);
  T* out = static_cast<T*>(p.out);
  if (!inside(group, p.num_groups)) {
    if (STEP == kMost || STEP == kDot) complain(complaint, group, p.num_groups);
    out[i] = 0;
    return;
  }
  auto add = [&](T v) {
    const bool shared = shares_group(group, p.width);
    if (shared) v = over_warp(v, p.width, [](T a, T b) { return a + b; });
    if (!shared || threadIdx.x % kWarp < p.width) atomicAdd(groups.sum + column, v);
  };
  if constexpr (STEP == kMost) {
    auto key = to_key(in[i]);
    const bool shared = shares_group(group, p.width);
    if (shared) key = over_warp(key, p.width, [](auto a, auto b) { return max(a, b); });
    if (!shared || threadIdx.x % kWarp < p.width) atomicMax(groups.most + column, key);
  } else if constexpr (STEP == kExp) {
    out[i] = exp(in[i] - from_key(groups.most[column]));
    add(out[i]);
  } else if constexpr (STEP == kDivide) {
    out[i] /= groups.sum[column] + static_cast<T>(1e-16);
  } else if constexpr (STEP == kDot) {
    add(in[i] * static_cast<const T*>(p.grad)[i]);
  } else {
    out[i] = in[i] * (static_cast<const T*>(p.grad)[i] - groups.sum[column]);
  }
}

template <class T, Step... STEPS>
void run(const SoftmaxCooArgs& p, const Tensor& index, const Tensor& out) {
  const Launch launch(out);
  const int64_t size = p.num_groups * p.width, threads = p.num_rows * p.width;
  if (threads == 0) return;
  const int64_t both = sizeof...(STEPS) == 3 ? 2 : 1;
  const Tensor scratch = make_empty(out, {both * size}, out.scalar_type());
  T* sum = static_cast<T*>(scratch.mutable_data_ptr());
  const Groups<T> groups{reinterpret_cast<typename Key<T>::type*>(sum + size), sum};
  if (size) STD_CUDA_CHECK(cudaMemsetAsync(sum, 0, both * size * sizeof(T), launch.stream));
  dispatch_index("index", index.scalar_type(), [&](auto type) {
    using I = typename decltype(type)::type;
    auto step = [&](auto which) {
      step_kernel<decltype(which)::value, T, I><<<blocks_for(threads), kBlock, 0, launch.stream>>>(p, groups, complaints());
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    };
    (step(std::integral_constant<Step, STEPS>{}), ...);
  });
}

template <Step... STEPS>
Tensor steps(const Tensor& in, const Tensor* grad, const Tensor& index_, int64_t num_groups) {
  const Tensor index = as_contiguous(index_);
  Tensor out = torch::stable::empty_like(in);
  const SoftmaxCooArgs args = check_softmax_coo(in, grad, index, num_groups, out);
  in.scalar_type() == ScalarType::Float ? run<float, STEPS...>(args, index, out) : run<double, STEPS...>(args, index, out);
  return out;
}

Tensor softmax_coo(const Tensor& src, const Tensor& index, int64_t num_groups) {
  return steps<kMost, kExp, kDivide>(as_contiguous(src), nullptr, index, num_groups);
}

Tensor softmax_coo_backward(const Tensor& prob, const Tensor& grad_, const Tensor& index, int64_t num_groups) {
  const Tensor grad = as_contiguous(grad_);
  return steps<kDot, kGradient>(as_contiguous(prob), &grad, index, num_groups);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("softmax_coo", TORCH_BOX(&softmax_coo));
  m.impl("softmax_coo_backward", TORCH_BOX(&softmax_coo_backward));
}

}  // namespace gnnfast
