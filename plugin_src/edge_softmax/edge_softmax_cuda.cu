// CUDA edge softmax: a few lanes per row and head. The running maximum and sum of each lane are merged by shuffles; a second
// pass computes the scores again, whose parts are then in the L2 cache, and writes. Rows that are too long for that wait until
// the block has done all others and are then shared by all of its threads, one after the other. Moves col and the result once,
// and the parts.
#include <torch/csrc/stable/library.h>

#include "common/launch.cuh"
#include "common/vec.cuh"
#include "edge_softmax.h"

namespace gnnfast {
namespace {

constexpr int kThreads = 512, kLongPerLane = 64;  // a longer share of a lane is left to the block

template <class A>
struct Running {
  A most = -INFINITY, sum = 0;

  __device__ void add(A s) {
    if (s > most) {
      sum = sum * exp(most - s) + 1;
      most = s;
    } else {
      sum += s == -INFINITY ? A{0} : exp(s - most);  // NaN stays
    }
  }
  __device__ void merge(A other, A other_sum) {
    const A top = max(most, other);
    const A mine = most == top ? sum : sum * exp(most - top), theirs = other == top ? other_sum : other_sum * exp(other - top);
    most = top, sum = mine + theirs;
  }
  // What a score is multiplied by after exp(s - most).
  __device__ A over() const { return most == INFINITY ? A{NAN} : A{1} / sum; }
};

// One row and head: from `first` on, every `step`-th slot.
template <class T>
struct Row {
  using A = acc_t<T>;
  const EdgeSoftmaxArgs& p;
  int64_t begin, end, head;
  A of_row, slope;

