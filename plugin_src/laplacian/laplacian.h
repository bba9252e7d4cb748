// The scaled Laplacian of ChebConv (Defferrard et al., NeurIPS 2016), as PyG's functions list it, in one call:
//
//   2 L / lambda_max - I,   L = D - A,   I - D^(-1/2) A D^(-1/2)   or   I - D^(-1) A
//
// The edges are those that are no loops, in order, and then one loop at each node; D sums weights by the source. lambda_max is
// twice the largest weight of L unless given; weights of +inf are 0. On a CPU the bits are those of PyG's twenty operations,
// one after the other; on CUDA it waits for the number of loops, as PyG does, and an edge with an id out of range weighs 0 and
// is complained of (common/ids.cuh).
#pragma once

#include "graph/convert.h"

namespace gnnfast {

enum Normalization { kNone, kSymmetric, kRandomWalk };

struct LaplacianArgs {
  const void* edges;   // [2, E]
  const void* weight;  // [E] or null: ones
  int64_t num_edges, num_nodes;
  Normalization normalization;
  std::optional<double> lambda_max;
  int64_t* out_edges;  // [2, kept + N]
  void* out;           // [kept + N]
};

// run(args, edge_index, type, make) finds the edges that are no loops, calls make(how many) for the result, and fills it.
template <class F>
std::tuple<Tensor, Tensor> run_laplacian(const Tensor& edge_index_, const OptTensor& weight_, int64_t num_nodes,
                                         int64_t normalization, std::optional<double> lambda_max, ScalarType dtype,
                                         const F& run) {
  const Tensor edge_index = as_contiguous(edge_index_);
  const OptTensor weight = weight_ ? OptTensor(as_contiguous(*weight_)) : weight_;
  check_dim("edge_index", edge_index, 2);
  check_size("edge_index", edge_index, 0, 2);
  GNNFAST_CHECK(num_nodes >= 0, "num_nodes must not be negative, got ", num_nodes);
  GNNFAST_CHECK(edge_index.size(1) < kMaxEdges, "2^31 - 2^16 edges or more are not supported, got ", edge_index.size(1));
  GNNFAST_CHECK(normalization >= kNone && normalization <= kRandomWalk, "normalization must be 0, 1 or 2, got ", normalization);
  GNNFAST_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, "weight must be float32 or float64");
  if (weight) {
    check_dim("weight", *weight, 1);
    check_size("weight", *weight, 0, edge_index.size(1));
    check_dtype("weight", *weight, dtype);
    check_same_device("weight", *weight, edge_index);
  }
  LaplacianArgs args{edge_index.const_data_ptr(),
                     weight ? weight->const_data_ptr() : nullptr,
                     edge_index.size(1),
                     num_nodes,
                     static_cast<Normalization>(normalization),
                     lambda_max,
                     nullptr,
                     nullptr};
  Tensor out_edges, out;
  auto make = [&](int64_t kept) {
    const int64_t size = kept + num_nodes;
    GNNFAST_CHECK(size > 0 || lambda_max, "nothing has a largest weight");
    out_edges = make_empty(edge_index, {2, size}, ScalarType::Long);
    out = make_empty(edge_index, {size}, dtype);
    args.out_edges = out_edges.mutable_data_ptr<int64_t>();
    args.out = out.mutable_data_ptr();
  };
  dispatch_index("edge_index", edge_index.scalar_type(), [&](auto type) { run(args, edge_index, type, make); });
  return {out_edges, out};
}

}  // namespace gnnfast
