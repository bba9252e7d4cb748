// CUDA edge softmax: some lanes per row and heads, of which neighbours hold heads of a slot, as many as a power of two that
// divides their number, so that loads and stores are of whole lines (128 heads, one apart: 9.2 ms for 1.2 GB). The running
// maximum and sum of each lane are merged by shuffles; a second pass writes, for which a lane keeps its first scores and
// computes the others again, whose parts are then in the L2 cache. Rows for which the schedule wants a block get one. Moves col
// and the result once, and the parts.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "common/launch.cuh"
#include "common/vec.cuh"
#include "edge_softmax.h"

namespace gnnfast {
namespace {

constexpr int kThreads = 512, kUnroll = 4, kSector = 32;  // bytes that a load moves at least

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
  // A few slots at a time, whose loads are in flight together: the edges, -1 where the row ends, and what they have.
  struct Scores {
    int32_t edge[kUnroll];
    A s[kUnroll];
  };
  struct Gradients {
    int32_t edge[kUnroll];
    A prob[kUnroll], grad[kUnroll];
  };
  __device__ int64_t slot(int64_t base, int i) const { return base + int64_t{i} * step; }
  __device__ int32_t edge_at(int64_t slot) const {
    return slot >= end ? -1 : p.m.perm ? __ldg(p.m.perm + slot) : static_cast<int32_t>(slot);
  }
  __device__ int64_t at(int32_t edge) const { return int64_t{edge} * p.heads + head; }
  __device__ A of_edge(const void* t, int32_t edge) const { return to_acc(__ldg(static_cast<const T*>(t) + at(edge))); }
  __device__ A raw(int64_t slot, int32_t edge) const {
    A s = of_row;
    if (p.score) s += of_edge(p.score, edge);
    if (p.src) s += of_edge(p.src, __ldg(p.m.col + slot));
    return s;
  }
  __device__ A bent(A s) const { return s > 0 ? s : slope * s; }

  __device__ Scores scores(int64_t base) const {
    Scores found;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) found.edge[i] = edge_at(slot(base, i));
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
      found.s[i] = found.edge[i] >= 0 ? bent(raw(slot(base, i), found.edge[i])) : static_cast<A>(-INFINITY);
    return found;
  }
  __device__ Gradients gradients(int64_t base) const {
    Gradients found;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) found.edge[i] = edge_at(slot(base, i));
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      found.prob[i] = found.edge[i] >= 0 ? of_edge(p.prob, found.edge[i]) : A{0};
      found.grad[i] = found.edge[i] >= 0 ? of_edge(p.grad, found.edge[i]) : A{0};
    }
    return found;
  }
  // Calls f with the first slots, which a lane keeps between passes, and then with what `load` gives of the others.
  template <class Slots, class Load, class F>
  __device__ void each(const Slots& first, const Load& load, const F& f) const {
    f(first, begin);
    for (int64_t base = slot(begin, kUnroll); base < end; base += int64_t{step} * kUnroll) f(load(base), base);
  }

  __device__ Running<A> look(const Scores& first) const {
    Running<A> found;
    each(first, [&](int64_t base) { return scores(base); }, [&](const Scores& of, int64_t) { found.add(of.s); });
    return found;
  }
  __device__ void write(const Scores& first, const Running<A>& all) const {
    const A over = A{1} / all.sum;
    each(
        first, [&](int64_t base) { return scores(base); },
        [&](const Scores& of, int64_t) {
#pragma unroll
          for (int i = 0; i < kUnroll; ++i)
            if (of.edge[i] >= 0) static_cast<T*>(p.out)[at(of.edge[i])] = from_acc<T>(exp(of.s[i] - all.most) * over);
        });
  }
  __device__ A dot(const Gradients& first) const {
    A total = 0;
    each(
        first, [&](int64_t base) { return gradients(base); },
        [&](const Gradients& of, int64_t) {
#pragma unroll
          for (int i = 0; i < kUnroll; ++i) total += of.prob[i] * of.grad[i];
        });
    return total;
  }
  // Returns the sum of what it writes.
  __device__ A write_gradient(const Gradients& first, A total) const {
    A sum = 0;
    each(
        first, [&](int64_t base) { return gradients(base); },
        [&](const Gradients& of, int64_t base) {
          A factor[kUnroll];
#pragma unroll
          for (int i = 0; i < kUnroll; ++i)
            factor[i] = slope == 1 || of.edge[i] < 0 || raw(slot(base, i), of.edge[i]) > 0 ? A{1} : slope;
#pragma unroll
          for (int i = 0; i < kUnroll; ++i) {
            const A found = of.prob[i] * (of.grad[i] - total) * factor[i];
            if (of.edge[i] >= 0) static_cast<T*>(p.out)[at(of.edge[i])] = from_acc<T>(found), sum += found;
          }
        });
    return sum;
  }
};

