// CUDA edge softmax: some lanes per row and heads. A lane holds VEC heads, a few of them where their number allows, and
// neighbours those of the same slot, as many as a power of two that divides their number, so that loads and stores are of whole
// lines (128 heads, one apart: 9.2 ms for 1.2 GB). The running maximum and sum of each lane are merged by shuffles; a second
// pass writes, for which a lane keeps its first scores and computes the others again, whose parts are then in the L2 cache.
// Rows for which the schedule wants a block get one for each sector of heads: all others wait for the longest row. Moves col
// and the result once, and the parts.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "common/launch.cuh"
#include "common/vec.cuh"
#include "edge_softmax.h"

namespace gnnfast {
namespace {

constexpr int kThreads = 256, kUnroll = 4, kSector = 32;  // bytes that a load moves at least

template <class A>
struct Running {
  A most = -INFINITY, sum = 0;

  __device__ void merge(A other, A other_sum) {
    const A top = max(most, other);
    const A mine = most == top ? sum : sum * exp(most - top), theirs = other == top ? other_sum : other_sum * exp(other - top);
    most = top, sum = mine + theirs;
  }
};

// The slots of one row that a lane takes for VEC heads: from `first` on, every `step`-th.
template <class T, int VEC>
struct Share {
  using A = acc_t<T>;
  const EdgeSoftmaxArgs& p;
  int64_t row, begin, end, head;
  int step;
  A of_row[VEC], slope;

  __device__ Share(const EdgeSoftmaxArgs& args, int64_t row_, int64_t h, int first, int step_)
      : p(args),
        row(row_),
        begin(args.m.rowptr[row_] + first),
        end(args.m.rowptr[row_ + 1]),
        head(h),
        step(step_),
        slope(static_cast<A>(args.slope)) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) of_row[v] = 0;
    if (p.dst) load_vector<VEC>(of_row, static_cast<const T*>(p.dst) + row * p.heads + head);
  }
  // A few slots at a time, whose loads are in flight together: the edges, -1 where the row ends, and what they have.
  struct Scores {
    int32_t edge[kUnroll];
    A s[kUnroll][VEC];
  };
  struct Gradients {
    int32_t edge[kUnroll];
    A prob[kUnroll][VEC], grad[kUnroll][VEC];
  };
  __device__ int64_t slot(int64_t base, int i) const { return base + int64_t{i} * step; }
  __device__ int32_t edge_at(int64_t slot) const {
    return slot >= end ? -1 : p.m.perm ? __ldg(p.m.perm + slot) : static_cast<int32_t>(slot);
  }
  __device__ int64_t at(int32_t edge) const { return int64_t{edge} * p.heads + head; }
  __device__ void load(A (&v)[VEC], const void* t, int32_t edge) const {
    load_vector<VEC>(v, static_cast<const T*>(t) + at(edge));
  }
  __device__ void raw(A (&s)[VEC], int64_t slot, int32_t edge) const {
    A part[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) s[v] = of_row[v];
    if (p.score) {
      load(part, p.score, edge);
#pragma unroll
      for (int v = 0; v < VEC; ++v) s[v] += part[v];
    }
    if (p.src) {
      load(part, p.src, __ldg(p.m.col + slot));
#pragma unroll
      for (int v = 0; v < VEC; ++v) s[v] += part[v];
    }
  }

