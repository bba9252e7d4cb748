// Finds communities of a square graph, so that rows that share neighbours can be worked on at the same time and find each
// other's sources in the cache: label propagation (Raghavan et al., Phys. Rev. E 76, 2007). Every row takes the label that most
// of its neighbours have, unless the label's cluster is full; a row looks at up to kSample neighbours, others in each round, so
// that a round costs at most one pass over the edges. Labels change in place, which makes the outcome vary from run to run: it
// decides in which order rows are worked on, never a result.
#include <torch/csrc/stable/library.h>

#include <cub/device/device_radix_sort.cuh>

#include "common/launch.cuh"
#include "schedule.h"

namespace gnnfast {
namespace {

constexpr int kSample = 64;  // two neighbours a lane
constexpr int kPerLane = kSample / kWarp;

__device__ inline uint32_t mix(uint32_t a, uint32_t b) {
  uint32_t h = a * 0x9e3779b1u ^ (b + 0x7f4a7c15u) * 0x85ebca6bu;
  h ^= h >> 15, h *= 0x2c1b3c6du, h ^= h >> 12, h *= 0x297a2d39u;
  return h ^ h >> 15;
}

struct ClusterArgs {
  const int32_t *rowptr, *col;
  int64_t num_rows;
  int32_t *label, *size;  // [num_rows]
  int32_t fullest;        // rows that a cluster may have
};

__global__ void __launch_bounds__(kBlock) start_kernel(const ClusterArgs p) {
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i < p.num_rows) p.label[i] = static_cast<int32_t>(i), p.size[i] = 1;
}

// A warp a row.
__global__ void __launch_bounds__(kBlock) propagate_kernel(const ClusterArgs p, uint32_t round) {
  const int64_t row = (int64_t{blockIdx.x} * kBlock + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (row >= p.num_rows) return;
  const int begin = p.rowptr[row], degree = p.rowptr[row + 1] - begin, taken = min(degree, kSample);
  if (degree == 0) return;
  const int own = p.label[row];
  // A stretch of the row that moves on with the rounds.
  const int first = degree > kSample ? mix(static_cast<uint32_t>(row), round) % degree : 0;
  int label[kPerLane], votes[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int k = i * kWarp + lane;
    label[i] = -1 - k;  // like no other
    votes[i] = 0;
    if (k < taken) {
      const int slot = first + k;
      const int source = p.col[begin + (slot < degree ? slot : slot - degree)];
      if (source != row) label[i] = p.label[source];
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (i * kWarp >= taken) break;
    for (int from = 0; from < min(taken - i * kWarp, kWarp); ++from) {
      const int other = __shfl_sync(kAllLanes, label[i], from);
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) votes[k] += label[k] == other;
    }
  }
  // The most votes win; of equal ones a random label, another in each round and row, so that no label floods the graph.
  uint64_t best = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (label[i] >= 0 && (label[i] == own || p.size[label[i]] < p.fullest)) {
      const uint64_t candidate = static_cast<uint64_t>(votes[i]) << 32 | mix(label[i], static_cast<uint32_t>(row) + round) | 1;
      if (candidate > best) best = candidate;
    }
  uint64_t winner = best;
  for (int o = 1; o < kWarp; o <<= 1) winner = max(winner, __shfl_xor_sync(kAllLanes, winner, o));
  if (winner == 0) return;
  int chosen = -1;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (label[i] >= 0 && best == winner &&
        (static_cast<uint64_t>(votes[i]) << 32 | mix(label[i], static_cast<uint32_t>(row) + round) | 1) == winner)
      chosen = label[i];
  const unsigned voters = __ballot_sync(kAllLanes, chosen >= 0);
  chosen = __shfl_sync(kAllLanes, chosen, __ffs(voters) - 1);
  if (lane == 0 && chosen != own) {
    p.label[row] = chosen;
    atomicAdd(p.size + chosen, 1);
    atomicSub(p.size + own, 1);
  }
}

// found[0]: of a sample of edges, those within a cluster; found[1]: those whose ends are at most `near` ids apart; found[2]:
// all.
__global__ void __launch_bounds__(kBlock)
    judge_kernel(const ClusterArgs p, int64_t stride, int32_t near, unsigned long long* found) {
  const int64_t row = (int64_t{blockIdx.x} * kBlock + threadIdx.x) * stride;
  int within = 0, close = 0, all = 0;
  if (row < p.num_rows) {
    const int begin = p.rowptr[row], degree = p.rowptr[row + 1] - begin;
    all = min(degree, 256);
    for (int k = 0; k < all; ++k) {
      const int source = p.col[begin + static_cast<int64_t>(degree) * k / all];
      within += p.label[source] == p.label[row];
      close += abs(source - static_cast<int>(row)) <= near;
    }
    // Long rows count as many edges as they have.
    const float weight = all ? static_cast<float>(degree) / all : 0;
    within = static_cast<int>(within * weight), close = static_cast<int>(close * weight), all = degree;
  }
  for (int o = 1; o < kWarp; o <<= 1) {
    within += __shfl_xor_sync(kAllLanes, within, o);
    close += __shfl_xor_sync(kAllLanes, close, o);
    all += __shfl_xor_sync(kAllLanes, all, o);
  }
  if (threadIdx.x % kWarp == 0 && all) {
    atomicAdd(found, within), atomicAdd(found + 1, close), atomicAdd(found + 2, all);
  }
}

std::tuple<Tensor, Tensor> cluster(const Tensor& rowptr, const Tensor& col, int64_t rounds, int64_t fullest) {
  ClusterArgs p{};
  p.rowptr = check_index("rowptr", rowptr, rowptr);
  p.col = check_index("col", col, rowptr);
  p.num_rows = rowptr.numel() - 1;
  p.fullest = static_cast<int32_t>(fullest);
  GNNFAST_CHECK(p.num_rows > 0, "cluster needs at least one row");
  const Launch launch(rowptr);
  auto ints = [&](int64_t n) { return make_empty(rowptr, {n}, ScalarType::Int); };
  Tensor label = ints(p.num_rows), size = ints(p.num_rows), order = ints(p.num_rows), sorted = ints(p.num_rows);
  Tensor facts = make_zeros(rowptr, {3}, ScalarType::Long);
  p.label = label.mutable_data_ptr<int32_t>(), p.size = size.mutable_data_ptr<int32_t>();
  const unsigned grid = blocks_for(p.num_rows);
  start_kernel<<<grid, kBlock, 0, launch.stream>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  for (int64_t round = 0; round < rounds; ++round) {
    propagate_kernel<<<blocks_for(p.num_rows * kWarp), kBlock, 0, launch.stream>>>(p, static_cast<uint32_t>(round));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  const int64_t sampled = std::min<int64_t>(p.num_rows, 65536), stride = p.num_rows / sampled;
  judge_kernel<<<blocks_for(p.num_rows / stride + 1), kBlock, 0, launch.stream>>>(
      p, stride, static_cast<int32_t>(fullest / 2), reinterpret_cast<unsigned long long*>(facts.mutable_data_ptr<int64_t>()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  // The rows by label, in id order within a cluster. `size` is free to hold the ids.
  start_kernel<<<grid, kBlock, 0, launch.stream>>>(
      {nullptr, nullptr, p.num_rows, p.size, sorted.mutable_data_ptr<int32_t>(), 0});
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  int bits = 1;
  while (bits < 31 && p.num_rows >> bits) ++bits;
  size_t bytes = 0;
  int32_t *keys_out = sorted.mutable_data_ptr<int32_t>(), *rows = order.mutable_data_ptr<int32_t>();
  STD_CUDA_CHECK(
      cub::DeviceRadixSort::SortPairs(nullptr, bytes, p.label, keys_out, p.size, rows, p.num_rows, 0, bits, launch.stream));
  Tensor temp = make_empty(rowptr, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  STD_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(temp.mutable_data_ptr(), bytes, p.label, keys_out, p.size, rows, p.num_rows, 0,
                                                 bits, launch.stream));
  return {order, facts};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) { m.impl("cluster", TORCH_BOX(&cluster)); }

}  // namespace gnnfast
