// How many members each group has, at least 1: what sums over groups are divided by to be means.
//
//   out[i] = max(1, |{e : index[e] = i}|)
//
// In one call of the host, where PyG writes four. On a CPU an id out of range fails; on CUDA it counts for none and is
// complained of (common/ids.cuh).
#pragma once

#include "common/dtype.h"

namespace gnnfast {

// run(index, out, type of the ids, zero of the dtype)
template <class F>
Tensor run_degrees(const Tensor& index_, int64_t num_groups, ScalarType dtype, const F& run) {
  const Tensor index = as_contiguous(index_);
  check_dim("index", index, 1);
  GNNFAST_CHECK(num_groups >= 0, "num_groups must not be negative, got ", num_groups);
  GNNFAST_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, "degrees must be float32 or float64");
  const Tensor out = make_empty(index, {num_groups}, dtype);
  dispatch_index("index", index.scalar_type(), [&](auto type) {
    dtype == ScalarType::Float ? run(index, out, type, float{}) : run(index, out, type, double{});
  });
  return out;
}

}  // namespace gnnfast
