#include <torch/csrc/stable/library.h>

#include "common/isa.h"
#include "common/parallel.h"
#include "sddmm.h"
#include "sddmm_cpu_kernel.h"

namespace gnnfast {
namespace {

// kDotWhereFirst from where it went: each element of a row is the product of one edge, whatever the number of edges.
template <class T>
void first_products(const SddmmArgs& p) {
  std::vector<int32_t> column_of(p.m.num_edges);  // by the edge's id
  const T *a = static_cast<const T*>(p.a), *b = static_cast<const T*>(p.b);
  T* out = static_cast<T*>(p.out);
  const int64_t segment = p.width / p.heads;
  parallel_rows(p.m.rowptr, p.m.num_rows, p.heads, [&](int64_t row_begin, int64_t row_end) {
    for (int64_t row = row_begin; row < row_end; ++row) {
      for (int64_t e = p.m.rowptr[row]; e < p.m.rowptr[row + 1]; ++e) {
        const int64_t id = p.m.perm ? p.m.perm[e] : e;
        column_of[id] = p.m.col[e];
        std::fill_n(out + id * p.heads, p.heads, T{0});
      }
      for (int64_t f = 0; f < p.width; ++f) {
        const int64_t id = p.arg[row * p.width + f];
        if (id < 0 || id >= p.m.num_edges) continue;
        out[id * p.heads + f / segment] += a[row * p.width + f] * b[column_of[id] * p.width + f];
      }
    }
  });
}

}  // namespace

void Cpu::sddmm(const SddmmArgs& args, const Tensor& a) {
  const DType dtype = dtype_of("a", a);
  if (args.op == kDotWhereFirst && (dtype == kFloat || dtype == kDouble))
    return dtype == kDouble ? first_products<double>(args) : first_products<float>(args);
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
