#include "multi_reduce.h"

#include <torch/csrc/stable/library.h>

#include "common/isa.h"
#include "common/parallel.h"
#include "multi_reduce_cpu_kernel.h"

namespace gnnfast {

void Cpu::multi_reduce(const MultiReduceArgs& args, const Tensor& x) {
  const DType dtype = dtype_of("x", x);
  parallel_rows(args.a.rowptr, args.a.num_rows, 4 * args.width,
                [&](int64_t begin, int64_t end) { GNNFAST_CALL_ISA(multi_reduce_rows, args, dtype, begin, end); });
}

void Cpu::multi_reduce_shares(const ReduceSharesArgs& args, const Tensor& grad) {
  const DType dtype = dtype_of("grad", grad);
  const int64_t chunks = thread_count(args.num_rows * args.width * args.layout.count, kGrain);
  parallel_chunks(chunks, [&](int64_t c) {
    const int64_t begin = args.num_rows * c / chunks, end = args.num_rows * (c + 1) / chunks;
    GNNFAST_CALL_ISA(multi_reduce_shares_rows, args, dtype, begin, end);
  });
}

void Cpu::multi_reduce_backward(const ReduceBackwardArgs& args, const Tensor& x) {
  const DType dtype = dtype_of("x", x);
  parallel_rows(args.a.rowptr, args.a.num_rows, args.layout.rows * args.width,
                [&](int64_t begin, int64_t end) { GNNFAST_CALL_ISA(multi_reduce_backward_rows, args, dtype, begin, end); });
}

void Cpu::multi_reduce_edges(const ReduceEdgesArgs& args, const Tensor& x) {
  const DType dtype = dtype_of("x", x);
  const int64_t edges = args.num_edges, chunks = thread_count(edges * args.width * args.layout.rows, kGrain);
  parallel_chunks(chunks, [&](int64_t c) {
    GNNFAST_CALL_ISA(multi_reduce_edges_range, args, dtype, edges * c / chunks, edges * (c + 1) / chunks);
  });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("multi_reduce", TORCH_BOX(&multi_reduce<Cpu>));
  m.impl("multi_reduce_shares", TORCH_BOX(&multi_reduce_shares<Cpu>));
  m.impl("multi_reduce_backward", TORCH_BOX(&multi_reduce_backward<Cpu>));
  m.impl("multi_reduce_edges", TORCH_BOX(&multi_reduce_edges<Cpu>));
}

}  // namespace gnnfast
