// CPU sampled SpMM. A thread stages the drawn edges of a few rows as a small CSR matrix of its own, over which the exact
// kernels run: nothing is computed differently, there is only less of it.
#include <torch/csrc/stable/library.h>

#include "common/isa.h"
#include "common/parallel.h"
#include "sddmm/sddmm_cpu_kernel.h"
#include "spmm/spmm_cpu_kernel.h"
#include "spmm_sampled.h"

namespace gnnfast {
namespace {

constexpr int64_t kStagedRows = 256;

// A CSR matrix of the drawn edges of some rows.
struct Staged {
  std::vector<int32_t> rowptr, col, id;
  std::vector<double> scale;

  // Rows [begin, end) of args.a.
  void draw(const SampledArgs& p, int64_t begin, int64_t end) {
    clear();
    for (int64_t row = begin; row < end; ++row) {
      const uint32_t first = p.a.rowptr[row], nnz = p.a.rowptr[row + 1] - first, draws = draws_of(p.draw, nnz);
      for (uint32_t i = 0; i < draws; ++i) {
        const uint32_t slot = first + position_of(p.draw, static_cast<uint32_t>(row), i, nnz);
        col.push_back(p.a.col[slot]);
        id.push_back(p.a.perm ? p.a.perm[slot] : slot);
      }
      rowptr.push_back(static_cast<int32_t>(col.size()));
      scale.push_back(p.rescale && nnz > draws ? double(nnz) / draws : 1.0);
    }
  }

  // Rows [begin, end) of args.t, of which it takes those edges that their row in args.a draws.
  void filter(const SampledArgs& p, int64_t begin, int64_t end) {
    clear();
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t at = p.t.rowptr[row]; at < p.t.rowptr[row + 1]; ++at) {
        const int32_t target = p.t.col[at], slot = p.t.perm ? p.t.perm[at] : static_cast<int32_t>(at);
        const int32_t first = p.a.rowptr[target], nnz = p.a.rowptr[target + 1] - first;
        if (!is_taken(p.draw, target, slot - first, nnz)) continue;
        col.push_back(target);
        id.push_back(p.a.perm ? p.a.perm[slot] : slot);
      }
      rowptr.push_back(static_cast<int32_t>(col.size()));
    }
  }

  Csr csr() const {
    Csr m{};
    m.rowptr = rowptr.data(), m.col = col.data(), m.perm = id.data();
    m.num_rows = static_cast<int64_t>(rowptr.size()) - 1, m.num_edges = static_cast<int64_t>(col.size());
    return m;
  }

 private:
  void clear() {
    rowptr.assign(1, 0);
    col.clear(), id.clear(), scale.clear();
  }
};

void run_rows(const SampledArgs& p, DType dtype, int64_t size, int64_t begin, int64_t end) {
  Staged staged;
  for (int64_t first = begin; first < end; first += kStagedRows) {
    const int64_t rows = std::min(kStagedRows, end - first), offset = first * p.width * size;
    p.t.rowptr ? staged.filter(p, first, first + rows) : staged.draw(p, first, first + rows);
    const Csr m = staged.csr();
    if (p.dot) {
      SddmmArgs dot{};
      dot.m = m, dot.width = p.width, dot.heads = p.heads;
      dot.a = static_cast<const char*>(p.self) + offset, dot.b = p.x, dot.out = p.dot;
      [&] { GNNFAST_CALL_ISA(sddmm_rows, dot, dtype, 0, rows); }();
      continue;
    }
    SpmmArgs sum{};
    sum.a = m, sum.op = kSum, sum.mean = p.mean, sum.width = p.width, sum.heads = p.heads;
    sum.mode = !p.weight ? kNoWeight : p.heads > 1 && p.heads == p.width ? kElementWeight : kHeadWeight;
    sum.weight = p.weight, sum.x = p.x, sum.out = static_cast<char*>(p.out) + offset;
    sum.scale = p.rescale && !p.mean ? staged.scale.data() : nullptr;
    [&] { GNNFAST_CALL_ISA(spmm_rows, sum, dtype, 0, rows); }();
  }
}

}  // namespace

void Cpu::spmm_sampled(const SampledArgs& args, const Tensor& x) {
  const DType dtype = dtype_of("x", x);
  const Csr& rows = args.t.rowptr ? args.t : args.a;
  parallel_rows(rows.rowptr, rows.num_rows, args.width,
                [&](int64_t begin, int64_t end) { run_rows(args, dtype, x.element_size(), begin, end); });
}

void Cpu::draw(const DrawArgs& p, const Tensor&) {
  parallel_rows(p.drawn, p.num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint32_t first = p.rowptr[row], nnz = p.rowptr[row + 1] - first, draws = draws_of(p.draw, nnz);
      for (uint32_t i = 0; i < draws; ++i)
        p.slot[p.drawn[row] + i] = static_cast<int32_t>(first + position_of(p.draw, static_cast<uint32_t>(row), i, nnz));
    }
  });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("draw", TORCH_BOX(&draw<Cpu>));
  m.impl("spmm_sampled", TORCH_BOX(&spmm_sampled<Cpu>));
  m.impl("sddmm_sampled", TORCH_BOX(&sddmm_sampled<Cpu>));
}

}  // namespace gnnfast
