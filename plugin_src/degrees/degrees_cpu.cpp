#include "degrees.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>

namespace gnnfast {
namespace {

// By one thread: the members are few.
Tensor degrees(const Tensor& index, int64_t num_groups, ScalarType dtype) {
  return run_degrees(index, num_groups, dtype, [num_groups](const Tensor& ids, const Tensor& out, auto type, auto zero) {
    const auto* id = static_cast<const typename decltype(type)::type*>(ids.const_data_ptr());
    auto* degree = static_cast<decltype(zero)*>(out.mutable_data_ptr());
    std::fill_n(degree, num_groups, zero);
    for (int64_t e = 0; e < ids.size(0); ++e) {
      GNNFAST_CHECK(id[e] >= 0 && id[e] < num_groups, "index ", id[e], " is out of range [0, ", num_groups, ")");
      degree[id[e]] += 1;
    }
    for (int64_t i = 0; i < num_groups; ++i) degree[i] = std::max(degree[i], zero + 1);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) { m.impl("degrees", TORCH_BOX(&degrees)); }

}  // namespace gnnfast
