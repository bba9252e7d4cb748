// What a lane reads of the edges of a batch in attention: columns, and which heads the dropout keeps.
#pragma once

#include "common/launch.cuh"
#include "random.h"

namespace gnnfast {

// COLUMNS registers a lane; IDS: whether the numbers of edges are wanted. `M` is a reducer (common/walk.cuh) with its arguments
// `p`, its `lane` and `kept`, the draws that keep.
template <int COLUMNS, bool IDS = false>
struct KeptEdges {
  int col[COLUMNS], ids[IDS ? COLUMNS : 1];
  uint32_t keep[COLUMNS];  // bit h: head h is kept

  template <int LANES, class M>
  __device__ void read(const M& m, int first, int end) {
#pragma unroll
    for (int u = 0; u < COLUMNS; ++u) {
      const int slot = first + u * LANES + m.lane % LANES;
      col[u] = 0, keep[u] = 0;
      if constexpr (IDS) ids[u] = 0;
      if (slot < end) {
        col[u] = __ldg(m.p.a.col + slot);
        if (IDS || m.p.seed) {
          const int id = m.p.a.perm ? __ldg(m.p.a.perm + slot) : slot;
          if constexpr (IDS) ids[u] = id;
          if (m.p.seed) keep[u] = kept_heads(__ldg(m.p.seed), id, static_cast<int>(m.p.heads), m.kept);
        }
      }
    }
  }
};

}  // namespace gnnfast