  __device__ Scores scores(int64_t base) const {
    Scores found;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) found.edge[i] = edge_at(slot(base, i));
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const bool has = found.edge[i] >= 0;
      if (has) raw(found.s[i], slot(base, i), found.edge[i]);
#pragma unroll
      for (int v = 0; v < VEC; ++v) {
        A& s = found.s[i][v];
        s = !has ? static_cast<A>(-INFINITY) : s > 0 ? s : slope * s;
      }
    }
    return found;
  }
  __device__ Gradients gradients(int64_t base) const {
    Gradients found;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) found.edge[i] = edge_at(slot(base, i));
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) found.prob[i][v] = found.grad[i][v] = 0;
      if (found.edge[i] >= 0) load(found.prob[i], p.prob, found.edge[i]), load(found.grad[i], p.grad, found.edge[i]);
    }
    return found;
  }
  // Calls f with the first slots, which a lane keeps between passes, and then with what `load` gives of the others.
  template <class Slots, class Load, class F>
  __device__ void each(const Slots& first, const Load& load, const F& f) const {
    f(first, begin);
    for (int64_t base = slot(begin, kUnroll); base < end; base += int64_t{step} * kUnroll) f(load(base), base);
  }

  __device__ void look(const Scores& first, Running<A> (&found)[VEC]) const {
    each(
        first, [&](int64_t base) { return scores(base); },
        [&](const Scores& of, int64_t) {
#pragma unroll
          for (int v = 0; v < VEC; ++v) {
            A top = found[v].most;
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) top = max(top, of.s[i][v]);  // of a number and NaN the number
            if (top > found[v].most) found[v].sum *= exp(found[v].most - top), found[v].most = top;
#pragma unroll
            for (int i = 0; i < kUnroll; ++i)  // NaN stays, and infinity becomes it
              found[v].sum += of.s[i][v] == -INFINITY ? A{0} : exp(of.s[i][v] - top);
          }
        });
  }
  __device__ void write(const Scores& first, const Running<A> (&all)[VEC]) const {
    A over[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) over[v] = A{1} / all[v].sum;
    each(
        first, [&](int64_t base) { return scores(base); },
        [&](const Scores& of, int64_t) {
#pragma unroll
          for (int i = 0; i < kUnroll; ++i) {
            A found[VEC];
#pragma unroll
            for (int v = 0; v < VEC; ++v) found[v] = exp(of.s[i][v] - all[v].most) * over[v];
            if (of.edge[i] >= 0) store_vector<VEC>(static_cast<T*>(p.out) + at(of.edge[i]), found);
          }
        });
  }
  __device__ void dot(const Gradients& first, A (&total)[VEC]) const {
    each(
        first, [&](int64_t base) { return gradients(base); },
        [&](const Gradients& of, int64_t) {
#pragma unroll
          for (int i = 0; i < kUnroll; ++i) {
#pragma unroll
            for (int v = 0; v < VEC; ++v) total[v] += of.prob[i][v] * of.grad[i][v];
          }
        });
  }
  // Adds what it writes to `sum`.
  __device__ void write_gradient(const Gradients& first, const A (&total)[VEC], A (&sum)[VEC]) const {
    each(
        first, [&](int64_t base) { return gradients(base); },
        [&](const Gradients& of, int64_t base) {
#pragma unroll
          for (int i = 0; i < kUnroll; ++i) {
            if (of.edge[i] < 0) continue;
            A found[VEC], s[VEC];
            if (slope != 1) raw(s, slot(base, i), of.edge[i]);
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
              found[v] = of.prob[i][v] * (of.grad[i][v] - total[v]) * (slope == 1 || s[v] > 0 ? A{1} : slope);
              sum[v] += found[v];
            }
            store_vector<VEC>(static_cast<T*>(p.out) + at(of.edge[i]), found);
          }
        });
  }
};

