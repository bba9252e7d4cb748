#include <torch/csrc/stable/library.h>

#include <atomic>

#include "common/isa.h"
#include "common/parallel.h"
#include "spmm_coo.h"
#include "spmm_coo_cpu_kernel.h"

namespace gnnfast {

// A thread owns a range of rows and reads all ids: no atomics of features, and sums in edge order.
void Cpu::spmm_coo(const SpmmCooArgs& args, const Tensor& x) {
  const DType dtype = dtype_of("x", x);
  const int64_t chunks = std::min(thread_count(args.num_edges * work_of_edge(args.width), kGrain), args.num_rows);
  const auto reduce = [&](int64_t begin, int64_t end) -> int64_t { GNNFAST_CALL_ISA(spmm_coo_rows, args, dtype, begin, end); };
  std::atomic<int64_t> taken{0};
  parallel_chunks(chunks, [&](int64_t c) { taken += reduce(args.num_rows * c / chunks, args.num_rows * (c + 1) / chunks); });
  GNNFAST_CHECK(taken == args.num_edges, "of ", args.num_edges, " edges ", args.num_edges - taken,
                " have an id out of range: rows are below ", args.num_rows, " and columns below ", args.num_cols);
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("spmm_coo", TORCH_BOX(&spmm_coo<Cpu>));
  m.impl("spmm_coo_backward", TORCH_BOX(&spmm_coo_backward<Cpu>));
}

}  // namespace gnnfast
