// Making schedules (schedule.h) on the device: up to two at a time, as a graph that is new wants those of both formats.
#pragma once

#include <array>

#include "common/launch.cuh"
#include "schedule.h"

namespace gnnfast {

constexpr int kWindow = 16 * kBlock;  // rows that are sorted together

// Items of each section: pieces, whole rows for a block, for a warp, for a few lanes.
struct Counts {
  int32_t n[4];
  __device__ Counts operator+(const Counts& o) const { return {{n[0] + o.n[0], n[1] + o.n[1], n[2] + o.n[2], n[3] + o.n[3]}}; }
};

struct ScheduleJob {
  const int32_t *rowptr = nullptr, *order = nullptr;  // order may be null
  int64_t num_rows = 0, num_edges = 0;
  int32_t warp_edges = 0, block_edges = 1;
  Counts* windows = nullptr;  // [num_windows()], scratch
  int4* counts = nullptr;     // all items, pieces, items for a block, for a warp
  int4* items = nullptr;      // [most_items()]
  int64_t* layout = nullptr;  // [4], the counts once more; or null

  ScheduleJob() = default;
  ScheduleJob(const int32_t* rowptr, int64_t num_rows, int64_t num_edges)
      : rowptr(rowptr),
        num_rows(num_rows),
        num_edges(num_edges),
        warp_edges(static_cast<int32_t>(gnnfast::warp_edges(num_edges))),
        block_edges(static_cast<int32_t>(gnnfast::block_edges(num_edges))) {}

  __host__ __device__ int64_t num_windows() const { return (num_rows + kWindow - 1) / kWindow; }
  int64_t most_items() const { return num_rows + num_edges / block_edges; }

  // How many items there can be, in the order of `counts`.
  std::array<int64_t, 4> bounds() const {
    if (num_rows == 0) return {};
    // A row of more than b edges has at most 2 / b pieces an edge.
    const int64_t pieces = num_edges > block_edges ? 2 * num_edges / block_edges : 0;
    const int64_t for_block = pieces + std::min(num_rows, num_edges / (warp_edges + 1));
    const int64_t for_warp = std::min(num_rows, num_edges / (kShortRow + 1));
    return {for_block + for_warp + num_rows, pieces, for_block, for_warp};
  }
};

struct ScheduleJobs {
  ScheduleJob of[2];
};

void launch_schedules(const ScheduleJobs& jobs, int count, cudaStream_t stream);

}  // namespace gnnfast