// `together` heads of a slot lie in neighbouring lanes, of long rows `in_block`. Blocks that come first take a long row of the
// schedule and so many of its heads each, others rows and so many heads with `lanes` for each.
template <class T, bool BACKWARD>
__global__ void __launch_bounds__(kThreads)
    edge_softmax_kernel(const EdgeSoftmaxArgs p, int lanes, int together, int in_block) {
  using A = acc_t<T>;
  const int4* items = reinterpret_cast<const int4*>(p.m.schedule);
  const int4 counts = count_items(p.m);
  const int64_t for_block = p.m.num_block_items * (p.heads / in_block);
  if (blockIdx.x < for_block) together = in_block;
  const int64_t per_row = p.heads / together;
  A* to_dst = static_cast<A*>(p.to_dst);
  auto share = [&](int64_t row, int64_t task, int lane, int of) {
    return Share<T>(p, row, task % per_row * together + lane % together, lane / together, of / together);
  };
  if (blockIdx.x >= for_block) {
    const int64_t task = ((blockIdx.x - for_block) * kThreads + threadIdx.x) / lanes, id = counts.z + task / per_row;
    const int t = static_cast<int>(threadIdx.x % lanes);
    const bool exists = id < counts.x;
    Share<T> row = share(exists ? __ldg(items + id).x : 0, task, t, lanes);
    if (!exists) row.end = row.begin;
    if constexpr (BACKWARD) {
      const auto first = row.gradients(row.begin);
      A total = row.dot(first);
      for (int o = together; o < lanes; o <<= 1) total += __shfl_xor_sync(kAllLanes, total, o);
      A sum = row.write_gradient(first, total);
      for (int o = together; o < lanes; o <<= 1) sum += __shfl_xor_sync(kAllLanes, sum, o);
      if (exists && to_dst && t < together) to_dst[row.row * p.heads + row.head] = sum;
    } else {
      const auto first = row.scores(row.begin);
      Running<A> found = row.look(first);
      for (int o = together; o < lanes; o <<= 1)
        found.merge(__shfl_xor_sync(kAllLanes, found.most, o), __shfl_xor_sync(kAllLanes, found.sum, o));
      row.write(first, found);
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
    const auto first = row.gradients(row.begin);
    found.sum = row.dot(first);
    found.sum = row.write_gradient(first, merge(found, true).sum);
    found.sum = merge(found, true).sum;
    if (to_dst && thread < together) to_dst[row.row * p.heads + row.head] = found.sum;
  } else {
    const auto first = row.scores(row.begin);
    row.write(first, merge(row.look(first), false));
  }
}

}  // namespace

void Cuda::edge_softmax(const EdgeSoftmaxArgs& args, const Tensor& ref) {
  const Launch launch(ref);
  const int together = static_cast<int>(std::min<int64_t>(kWarp, args.heads & -args.heads));  // the lowest bit that is set
  int lanes = together;
  while (lanes < kWarp && int64_t{lanes} / together * 2 * args.m.num_rows <= args.m.num_edges) lanes *= 2;
  const int64_t tasks = (args.m.num_items - args.m.num_block_items) * (args.heads / together), per_block = kThreads / lanes;
  dispatch_cuda(dtype_of("the scores", ref), [&](auto type) {
    using T = typename decltype(type)::type;
    // All wait for the longest row: a block reads no more of a slot than the sector that it must.
    const int in_block = std::min(together, kSector / static_cast<int>(sizeof(T)));
    const int64_t blocks = args.m.num_block_items * (args.heads / in_block) + (tasks + per_block - 1) / per_block;
    GNNFAST_CHECK(blocks <= 2147483647, tasks, " rows times heads are more than one CUDA launch can start");
    const unsigned grid = static_cast<unsigned>(blocks);
    if (args.prob)
      edge_softmax_kernel<T, true><<<grid, kThreads, 0, launch.stream>>>(args, lanes, together, in_block);
    else
      edge_softmax_kernel<T, false><<<grid, kThreads, 0, launch.stream>>>(args, lanes, together, in_block);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("edge_softmax", TORCH_BOX(&edge_softmax<Cuda>));
  m.impl("edge_softmax_backward", TORCH_BOX(&edge_softmax_backward<Cuda>));
}

}  // namespace gnnfast
