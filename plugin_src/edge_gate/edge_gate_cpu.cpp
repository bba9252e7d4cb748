#include "edge_gate.h"

#include <torch/csrc/stable/library.h>

#include "common/isa.h"
#include "common/parallel.h"
#include "edge_gate_cpu_kernel.h"

namespace gnnfast {

void Cpu::edge_gate(const EdgeGateArgs& args, const Tensor& ref) {
  const DType dtype = dtype_of("rows", ref);
  constexpr int64_t kActivation = 8;  // multiply-adds that take as long
  parallel_rows(args.a.rowptr, args.a.num_rows, args.width * args.count * kActivation,
                [&](int64_t begin, int64_t end) { GNNFAST_CALL_ISA(edge_gate_rows, args, dtype, begin, end); });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("edge_gate", TORCH_BOX(&edge_gate<Cpu>));
  m.impl("edge_gate_backward", TORCH_BOX(&edge_gate_backward<Cpu>));
}

}  // namespace gnnfast