// `together` lanes hold the heads of a slot, of long rows `in_block`. Blocks that come first take a long row of the schedule
// and so many of its heads each, others rows and so many heads with `lanes` for each.
template <class T, int VEC, bool BACKWARD>
__global__ void __launch_bounds__(kThreads)
    edge_softmax_kernel(const EdgeSoftmaxArgs p, int lanes, int together, int in_block) {
  using A = acc_t<T>;
  const int4* items = reinterpret_cast<const int4*>(p.m.schedule);
  const int4 counts = count_items(p.m);
  const int64_t units = p.heads / VEC, for_block = p.m.num_block_items * (units / in_block);
  if (blockIdx.x < for_block) together = in_block;
  const int64_t per_row = units / together;
  auto share = [&](int64_t row, int64_t task, int lane, int of) {
    return Share<T, VEC>(p, row, (task % per_row * together + lane % together) * VEC, lane / together, of / together);
  };
  auto store_sum = [&](const Share<T, VEC>& row, const A(&sum)[VEC]) {
    A* to_dst = static_cast<A*>(p.to_dst);
#pragma unroll
    for (int v = 0; v < VEC; ++v)
      if (to_dst) to_dst[row.row * p.heads + row.head + v] = sum[v];
  };
  auto add_up = [&](A(&sum)[VEC], int of) {
    for (int o = together; o < of; o <<= 1) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) sum[v] += __shfl_xor_sync(kAllLanes, sum[v], o);
    }
  };
  auto merge = [&](Running<A>(&found)[VEC], int of) {
    for (int o = together; o < of; o <<= 1) {
#pragma unroll
      for (int v = 0; v < VEC; ++v)
        found[v].merge(__shfl_xor_sync(kAllLanes, found[v].most, o), __shfl_xor_sync(kAllLanes, found[v].sum, o));
    }
  };
  A total[VEC] = {}, sum[VEC] = {};
  Running<A> found[VEC];
  if (blockIdx.x >= for_block) {
    const int64_t task = ((blockIdx.x - for_block) * kThreads + threadIdx.x) / lanes, id = counts.z + task / per_row;
    const int t = static_cast<int>(threadIdx.x % lanes);
    const bool exists = id < counts.x;
    Share<T, VEC> row = share(exists ? __ldg(items + id).x : 0, task, t, lanes);
    if (!exists) row.end = row.begin;
    if constexpr (BACKWARD) {
      const auto first = row.gradients(row.begin);
      row.dot(first, total);
      add_up(total, lanes);
      row.write_gradient(first, total, sum);
      add_up(sum, lanes);
      if (exists && t < together) store_sum(row, sum);
    } else {
      const auto first = row.scores(row.begin);
      row.look(first, found);
      merge(found, lanes);
      row.write(first, found);
    }
    return;
  }

  const int64_t id = blockIdx.x / per_row;
  if (id >= counts.z) return;
  const int4 item = __ldg(items + id);
  if (id < counts.y && item.w <= 0) return;  // a piece of a row, which the block of its first one takes as a whole
  constexpr int kWarps = kThreads / kWarp;
  __shared__ A shared_most[kWarps][kWarp][VEC], shared_sum[kWarps][kWarp][VEC];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, thread = static_cast<int>(threadIdx.x);
  const Share<T, VEC> row = share(item.x, blockIdx.x, thread, kThreads);
  // Over the block, for each head.
  auto add_up_all = [&](A(&sum)[VEC]) {
    add_up(sum, kWarp);
    __syncthreads();  // the last values have been read
#pragma unroll
    for (int v = 0; v < VEC; ++v) shared_sum[warp][lane][v] = sum[v], sum[v] = 0;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) sum[v] += shared_sum[w][lane % together][v];
    }
  };
  if constexpr (BACKWARD) {
    const auto first = row.gradients(row.begin);
    row.dot(first, total);
    add_up_all(total);
    row.write_gradient(first, total, sum);
    add_up_all(sum);
    if (thread < together) store_sum(row, sum);
  } else {
    const auto first = row.scores(row.begin);
    row.look(first, found);
    merge(found, kWarp);
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
      shared_most[warp][lane][v] = found[v].most, shared_sum[warp][lane][v] = found[v].sum;
      found[v] = Running<A>();
    }
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) found[v].merge(shared_most[w][lane % together][v], shared_sum[w][lane % together][v]);
    }
    row.write(first, found);
  }
}

template <class T, int VEC>
void launch_edge_softmax(const EdgeSoftmaxArgs& args, cudaStream_t stream) {
  const int64_t units = args.heads / VEC;
  const int together = static_cast<int>(std::min<int64_t>(kWarp, units & -units));  // the lowest bit that is set
  const int in_block = std::min(together, std::max(1, kSector / static_cast<int>(sizeof(T) * VEC)));
  int lanes = together;
  while (lanes < kWarp && int64_t{lanes} / together * 2 * args.m.num_rows <= args.m.num_edges) lanes *= 2;
  const int64_t tasks = (args.m.num_items - args.m.num_block_items) * (units / together), per_block = kThreads / lanes;
  const int64_t blocks = args.m.num_block_items * (units / in_block) + (tasks + per_block - 1) / per_block;
  GNNFAST_CHECK(blocks <= 2147483647, tasks, " rows times heads are more than one CUDA launch can start");
  const unsigned grid = static_cast<unsigned>(blocks);
  if (args.prob)
    edge_softmax_kernel<T, VEC, true><<<grid, kThreads, 0, stream>>>(args, lanes, together, in_block);
  else
    edge_softmax_kernel<T, VEC, false><<<grid, kThreads, 0, stream>>>(args, lanes, together, in_block);
}

}  // namespace

void Cuda::edge_softmax(const EdgeSoftmaxArgs& args, const Tensor& ref) {
  const Launch launch(ref);
  dispatch_cuda(dtype_of("the scores", ref), [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int VEC = std::min(kVec<T>, 4);  // more would take too many registers
    bool wide = args.heads % VEC == 0;
    for (const void* t : {args.score, args.dst, args.src, args.prob, args.grad, const_cast<const void*>(args.out)})
      wide = wide && aligned16(t);
    if (wide)
      launch_edge_softmax<T, VEC>(args, launch.stream);
    else
      launch_edge_softmax<T, 1>(args, launch.stream);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("edge_softmax", TORCH_BOX(&edge_softmax<Cuda>));
  m.impl("edge_softmax_backward", TORCH_BOX(&edge_softmax_backward<Cuda>));
}

}  // namespace gnnfast
