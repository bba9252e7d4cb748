#include "head_dots.h"

#include <torch/csrc/stable/library.h>

#include "common/isa.h"
#include "common/parallel.h"
#include "head_dots_cpu_kernel.h"

namespace gnnfast {

void Cpu::head_dots(const HeadDotsArgs& args, const Tensor& x) {
  const DType dtype = dtype_of("x", x);
  const int64_t rows = args.num_rows, chunks = thread_count(rows * args.width * args.vectors, kGrain);
  parallel_chunks(
      chunks, [&](int64_t c) { GNNFAST_CALL_ISA(head_dots_rows, args, dtype, rows * c / chunks, rows * (c + 1) / chunks); });
}

void Cpu::head_dots_backward(const HeadDotsArgs& args, const Tensor& x) {
  const DType dtype = dtype_of("x", x);
  const int64_t rows = args.num_rows, size = args.vectors * args.width, parts = thread_count(rows * size, kGrain);
  // What each thread adds up for the gradient of a; the first adds up these.
  const Tensor sums = make_empty(x, {parts, size}, acc_dtype(x.scalar_type()));
  parallel_chunks(parts, [&](int64_t c) {
    GNNFAST_CALL_ISA(head_dots_backward_rows, args, dtype, sums.mutable_data_ptr(), c, rows * c / parts,
                     rows * (c + 1) / parts);
  });
  GNNFAST_CALL_ISA(head_dots_combine, args, dtype, sums.const_data_ptr(), parts);
}

void Cpu::column_sums(const HeadDotsArgs& args, const Tensor& x) { head_dots_backward(args, x); }

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("head_dots", TORCH_BOX(&head_dots<Cpu>));
  m.impl("head_dots_backward", TORCH_BOX(&head_dots_backward<Cpu>));
  m.impl("column_sums", TORCH_BOX(&column_sums<Cpu>));
}

}  // namespace gnnfast
