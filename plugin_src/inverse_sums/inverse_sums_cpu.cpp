// The weights that make sums over the members of a group means, for each member e, in one call (CPU only):
//
//   out[e] = 1 / (sum of the weights of all members of e's group),   0 where that is infinite
//
// The bits are those of PyG's eight operations, one after the other: sums in the order of the members, which are few, or are
// remembered. So by one thread.
#include <torch/csrc/stable/library.h>

#include <limits>
#include <vector>

#include "common/dtype.h"

namespace gnnfast {
namespace {

template <class T, class I>
void run(const I* index, const T* weight, int64_t num_members, int64_t num_groups, T* out) {
  std::vector<T> group(num_groups);
  for (int64_t e = 0; e < num_members; ++e) {
    GNNFAST_CHECK(index[e] >= 0 && index[e] < num_groups, "index ", index[e], " is out of range [0, ", num_groups, ")");
    group[index[e]] += weight ? weight[e] : T{1};
  }
  for (T& sum : group) {
    sum = 1 / sum;
    if (sum == std::numeric_limits<T>::infinity()) sum = 0;
  }
  for (int64_t e = 0; e < num_members; ++e) out[e] = group[index[e]];
}

Tensor inverse_sums(const Tensor& index_, const OptTensor& weight_, int64_t num_groups, ScalarType dtype) {
  const Tensor index = as_contiguous(index_);
  const OptTensor weight = weight_ ? OptTensor(as_contiguous(*weight_)) : weight_;
  check_dim("index", index, 1);
  GNNFAST_CHECK(num_groups >= 0, "num_groups must not be negative, got ", num_groups);
  GNNFAST_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, "weight must be float32 or float64");
  if (weight) {
    check_dim("weight", *weight, 1);
    check_size("weight", *weight, 0, index.size(0));
    check_dtype("weight", *weight, dtype);
  }
  Tensor out = make_empty(index, {index.size(0)}, dtype);
  auto of = [&](auto zero) {
    using T = decltype(zero);
    dispatch_index("index", index.scalar_type(), [&](auto type) {
      using I = typename decltype(type)::type;
      run(static_cast<const I*>(index.const_data_ptr()), weight ? static_cast<const T*>(weight->const_data_ptr()) : nullptr,
          index.size(0), num_groups, static_cast<T*>(out.mutable_data_ptr()));
    });
  };
  dtype == ScalarType::Float ? of(float{}) : of(double{});
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) { m.impl("inverse_sums", TORCH_BOX(&inverse_sums)); }

}  // namespace gnnfast
