// Checks and allocation of the ops of edge_gate, for both devices. The contract is in edge_gate_args.h.
#pragma once

#include <algorithm>

#include "common/csr.h"
#include "edge_gate_args.h"

namespace gnnfast {

inline bool is_of_sources(int64_t role) { return role != kWeightRole && role % kParts == kSrc; }
inline bool is_of_edges(int64_t role) { return role == kWeightRole || role % kParts == kEdge || role % kParts == kAttr; }

inline bool has(const std::vector<int64_t>& roles, int64_t role) {
  return std::find(roles.begin(), roles.end(), role) != roles.end();
}

// Where an array, or its gradient, is kept.
inline const void*& part_at(EdgeGateArgs& args, int64_t role) {
  return role == kWeightRole ? args.weight : args.factors[role / kParts].parts[role % kParts];
}
inline void*& grad_at(EdgeGateArgs& args, int64_t role) {
  return role == kWeightRole ? args.to_weight : args.factors[role / kParts].grads[role % kParts];
}

// `parts` are the arrays that there are, the first of them [.., F], and `roles` what they are. `rows` keeps them alive.
inline EdgeGateArgs gate_args(const Csr& a, bool transposed, const std::vector<Tensor>& parts,
                              const std::vector<int64_t>& roles, const std::vector<int64_t>& acts, std::vector<Tensor>& rows) {
  EdgeGateArgs args{};
  args.a = a;
  args.transposed = transposed;
  args.count = static_cast<int>(acts.size());
  GNNFAST_CHECK(1 <= args.count && args.count <= kMostFactors, "there must be 1 or 2 activations, got ", args.count);
  GNNFAST_CHECK(parts.size() == roles.size(), "there must be a role for each of the arrays, got ", roles.size(), " for ",
                parts.size());
  for (int k = 0; k < args.count; ++k) {
    GNNFAST_CHECK(0 <= acts[k] && acts[k] <= kAbs, "an activation must be 0 to ", int{kAbs}, ", got ", acts[k]);
    args.factors[k].act = static_cast<Activation>(acts[k]);
  }
  const Tensor& ref = parts[0];
  GNNFAST_CHECK(ref.scalar_type() == ScalarType::Float || ref.scalar_type() == ScalarType::Double,
                "edge_gate takes float32 and float64, got ", torch::headeronly::toString(ref.scalar_type()));
  check_dim("parts[0]", ref, 2);
  args.width = ref.size(1);
  for (size_t n = 0; n < parts.size(); ++n) {
    const std::string name = "parts[" + std::to_string(n) + "]";
    const int64_t role = roles[n];
    GNNFAST_CHECK(role == kWeightRole || (0 <= role && role < args.count * kParts), "a role must be 0 to ",
                  args.count * kParts - 1, " or ", kWeightRole, ", got ", role);
    check_dtype(name.c_str(), parts[n], ref.scalar_type());
    check_same_device(name.c_str(), parts[n], ref);
    GNNFAST_CHECK(role == kWeightRole || role % kParts != kScale || has(roles, role - kScale + kSrc),
                  "there is a scale, and no src");
    const bool is_matrix = role != kWeightRole && role % kParts == kMatrix,
               is_attr = role != kWeightRole && role % kParts == kAttr;
    const int64_t num_rows = is_of_edges(role)                                 ? a.num_edges
                             : !is_matrix && is_of_sources(role) == transposed ? a.num_rows
                                                                               : -1;
    rows.push_back(check_features(name.c_str(), parts[n], num_rows));
    if (is_attr) args.factors[role / kParts].depth = rows.back().size(1);
    if (!is_attr) check_size(name.c_str(), rows.back(), 1, role == kWeightRole ? 1 : args.width);
    part_at(args, role) = rows.back().const_data_ptr();
  }
  for (size_t n = 0; n < parts.size(); ++n) {
    if (roles[n] == kWeightRole || roles[n] % kParts < kAttr) continue;
    const bool is_attr = roles[n] % kParts == kAttr;
    GNNFAST_CHECK(has(roles, is_attr ? roles[n] + 1 : roles[n] - 1),
                  "there is an attr without a matrix, or a matrix without one");
    if (!is_attr) check_size(("parts[" + std::to_string(n) + "]").c_str(), rows[n], 0, args.factors[roles[n] / kParts].depth);
  }
  return args;
}

// out [M, F]
template <class Device>
Tensor edge_gate(GNNFAST_GRAPH_PARAMS, std::vector<Tensor> parts, std::vector<int64_t> roles, std::vector<int64_t> acts,
                 bool mean) {
  GNNFAST_CHECK(!parts.empty(), "there must be arrays");
  std::vector<Tensor> rows;
  EdgeGateArgs args = gate_args(check_csr(rowptr, col, perm, schedule, layout, parts[0]), false, parts, roles, acts, rows);
  args.mean = mean;
  Tensor out = make_empty(rows[0], {args.a.num_rows, args.width}, rows[0].scalar_type());
  args.out = out.mutable_data_ptr();
  if (out.numel() > 0) Device::edge_gate(args, out);
  return out;
}

// The gradients of the arrays of `needs`, which are roles: those of sources over the transpose, others over the matrix.
template <class Device>
std::vector<Tensor> edge_gate_backward(GNNFAST_GRAPH_PARAMS, std::vector<Tensor> parts, std::vector<int64_t> roles,
                                       std::vector<int64_t> acts, const Tensor& grad_, std::vector<int64_t> needs,
                                       bool transposed) {
  GNNFAST_CHECK(!parts.empty(), "there must be arrays");
  std::vector<Tensor> rows, grads;
  EdgeGateArgs args = gate_args(check_csr(rowptr, col, perm, schedule, layout, parts[0]), transposed, parts, roles, acts, rows);
  const ScalarType dtype = rows[0].scalar_type();
  check_dtype("grad", grad_, dtype);
  check_same_device("grad", grad_, rows[0]);
  const Tensor grad = check_features("grad", grad_, transposed ? -1 : args.a.num_rows);
  check_size("grad", grad, 1, args.width);
  args.backward = true;
  args.grad = grad.const_data_ptr();
  for (const int64_t role : needs) {
    const bool is_attr = role != kWeightRole && role % kParts == kAttr,
               is_matrix = role != kWeightRole && role % kParts == kMatrix;
    GNNFAST_CHECK(has(roles, role) && is_of_sources(role) == transposed && !is_attr, "there is no gradient for the role ", role,
                  " in this walk");
    const bool of_edge = is_of_edges(role);
    const std::initializer_list<int64_t> sizes = {of_edge     ? args.a.num_edges
                                                  : is_matrix ? args.factors[role / kParts].depth
                                                              : args.a.num_rows,
                                                  role == kWeightRole ? 1 : args.width};
    const bool zero = is_matrix || (of_edge && (may_leave_out(args.a) || args.width == 0));
    grads.push_back(zero ? make_zeros(grad, sizes, dtype) : make_empty(grad, sizes, dtype));
    grad_at(args, role) = grads.back().mutable_data_ptr();
  }
  if (args.a.num_rows > 0 && args.width > 0 && !grads.empty()) Device::edge_gate(args, grad);
  return grads;
}

}  // namespace gnnfast
