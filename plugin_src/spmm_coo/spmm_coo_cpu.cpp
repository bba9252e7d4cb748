#include <torch/csrc/stable/library.h>

#include "common/isa.h"
#include "common/parallel.h"
#include "spmm_coo.h"
#include "spmm_coo_cpu_kernel.h"

namespace gnnfast {

// A thread owns a range of rows and reads all ids: no atomics, and sums in edge order.
void Cpu::spmm_coo(const SpmmCooArgs& args, const Tensor& x) {
  const DType dtype = dtype_of("x", x);
  const int64_t chunks = std::min(thread_count(args.num_edges * work_of_edge(args.width), kGrain), args.num_rows);
  parallel_chunks(chunks, [&](int64_t c) {
    GNNFAST_CALL_ISA(spmm_coo_rows, args, dtype, args.num_rows * c / chunks, args.num_rows * (c + 1) / chunks);
  });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("spmm_coo", TORCH_BOX(&spmm_coo<Cpu>));
  m.impl("spmm_coo_backward", TORCH_BOX(&spmm_coo_backward<Cpu>));
}

}  // namespace gnnfast
