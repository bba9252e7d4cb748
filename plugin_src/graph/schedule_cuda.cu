#include <torch/csrc/stable/library.h>

#include <array>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "common/launch.cuh"
#include "schedule.h"

namespace gnnfast {
namespace {

constexpr int kRows = 16;                // rows a thread
constexpr int kWindow = kBlock * kRows;  // rows that are sorted together
constexpr int kKeyBits = 11, kLast = (1 << kKeyBits) - 1;
static_assert(kMostWarpEdges < kLast);

struct ScheduleArgs {
  const int32_t *rowptr, *order;  // order may be null
  int64_t num_rows;
  int32_t warp_edges, block_edges;
};

// Items of each section: pieces, whole rows for a block, for a warp, for a few lanes.
struct Counts {
  int32_t n[4];
  __device__ Counts operator+(const Counts& o) const { return {{n[0] + o.n[0], n[1] + o.n[1], n[2] + o.n[2], n[3] + o.n[3]}}; }
};

struct Row {
  int32_t id, begin, degree;
};

__device__ inline Row row_at(const ScheduleArgs& p, int64_t position) {
  if (position >= p.num_rows) return {-1, 0, 0};
  const int32_t id = p.order ? p.order[position] : static_cast<int32_t>(position);
  const int32_t begin = p.rowptr[id];
  return {id, begin, p.rowptr[id + 1] - begin};
}

__device__ inline int pieces_of(const ScheduleArgs& p, int degree) { return (degree - 1) / p.block_edges + 1; }

__device__ inline int section_of(const ScheduleArgs& p, int degree) {
  return degree > p.block_edges ? 0 : degree > p.warp_edges ? 1 : degree > kShortRow ? 2 : 3;
}

__device__ inline Counts count_rows(const ScheduleArgs& p, const Row (&rows)[kRows]) {
  Counts mine{};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (rows[i].id < 0) continue;
    const int section = section_of(p, rows[i].degree);
#pragma unroll
    for (int s = 0; s < 4; ++s) mine.n[s] += s == section ? (s == 0 ? pieces_of(p, rows[i].degree) : 1) : 0;
  }
  return mine;
}

__device__ inline void read_rows(const ScheduleArgs& p, Row (&rows)[kRows]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) rows[i] = row_at(p, int64_t{blockIdx.x} * kWindow + threadIdx.x * kRows + i);
}

using Scan = cub::BlockScan<Counts, kBlock>;

__global__ void __launch_bounds__(kBlock) count_kernel(const ScheduleArgs p, Counts* windows) {
  __shared__ typename cub::BlockReduce<Counts, kBlock>::TempStorage storage;
  Row rows[kRows];
  read_rows(p, rows);
  const Counts total =
      cub::BlockReduce<Counts, kBlock>(storage).Reduce(count_rows(p, rows), [](Counts a, Counts b) { return a + b; });
  if (threadIdx.x == 0) windows[blockIdx.x] = total;
}

// One block: where each window's items begin within their sections, and the layout.
__global__ void __launch_bounds__(kBlock) scan_kernel(Counts* windows, int64_t num_windows, int64_t* layout, int4* counts) {
  __shared__ typename Scan::TempStorage storage;
  Counts before{};
  for (int64_t base = 0; base < num_windows; base += kBlock) {
    const int64_t i = base + threadIdx.x;
    const Counts mine = i < num_windows ? windows[i] : Counts{};
    Counts offset{}, total{};
    Scan(storage).ExclusiveScan(mine, offset, Counts{}, [](Counts a, Counts b) { return a + b; }, total);
    if (i < num_windows) windows[i] = before + offset;
    before = before + total;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    const int32_t* n = before.n;
    layout[0] = int64_t{n[0]} + n[1] + n[2] + n[3], layout[1] = n[0], layout[2] = int64_t{n[0]} + n[1], layout[3] = n[2];
    if (counts) *counts = make_int4(n[0] + n[1] + n[2] + n[3], n[0], n[0] + n[1], n[2]);
  }
}

