#include <torch/csrc/stable/library.h>

#include <array>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "schedule.cuh"

namespace gnnfast {
namespace {

constexpr int kRows = kWindow / kBlock;  // rows a thread
constexpr int kKeyBits = 11, kLast = (1 << kKeyBits) - 1;
static_assert(kMostWarpEdges < kLast);

struct Row {
  int32_t id, begin, degree;
};

__device__ inline Row row_at(const ScheduleJob& p, int64_t position) {
  if (position >= p.num_rows) return {-1, 0, 0};
  const int32_t id = p.order ? p.order[position] : static_cast<int32_t>(position);
  const int32_t begin = p.rowptr[id];
  return {id, begin, p.rowptr[id + 1] - begin};
}

__device__ inline int pieces_of(const ScheduleJob& p, int degree) { return (degree - 1) / p.block_edges + 1; }

__device__ inline int section_of(const ScheduleJob& p, int degree) {
  return degree > p.block_edges ? 0 : degree > p.warp_edges ? 1 : degree > kShortRow ? 2 : 3;
}

__device__ inline Counts count_rows(const ScheduleJob& p, const Row (&rows)[kRows]) {
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

__device__ inline void read_rows(const ScheduleJob& p, Row (&rows)[kRows]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) rows[i] = row_at(p, int64_t{blockIdx.x} * kWindow + threadIdx.x * kRows + i);
}

using Scan = cub::BlockScan<Counts, kBlock>;

__global__ void __launch_bounds__(kBlock) count_kernel(const ScheduleJobs jobs) {
  const ScheduleJob& p = jobs.of[blockIdx.y];
  if (blockIdx.x >= p.num_windows()) return;
  __shared__ typename cub::BlockReduce<Counts, kBlock>::TempStorage storage;
  Row rows[kRows];
  read_rows(p, rows);
  const Counts total =
      cub::BlockReduce<Counts, kBlock>(storage).Reduce(count_rows(p, rows), [](Counts a, Counts b) { return a + b; });
  if (threadIdx.x == 0) p.windows[blockIdx.x] = total;
}

// One block a job: where each window's items begin within their sections, and how many there are of all.
__global__ void __launch_bounds__(kBlock) scan_kernel(const ScheduleJobs jobs) {
  const ScheduleJob& p = jobs.of[blockIdx.y];
  Counts* windows = p.windows;
  const int64_t num_windows = p.num_windows();
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
    *p.counts = make_int4(n[0] + n[1] + n[2] + n[3], n[0], n[0] + n[1], n[2]);
    if (p.layout) p.layout[0] = p.counts->x, p.layout[1] = p.counts->y, p.layout[2] = p.counts->z, p.layout[3] = p.counts->w;
  }
}

__global__ void __launch_bounds__(kBlock) items_kernel(const ScheduleJobs jobs) {
  const ScheduleJob& p = jobs.of[blockIdx.y];
  if (blockIdx.x >= p.num_windows()) return;
  int4* items = p.items;
  using Sort = cub::BlockRadixSort<int32_t, kBlock, kRows, int32_t>;
  __shared__ union {
    typename Scan::TempStorage scan;
    typename Sort::TempStorage sort;
  } storage;
  Row rows[kRows];
  read_rows(p, rows);
  Counts offset{}, here{};
  Scan(storage.scan).ExclusiveScan(count_rows(p, rows), offset, Counts{}, [](Counts a, Counts b) { return a + b; }, here);
  const Counts window = p.windows[blockIdx.x];
  const int4 counts = *p.counts;
  const int64_t first[4] = {0, counts.y, counts.z, int64_t{counts.z} + counts.w};

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

}  // namespace

void launch_schedules(const ScheduleJobs& jobs, int count, cudaStream_t stream) {
  int64_t windows = 0;
  for (int i = 0; i < count; ++i) windows = std::max(windows, jobs.of[i].num_windows());
  if (windows == 0) return;
  const dim3 grid(static_cast<unsigned>(windows), count);
  count_kernel<<<grid, kBlock, 0, stream>>>(jobs);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  scan_kernel<<<dim3(1, count), kBlock, 0, stream>>>(jobs);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  items_kernel<<<grid, kBlock, 0, stream>>>(jobs);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

namespace {

std::tuple<Tensor, Tensor> schedule(const Tensor& rowptr, const OptTensor& order, int64_t num_edges) {
  GNNFAST_CHECK(rowptr.numel() > 0, "rowptr must have at least one element");
  ScheduleJob job(check_index("rowptr", rowptr, rowptr), rowptr.numel() - 1, num_edges);
  job.order = check_index("order", order, rowptr);
  if (order) check_size("order", *order, 0, job.num_rows);
  const Launch launch(rowptr);
  Tensor items = make_empty(rowptr, {job.most_items() + 1, 4}, ScalarType::Int);
  Tensor layout = make_zeros(rowptr, {4}, ScalarType::Long);
  Tensor windows = make_empty(rowptr, {job.num_windows(), 4}, ScalarType::Int);
  job.windows = reinterpret_cast<Counts*>(windows.mutable_data_ptr<int32_t>());
  job.items = reinterpret_cast<int4*>(items.mutable_data_ptr<int32_t>());
  job.counts = job.items + job.most_items();
  job.layout = layout.mutable_data_ptr<int64_t>();
  launch_schedules({{job}}, 1, launch.stream);
  return {items, layout};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) { m.impl("schedule", TORCH_BOX(&schedule)); }

}  // namespace gnnfast
