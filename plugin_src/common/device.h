// The two devices. Each op folder implements these in <op>_cpu.cpp and <op>_cuda.cu; checks and allocation are written once, as
// templates over the device, in <op>.h.
#pragma once

#include "dtype.h"

namespace gnnfast {

struct SpmmArgs;
struct TiesArgs;
struct SpmmCooArgs;
struct GcnNormArgs;
struct HeadDotsArgs;
struct EdgeReluArgs;
struct EdgeGateArgs;
struct MultiReduceArgs;
struct ReduceSharesArgs;
struct ReduceBackwardArgs;
struct ReduceEdgesArgs;
struct SoftmaxReduceArgs;
struct SoftmaxBackwardArgs;
struct EndsArgs;
struct SddmmArgs;
struct EdgeSoftmaxArgs;
struct AttentionArgs;
struct AttentionDotsArgs;
struct AttentionKeepArgs;
struct PairArgs;
struct SampledArgs;
struct DrawArgs;
struct SparseFeaturesArgs;

struct Cpu {
  static void spmm(const SpmmArgs& args, const Tensor& x);
  static bool can_fuse_dot(const SpmmArgs& args, ScalarType dtype);
  static void spmm_coo(const SpmmCooArgs& args, const Tensor& x);
  static void gcn_norm(const GcnNormArgs& args, const Tensor& out);
  static void head_dots(const HeadDotsArgs& args, const Tensor& x);
  static void head_dots_backward(const HeadDotsArgs& args, const Tensor& x);
  static void column_sums(const HeadDotsArgs& args, const Tensor& x);
  static void edge_relu(const EdgeReluArgs& args, const Tensor& x);
  static void edge_gate(const EdgeGateArgs& args, const Tensor& ref);
  static void multi_reduce(const MultiReduceArgs& args, const Tensor& x);
  static void multi_reduce_shares(const ReduceSharesArgs& args, const Tensor& grad);
  static void multi_reduce_backward(const ReduceBackwardArgs& args, const Tensor& x);
  static void multi_reduce_edges(const ReduceEdgesArgs& args, const Tensor& x);
  static void softmax_reduce(const SoftmaxReduceArgs& args, const Tensor& x);
  static void softmax_reduce_backward(const SoftmaxBackwardArgs& args, const Tensor& x);
  static void ends(const EndsArgs& args, const Tensor& a);
  static void sddmm(const SddmmArgs& args, const Tensor& a);
  static void edge_softmax(const EdgeSoftmaxArgs& args, const Tensor& ref);
  static void attention(const AttentionArgs& args, const Tensor& x);
  static void attention_dots(const AttentionDotsArgs& args, const Tensor& out);
  static void attention_keep(const AttentionKeepArgs& args, const Tensor& seed);
  static void pair_attention(const PairArgs& args, const Tensor& ref);
  static int64_t most_pair_features(const Tensor& ref, int64_t features);  // of a head; negative: any number
  static void spmm_sampled(const SampledArgs& args, const Tensor& x);
  static void draw(const DrawArgs& args, const Tensor& rowptr);
  static void sparse_features(const SparseFeaturesArgs& args, const Tensor& ref);
};

struct Cuda {
  static void spmm(const SpmmArgs& args, const Tensor& x);
  static void count_ties(const TiesArgs& args, const Tensor& x);
  static void spmm_max_backward(const TiesArgs& args, const Tensor& x);
  static bool can_fuse_dot(const SpmmArgs& args, ScalarType dtype);
  static void spmm_coo(const SpmmCooArgs& args, const Tensor& x);
  static void gcn_norm(const GcnNormArgs& args, const Tensor& out);
  static void head_dots(const HeadDotsArgs& args, const Tensor& x);
  static void head_dots_backward(const HeadDotsArgs& args, const Tensor& x);
  static void column_sums(const HeadDotsArgs& args, const Tensor& x);
  static void edge_relu(const EdgeReluArgs& args, const Tensor& x);
  static void edge_gate(const EdgeGateArgs& args, const Tensor& ref);
  static void multi_reduce(const MultiReduceArgs& args, const Tensor& x);
  static void multi_reduce_shares(const ReduceSharesArgs& args, const Tensor& grad);
  static void multi_reduce_backward(const ReduceBackwardArgs& args, const Tensor& x);
  static void multi_reduce_edges(const ReduceEdgesArgs& args, const Tensor& x);
  static void softmax_reduce(const SoftmaxReduceArgs& args, const Tensor& x);
  static void softmax_reduce_backward(const SoftmaxBackwardArgs& args, const Tensor& x);
  static void ends(const EndsArgs& args, const Tensor& a);
  static void sddmm(const SddmmArgs& args, const Tensor& a);
  static void edge_softmax(const EdgeSoftmaxArgs& args, const Tensor& ref);
  static void attention(const AttentionArgs& args, const Tensor& x);
  static void attention_dots(const AttentionDotsArgs& args, const Tensor& out);
  static void attention_keep(const AttentionKeepArgs& args, const Tensor& seed);
  static void pair_attention(const PairArgs& args, const Tensor& ref);
  static int64_t most_pair_features(const Tensor& ref, int64_t features);  // of a head; negative: any number
  static void spmm_sampled(const SampledArgs& args, const Tensor& x);
  static void draw(const DrawArgs& args, const Tensor& rowptr);
  static void sparse_features(const SparseFeaturesArgs& args, const Tensor& ref);
};

}  // namespace gnnfast
