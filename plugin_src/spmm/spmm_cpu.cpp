#include <torch/csrc/stable/library.h>

#include "common/isa.h"
#include "common/parallel.h"
#include "spmm.h"
#include "spmm_cpu_kernel.h"

namespace gnnfast {

void Cpu::spmm(const SpmmArgs& args, const Tensor& x) {
  const DType dtype = dtype_of("x", x);
  parallel_rows(args.a.rowptr, args.a.num_rows, args.width,
                [&](int64_t begin, int64_t end) { GNNFAST_CALL_ISA(spmm_rows, args, dtype, begin, end); });
}

bool Cpu::can_fuse_dot(const SpmmArgs&, ScalarType) { return true; }

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("spmm", TORCH_BOX(&spmm<Cpu>));
  m.impl("spmm_max", TORCH_BOX(&spmm_max<Cpu>));
  m.impl("spmm_where", TORCH_BOX(&spmm_where<Cpu>));
  m.impl("spmm_backward", TORCH_BOX(&spmm_backward<Cpu>));
}

}  // namespace gnnfast
