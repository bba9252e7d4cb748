// Plain types that kernels see. Nothing of torch is included here: the CPU kernels are compiled once per instruction set, and
// an inline function of a library compiled that way could be the copy the linker keeps for machines that lack the instructions.
#pragma once

#include <cstdint>

namespace gnnfast {

enum DType : int { kFloat, kDouble, kHalf, kBFloat16 };

// Storage of the 16-bit types on the host; arithmetic is done in float.
struct half_t {
  uint16_t bits;
};
struct bf16_t {
  uint16_t bits;
};

// Types in which a reduction is accumulated: double for double, float for everything shorter.
template <class T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <class T>
using acc_t = typename Accumulate<T>::type;

template <class T>
struct Type {
  using type = T;
};

template <int V>
struct Int {
  static constexpr int value = V;
};

// The view of a CSR matrix.
struct Csr {
  const int32_t* rowptr;  // [num_rows + 1]
  const int32_t* col;     // [num_edges]
  const int32_t* perm;    // [num_edges], CSR slot -> user's edge id, or null: slots are edge ids
  int64_t num_rows, num_edges;
  // Work items of the CUDA kernels (graph/schedule.h builds them): int4 (row, first slot, last slot + 1, pieces of the row), in
  // three sections: num_block_items for a block of threads each, num_warp_items for a warp each, and the rest, short rows, for
  // a few lanes each. The first num_pieces are pieces of long rows, which are combined in a second kernel; others are whole
  // rows. Of a new graph the host knows only how many there can be: the numbers are then at `counts`, in the order items,
  // pieces, items for a block, for a warp, and those below are for the size of a launch.
  const int32_t* schedule;  // [num_items, 4] or null
  const int32_t* counts;    // [4] or null
  int64_t num_items, num_pieces, num_block_items, num_warp_items;
  int64_t slab;  // bytes of features that a pass over the edges covers; 0: the kernel decides
};

}  // namespace gnnfast
