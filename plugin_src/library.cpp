// The schemas of all ops. Fake kernels and autograd formulas are registered in Python (gnnfast/ops).
#include <torch/csrc/stable/library.h>

// A matrix in CSR and its transpose, which only the autograd formulas read; see common/csr.h.
#define GNNFAST_GRAPH                                                         \
  "Tensor rowptr, Tensor col, Tensor? perm, Tensor? schedule, int[] layout, " \
  "Tensor? rowptr_t, Tensor? col_t, Tensor? perm_t, Tensor? schedule_t, int[] layout_t"

// The same for ops that run over both.
#define GNNFAST_BOTH                                                          \
  "Tensor rowptr, Tensor col, Tensor? perm, Tensor? schedule, int[] layout, " \
  "Tensor rowptr_t, Tensor col_t, Tensor? perm_t, Tensor? schedule_t, int[] layout_t"

STABLE_TORCH_LIBRARY(gnnfast, m) {
  // graph/convert.h
  // CPU only, as the next
  m.def(
      "coo_to_csr(Tensor row, Tensor column, int num_rows, int num_cols, bool both) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("coo_facts(Tensor row, Tensor column) -> Tensor");
  m.def("loops_listed(Tensor edge_index, int num_nodes, bool remove=True) -> Tensor");
  // CUDA only, as all up to spmm
  m.def(
      "coo_to_formats(Tensor row, Tensor column, int num_rows, int num_cols, bool loops, bool both) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("csr_rows(Tensor rowptr, int num_slots) -> Tensor");
  m.def("id_complaints(Tensor any) -> int");  // common/ids.cuh
  // graph/schedule.h
  m.def("schedule(Tensor rowptr, Tensor? order, int num_edges) -> (Tensor, Tensor)");
  m.def("cluster(Tensor rowptr, Tensor col, int rounds, int fullest) -> (Tensor, Tensor)");
  m.def("empty_rows(Tensor like, int rows, int width) -> Tensor");  // CPU only: common/check.h
  // spmm/spmm.h
  m.def("spmm(" GNNFAST_GRAPH ", Tensor? weight, Tensor? weight_t, Tensor x, bool mean, Tensor? scale=None) -> Tensor");
  m.def("spmm_max(" GNNFAST_GRAPH ", Tensor? weight, Tensor x, bool minimum, int ties, float? empty) -> (Tensor, Tensor)");
  m.def("spmm_max_backward(" GNNFAST_GRAPH
        ", Tensor? weight, Tensor? x, Tensor grad, Tensor? value, Tensor aux, int num_cols) -> Tensor");  // CUDA only
  // CPU only, as the next
  m.def("spmm_plus(" GNNFAST_GRAPH ", Tensor weight, Tensor x, bool minus, bool mean) -> Tensor");
  m.def("spmm_plus_max(" GNNFAST_GRAPH
        ", Tensor weight, Tensor x, bool minus, bool minimum, bool train, float? empty) -> (Tensor, Tensor)");
  m.def("spmm_where(" GNNFAST_GRAPH ", Tensor? weight, Tensor? self, Tensor grad, Tensor? value, Tensor? arg) -> Tensor");
  m.def("spmm_backward(" GNNFAST_GRAPH ", Tensor weight, Tensor self, Tensor grad, Tensor? inverse=None) -> (Tensor, Tensor)");
  // sddmm/sddmm.h
  m.def("sddmm(" GNNFAST_GRAPH
        ", Tensor a, Tensor b, int heads, Tensor? weight=None, Tensor? value=None, Tensor? arg=None) -> Tensor");
  m.def("sddmm_coo(Tensor row, Tensor column, Tensor a, Tensor b, int heads) -> Tensor");
  m.def("scatter_first(Tensor grad, Tensor arg, int num_edges, int heads) -> Tensor");  // CPU only: sddmm/sddmm_cpu.cpp
  // ends/ends.h
  m.def("gather_ends(Tensor row, Tensor a) -> Tensor");  // CUDA only
  m.def("combine_ends(Tensor row, Tensor column, Tensor a, Tensor b, int op) -> Tensor");
  // loop_means/loop_means.h, CPU only
  m.def("loop_means(Tensor edge_index, Tensor rows, int kept, int num_nodes) -> Tensor");
  m.def("loop_means_backward(Tensor edge_index, Tensor grad, int kept, int num_nodes) -> Tensor");
  // edge_relu/edge_relu.h
  m.def("edge_relu(" GNNFAST_GRAPH ", Tensor x, Tensor w, bool train) -> (Tensor, Tensor)");
  m.def("edge_relu_backward(" GNNFAST_GRAPH ", Tensor kept, Tensor grad, bool need_w) -> (Tensor, Tensor)");
  // edge_gate/edge_gate.h
  m.def("edge_gate(" GNNFAST_GRAPH ", Tensor[] parts, int[] roles, int[] acts, bool mean) -> Tensor");
  m.def("edge_gate_backward(" GNNFAST_GRAPH
        ", Tensor[] parts, int[] roles, int[] acts, Tensor grad, int[] needs, bool transposed) -> Tensor[]");
  // multi_reduce/multi_reduce.h
  m.def("multi_reduce(" GNNFAST_GRAPH ", Tensor x, Tensor? shift, int[] kinds, bool train) -> (Tensor, Tensor, Tensor)");
  m.def(
      "multi_reduce_shares(Tensor rowptr, Tensor grad, Tensor out, Tensor kept, Tensor ties, int[] kinds, bool need_shift) "
      "-> (Tensor, Tensor)");
  m.def("multi_reduce_backward(" GNNFAST_GRAPH ", Tensor x, Tensor shares, int[] kinds) -> Tensor");
  m.def("multi_reduce_edges(Tensor index, Tensor x, Tensor shares, int[] kinds) -> Tensor");
  // softmax_reduce/softmax_reduce.h
  m.def("softmax_reduce(" GNNFAST_GRAPH ", Tensor x, Tensor? t, float scale, bool train) -> (Tensor, Tensor, Tensor)");
  m.def("softmax_reduce_backward(" GNNFAST_GRAPH
        ", Tensor x, Tensor? t, float scale, Tensor most, Tensor share, Tensor out, bool need_t) -> (Tensor, Tensor)");
  m.def(
      "softmax_reduce_edges(Tensor index, Tensor x, Tensor? t, float scale, Tensor most, Tensor share, Tensor out, bool "
      "need_t) "
      "-> (Tensor, Tensor)");
  // edge_softmax/edge_softmax.h
  m.def("edge_softmax(" GNNFAST_GRAPH ", Tensor? score, Tensor? dst, Tensor? src, float slope) -> Tensor");
  m.def("edge_softmax_backward(" GNNFAST_GRAPH
        ", Tensor prob, Tensor grad, Tensor? score, Tensor? dst, Tensor? src, float slope, bool sums) -> (Tensor, Tensor)");
  // head_dots/head_dots.h
  m.def("head_dots(Tensor x, Tensor a, int heads) -> Tensor");
  m.def("head_dots_backward(Tensor x, Tensor a, Tensor grad, int heads, bool need_x) -> (Tensor, Tensor)");
  m.def("column_sums(Tensor x) -> Tensor");
  // attention/attention.h
  m.def("attention(" GNNFAST_GRAPH
        ", Tensor dst, Tensor src, Tensor x, float slope, float dropout, Tensor? seed, bool train) -> (Tensor, Tensor)");
  m.def("attention_backward(" GNNFAST_BOTH
        ", Tensor dst, Tensor src, Tensor x, Tensor out, Tensor stats, Tensor grad, float slope, float dropout, Tensor? seed, "
        "bool atomics) -> (Tensor, Tensor, Tensor)");
  m.def("attention_keep(Tensor seed, int num_edges, int heads, float dropout) -> Tensor");
  // pair_attention/pair_attention.h
  m.def("pair_attention(" GNNFAST_GRAPH
        ", Tensor query, Tensor key, Tensor? value, Tensor? att, Tensor? edge, int heads, float slope, float dropout, Tensor? "
        "seed, bool train) -> (Tensor, Tensor)");
  m.def("pair_attention_backward(" GNNFAST_BOTH
        ", Tensor query, Tensor key, Tensor? value, Tensor? att, Tensor? edge, Tensor out, Tensor stats, Tensor grad, int "
        "heads, float slope, float dropout, Tensor? seed) -> (Tensor, Tensor, Tensor, Tensor)");
  // spmm_sampled/spmm_sampled.h
  m.def(
      "spmm_sampled(" GNNFAST_GRAPH
      ", Tensor? order, Tensor? weight, Tensor x, int width, int strategy, int seed, bool mean, bool rescale, bool transposed) "
      "-> Tensor");
  m.def("draw(Tensor rowptr, Tensor rowptr_drawn, int num_draws, int width, int strategy) -> Tensor");
  m.def("sddmm_sampled(" GNNFAST_GRAPH ", Tensor a, Tensor b, int heads, int width, int strategy, int seed) -> Tensor");
  // spmm_sparse_features/sparse_features.h
  m.def("spmm_sparse_features(" GNNFAST_GRAPH
        ", Tensor? weight, Tensor xrowptr, Tensor xcol, Tensor xval, int width, bool mean) -> Tensor");
  m.def("spmm_sparse_features_values(" GNNFAST_GRAPH ", Tensor? weight, Tensor xrowptr, Tensor xcol, Tensor grad) -> Tensor");
  m.def("spmm_sparse_features_edges(" GNNFAST_GRAPH ", Tensor xrowptr, Tensor xcol, Tensor xval, Tensor grad) -> Tensor");
  // spmm_coo/spmm_coo.h
  m.def(
      "spmm_coo(Tensor row, Tensor? column, Tensor? weight, Tensor x, int num_rows, int reduce, Tensor? degree=None) -> "
      "(Tensor, Tensor)");
  m.def(
      "spmm_coo_backward(Tensor row, Tensor column, Tensor weight, Tensor self, Tensor grad, Tensor? degree=None) -> "
      "(Tensor, Tensor)");
  m.def("spmm_csr(Tensor rowptr, Tensor col, Tensor value, Tensor x, bool mean) -> Tensor");  // CUDA only: spmm_csr/spmm_csr.h
  // gcn_norm/gcn_norm.h
  m.def(
      "gcn_norm_coo(Tensor edge_index, Tensor? weight, int num_nodes, float? fill, bool to_target, ScalarType dtype) -> "
      "(Tensor, Tensor)");
  m.def(
      "gcn_norm_listed(Tensor edge_index, Tensor? weight, int num_nodes, float? fill, bool to_target, ScalarType dtype) -> "
      "(Tensor, Tensor)");
  // laplacian/laplacian.h
  m.def(
      "laplacian_listed(Tensor edge_index, Tensor? weight, int num_nodes, int normalization, float? lambda_max, "
      "ScalarType dtype) -> (Tensor, Tensor)");
  // inverse_sums/inverse_sums_cpu.cpp, CPU only
  m.def("inverse_sums(Tensor index, Tensor? weight, int num_groups, ScalarType dtype) -> Tensor");
  // degrees/degrees.h
  m.def("degrees(Tensor index, int num_groups, ScalarType dtype) -> Tensor");
  // softmax_coo/softmax_coo.h
  m.def("softmax_coo(Tensor src, Tensor index, int num_groups) -> Tensor");
  m.def("softmax_coo_backward(Tensor prob, Tensor grad, Tensor index, int num_groups) -> Tensor");
}
