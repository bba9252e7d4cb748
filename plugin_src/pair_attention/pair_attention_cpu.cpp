#include <torch/csrc/stable/library.h>

#include <vector>

#include "common/isa.h"
#include "common/parallel.h"
#include "pair_attention.h"
#include "pair_attention_cpu_kernel.h"

namespace gnnfast {

void Cpu::pair_attention(const PairArgs& args, const Tensor& ref) {
  const DType dtype = dtype_of("key", ref);
  parallel_rows(args.a.rowptr, args.a.num_rows, 4 * args.width + 8 * args.heads, [&](int64_t begin, int64_t end) {
    std::vector<double> scratch(pair_scratch(args));
    GNNFAST_CALL_ISA(pair_items, args, dtype, begin, end, scratch.data());
  });
}

int64_t Cpu::most_pair_features(const Tensor&, int64_t) { return -1; }

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("pair_attention", TORCH_BOX(&pair_attention<Cpu>));
  m.impl("pair_attention_backward", TORCH_BOX(&pair_attention_backward<Cpu>));
  m.impl("attention_backward", TORCH_BOX(&attention_backward<Cpu>));
}

}  // namespace gnnfast
