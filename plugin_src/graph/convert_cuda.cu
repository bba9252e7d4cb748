#include <torch/csrc/stable/library.h>

#include <cub/device/device_radix_sort.cuh>
#include <mutex>

#include "common/ids.cuh"
#include "common/launch.cuh"
#include "convert.h"
#include "schedule.cuh"

namespace gnnfast {
namespace {

// A format that is made: of rows and columns as given, or of the transpose.
struct Side {
  int64_t num_rows, num_cols;
  const void *row, *column;
  int32_t *rowptr, *col, *perm;
};

struct ConvertArgs {
  Side of[2];
  int64_t num_edges, slots;  // without and with loops that are added
  bool loops;
  int32_t *key, *id, *sorted_key, *sorted_id;  // [sides * slots]; keys of the transpose follow those of all rows

  __device__ int32_t first_key(int side) const { return side ? static_cast<int32_t>(of[0].num_rows) + 1 : 0; }
};

// An edge that is not inside the matrix is sorted behind all others of a side, where no row's slots are.
template <class I>
__global__ void __launch_bounds__(kBlock) keys_kernel(const ConvertArgs p, int sides, longlong2* complaint) {
  const int64_t e = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (e >= p.slots) return;
  int64_t ends[2] = {e - p.num_edges, e - p.num_edges};
  bool counts = true;
  if (e < p.num_edges) {
    ends[0] = static_cast<const I*>(p.of[0].row)[e], ends[1] = static_cast<const I*>(p.of[0].column)[e];
    const bool good_row = inside(ends[0], p.of[0].num_rows), good = good_row && inside(ends[1], p.of[0].num_cols);
    if (!good) complain(complaint, good_row ? ends[1] : ends[0], good_row ? p.of[0].num_cols : p.of[0].num_rows);
    counts = good && !(p.loops && ends[0] == ends[1]);
  }
  for (int side = 0; side < sides; ++side) {
    p.key[side * p.slots + e] = p.first_key(side) + static_cast<int32_t>(counts ? ends[side] : p.of[side].num_rows);
    p.id[side * p.slots + e] = static_cast<int32_t>(e);
  }
}

// From the sorted rows: where each row begins, and the edges in that order. Each row searches for its first edge. Edges would
// tell where rows begin in fewer steps, but one thread for all rows without an edge that follow each other, as the nodes of a
// last hop do.
template <class I>
__global__ void __launch_bounds__(kBlock) fill_kernel(const ConvertArgs p) {
  const Side& side = p.of[blockIdx.y];
  const int32_t *key = p.sorted_key + blockIdx.y * p.slots, *id = p.sorted_id + blockIdx.y * p.slots;
  const int64_t s = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (s <= side.num_rows) {
    const int64_t row = s + p.first_key(blockIdx.y);
    int64_t low = 0, high = p.slots;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (key[middle] < row)
        low = middle + 1;
      else
        high = middle;
    }
    side.rowptr[s] = static_cast<int32_t>(low);
  }
  if (s >= p.slots) return;
  const int32_t e = id[s];
  const int64_t column = e < p.num_edges ? static_cast<const I*>(side.column)[e] : e - p.num_edges;
  side.col[s] = static_cast<int32_t>(inside(column, side.num_cols) ? column : 0);
  if (side.perm != id) side.perm[s] = e;
}

using Formats = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// rowptr, col, perm and the items of the schedule, those of the transpose (or empty ones), and on the CPU, [8], how large each
// schedule's layout can be; the last of the items holds what it is.
Formats coo_to_formats(const Tensor& row_, const Tensor& column_, int64_t num_rows, int64_t num_cols, bool loops, bool both) {
  const Tensor row = as_contiguous(row_), column = as_contiguous(column_);
  const CooArgs coo = check_coo_input(row, column, num_rows, num_cols);
  const Launch launch(row);
  const int sides = both ? 2 : 1;
  const int64_t slots = coo.num_edges + (loops ? std::min(num_rows, num_cols) : 0),
                last_key = num_rows + (both ? num_cols + 1 : 0);
  GNNFAST_CHECK(sides * slots < kMaxEdges && last_key < kMaxIndex, "graphs of 2^31 nodes or edges are not supported, got ",
                num_rows, " rows, ", num_cols, " columns and ", slots, " edges, loops included");
  auto ints = [&](int64_t n) { return make_empty(row, {n}, ScalarType::Int); };
  ConvertArgs p{};
  p.num_edges = coo.num_edges, p.slots = slots, p.loops = loops;
  p.of[0] = {num_rows, num_cols, coo.row, coo.column, nullptr, nullptr, nullptr};
  p.of[1] = {num_cols, num_rows, coo.column, coo.row, nullptr, nullptr, nullptr};
  std::optional<Tensor> rowptr[2], col[2], perm[2], items[2];
  std::array<int64_t, 8> bounds{};
  ScheduleJobs jobs;
  int64_t windows = 0;
  for (int side = 0; side < 2; ++side) {
    const bool wanted = side < sides;
    ScheduleJob& job = jobs.of[side];
    rowptr[side] = ints(wanted ? p.of[side].num_rows + 1 : 0);
    if (wanted) job = ScheduleJob(rowptr[side]->mutable_data_ptr<int32_t>(), p.of[side].num_rows, slots);
    col[side] = ints(wanted ? slots : 0), perm[side] = ints(wanted ? slots : 0);
    const int64_t most = wanted ? job.most_items() + 1 : 0;
    items[side] = make_empty(row, {most, 4}, ScalarType::Int);
    if (!wanted) continue;
    job.items = reinterpret_cast<int4*>(items[side]->mutable_data_ptr<int32_t>());
    job.counts = job.items + most - 1;
    p.of[side].rowptr = rowptr[side]->mutable_data_ptr<int32_t>();
    p.of[side].col = col[side]->mutable_data_ptr<int32_t>();
    p.of[side].perm = perm[side]->mutable_data_ptr<int32_t>();
    const std::array<int64_t, 4> most_of_each = job.bounds();
    std::copy(most_of_each.begin(), most_of_each.end(), bounds.begin() + 4 * side);
    windows += job.num_windows();
  }
  size_t temp_bytes = 0;
  int bits = 1;
  while (bits < 31 && last_key >> bits) ++bits;
  const int64_t all = sides * slots;
  auto sort = [&](void* temp) {
    STD_CUDA_CHECK(
        cub::DeviceRadixSort::SortPairs(temp, temp_bytes, p.key, p.sorted_key, p.id, p.sorted_id, all, 0, bits, launch.stream));
  };
  sort(nullptr);
  // Scratch: what cub wants and windows of schedules, each at a multiple of 16 bytes, and three buffers of keys and ids, or
  // four for two sides; columns and perms serve as the others until they are filled.
  const int64_t temp_ints = (static_cast<int64_t>(temp_bytes) + 15) / 16 * 4;
  Tensor scratch = ints(temp_ints + 4 * windows + (both ? 4 : 2) * all);
  int32_t* at = scratch.mutable_data_ptr<int32_t>();
  int32_t* temp = at;
  at += temp_ints;
  for (int side = 0; side < sides; ++side) {
    jobs.of[side].windows = reinterpret_cast<Counts*>(at);
    at += 4 * jobs.of[side].num_windows();
  }
  p.key = at, p.sorted_key = at + all;
  p.id = both ? at + 2 * all : p.of[0].col, p.sorted_id = both ? at + 3 * all : p.of[0].perm;
  dispatch_index("edge_index", coo.index, [&](auto type) {
    using I = typename decltype(type)::type;
    if (slots > 0) {
      keys_kernel<I><<<blocks_for(slots), kBlock, 0, launch.stream>>>(p, sides, complaints());
      STD_CUDA_KERNEL_LAUNCH_CHECK();
      sort(temp);
    }
    const int64_t most = std::max({slots, num_rows + 1, both ? num_cols + 1 : 0});
    fill_kernel<I><<<dim3(blocks_for(most), sides), kBlock, 0, launch.stream>>>(p);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  launch_schedules(jobs, sides, launch.stream);
  return {*rowptr[0], *col[0], *perm[0], *items[0], *rowptr[1], *col[1], *perm[1], *items[1], make_on_cpu(bounds)};
}

template <class I>
__global__ void __launch_bounds__(kBlock) rows_kernel(const I* rowptr, int64_t num_rows, int64_t num_slots, I* row) {
  const int64_t s = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (s >= num_slots) return;
  const int64_t slot = __ldg(rowptr) + s;
  int64_t low = 0, high = num_rows;  // the last row that begins at the slot or before: it has slots, those before it may not
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (static_cast<int64_t>(__ldg(rowptr + middle)) <= slot ? low : high) = middle;
  }
  row[s] = static_cast<I>(low);
}

Tensor csr_rows(const Tensor& rowptr_, int64_t num_slots) {
  const Tensor rowptr = as_contiguous(rowptr_);
  check_dim("rowptr", rowptr, 1);
  GNNFAST_CHECK(num_slots >= 0, "num_slots must not be negative, got ", num_slots);
  GNNFAST_CHECK(num_slots == 0 || rowptr.size(0) > 1, "there are slots, and rowptr has no rows");
  const Launch launch(rowptr);
  Tensor row = make_empty(rowptr, {num_slots}, rowptr.scalar_type());
  if (num_slots == 0) return row;
  dispatch_index("rowptr", rowptr.scalar_type(), [&](auto type) {
    using I = typename decltype(type)::type;
    rows_kernel<I><<<blocks_for(num_slots), kBlock, 0, launch.stream>>>(
        static_cast<const I*>(rowptr.const_data_ptr()), rowptr.size(0) - 1, num_slots, static_cast<I*>(row.mutable_data_ptr()));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return row;
}

// The address of the complaints, for a device of CUDA.
int64_t id_complaints(const Tensor&) { return reinterpret_cast<int64_t>(complaints()); }

}  // namespace

longlong2* complaints() {
  static std::mutex lock;
  static longlong2* at = nullptr;
  std::lock_guard<std::mutex> guard(lock);
  if (at) return at;
  void* made = nullptr;
  // While a CUDA graph is captured, in another thread perhaps, it would be refused and end that; it is no work of a stream.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  const cudaError_t error = cudaHostAlloc(&made, sizeof(longlong2), cudaHostAllocPortable | cudaHostAllocMapped);
  STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  if (error != cudaSuccess) {  // must not stay behind
    cudaGetLastError();
    return nullptr;
  }
  at = static_cast<longlong2*>(made);
  *at = {0, 0};
  return at;
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("id_complaints", TORCH_BOX(&id_complaints));
  m.impl("coo_to_formats", TORCH_BOX(&coo_to_formats));
  m.impl("csr_rows", TORCH_BOX(&csr_rows));
}

}  // namespace gnnfast
