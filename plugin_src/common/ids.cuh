// Ids that are out of range, met by a kernel on a GPU. Nobody waits to hear of them: the kernel leaves the edge out, and writes
// what it met where the host can look without waiting, which raises the IndexError (gnnfast/graph/ids.py).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace gnnfast {

// One place for the process, in the host's memory: {the id, 2 * bound + 1}; the second is 0 while there is nothing to say. Of
// several, some one is kept. Null if the host has no memory for it.
longlong2* complaints();

__device__ inline void complain(longlong2* at, int64_t id, int64_t bound) {
  if (at) *at = make_longlong2(id, 2 * bound + 1);
}

__device__ inline bool inside(int64_t id, int64_t bound) { return static_cast<uint64_t>(id) < static_cast<uint64_t>(bound); }

}  // namespace gnnfast
