#include "laplacian.h"

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <limits>

namespace gnnfast {
namespace {

// In the order of PyG's operations, each rounded as there.
template <class T, class I>
void run(const WithoutLoops<I>& edges, const LaplacianArgs& p) {
  const int64_t kept = edges.count(), size = kept + p.num_nodes;
  const T* weight = static_cast<const T*>(p.weight);
  T* out = static_cast<T*>(p.out);
  auto inside = [&](int64_t id) { return static_cast<uint64_t>(id) < static_cast<uint64_t>(p.num_nodes); };
  bool good = true;
  std::vector<T> degree(p.num_nodes);
  edges.each([&](int64_t k, int64_t e) {
    const int64_t from = edges.source[e], to = edges.target[e];
    if (!(inside(from) && inside(to))) return void(good = false);
    out[k] = weight ? weight[e] : T{1};
    degree[from] += out[k];
    p.out_edges[k] = from, p.out_edges[size + k] = to;
  });
  GNNFAST_CHECK(good, "an index of an edge is out of range [0, ", p.num_nodes, ")");
  std::vector<T> factor(p.normalization == kNone ? 0 : p.num_nodes);
  for (size_t i = 0; i < factor.size(); ++i) {
    const T inverse = 1 / (p.normalization == kSymmetric ? std::sqrt(degree[i]) : degree[i]);
    factor[i] = inverse == std::numeric_limits<T>::infinity() ? T{0} : inverse;
  }
  for (int64_t k = 0; k < kept; ++k) {
    if (p.normalization != kNone) out[k] = factor[p.out_edges[k]] * out[k];
    if (p.normalization == kSymmetric) out[k] *= factor[p.out_edges[size + k]];
    out[k] = -out[k];
  }
  for (int64_t i = 0; i < p.num_nodes; ++i) {
    out[kept + i] = p.normalization == kNone ? degree[i] : T{1};
    p.out_edges[kept + i] = p.out_edges[size + kept + i] = i;
  }
  T most = p.lambda_max ? static_cast<T>(*p.lambda_max) : -std::numeric_limits<T>::infinity();
  if (!p.lambda_max) {
    for (int64_t k = 0; k < size; ++k) most = !(out[k] <= most) && most == most ? out[k] : most;  // NaN stays
    most *= 2;
  }
  for (int64_t k = 0; k < size; ++k) {
    const T scaled = 2 * out[k] / most, finite = scaled == std::numeric_limits<T>::infinity() ? T{0} : scaled;
    out[k] = k < kept ? finite : finite - 1;
  }
}

std::tuple<Tensor, Tensor> laplacian_listed(const Tensor& edge_index_, const OptTensor& weight_, int64_t num_nodes,
                                            int64_t normalization, std::optional<double> lambda_max, ScalarType dtype) {
  const Tensor edge_index = as_contiguous(edge_index_);
  const OptTensor weight = weight_ ? OptTensor(as_contiguous(*weight_)) : weight_;
  check_dim("edge_index", edge_index, 2);
  check_size("edge_index", edge_index, 0, 2);
  GNNFAST_CHECK(num_nodes >= 0, "num_nodes must not be negative, got ", num_nodes);
  GNNFAST_CHECK(normalization >= kNone && normalization <= kRandomWalk, "normalization must be 0, 1 or 2, got ", normalization);
  GNNFAST_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, "weight must be float32 or float64");
  if (weight) {
    check_dim("weight", *weight, 1);
    check_size("weight", *weight, 0, edge_index.size(1));
    check_dtype("weight", *weight, dtype);
  }
  LaplacianArgs args{weight ? weight->const_data_ptr() : nullptr,
                     num_nodes,
                     static_cast<Normalization>(normalization),
                     lambda_max,
                     nullptr,
                     nullptr};
  Tensor out_edges, out;
  dispatch_index("edge_index", edge_index.scalar_type(), [&](auto type) {
    using I = typename decltype(type)::type;
    const WithoutLoops<I> edges(edge_index.const_data_ptr(), edge_index.size(1), 1);
    const int64_t size = edges.count() + num_nodes;
    GNNFAST_CHECK(size > 0 || lambda_max, "nothing has a largest weight");
    out_edges = make_empty(edge_index, {2, size}, ScalarType::Long);
    out = make_empty(edge_index, {size}, dtype);
    args.out_edges = out_edges.mutable_data_ptr<int64_t>();
    args.out = out.mutable_data_ptr();
    dtype == ScalarType::Float ? run<float>(edges, args) : run<double>(edges, args);
  });
  return {out_edges, out};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) { m.impl("laplacian_listed", TORCH_BOX(&laplacian_listed)); }

}  // namespace gnnfast
