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

// Which slots of args.a kRandom takes, for a walk over the transpose: asking is_taken for each edge of it would cost more than
// an exact backward pass. It lives as long as one call.
std::vector<uint8_t> mark(const SampledArgs& p) {
  std::vector<uint8_t> taken(p.a.num_edges);
  parallel_rows(p.a.rowptr, p.a.num_rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      uint8_t* first = taken.data() + p.a.rowptr[row];
      for_each_draw(p.draw, row, p.a.rowptr[row + 1] - p.a.rowptr[row], [&](uint32_t at) { first[at] = 1; });
    }
  });
  return taken;
}

// A CSR matrix of the drawn edges of some rows.
class Staged {
 public:
  // Rows [begin, end) of args.a.
  void draw(const SampledArgs& p, int64_t begin, int64_t end) {
    const int64_t edges = p.a.rowptr[end] - p.a.rowptr[begin];
    start(std::min<int64_t>(edges, (end - begin) * int64_t{p.draw.width}));
    for (int64_t row = begin; row < end; ++row) {
      const uint32_t first = p.a.rowptr[row], nnz = p.a.rowptr[row + 1] - first, draws = draws_of(p.draw, nnz);
      for_each_draw(p.draw, row, nnz, [&](uint32_t at) {
        id_[count_] = static_cast<int32_t>(first + at);
        col_[count_++] = p.a.col[first + at];
      });
      rowptr_.push_back(static_cast<int32_t>(count_));
      scale_.push_back(p.rescale && nnz > draws ? double(nnz) / draws : 1.0);
    }
    to_ids(p);
  }

  // Rows [begin, end) of args.t, of which it takes those edges that their row in args.a draws.
  void filter(const SampledArgs& p, const std::vector<uint8_t>& taken, int64_t begin, int64_t end) {
    start(p.t.rowptr[end] - p.t.rowptr[begin] + 1);  // and one that is not taken
    const uint8_t* is_taken = taken.data();
    int32_t *col = col_.data(), *id = id_.data();
    int64_t count = 0;
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t at = p.t.rowptr[row]; at < p.t.rowptr[row + 1]; ++at) {
        const int32_t slot = p.t.perm ? p.t.perm[at] : static_cast<int32_t>(at);
        id[count] = slot;
        col[count] = p.t.col[at];
        count += is_taken[slot];
      }
      rowptr_.push_back(static_cast<int32_t>(count));
    }
    count_ = count;
    to_ids(p);
  }

  Csr csr() const {
    Csr m{};
    m.rowptr = rowptr_.data(), m.col = col_.data(), m.perm = id_.data();
    m.num_rows = static_cast<int64_t>(rowptr_.size()) - 1, m.num_edges = count_;
    return m;
  }

  const double* scale() const { return scale_.data(); }

 private:
  void start(size_t most) {
    if (col_.size() < most) col_.resize(most), id_.resize(most);
    count_ = 0;
    rowptr_.assign(1, 0);
    scale_.clear();
  }

  // From slots of args.a to the indices of weights and dot products.
  void to_ids(const SampledArgs& p) {
    if (p.a.perm && (p.weight || p.dot))
      for (int64_t i = 0; i < count_; ++i) id_[i] = p.a.perm[id_[i]];
  }

  std::vector<int32_t> rowptr_, col_, id_;
  std::vector<double> scale_;
  int64_t count_ = 0;
};

void run_rows(const SampledArgs& p, const std::vector<uint8_t>& taken, DType dtype, int64_t size, int64_t begin, int64_t end) {
  Staged staged;
  for (int64_t first = begin; first < end; first += kStagedRows) {
    const int64_t rows = std::min(kStagedRows, end - first), offset = first * p.width * size;
    p.t.rowptr ? staged.filter(p, taken, first, first + rows) : staged.draw(p, first, first + rows);
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
    sum.scale = p.rescale && !p.mean ? staged.scale() : nullptr;
    [&] { GNNFAST_CALL_ISA(spmm_rows, sum, dtype, 0, rows); }();
  }
}

}  // namespace

void Cpu::spmm_sampled(const SampledArgs& args, const Tensor& x) {
  const DType dtype = dtype_of("x", x);
  const Csr& rows = args.t.rowptr ? args.t : args.a;
  const std::vector<uint8_t> taken = args.t.rowptr ? mark(args) : std::vector<uint8_t>();
  parallel_rows(rows.rowptr, rows.num_rows, args.width,
                [&](int64_t begin, int64_t end) { run_rows(args, taken, dtype, x.element_size(), begin, end); });
}

void Cpu::draw(const DrawArgs& p, const Tensor&) {
  parallel_rows(p.drawn, p.num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int32_t first = p.rowptr[row];
      int32_t* slot = p.slot + p.drawn[row];
      for_each_draw(p.draw, row, p.rowptr[row + 1] - first, [&](uint32_t at) { *slot++ = first + static_cast<int32_t>(at); });
    }
  });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("draw", TORCH_BOX(&draw<Cpu>));
  m.impl("spmm_sampled", TORCH_BOX(&spmm_sampled<Cpu>));
  m.impl("sddmm_sampled", TORCH_BOX(&sddmm_sampled<Cpu>));
}

}  // namespace gnnfast
