// CUDA sampled SpMM (ES-SpMM, Lin et al., 2021, Algorithm 1). A group of 1 or 4 warps reduces a row. Each warp stages column
// ids and weights of its share of the draws in shared memory, all of them read at once, and then gathers without any dependent
// load between: TPR lanes hold VEC features each (16-byte loads) of one edge, 32 / TPR edges are taken at a time, and 8 or 4
// gathers a lane are in flight. Staging needs no barrier beyond the warp's; further slabs of features reuse it where it holds
// the whole share.
//
// The transpose is walked by the work items of its schedule (graph/schedule.h), since its rows are not cut to `width`: a warp
// group an item, staging what is_taken lets through. Pieces of long rows are combined by spmm_cuda.cuh's second kernel.
//
// Bytes that must move, per row: 8 (rowptr) + draws * (32 (a sector for each drawn column id; less where draws are neighbours)
// + F * sizeof(T)) + F * sizeof(T).
#include <torch/csrc/stable/library.h>

#include "spmm/spmm_cuda.cuh"
#include "spmm_sampled.h"

namespace gnnfast {
namespace {

constexpr int kWarps = kBlock / kWarp;
constexpr int kRead = 4;         // edges a lane reads at once, so that their latencies do not add up
constexpr int kManyDraws = 128;  // draws of an average row from which 4 warps share it, ...
constexpr int kFewRows = 32768;  // ... or half as many where there are few rows to fill the device with

// What is left of an item for a warp: draws, or slots of the transpose.
struct Share {
  int row;
  uint32_t first, nnz;  // of the row in the sampled matrix
  uint32_t at, end;
};

template <class T, int W, int VEC, int TPR, bool TRANSPOSED>
struct Warp {
  using A = acc_t<T>;
  static constexpr int kGroups = kWarp / TPR, kFlight = kGroups == 1 && sizeof(A) == 4 ? 8 : 4, kBatch = kGroups * kFlight;
  static constexpr int kChunk = kRead * kWarp, kStage = TRANSPOSED ? 2 * kChunk : kChunk;  // staged edges
  static constexpr bool kWeights = W == kScalar, kIds = W == kPerHead;
  static_assert(kStage % kBatch == 0);

  struct Staging {
    int32_t col[kStage];
    A weight[kWeights ? kStage : 1];
    int32_t id[kIds ? kStage : 1];
  };

  const SampledArgs& p;
  Staging& staged;
  const int lane;

  // Stages those of a lane's edges for which `at` is a place, not -1.
  __device__ void put(const int (&at)[kRead], const int32_t (&col)[kRead], const uint32_t (&slot)[kRead]) {
    int32_t id[kRead];
    A weight[kRead];
    if constexpr (kWeights || kIds) {
#pragma unroll
      for (int u = 0; u < kRead; ++u) id[u] = p.a.perm ? __ldg(p.a.perm + slot[u]) : static_cast<int32_t>(slot[u]);
      if constexpr (kWeights)
#pragma unroll
        for (int u = 0; u < kRead; ++u) weight[u] = to_acc(__ldg(static_cast<const T*>(p.weight) + id[u]));
    }
#pragma unroll
    for (int u = 0; u < kRead; ++u) {
      if (at[u] < 0) continue;
      staged.col[at[u]] = col[u];
      if constexpr (kWeights) staged.weight[at[u]] = weight[u];
      if constexpr (kIds) staged.id[at[u]] = id[u];
    }
  }

