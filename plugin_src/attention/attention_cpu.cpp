#include <torch/csrc/stable/library.h>

#include <vector>

#include "attention.h"
#include "attention_cpu_kernel.h"
#include "common/isa.h"
#include "common/parallel.h"

namespace gnnfast {

void Cpu::attention(const AttentionArgs& args, const Tensor& x) {
  const DType dtype = dtype_of("x", x);
  parallel_rows(args.a.rowptr, args.a.num_rows, 2 * args.width + 8 * args.heads, [&](int64_t begin, int64_t end) {
    std::vector<double> scratch(attention_scratch(args));
    GNNFAST_CALL_ISA(attention_items, args, dtype, begin, end, scratch.data());
  });
}

void Cpu::attention_dots(const AttentionDotsArgs& args, const Tensor& out) {
  const DType dtype = dtype_of("out", out);
  const int64_t rows = args.num_rows, chunks = thread_count(rows * args.width, 65536);
  parallel_chunks(
      chunks, [&](int64_t c) { GNNFAST_CALL_ISA(attention_dots, args, dtype, rows * c / chunks, rows * (c + 1) / chunks); });
}

void Cpu::attention_keep(const AttentionKeepArgs& p, const Tensor&) {
  for (int64_t e = 0; e < p.num_edges; ++e) {
    const uint32_t kept = kept_heads(static_cast<uint64_t>(*p.seed), static_cast<uint32_t>(e), static_cast<int>(p.heads),
                                     kept_of_65536(p.dropout));
    for (int64_t h = 0; h < p.heads; ++h) p.out[e * p.heads + h] = kept >> h & 1;
  }
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention<Cpu>));
  m.impl("attention_keep", TORCH_BOX(&attention_keep<Cpu>));
}

}  // namespace gnnfast
