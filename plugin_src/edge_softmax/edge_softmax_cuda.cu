// CUDA edge softmax: some lanes per row, of which neighbours hold the heads of a slot where these are a power of two, so that
// loads and stores are of whole lines; else some lanes per row and head. The running maximum and sum of each lane are merged by
// shuffles; a second pass computes the scores again, whose parts are then in the L2 cache, and writes. Rows that are too long
// for that wait until the block has done all others and are then shared by all of its threads, one after the other. Moves col
// and the result once, and the parts.
#include <torch/csrc/stable/library.h>

#include "common/launch.cuh"
#include "common/vec.cuh"
#include "edge_softmax.h"

namespace gnnfast {
namespace {

constexpr int kThreads = 512, kUnroll = 4, kLongPerLane = 64;  // a longer share of a lane is left to the block

template <class A>
struct Running {
  A most = -INFINITY, sum = 0;

  __device__ void add(const A (&s)[kUnroll]) {
    A top = most;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) top = max(top, s[i]);  // of a number and NaN the number
    if (top > most) sum *= exp(most - top), most = top;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) sum += s[i] == -INFINITY ? A{0} : exp(s[i] - most);  // NaN stays, and infinity becomes it
  }
  __device__ void merge(A other, A other_sum) {
    const A top = max(most, other);
    const A mine = most == top ? sum : sum * exp(most - top), theirs = other == top ? other_sum : other_sum * exp(other - top);
    most = top, sum = mine + theirs;
  }
};

// The slots of one row that a lane takes for one head: from `first` on, every `step`-th.
template <class T>
struct Share {
  using A = acc_t<T>;
  const EdgeSoftmaxArgs& p;
  int64_t row, begin, end, head;
  int step;
  A of_row, slope;

  __device__ Share(const EdgeSoftmaxArgs& args, int64_t row_, int64_t h, int first, int step_)
      : p(args),
        row(row_),
        begin(args.m.rowptr[row_] + first),
        end(args.m.rowptr[row_ + 1]),
        head(h),
        step(step_),
        slope(static_cast<A>(args.slope)) {
    of_row = p.dst ? to_acc(__ldg(static_cast<const T*>(p.dst) + row * p.heads + h)) : A{0};
  }
  __device__ int64_t at(int64_t slot) const { return (p.m.perm ? int64_t{__ldg(p.m.perm + slot)} : slot) * p.heads + head; }
  __device__ A raw(int64_t slot) const {
    A s = of_row;
    if (p.score) s += to_acc(__ldg(static_cast<const T*>(p.score) + at(slot)));
    if (p.src) s += to_acc(__ldg(static_cast<const T*>(p.src) + int64_t{__ldg(p.m.col + slot)} * p.heads + head));
    return s;
  }
  // Calls f with the first of a few slots at a time, so that their loads are in flight together.
  template <class F>
  __device__ void each(const F& f) const {
    for (int64_t base = begin; base < end; base += int64_t{step} * kUnroll) f(base);
  }
  __device__ bool has(int64_t slot) const { return slot < end; }
  __device__ Running<A> look() const {
    Running<A> found;
    each([&](int64_t base) {
      A s[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t slot = base + int64_t{i} * step;
        const A v = has(slot) ? raw(slot) : -INFINITY;
        s[i] = v > 0 ? v : has(slot) ? slope * v : v;
      }
      found.add(s);
    });
    return found;
  }
  __device__ void write(const Running<A>& of) const {
    const A over = A{1} / of.sum;
    each([&](int64_t base) {
      A s[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t slot = base + int64_t{i} * step;
        s[i] = has(slot) ? raw(slot) : A{0};
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t slot = base + int64_t{i} * step;
        if (has(slot)) static_cast<T*>(p.out)[at(slot)] = from_acc<T>(exp((s[i] > 0 ? s[i] : slope * s[i]) - of.most) * over);
      }
    });
  }
  __device__ A dot() const {
    A total = 0;
    each([&](int64_t base) {
      A prob[kUnroll], grad[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t slot = base + int64_t{i} * step, place = has(slot) ? at(slot) : 0;
        prob[i] = has(slot) ? to_acc(__ldg(static_cast<const T*>(p.prob) + place)) : A{0};
        grad[i] = has(slot) ? to_acc(__ldg(static_cast<const T*>(p.grad) + place)) : A{0};
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) total += prob[i] * grad[i];
    });
    return total;
  }
  // Returns the sum of what it writes.
  __device__ A write_gradient(A total) const {
    A sum = 0;
    each([&](int64_t base) {
      A prob[kUnroll], grad[kUnroll], s[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t slot = base + int64_t{i} * step, place = has(slot) ? at(slot) : 0;
        prob[i] = has(slot) ? to_acc(__ldg(static_cast<const T*>(p.prob) + place)) : A{0};
        grad[i] = has(slot) ? to_acc(__ldg(static_cast<const T*>(p.grad) + place)) : A{0};
        s[i] = slope != 1 && has(slot) ? raw(slot) : A{1};
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t slot = base + int64_t{i} * step;
        const A found = prob[i] * (grad[i] - total) * (s[i] > 0 ? A{1} : slope);
        if (has(slot)) static_cast<T*>(p.out)[at(slot)] = from_acc<T>(found), sum += found;
      }
    });
    return sum;
  }
};

