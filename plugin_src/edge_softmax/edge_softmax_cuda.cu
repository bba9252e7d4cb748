// CUDA edge softmax: some lanes per row and heads, of which neighbours hold heads of a slot, as many as a power of two that
// divides their number, so that loads and stores are of whole lines (128 heads, one apart: 9.2 ms for 1.2 GB). The running
// maximum and sum of each lane are merged by shuffles; a second pass computes the scores again, whose parts are then in the L2
// cache, and writes. Rows for which the schedule wants a block get one. Moves col and the result once, and the parts.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "common/launch.cuh"
#include "common/vec.cuh"
#include "edge_softmax.h"

namespace gnnfast {
namespace {

constexpr int kThreads = 512, kUnroll = 4;

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

// `together` heads of a slot lie in neighbouring lanes. Blocks that come first take a long row of the schedule and so many of
// its heads each, others a row and so many heads with `lanes`.
template <class T, bool BACKWARD>
__global__ void __launch_bounds__(kThreads) edge_softmax_kernel(const EdgeSoftmaxArgs p, int lanes, int together) {
  using A = acc_t<T>;
  const int4* items = reinterpret_cast<const int4*>(p.m.schedule);
  const int4 counts = count_items(p.m);
  const int64_t per_row = p.heads / together, for_block = p.m.num_block_items * per_row;
  A* to_dst = static_cast<A*>(p.to_dst);
  auto share = [&](int64_t row, int64_t task, int lane, int of) {
    return Share<T>(p, row, task % per_row * together + lane % together, lane / together, of / together);
  };
  if (blockIdx.x >= for_block) {
    const int64_t task = ((blockIdx.x - for_block) * kThreads + threadIdx.x) / lanes, id = counts.z + task / per_row;
    const int t = static_cast<int>(threadIdx.x % lanes);
    const bool exists = id < counts.x;
    const Share<T> row = share(exists ? __ldg(items + id).x : 0, task, t, lanes);
    if constexpr (BACKWARD) {
      A total = exists ? row.dot() : A{0};
      for (int o = together; o < lanes; o <<= 1) total += __shfl_xor_sync(kAllLanes, total, o);
      A sum = exists ? row.write_gradient(total) : A{0};
      for (int o = together; o < lanes; o <<= 1) sum += __shfl_xor_sync(kAllLanes, sum, o);
      if (exists && to_dst && t < together) to_dst[row.row * p.heads + row.head] = sum;
    } else {
      Running<A> found;
      if (exists) found = row.look();
      for (int o = together; o < lanes; o <<= 1)
        found.merge(__shfl_xor_sync(kAllLanes, found.most, o), __shfl_xor_sync(kAllLanes, found.sum, o));
      if (exists) row.write(found);
    }
    return;
  }

  const int64_t id = blockIdx.x / per_row;
  if (id >= counts.z) return;
  const int4 item = __ldg(items + id);
  if (id < counts.y && item.w <= 0) return;  // a piece of a row, which the block of its first one takes as a whole
  __shared__ A shared_most[kThreads / kWarp][kWarp], shared_sum[kThreads / kWarp][kWarp];
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
  const Share<T> row = share(item.x, blockIdx.x, thread, kThreads);
  Running<A> found;
  if constexpr (BACKWARD) {
    found.sum = row.dot();
    found.sum = row.write_gradient(merge(found, true).sum);
    found.sum = merge(found, true).sum;
    if (to_dst && thread < together) to_dst[row.row * p.heads + row.head] = found.sum;
  } else {
    row.write(merge(row.look(), false));
  }
}

}  // namespace

void Cuda::edge_softmax(const EdgeSoftmaxArgs& args, const Tensor& ref) {
  const Launch launch(ref);
  const int together = static_cast<int>(std::min<int64_t>(kWarp, args.heads & -args.heads));  // the lowest bit that is set
  int lanes = together;
  while (lanes < kWarp && int64_t{lanes} / together * 2 * args.m.num_rows <= args.m.num_edges) lanes *= 2;
  const int64_t tasks = (args.m.num_items - args.m.num_block_items) * (args.heads / together), per_block = kThreads / lanes;
  const int64_t blocks = args.m.num_block_items * (args.heads / together) + (tasks + per_block - 1) / per_block;
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
