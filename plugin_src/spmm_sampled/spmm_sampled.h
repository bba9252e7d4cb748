// Checks and allocation of the sampled ops, for both devices. The contract is in spmm_sampled_args.h.
#pragma once

#include "spmm/spmm.h"
#include "spmm_sampled_args.h"

namespace gnnfast {

inline Draw check_draw(int64_t width, int64_t strategy, int64_t seed) {
  GNNFAST_CHECK(width >= 1, "width must be at least 1, got ", width);
  GNNFAST_CHECK(strategy >= kBucket && strategy <= kRandom, "strategy must be 0, 1 or 2, got ", strategy);
  return {static_cast<SampleStrategy>(strategy), static_cast<uint32_t>(std::min<int64_t>(width, 1u << 31)),
          static_cast<uint64_t>(seed)};
}

#define GNNFAST_BOTH_GRAPHS                                                                                               \
  const Tensor &rowptr, const Tensor &col, const OptTensor &perm, const OptTensor &schedule, std::vector<int64_t> layout, \
      const OptTensor &rowptr_t, const OptTensor &col_t, const OptTensor &slots_t, const OptTensor &schedule_t,           \
      std::vector<int64_t> layout_t

template <class Device>
Tensor spmm_sampled(GNNFAST_BOTH_GRAPHS, const OptTensor& order, const OptTensor& weight, const Tensor& x_, int64_t width,
                    int64_t strategy, int64_t seed, bool mean, bool rescale, bool transposed) {
  const Tensor x = check_features("x", x_, -1);
  SampledArgs args{};
  SpmmArgs weighted{};
  weighted.a = args.a = check_csr(rowptr, col, perm, schedule, layout, x);
  args.draw = check_draw(width, strategy, seed);
  const OptTensor w = check_weight(weighted, weight, x);
  args.width = weighted.width, args.heads = weighted.heads, args.weight = weighted.weight;
  args.mean = mean, args.rescale = rescale;
  args.order = check_index("order", order, x);
  if (order) check_size("order", *order, 0, args.a.num_rows);
  if (transposed) {
    GNNFAST_CHECK(args.draw.strategy == kRandom, "the random strategy alone has a gradient");
    GNNFAST_CHECK(rowptr_t && col_t, "transposed needs the transpose");
    args.t = check_exact_csr(*rowptr_t, *col_t, slots_t, schedule_t, layout_t, x);
    check_size("x", x, 0, args.a.num_rows);
  }
  args.x = x.const_data_ptr();
  Tensor out = empty_like_rows(x, transposed ? args.t.num_rows : args.a.num_rows, x.scalar_type());
  args.out = out.mutable_data_ptr();
  if (out.numel() > 0) Device::spmm_sampled(args, x);
  return out;
}

template <class Device>
Tensor sddmm_sampled(GNNFAST_BOTH_GRAPHS, const Tensor& a_, const Tensor& b_, int64_t heads, int64_t width, int64_t strategy,
                     int64_t seed) {
  const Tensor a = check_features("a", a_, rowptr.numel() - 1), b = check_features("b", b_, -1);
  check_dtype("b", b, a.scalar_type());
  check_size("b", b, 1, a.size(1));
  check_heads(heads, a.size(1));
  SampledArgs args{};
  args.a = check_csr(rowptr, col, perm, schedule, layout, a);
  args.draw = check_draw(width, strategy, seed);
  GNNFAST_CHECK(args.draw.strategy == kRandom, "the random strategy alone has a gradient");
  args.width = a.size(1), args.heads = heads;
  args.self = a.const_data_ptr(), args.x = b.const_data_ptr();
  Tensor dot = make_zeros(a, {args.a.num_edges, heads}, a.scalar_type());
  args.dot = dot.mutable_data_ptr();
  if (a.numel() > 0 && dot.numel() > 0) Device::spmm_sampled(args, a);
  return dot;
}

// For strategies without chance. rowptr_drawn [M + 1] counts min(nnz, width) draws a row, num_draws in all.
template <class Device>
Tensor draw(const Tensor& rowptr, const Tensor& rowptr_drawn, int64_t num_draws, int64_t width, int64_t strategy) {
  DrawArgs args{};
  args.rowptr = check_index("rowptr", rowptr, rowptr);
  args.drawn = check_index("rowptr_drawn", rowptr_drawn, rowptr);
  args.num_rows = rowptr.numel() - 1;
  check_size("rowptr_drawn", rowptr_drawn, 0, rowptr.numel());
  args.draw = check_draw(width, strategy, 0);
  Tensor slot = make_empty(rowptr, {num_draws}, ScalarType::Int);
  args.slot = slot.mutable_data_ptr<int32_t>();
  if (num_draws > 0) Device::draw(args, rowptr);
  return slot;
}

}  // namespace gnnfast