  // Stages what fits of the share, and returns how many edges that are. Lanes beyond the last edge read it too, so that no load
  // needs a check.
  __device__ int stage(Share& s) {
    int count = 0, at[kRead];
    int32_t col[kRead];
    uint32_t slot[kRead];
    if constexpr (TRANSPOSED) {
      for (; s.at < s.end && count <= kStage - kChunk; s.at += kChunk) {
        uint32_t first[kRead], next[kRead];
#pragma unroll
        for (int u = 0; u < kRead; ++u) {
          slot[u] = min(s.at + u * kWarp + lane, s.end - 1);
          col[u] = __ldg(p.t.col + slot[u]);
          if (p.t.perm) slot[u] = __ldg(p.t.perm + slot[u]);
        }
#pragma unroll
        for (int u = 0; u < kRead; ++u) first[u] = __ldg(p.a.rowptr + col[u]), next[u] = __ldg(p.a.rowptr + col[u] + 1);
#pragma unroll
        for (int u = 0; u < kRead; ++u) {
          const bool taken =
              s.at + u * kWarp + lane < s.end && is_taken(p.draw, col[u], slot[u] - first[u], next[u] - first[u]);
          const unsigned all = __ballot_sync(kAllLanes, taken);
          at[u] = taken ? count + __popc(all & ((1u << lane) - 1)) : -1;
          count += __popc(all);
        }
        put(at, col, slot);
      }
    } else if (s.at < s.end) {
      count = min(s.end - s.at, kStage);
#pragma unroll
      for (int u = 0; u < kRead; ++u) {
        const int i = u * kWarp + lane;
        at[u] = i < count ? i : -1;
        slot[u] = s.first + position_of(p.draw, s.row, s.at + min(i, count - 1), s.nnz);
        col[u] = __ldg(p.a.col + slot[u]);
      }
      put(at, col, slot);
      s.at += count;
    }
    __syncwarp();
    if (count > 0) {  // a whole batch can then be loaded without checks
      const int padded = (count + kBatch - 1) / kBatch * kBatch;
      for (int i = count + lane; i < padded; i += kWarp) staged.col[i] = staged.col[count - 1];
    }
    __syncwarp();
    return count;
  }

  // Adds the staged edges to the VEC features that begin at f.
  __device__ void gather(A (&acc)[VEC], int count, int64_t f) {
    const char* x = static_cast<const char*>(p.x) + f * sizeof(T);
    const uint32_t row_bytes = static_cast<uint32_t>(p.width * sizeof(T));
    const int64_t head = W == kPerHead ? f / (p.width / p.heads) : 0;
    const int group = lane / TPR;
    for (int k = group; k < count; k += kBatch) {
      Raw<T, VEC> raw[kFlight];
#pragma unroll
      for (int u = 0; u < kFlight; ++u)
        raw[u].load(reinterpret_cast<const T*>(x + uint64_t{static_cast<uint32_t>(staged.col[k + u * kGroups])} * row_bytes));
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        const int at = k + u * kGroups;
        if (at >= count) continue;
        A w = 1;
        if constexpr (kWeights) w = staged.weight[at];
        if constexpr (kIds) w = to_acc(__ldg(static_cast<const T*>(p.weight) + int64_t{staged.id[at]} * p.heads + head));
#pragma unroll
        for (int i = 0; i < VEC; ++i) acc[i] += W == kNone ? raw[u].get(i) : w * raw[u].get(i);
      }
    }
  }
};

// Group `group` of 2^`halvings` warps takes row or item `group`.
template <class T, int W, int VEC, int TPR, bool TRANSPOSED>
__global__ void __launch_bounds__(kBlock)
    spmm_sampled_kernel(const SampledArgs p, const Pieces pieces, int64_t groups, int halvings) {
  using A = acc_t<T>;
  using Mine = Warp<T, W, VEC, TPR, TRANSPOSED>;
  __shared__ typename Mine::Staging staging[kWarps];
  __shared__ A shared_acc[kWarps][VEC][TPR];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, t = lane % TPR;
  const int warps = 1 << halvings, part = warp & (warps - 1);
  const int64_t group = (int64_t{blockIdx.x} * kWarps + warp) >> halvings;
  const bool live = group < groups;
  if (!live && warps == 1) return;

  Share share{};
  if (live) {
    uint32_t begin = 0, count = 0;
    if constexpr (TRANSPOSED) {
      const int4 item = __ldg(reinterpret_cast<const int4*>(p.t.schedule) + group);
      share.row = item.x, begin = item.y, count = item.z - item.y;
    } else {
      share.row = p.order ? __ldg(p.order + group) : static_cast<int>(group);
      share.first = __ldg(p.a.rowptr + share.row);
      share.nnz = __ldg(p.a.rowptr + share.row + 1) - share.first;
      count = draws_of(p.draw, share.nnz);
    }
    // Whole batches of 32 for each warp of the group.
    const uint32_t each = warps == 1 ? count : (((count + warps - 1) >> halvings) + kWarp - 1) / kWarp * kWarp;
    share.at = begin + min(part * each, count);
    share.end = begin + min((part + 1) * each, count);
  }
  Mine mine{p, staging[warp], lane};
  const bool is_piece = TRANSPOSED && group < p.t.num_pieces;
  const bool kept = share.end - share.at <= Mine::kChunk;  // one staging serves all slabs
  int count = 0;
  for (int64_t f0 = 0; f0 < p.width; f0 += TPR * VEC) {
    // Lanes without features of their own repeat the last ones, so that no load needs a check, and store nothing.
    const bool active = f0 + t * VEC < p.width;
    const int64_t f = active ? f0 + t * VEC : p.width - VEC;
    A acc[VEC] = {};
    Share left = share;
    do {
      if (f0 == 0 || !kept)
        count = mine.stage(left);
      else
        left.at = left.end;
      mine.gather(acc, count, f);
      __syncwarp();
    } while (left.at < left.end);
#pragma unroll
    for (int o = TPR; o < kWarp; o <<= 1)
#pragma unroll
      for (int i = 0; i < VEC; ++i) acc[i] += __shfl_xor_sync(kAllLanes, acc[i], o);
    if (warps > 1) {
      __syncthreads();
      if (lane < TPR)
#pragma unroll
        for (int i = 0; i < VEC; ++i) shared_acc[warp][i][t] = acc[i];
      __syncthreads();
      if (part > 0 || !live) continue;
      for (int other = 1; other < warps; ++other)
#pragma unroll
        for (int i = 0; i < VEC; ++i) acc[i] += shared_acc[warp + other][i][t];
    }
    if (lane >= TPR || !active) continue;
    if (is_piece) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) static_cast<A*>(pieces.value)[group * p.width + f + i] = acc[i];
      continue;
    }
    if constexpr (!TRANSPOSED) {
      const uint32_t draws = draws_of(p.draw, share.nnz);
      if (p.mean && draws > 0) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) acc[i] /= static_cast<A>(draws);
      } else if (p.rescale && draws < share.nnz) {
        const A scale = static_cast<A>(share.nnz) / static_cast<A>(draws);
#pragma unroll
        for (int i = 0; i < VEC; ++i) acc[i] *= scale;
      }
    }
    store_vector<VEC>(static_cast<T*>(p.out) + int64_t{share.row} * p.width + f, acc);
  }
}

