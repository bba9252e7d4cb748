// GCN normalisation of an edge list: what takes PyG a dozen operations, some of which wait for the device, in one.
//
//   weight'[e] = weight[e] / sqrt(degree[source] * degree[destination]),  degree[i] = sum of the weights at the node i
//
// With a fill every node gets a loop: of the weight of its last loop in the list, or of `fill` where it has none. PyG takes the
// loops in the list out; here they stay, since the size of the result must not depend on what only the device knows: a node's k
// loops and the new one share the weight equally. Sums over the result are PyG's, also of features that are not finite, but not
// means. Degrees are summed in the accumulation type, by atomics on CUDA, where without weights they are integers: only with
// weights do results vary from run to run there.
//
// An edge with an id out of range counts as none and gets the weight 0. On CUDA it is complained of (common/ids.cuh); on the
// CPU the call fails.
//
// gcn_norm_listed (float32 and float64): edges and weights as PyG's functions list them, the edges that are no loops, in order,
// and then one loop at each node. On a CPU with the same bits; on CUDA it waits for the number of loops, as PyG does, and fails
// where several loops of a node have weights: PyG takes any of them there.
#pragma once

#include "common/device.h"
#include "graph/convert.h"

namespace gnnfast {

struct GcnNormArgs {
  const void* edges;  // [2, E], int32 or int64
  bool index64, loops, to_target, listed;
  int64_t num_edges, num_nodes;
  int64_t kept;        // edges of the result before the loops that are added: E, but for those in the list where `listed`
  const void* weight;  // [E] or null: ones
  const int32_t* ids;  // CUDA: [kept] of the edges of the result before these loops; null: all
  void* collected;     // CUDA: what the edges say of each node; null if that is not known
  double fill;         // of a node without a loop
  int64_t* out_edges;  // [2, kept + N]; with loops only
  void* out;           // [kept + N], without loops [E]
};

template <class Device>
std::tuple<Tensor, Tensor> run_gcn_norm(GcnNormArgs& args, const Tensor& edge_index, ScalarType dtype) {
  const int64_t size = args.loops ? args.kept + args.num_nodes : args.num_edges;
  Tensor out_edges = make_empty(edge_index, {2, args.loops ? size : 0}, ScalarType::Long);
  Tensor out = make_empty(edge_index, {size}, dtype);
  args.out_edges = out_edges.mutable_data_ptr<int64_t>();
  args.out = out.mutable_data_ptr();
  if (size > 0) Device::gcn_norm(args, out);
  return {out_edges, out};
}

// Of contiguous operands.
inline GcnNormArgs check_gcn_norm(const Tensor& edge_index, const OptTensor& weight, int64_t num_nodes,
                                  std::optional<double> fill, bool to_target, ScalarType dtype) {
  check_dim("edge_index", edge_index, 2);
  check_size("edge_index", edge_index, 0, 2);
  GNNFAST_CHECK(num_nodes >= 0, "num_nodes must not be negative, got ", num_nodes);
  GcnNormArgs args{};
  args.edges = edge_index.const_data_ptr();
  args.index64 = edge_index.scalar_type() == ScalarType::Long;
  if (!args.index64) check_dtype("edge_index", edge_index, ScalarType::Int);
  args.num_edges = args.kept = edge_index.size(1);
  args.num_nodes = num_nodes;
  GNNFAST_CHECK(args.num_edges < kMaxEdges, "2^31 - 2^16 edges or more are not supported, got ", args.num_edges);
  if (weight) {
    check_dim("weight", *weight, 1);
    check_size("weight", *weight, 0, args.num_edges);
    check_dtype("weight", *weight, dtype);
    check_same_device("weight", *weight, edge_index);
    args.weight = weight->const_data_ptr();
  }
  args.loops = fill.has_value();
  args.fill = fill.value_or(0);
  args.to_target = to_target;
  return args;
}

// fill: none adds no loops; the result's edges are then empty [2, 0], as they are those given. to_target: degrees are of
// destinations, else of sources. dtype: of the result, and of the weights if there are any.
template <class Device>
std::tuple<Tensor, Tensor> gcn_norm_coo(const Tensor& edge_index_, const OptTensor& weight_, int64_t num_nodes,
                                        std::optional<double> fill, bool to_target, ScalarType dtype) {
  const Tensor edge_index = as_contiguous(edge_index_);
  const OptTensor weight = weight_ ? OptTensor(as_contiguous(*weight_)) : weight_;
  GcnNormArgs args = check_gcn_norm(edge_index, weight, num_nodes, fill, to_target, dtype);
  return run_gcn_norm<Device>(args, edge_index, dtype);
}

// keep(args, edge_index, type) finds `kept`, and on CUDA `ids` and `collected`.
template <class Device, class F>
std::tuple<Tensor, Tensor> run_gcn_norm_listed(const Tensor& edge_index_, const OptTensor& weight_, int64_t num_nodes,
                                               std::optional<double> fill, bool to_target, ScalarType dtype, const F& keep) {
  const Tensor edge_index = as_contiguous(edge_index_);
  const OptTensor weight = weight_ ? OptTensor(as_contiguous(*weight_)) : weight_;
  GcnNormArgs args = check_gcn_norm(edge_index, weight, num_nodes, fill, to_target, dtype);
  GNNFAST_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, "weight must be float32 or float64");
  args.listed = true;
  if (args.loops) dispatch_index("edge_index", edge_index.scalar_type(), [&](auto type) { keep(args, edge_index, type); });
  return run_gcn_norm<Device>(args, edge_index, dtype);
}

}  // namespace gnnfast