// `together` heads of a slot lie in neighbouring lanes: all of them, or 1, and then a task is a row and head.
template <class T, bool BACKWARD>
__global__ void __launch_bounds__(kThreads) edge_softmax_kernel(const EdgeSoftmaxArgs p, int lanes, int together) {
  using A = acc_t<T>;
  __shared__ int64_t waiting[kThreads];
  __shared__ A shared_most[kThreads / kWarp][kWarp], shared_sum[kThreads / kWarp][kWarp];
  __shared__ int num_waiting;
  if (threadIdx.x == 0) num_waiting = 0;
  __syncthreads();
  const int64_t per_row = p.heads / together, tasks = p.m.num_rows * per_row;
  const int64_t task = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / lanes;
  const int t = static_cast<int>(threadIdx.x % lanes);
  const bool exists = task < tasks;
  auto share = [&](int64_t which, int lane, int of) {
    return Share<T>(p, which / per_row, which % per_row + lane % together, lane / together, of / together);
  };
  const Share<T> row = share(exists ? task : 0, t, lanes);
  const bool too_long = row.end - p.m.rowptr[row.row] > int64_t{lanes / together} * kLongPerLane;
  const bool mine = exists && !too_long;
  if (exists && too_long && t == 0) waiting[atomicAdd(&num_waiting, 1)] = task;
  A* to_dst = static_cast<A*>(p.to_dst);
  if constexpr (BACKWARD) {
    A total = mine ? row.dot() : A{0};
    for (int o = together; o < lanes; o <<= 1) total += __shfl_xor_sync(kAllLanes, total, o);
    A sum = mine ? row.write_gradient(total) : A{0};
    for (int o = together; o < lanes; o <<= 1) sum += __shfl_xor_sync(kAllLanes, sum, o);
    if (mine && to_dst && t < together) to_dst[row.row * p.heads + row.head] = sum;
  } else {
    Running<A> found;
    if (mine) found = row.look();
    for (int o = together; o < lanes; o <<= 1)
      found.merge(__shfl_xor_sync(kAllLanes, found.most, o), __shfl_xor_sync(kAllLanes, found.sum, o));
    if (mine) row.write(found);
  }
  __syncthreads();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, thread = static_cast<int>(threadIdx.x);
  // Merges over the block, for each head.
  auto merge = [&](Running<A> found, bool sums) {
    for (int o = together; o < kWarp; o <<= 1) {
      const A most = __shfl_xor_sync(kAllLanes, found.most, o), sum = __shfl_xor_sync(kAllLanes, found.sum, o);
      sums ? void(found.sum += sum) : found.merge(most, sum);
    }
    __syncthreads();  // the last values have been read
    shared_most[warp][lane] = found.most, shared_sum[warp][lane] = found.sum;
    __syncthreads();
    found = Running<A>();
    for (int w = 0; w < kThreads / kWarp; ++w)
      sums ? void(found.sum += shared_sum[w][lane % together])
           : found.merge(shared_most[w][lane % together], shared_sum[w][lane % together]);
    return found;
  };
  for (int i = 0; i < num_waiting; ++i) {  // each is independent of the others, so that their order does not matter
    const Share<T> one = share(waiting[i], thread, kThreads);
    Running<A> found;
    if constexpr (BACKWARD) {
      found.sum = one.dot();
      found.sum = one.write_gradient(merge(found, true).sum);
      found.sum = merge(found, true).sum;
      if (to_dst && thread < together) to_dst[one.row * p.heads + one.head] = found.sum;
    } else {
      one.write(merge(one.look(), false));
    }
  }
}

}  // namespace

void Cuda::edge_softmax(const EdgeSoftmaxArgs& args, const Tensor& ref) {
  const Launch launch(ref);
  const bool power = args.heads <= kWarp && (args.heads & (args.heads - 1)) == 0;
  const int together = power ? static_cast<int>(args.heads) : 1;
  int lanes = together;
  while (lanes < kWarp && int64_t{lanes} / together * 2 * args.m.num_rows <= args.m.num_edges) lanes *= 2;
  const int64_t tasks = args.m.num_rows * (args.heads / together), per_block = kThreads / lanes;
  const int64_t blocks = (tasks + per_block - 1) / per_block;
  GNNFAST_CHECK(blocks <= 2147483647, tasks, " rows times heads are more than one CUDA launch can start");
  dispatch_cuda(dtype_of("the scores", ref), [&](auto type) {
    using T = typename decltype(type)::type;
    const unsigned grid = static_cast<unsigned>(blocks);
    if (args.prob)
      edge_softmax_kernel<T, true><<<grid, kThreads, 0, launch.stream>>>(args, lanes, together);
    else
      edge_softmax_kernel<T, false><<<grid, kThreads, 0, launch.stream>>>(args, lanes, together);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("edge_softmax", TORCH_BOX(&edge_softmax<Cuda>));
  m.impl("edge_softmax_backward", TORCH_BOX(&edge_softmax_backward<Cuda>));
}

}  // namespace gnnfast
