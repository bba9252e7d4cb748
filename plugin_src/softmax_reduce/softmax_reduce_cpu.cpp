#include "softmax_reduce.h"

#include <torch/csrc/stable/library.h>

#include "common/isa.h"
#include "common/parallel.h"
#include "softmax_reduce_cpu_kernel.h"

namespace gnnfast {

constexpr int64_t kExponential = 8;  // multiply-adds that take as long

void Cpu::softmax_reduce(const SoftmaxReduceArgs& args, const Tensor& x) {
  const DType dtype = dtype_of("x", x);
  parallel_rows(args.a.rowptr, args.a.num_rows, kExponential * args.width,
                [&](int64_t begin, int64_t end) { GNNFAST_CALL_ISA(softmax_reduce_rows, args, dtype, begin, end); });
}

void Cpu::softmax_reduce_backward(const SoftmaxBackwardArgs& args, const Tensor& x) {
  const DType dtype = dtype_of("x", x);
  auto run = [&](int64_t begin, int64_t end) { GNNFAST_CALL_ISA(softmax_reduce_backward_rows, args, dtype, begin, end); };
  if (!args.index) return parallel_rows(args.a.rowptr, args.num_rows, kExponential * args.width, run);
  const int64_t rows = args.num_rows, chunks = thread_count(rows * args.width * kExponential, kGrain);
  parallel_chunks(chunks, [&](int64_t c) { run(rows * c / chunks, rows * (c + 1) / chunks); });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("softmax_reduce", TORCH_BOX(&softmax_reduce<Cpu>));
  m.impl("softmax_reduce_backward", TORCH_BOX(&softmax_reduce_backward<Cpu>));
  m.impl("softmax_reduce_edges", TORCH_BOX(&softmax_reduce_edges<Cpu>));
}

}  // namespace gnnfast
