// Softmax of values that belong to groups, as PyG's `softmax` writes it, on a CPU with the same bits. src is [E, ...], of
// which each column is normalised on its own; index [E] has the group of each row. A row without one is an error on a CPU, and
// on CUDA is 0 and complained of (common/ids.cuh).
//
//   out[e, d] = exp(src[e, d] - m[g, d]) / (s[g, d] + 1e-16),   g = index[e],
//   m and s the maximum of src and the sum of the exponentials over the rows of a group, in order
//
// softmax_coo_backward: out[e, d] = p * (grad - sum_g p * grad), with p the result of the softmax.
#pragma once

#include "common/check.h"
#include "common/dtype.h"

namespace gnnfast {

struct SoftmaxCooArgs {
  const void* index;  // [E], int32 or int64
  int64_t num_rows, num_groups, width;
  const void *in, *grad;  // [E, width]: values; in the backward pass p, and the gradient
  void* out;              // [E, width]
};

// Of contiguous operands.
inline SoftmaxCooArgs check_softmax_coo(const Tensor& in, const Tensor* grad, const Tensor& index, int64_t num_groups,
                                        const Tensor& out) {
  const ScalarType dtype = in.scalar_type();
  GNNFAST_CHECK(in.dim() > 0, "src must have a dimension");
  check_dim("index", index, 1);
  check_size("index", index, 0, in.size(0));
  check_same_device("index", index, in);
  GNNFAST_CHECK(num_groups >= 0, "the number of groups must not be negative, got ", num_groups);
  GNNFAST_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, "src must be float32 or float64");
  if (grad) {
    check_dtype("grad", *grad, dtype);
    check_same_device("grad", *grad, in);
    GNNFAST_CHECK(shape_str(*grad) == shape_str(in), "grad must have the shape of src, ", shape_str(in), ", got ",
                  shape_str(*grad));
  }
  const int64_t rows = in.size(0);
  return {index.const_data_ptr(),
          rows,
          num_groups,
          rows ? in.numel() / rows : 0,
          in.const_data_ptr(),
          grad ? grad->const_data_ptr() : nullptr,
          out.mutable_data_ptr()};
}

}  // namespace gnnfast
