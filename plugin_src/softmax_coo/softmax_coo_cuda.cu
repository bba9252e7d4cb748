// CUDA softmax over groups: a thread has a number, or 16 bytes of them, and groups are reduced by atomics, within a warp first
// where many of its rows are of one group: in sorted lists of large groups (readouts), and at a hub, 32 atomics of one address
// would follow each other. Numbers and the ids of their groups are read three times and numbers written once (forward);
// PyG's ten operations pass over them some fourteen times. On small graphs it is one call of the host in place of a dozen.
#include <torch/csrc/stable/library.h>

#include "common/atomics.cuh"
#include "common/ids.cuh"
#include "common/launch.cuh"
#include "common/vec.cuh"
#include "softmax_coo.h"

namespace gnnfast {
namespace {

enum Step { kMost, kSum, kDivide, kDot, kGradient };

template <class T>
struct Groups {
  typename Key<T>::type* most;  // [num_groups, width], of keys
  T* sum;                       // [num_groups, width]
};

// The group that a quarter of a warp's lanes or more have in common. Four lanes are tried, at rows of both parities, as lists
// may alternate between groups.
struct Common {
  unsigned lanes = 0;  // that have it; 0 if there is none, or not each vector of features at every width-th lane
  int first, width;

  __device__ Common(int64_t group, int64_t width_) : width(static_cast<int>(width_)) {
    if (width_ > kWarp / 2 || (width_ & (width_ - 1)) != 0 || __activemask() != kAllLanes) return;
    constexpr unsigned kTried = 0x1f140d00;  // lanes 0, 13, 20 and 31
    for (int n = 0; n < 4; ++n) {
      lanes = __ballot_sync(kAllLanes, group == __shfl_sync(kAllLanes, group, kTried >> 8 * n & 0xff));
      first = __ffs(lanes) - 1;
      if (__popc(lanes) >= max(kWarp / 4, 2 * width)) return;
    }
    lanes = 0;
  }

  // `v` over the rows of the group by `both`, at its first lanes; of others what it was. `none` is what changes nothing.
  template <int N, class V, class F>
  __device__ void reduce(V (&v)[N], V none, const F& both) const {
    if (lanes == 0) return;
    const int lane = threadIdx.x % kWarp;
    const bool mine = lanes >> lane & 1;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      V all = mine ? v[n] : none;
      for (int o = kWarp / 2; o >= width; o /= 2) all = both(all, __shfl_xor_sync(kAllLanes, all, o));
      if (mine) v[n] = all;
    }
  }

  // Whether a lane has no part in the group, or its sum or maximum.
  __device__ bool writes() const {
    const int lane = threadIdx.x % kWarp;
    return !(lanes >> lane & 1) || lane < first + width;
  }
};

template <Step STEP, class T, class I, int VEC>
__global__ void __launch_bounds__(kBlock) step_kernel(const SoftmaxCooArgs p, const Groups<T> groups, longlong2* complaint) {
  using K = typename Key<T>::type;
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x, width = p.width / VEC;
  if (i >= p.num_rows * width) return;
  const longlong2 at = row_and_feature(i, width);
  const int64_t group = static_cast<const I*>(p.index)[at.x], column = group * p.width + at.y * VEC;
  T v[VEC] = {}, *out = static_cast<T*>(p.out) + i * VEC;
  if (!inside(group, p.num_groups)) {
    if (STEP == kMost || STEP == kDot) complain(complaint, group, p.num_groups);
    if (STEP == kDivide || STEP == kGradient) store_vector(out, v);
    return;
  }
  load_vector<VEC>(v, static_cast<const T*>(p.in) + i * VEC);
  if constexpr (STEP == kMost) {
    K keys[VEC];
#pragma unroll
    for (int n = 0; n < VEC; ++n) keys[n] = to_key(v[n]);
    const Common common(group, width);
    common.reduce(keys, K{0}, [](K a, K b) { return max(a, b); });
    if (common.writes()) raise_to(groups.most + column, keys);
    return;
  }
  T most[VEC], sum[VEC], grad[VEC];
  if (STEP == kSum || STEP == kDivide) load_vector<VEC>(most, reinterpret_cast<const T*>(groups.most + column));
  if (STEP == kDivide || STEP == kGradient) load_vector<VEC>(sum, groups.sum + column);
  if (STEP == kDot || STEP == kGradient) load_vector<VEC>(grad, static_cast<const T*>(p.grad) + i * VEC);
#pragma unroll
  for (int n = 0; n < VEC; ++n) {
    if (STEP == kSum || STEP == kDivide) v[n] = exp(v[n] - from_key(reinterpret_cast<const K(&)[VEC]>(most)[n]));
    if (STEP == kDivide) v[n] /= sum[n] + static_cast<T>(1e-16);
    if (STEP == kDot) v[n] *= grad[n];
    if (STEP == kGradient) v[n] *= grad[n] - sum[n];
  }
  if (STEP == kDivide || STEP == kGradient) return store_vector(out, v);
  const Common common(group, width);
  common.reduce(v, T{0}, [](T a, T b) { return a + b; });
  if (common.writes()) atomic_add(groups.sum + column, v);
}

template <class T, int VEC, Step... STEPS>
void run(const SoftmaxCooArgs& p, const Tensor& index, const Tensor& out) {
  const Launch launch(out);
  const int64_t size = p.num_groups * p.width, threads = p.num_rows * (p.width / VEC);
  if (threads == 0) return;
  const int64_t both = sizeof...(STEPS) == 3 ? 2 : 1;
  const Tensor scratch = make_empty(out, {both * size}, out.scalar_type());
  T* sum = static_cast<T*>(scratch.mutable_data_ptr());
  const Groups<T> groups{reinterpret_cast<typename Key<T>::type*>(sum + size), sum};
  if (size) STD_CUDA_CHECK(cudaMemsetAsync(sum, 0, both * size * sizeof(T), launch.stream));
  dispatch_index("index", index.scalar_type(), [&](auto type) {
    using I = typename decltype(type)::type;
    auto step = [&](auto which) {
      step_kernel<decltype(which)::value, T, I, VEC>
          <<<blocks_for(threads), kBlock, 0, launch.stream>>>(p, groups, complaints());
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
  dispatch_cuda(dtype_of("src", in), [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, acc_t<T>>) {
      const bool vectors = args.width % kVec<T> == 0 && aligned16(args.in) && aligned16(args.grad);
      vectors ? run<T, kVec<T>, STEPS...>(args, index, out) : run<T, 1, STEPS...>(args, index, out);
    }
  });
  return out;
}

Tensor softmax_coo(const Tensor& src, const Tensor& index, int64_t num_groups) {
  return steps<kMost, kSum, kDivide>(as_contiguous(src), nullptr, index, num_groups);
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