__global__ void __launch_bounds__(kBlock)
    items_kernel(const ScheduleArgs p, const Counts* windows, const int64_t* layout, int4* items) {
  using Sort = cub::BlockRadixSort<int32_t, kBlock, kRows, int32_t>;
  __shared__ union {
    typename Scan::TempStorage scan;
    typename Sort::TempStorage sort;
  } storage;
  Row rows[kRows];
  read_rows(p, rows);
  Counts offset{}, here{};
  Scan(storage.scan).ExclusiveScan(count_rows(p, rows), offset, Counts{}, [](Counts a, Counts b) { return a + b; }, here);
  const Counts window = windows[blockIdx.x];
  const int64_t first[4] = {0, layout[1], layout[2], layout[2] + layout[3]};

  int32_t key[kRows], position[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    key[i] = kLast;
    position[i] = threadIdx.x * kRows + i;
    const Row& row = rows[i];
    if (row.id < 0) continue;
    const int section = section_of(p, row.degree);
    if (section >= 2) {
      key[i] = kLast - 1 - row.degree;
    } else if (section == 1) {
      items[first[1] + window.n[1] + offset.n[1]++] = make_int4(row.id, row.begin, row.begin + row.degree, 0);
    } else {
      const int count = pieces_of(p, row.degree);
      for (int piece = 0; piece < count; ++piece) {
        const int32_t begin = row.begin + piece * p.block_edges;
        items[window.n[0] + offset.n[0]++] =
            make_int4(row.id, begin, min(begin + p.block_edges, row.begin + row.degree), piece == 0 ? count : -1);
      }
    }
  }
  __syncthreads();
  Sort(storage.sort).SortBlockedToStriped(key, position, 0, kKeyBits);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (key[i] == kLast) continue;
    const Row row = row_at(p, int64_t{blockIdx.x} * kWindow + position[i]);
    const int rank = i * kBlock + threadIdx.x, section = row.degree > kShortRow ? 2 : 3;
    const int64_t at = first[section] + window.n[section] + rank - (section == 3 ? here.n[2] : 0);
    items[at] = make_int4(row.id, row.begin, row.begin + row.degree, 0);
  }
}

// How many items there can be, in the order of a layout.
std::array<int64_t, 4> most_items(const ScheduleArgs& p, int64_t num_edges) {
  // A row of more than b edges has at most 2 / b pieces an edge.
  const int64_t pieces = num_edges > p.block_edges ? 2 * num_edges / p.block_edges : 0;
  const int64_t for_block = pieces + std::min(p.num_rows, num_edges / (p.warp_edges + 1));
  const int64_t for_warp = std::min(p.num_rows, num_edges / (kShortRow + 1));
  return {for_block + for_warp + p.num_rows, pieces, for_block, for_warp};
}

std::tuple<Tensor, Tensor> schedule(const Tensor& rowptr, const OptTensor& order, int64_t num_edges, bool bounds) {
  ScheduleArgs p{};
  p.rowptr = check_index("rowptr", rowptr, rowptr);
  p.order = check_index("order", order, rowptr);
  p.num_rows = rowptr.numel() - 1;
  GNNFAST_CHECK(p.num_rows >= 0, "rowptr must have at least one element");
  if (order) check_size("order", *order, 0, p.num_rows);
  p.warp_edges = static_cast<int32_t>(warp_edges(num_edges));
  p.block_edges = static_cast<int32_t>(block_edges(num_edges));
  const Launch launch(rowptr);
  const int64_t most = p.num_rows + num_edges / p.block_edges + (bounds ? 1 : 0);
  Tensor items = make_empty(rowptr, {most, 4}, ScalarType::Int);
  Tensor layout = torch::stable::new_zeros(rowptr, {4}, ScalarType::Long);
  Tensor known = make_on_cpu(p.num_rows ? most_items(p, num_edges) : std::array<int64_t, 4>{});
  if (p.num_rows == 0) return {items, bounds ? known : layout};
  const int64_t windows = (p.num_rows + kWindow - 1) / kWindow;
  Tensor counts = make_empty(rowptr, {windows, 4}, ScalarType::Int);
  Counts* at = reinterpret_cast<Counts*>(counts.mutable_data_ptr<int32_t>());
  const unsigned grid = static_cast<unsigned>(windows);
  int4* item = reinterpret_cast<int4*>(items.mutable_data_ptr<int32_t>());
  count_kernel<<<grid, kBlock, 0, launch.stream>>>(p, at);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  scan_kernel<<<1, kBlock, 0, launch.stream>>>(at, windows, layout.mutable_data_ptr<int64_t>(),
                                               bounds ? item + most - 1 : nullptr);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  items_kernel<<<grid, kBlock, 0, launch.stream>>>(p, at, layout.const_data_ptr<int64_t>(), item);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {items, bounds ? known : layout};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) { m.impl("schedule", TORCH_BOX(&schedule)); }

}  // namespace gnnfast
