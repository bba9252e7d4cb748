#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "common/isa.h"
#include "common/parallel.h"
#include "edge_softmax.h"
#include "edge_softmax_cpu_kernel.h"

namespace gnnfast {

void Cpu::edge_softmax(const EdgeSoftmaxArgs& args, const Tensor& ref) {
  const DType dtype = dtype_of("the scores", ref);
  parallel_rows(args.m.rowptr, args.m.num_rows, 4 * args.heads, [&](int64_t begin, int64_t end) {
    int64_t longest = 0;
    for (int64_t i = begin; i < end; ++i) longest = std::max<int64_t>(longest, args.m.rowptr[i + 1] - args.m.rowptr[i]);
    std::vector<double> scratch(args.prob ? 0 : longest * 8);  // the scores of 8 heads, in the accumulation type at most
    GNNFAST_CALL_ISA(edge_softmax_rows, args, dtype, begin, end, scratch.data());
  });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("edge_softmax", TORCH_BOX(&edge_softmax<Cpu>));
  m.impl("edge_softmax_backward", TORCH_BOX(&edge_softmax_backward<Cpu>));
}

}  // namespace gnnfast
