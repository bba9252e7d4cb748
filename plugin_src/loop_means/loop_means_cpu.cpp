#include "loop_means.h"

#include <torch/csrc/stable/library.h>

namespace gnnfast {
namespace {

Tensor loop_means(const Tensor& edge_index_, const Tensor& rows_, int64_t kept, int64_t num_nodes) {
  const Tensor edge_index = as_contiguous(edge_index_), rows = check_features("rows", rows_, edge_index_.size(1));
  Tensor out;
  dispatch_listed(edge_index, rows, kept, num_nodes, [&](const auto& listed, auto type) {
    using T = typename decltype(type)::type;
    out = make_empty(rows, {kept + num_nodes, rows.size(1)}, rows.scalar_type());
    listed.forward(static_cast<const T*>(rows.const_data_ptr()), static_cast<T*>(out.mutable_data_ptr()));
  });
  return out;
}

Tensor loop_means_backward(const Tensor& edge_index_, const Tensor& grad_, int64_t kept, int64_t num_nodes) {
  const Tensor edge_index = as_contiguous(edge_index_), grad = check_features("grad", grad_, kept + num_nodes);
  Tensor out;
  dispatch_listed(edge_index, grad, kept, num_nodes, [&](const auto& listed, auto type) {
    using T = typename decltype(type)::type;
    out = make_empty(grad, {edge_index.size(1), grad.size(1)}, grad.scalar_type());
    listed.backward(static_cast<const T*>(grad.const_data_ptr()), static_cast<T*>(out.mutable_data_ptr()));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("loop_means", TORCH_BOX(&loop_means));
  m.impl("loop_means_backward", TORCH_BOX(&loop_means_backward));
}

}  // namespace gnnfast
