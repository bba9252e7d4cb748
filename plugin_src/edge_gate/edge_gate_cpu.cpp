#include "edge_gate.h"

#include <torch/csrc/stable/library.h>

#include "common/isa.h"
#include "common/parallel.h"
#include "edge_gate_cpu_kernel.h"

namespace gnnfast {

namespace {

template <class T>
void edge_gate_of(const EdgeGateArgs& args, DType dtype) {
  constexpr int64_t kActivation = 8;  // multiply-adds that take as long
  // A gradient of a matrix for each chunk of rows, which are added up in their order.
  const int64_t threads = thread_count(torch::stable::get_num_threads(), 1), width = args.width;
  std::vector<T> partial[kMostFactors];
  int64_t work = 0;
  for (int k = 0; k < args.count; ++k) {
    const GateFactor& factor = args.factors[k];
    work += width * (kActivation + factor.depth);
    if (factor.grads[kMatrix]) partial[k].resize(static_cast<size_t>(threads * factor.depth * width));
  }
  parallel_row_chunks(args.a.rowptr, args.a.num_rows, work, [&](int64_t begin, int64_t end, int64_t chunk) {
    EdgeGateArgs mine = args;
    for (int k = 0; k < args.count; ++k)
      if (!partial[k].empty()) mine.factors[k].grads[kMatrix] = partial[k].data() + chunk * args.factors[k].depth * width;
    GNNFAST_CALL_ISA(edge_gate_rows, mine, dtype, begin, end);
  });
  for (int k = 0; k < args.count; ++k) {
    const int64_t size = args.factors[k].depth * width;
    T* total = static_cast<T*>(args.factors[k].grads[kMatrix]);
    for (size_t i = 0; i < partial[k].size(); ++i) total[static_cast<int64_t>(i) % size] += partial[k][i];
  }
}

}  // namespace

void Cpu::edge_gate(const EdgeGateArgs& args, const Tensor& ref) {
  const DType dtype = dtype_of("parts", ref);
  dtype == kDouble ? edge_gate_of<double>(args, dtype) : edge_gate_of<float>(args, dtype);
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("edge_gate", TORCH_BOX(&edge_gate<Cpu>));
  m.impl("edge_gate_backward", TORCH_BOX(&edge_gate_backward<Cpu>));
}

}  // namespace gnnfast
