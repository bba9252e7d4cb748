#include <torch/csrc/stable/library.h>

#include "common/isa.h"
#include "common/parallel.h"
#include "sddmm.h"
#include "sddmm_cpu_kernel.h"

namespace gnnfast {

void Cpu::sddmm(const SddmmArgs& args, const Tensor& a) {
  const DType dtype = dtype_of("a", a);
  if (args.m.rowptr) {
    parallel_rows(args.m.rowptr, args.m.num_rows, args.width,
                  [&](int64_t begin, int64_t end) { GNNFAST_CALL_ISA(sddmm_rows, args, dtype, begin, end); });
    return;
  }
  const int64_t edges = args.m.num_edges, chunks = thread_count(edges * args.width, kGrain);
  parallel_chunks(chunks,
                  [&](int64_t c) { GNNFAST_CALL_ISA(sddmm_edges, args, dtype, edges * c / chunks, edges * (c + 1) / chunks); });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("sddmm", TORCH_BOX(&sddmm<Cpu>));
  m.impl("sddmm_coo", TORCH_BOX(&sddmm_coo<Cpu>));
}

}  // namespace gnnfast
