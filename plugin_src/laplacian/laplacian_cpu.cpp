#include "laplacian.h"

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <limits>

#include "graph/loops.h"

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

std::tuple<Tensor, Tensor> laplacian_listed(const Tensor& edge_index, const OptTensor& weight, int64_t num_nodes,
                                            int64_t normalization, std::optional<double> lambda_max, ScalarType dtype) {
  auto fill = [dtype](LaplacianArgs& args, const Tensor&, auto type, auto make) {
    const WithoutLoops<typename decltype(type)::type> edges(args.edges, args.num_edges, 1);
    make(edges.count());
    dtype == ScalarType::Float ? run<float>(edges, args) : run<double>(edges, args);
  };
  return run_laplacian(edge_index, weight, num_nodes, normalization, lambda_max, dtype, fill);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) { m.impl("laplacian_listed", TORCH_BOX(&laplacian_listed)); }

}  // namespace gnnfast