template <class T, int W, int VEC, int TPR>
void launch_sampled(const SampledArgs& p, const Pieces& pieces, cudaStream_t stream) {
  if (p.t.rowptr) {
    const unsigned grid = blocks_for(p.t.num_items * kWarp);
    spmm_sampled_kernel<T, W, VEC, TPR, true><<<grid, kBlock, 0, stream>>>(p, pieces, p.t.num_items, 0);
  } else {
    const int64_t draws = std::min<int64_t>(p.draw.width, p.a.num_edges / p.a.num_rows);
    const bool share = draws > kManyDraws || (draws > kManyDraws / 2 && p.a.num_rows < kFewRows);
    const int halvings = share ? 2 : 0;
    const unsigned grid = blocks_for((p.a.num_rows << halvings) * kWarp);
    spmm_sampled_kernel<T, W, VEC, TPR, false><<<grid, kBlock, 0, stream>>>(p, pieces, p.a.num_rows, halvings);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T, int W>
void launch_sampled_vectors(const SampledArgs& p, const Pieces& pieces, cudaStream_t stream) {
  auto fits = [&](int64_t vec) {
    return p.width % vec == 0 && (W != kPerHead || p.width / p.heads % vec == 0) &&
           reinterpret_cast<uintptr_t>(p.x) % (vec * sizeof(T)) == 0;
  };
  constexpr int kWide = kVec<T>;
  if (fits(kWide)) {
    if (p.width <= 4 * kWide) return launch_sampled<T, W, kWide, 4>(p, pieces, stream);
    if (p.width <= 8 * kWide) return launch_sampled<T, W, kWide, 8>(p, pieces, stream);
    if (p.width <= 16 * kWide) return launch_sampled<T, W, kWide, 16>(p, pieces, stream);
    return launch_sampled<T, W, kWide, 32>(p, pieces, stream);
  }
  if constexpr (kWide > 2)
    if (fits(kWide / 2)) return launch_sampled<T, W, kWide / 2, 32>(p, pieces, stream);
  return launch_sampled<T, W, 1, 32>(p, pieces, stream);
}

// Dot products of the drawn edges: a warp a row, whose lanes share the features of each head.
template <class T>
__global__ void __launch_bounds__(kBlock) sddmm_sampled_kernel(const SampledArgs p) {
  using A = acc_t<T>;
  const int lane = threadIdx.x % kWarp;
  const int64_t row = (int64_t{blockIdx.x} * kBlock + threadIdx.x) / kWarp;
  if (row >= p.a.num_rows) return;
  const uint32_t first = __ldg(p.a.rowptr + row), nnz = __ldg(p.a.rowptr + row + 1) - first, draws = draws_of(p.draw, nnz);
  const int64_t segment = p.width / p.heads;
  const T* self = static_cast<const T*>(p.self) + row * p.width;
  for (uint32_t base = 0; base < draws; base += kWarp) {
    int32_t col = 0, id = 0;
    if (base + lane < draws) {  // each lane finds an edge, which then all lanes take
      const uint32_t slot = first + position_of(p.draw, static_cast<uint32_t>(row), base + lane, nnz);
      col = __ldg(p.a.col + slot);
      id = p.a.perm ? __ldg(p.a.perm + slot) : static_cast<int32_t>(slot);
    }
    const int count = min(draws - base, kWarp);
    for (int k = 0; k < count; ++k) {
      const T* x = static_cast<const T*>(p.x) + int64_t{__shfl_sync(kAllLanes, col, k)} * p.width;
      const int64_t edge = __shfl_sync(kAllLanes, id, k);
      for (int64_t h = 0; h < p.heads; ++h) {
        A sum = 0;
        for (int64_t f = h * segment + lane; f < (h + 1) * segment; f += kWarp) sum += to_acc(self[f]) * to_acc(__ldg(x + f));
        for (int o = kWarp / 2; o > 0; o /= 2) sum += __shfl_xor_sync(kAllLanes, sum, o);
        if (lane == 0) static_cast<T*>(p.dot)[edge * p.heads + h] = from_acc<T>(sum);
      }
    }
  }
}

// A warp a row.
__global__ void __launch_bounds__(kBlock) draw_kernel(const DrawArgs p) {
  const int64_t row = (int64_t{blockIdx.x} * kBlock + threadIdx.x) / kWarp;
  if (row >= p.num_rows) return;
  const uint32_t first = p.rowptr[row], nnz = p.rowptr[row + 1] - first, draws = draws_of(p.draw, nnz);
  for (uint32_t i = threadIdx.x % kWarp; i < draws; i += kWarp)
    p.slot[p.drawn[row] + i] = static_cast<int32_t>(first + position_of(p.draw, static_cast<uint32_t>(row), i, nnz));
}

}  // namespace

void Cuda::draw(const DrawArgs& args, const Tensor& rowptr) {
  const Launch launch(rowptr);
  draw_kernel<<<blocks_for(args.num_rows * kWarp), kBlock, 0, launch.stream>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void Cuda::spmm_sampled(const SampledArgs& args, const Tensor& x) {
  const Launch launch(x);
  Pieces pieces{};
  std::optional<Tensor> value;  // freed in stream order when this returns
  if (args.t.num_pieces > 0) {
    value = make_empty(x, {args.t.num_pieces * args.width}, acc_dtype(x.scalar_type()));
    pieces.value = value->mutable_data_ptr();
  }
  dispatch_cuda(dtype_of("x", x), [&](auto type) {
    using T = typename decltype(type)::type;
    if (args.dot) {
      sddmm_sampled_kernel<T><<<blocks_for(args.a.num_rows * kWarp), kBlock, 0, launch.stream>>>(args);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
      return;
    }
    if (!args.weight)
      launch_sampled_vectors<T, kNone>(args, pieces, launch.stream);
    else if (args.heads == 1)
      launch_sampled_vectors<T, kScalar>(args, pieces, launch.stream);
    else
      launch_sampled_vectors<T, kPerHead>(args, pieces, launch.stream);
    if (args.t.num_pieces > 0) {
      SpmmArgs sum{};
      sum.a = args.t, sum.width = args.width, sum.out = args.out;
      combine_kernel<T, kSum><<<blocks_for(args.t.num_pieces * kWarp), kBlock, 0, launch.stream>>>(sum, pieces);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
  });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("draw", TORCH_BOX(&draw<Cuda>));
  m.impl("spmm_sampled", TORCH_BOX(&spmm_sampled<Cuda>));
  m.impl("sddmm_sampled", TORCH_BOX(&sddmm_sampled<Cuda>));
}

}  // namespace gnnfast