  __device__ Row(const EdgeSoftmaxArgs& args, int64_t row, int64_t h)
      : p(args), begin(args.m.rowptr[row]), end(args.m.rowptr[row + 1]), head(h), slope(static_cast<A>(args.slope)) {
    of_row = p.dst ? to_acc(__ldg(static_cast<const T*>(p.dst) + row * p.heads + h)) : A{0};
  }
  __device__ int64_t at(int64_t slot) const { return (p.m.perm ? int64_t{__ldg(p.m.perm + slot)} : slot) * p.heads + head; }
  __device__ A raw(int64_t slot) const {
    A s = of_row;
    if (p.score) s += to_acc(__ldg(static_cast<const T*>(p.score) + at(slot)));
    if (p.src) s += to_acc(__ldg(static_cast<const T*>(p.src) + int64_t{__ldg(p.m.col + slot)} * p.heads + head));
    return s;
  }
  __device__ A score(int64_t slot) const {
    const A s = raw(slot);
    return s > 0 ? s : slope * s;
  }
  __device__ Running<A> look(int64_t first, int64_t step) const {
    Running<A> found;
    for (int64_t slot = begin + first; slot < end; slot += step) found.add(score(slot));
    return found;
  }
  __device__ void write(const Running<A>& of, int64_t first, int64_t step) const {
    const A over = of.over();
    for (int64_t slot = begin + first; slot < end; slot += step)
      static_cast<T*>(p.out)[at(slot)] = from_acc<T>(exp(score(slot) - of.most) * over);
  }
  __device__ A dot(int64_t first, int64_t step) const {
    A total = 0;
    for (int64_t slot = begin + first; slot < end; slot += step) {
      const int64_t i = at(slot);
      total += to_acc(__ldg(static_cast<const T*>(p.prob) + i)) * to_acc(__ldg(static_cast<const T*>(p.grad) + i));
    }
    return total;
  }
  __device__ void write_gradient(A total, int64_t first, int64_t step) const {
    for (int64_t slot = begin + first; slot < end; slot += step) {
      const int64_t i = at(slot);
      const A factor = slope == 1 || raw(slot) > 0 ? A{1} : slope;
      const A prob = to_acc(__ldg(static_cast<const T*>(p.prob) + i)), grad = to_acc(__ldg(static_cast<const T*>(p.grad) + i));
      static_cast<T*>(p.out)[i] = from_acc<T>(prob * (grad - total) * factor);
    }
  }
};

template <class T, bool BACKWARD>
__global__ void __launch_bounds__(kThreads) edge_softmax_kernel(const EdgeSoftmaxArgs p, int lanes) {
  using A = acc_t<T>;
  __shared__ int64_t waiting[kThreads];
  __shared__ A shared_most[kThreads / kWarp], shared_sum[kThreads / kWarp];
  __shared__ int num_waiting;
  if (threadIdx.x == 0) num_waiting = 0;
  __syncthreads();
  const int64_t tasks = p.m.num_rows * p.heads, task = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / lanes;
  const int t = static_cast<int>(threadIdx.x % lanes);
  const bool exists = task < tasks;
  const Row<T> row(p, exists ? task / p.heads : 0, exists ? task % p.heads : 0);
  const bool too_long = row.end - row.begin > int64_t{lanes} * kLongPerLane;
  const bool mine = exists && !too_long;
  if (exists && too_long && t == 0) waiting[atomicAdd(&num_waiting, 1)] = task;
  if constexpr (BACKWARD) {
    A total = mine ? row.dot(t, lanes) : A{0};
    for (int o = 1; o < lanes; o <<= 1) total += __shfl_xor_sync(kAllLanes, total, o);
    if (mine) row.write_gradient(total, t, lanes);
  } else {
    Running<A> found;
    if (mine) found = row.look(t, lanes);
    for (int o = 1; o < lanes; o <<= 1)
      found.merge(__shfl_xor_sync(kAllLanes, found.most, o), __shfl_xor_sync(kAllLanes, found.sum, o));
    if (mine) row.write(found, t, lanes);
  }
  __syncthreads();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int i = 0; i < num_waiting; ++i) {  // each is independent of the others, so that their order does not matter
    const Row<T> one(p, waiting[i] / p.heads, waiting[i] % p.heads);
    Running<A> found;
    if constexpr (BACKWARD)
      found.sum = one.dot(threadIdx.x, kThreads);
    else
      found = one.look(threadIdx.x, kThreads);
    for (int o = 1; o < kWarp; o <<= 1) {
      const A most = __shfl_xor_sync(kAllLanes, found.most, o), sum = __shfl_xor_sync(kAllLanes, found.sum, o);
      if constexpr (BACKWARD)
        found.sum += sum;
      else
        found.merge(most, sum);
    }
    if (lane == 0) shared_most[warp] = found.most, shared_sum[warp] = found.sum;
    __syncthreads();
    found = Running<A>();
    for (int w = 0; w < kThreads / kWarp; ++w) {
      if constexpr (BACKWARD)
        found.sum += shared_sum[w];
      else
        found.merge(shared_most[w], shared_sum[w]);
    }
    if constexpr (BACKWARD)
      one.write_gradient(found.sum, threadIdx.x, kThreads);
    else
      one.write(found, threadIdx.x, kThreads);
    __syncthreads();
  }
}

}  // namespace

void Cuda::edge_softmax(const EdgeSoftmaxArgs& args, const Tensor& ref) {
  const Launch launch(ref);
  int lanes = 1;
  while (lanes < kWarp && int64_t{lanes} * 2 * args.m.num_rows <= args.m.num_edges) lanes *= 2;
  const int64_t tasks = args.m.num_rows * args.heads, per_block = kThreads / lanes,
                blocks = (tasks + per_block - 1) / per_block;
  GNNFAST_CHECK(blocks <= 2147483647, tasks, " rows times heads are more than one CUDA launch can start");
  dispatch_cuda(dtype_of("the scores", ref), [&](auto type) {
    using T = typename decltype(type)::type;
    if (args.prob)
      edge_softmax_kernel<T, true><<<static_cast<unsigned>(blocks), kThreads, 0, launch.stream>>>(args, lanes);
    else
      edge_softmax_kernel<T, false><<<static_cast<unsigned>(blocks), kThreads, 0, launch.stream>>>(args, lanes);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("edge_softmax", TORCH_BOX(&edge_softmax<Cuda>));
  m.impl("edge_softmax_backward", TORCH_BOX(&edge_softmax_backward<Cuda>));
}

}  // namespace gnnfast
