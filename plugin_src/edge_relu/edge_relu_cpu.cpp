#include "edge_relu.h"

#include <torch/csrc/stable/library.h>

#include "common/isa.h"
#include "common/parallel.h"
#include "edge_relu_cpu_kernel.h"

namespace gnnfast {

void Cpu::edge_relu(const EdgeReluArgs& args, const Tensor& x) {
  const DType dtype = dtype_of("x", x);
  parallel_rows(args.a.rowptr, args.a.num_rows, args.width,
                [&](int64_t begin, int64_t end) { GNNFAST_CALL_ISA(edge_relu_rows, args, dtype, begin, end); });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("edge_relu", TORCH_BOX(&edge_relu<Cpu>));
  m.impl("edge_relu_backward", TORCH_BOX(&edge_relu_backward<Cpu>));
}

}  // namespace gnnfast
