#include <torch/csrc/stable/library.h>

#include <cstring>

#include "common/isa.h"
#include "common/parallel.h"
#include "spmm.h"
#include "spmm_cpu_kernel.h"

namespace gnnfast {
namespace {

constexpr int64_t kScatterFeatures = 16;  // at least, of a thread: a line of the cache, so that none is written by two

// kSumWhereFirst from where it went: each element of arg is looked at once, whatever the number of edges.
template <class T>
void scatter_first(const SpmmArgs& p, int64_t num_cols) {
  std::vector<int32_t> row_of(p.a.num_edges);  // by the edge's id
  parallel_rows(p.a.rowptr, p.a.num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t e = p.a.rowptr[row]; e < p.a.rowptr[row + 1]; ++e)
        row_of[p.a.perm ? p.a.perm[e] : e] = static_cast<int32_t>(row);
  });
  const T *grad = static_cast<const T*>(p.x), *weight = static_cast<const T*>(p.weight);
  T* out = static_cast<T*>(p.out);
  std::memset(out, 0, p.a.num_rows * p.width * sizeof(T));
  const int64_t segment = p.width / p.heads, parts = std::max<int64_t>(1, p.width / kScatterFeatures);
  const int64_t chunks = std::min(parts, thread_count(num_cols * p.width, kGrain));
  auto cut = [&](int64_t c) { return c == chunks ? p.width : parts * c / chunks * kScatterFeatures; };
  parallel_chunks(chunks, [&](int64_t c) {
    for (int64_t i = 0; i < num_cols; ++i) {
      for (int64_t f = cut(c); f < cut(c + 1); ++f) {
        const int64_t id = p.arg[i * p.width + f];
        if (id < 0 || id >= p.a.num_edges) continue;
        if (weight && i + 1 < num_cols)
          __builtin_prefetch(weight + std::max(0, p.arg[(i + 1) * p.width + f]) * p.heads + f / segment);
        const T share = grad[i * p.width + f];
        out[row_of[id] * p.width + f] += weight ? weight[id * p.heads + f / segment] * share : share;
      }
    }
  });
}

// Whether that is faster than a look at each feature of each edge: an element takes about twice as long, and there are as many
// threads as parts of a row.
bool scatters(const SpmmArgs& p, DType dtype, int64_t num_cols) {
  if (p.op != kSumWhereFirst || (dtype != kFloat && dtype != kDouble)) return false;
  const int64_t threads = thread_count(p.a.num_edges * p.width, kGrain);
  return p.a.num_edges * std::clamp<int64_t>(p.width / kScatterFeatures, 1, threads) >= 2 * num_cols * threads;
}

}  // namespace

void Cpu::spmm(const SpmmArgs& args, const Tensor& x) {
  const DType dtype = dtype_of("x", x);
  if (scatters(args, dtype, x.size(0)))
    return dtype == kDouble ? scatter_first<double>(args, x.size(0)) : scatter_first<float>(args, x.size(0));
  parallel_rows(args.a.rowptr, args.a.num_rows, args.width,
                [&](int64_t begin, int64_t end) { GNNFAST_CALL_ISA(spmm_rows, args, dtype, begin, end); });
}

bool Cpu::can_fuse_dot(const SpmmArgs&, ScalarType) { return true; }

Tensor empty_rows(const Tensor& like, int64_t rows, int64_t width) {
  return make_empty(like, {rows, width}, like.scalar_type());
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("empty_rows", TORCH_BOX(&empty_rows));
  m.impl("spmm", TORCH_BOX(&spmm<Cpu>));
  m.impl("spmm_max", TORCH_BOX(&spmm_max<Cpu>));
  m.impl("spmm_plus", TORCH_BOX(&spmm_plus<Cpu>));
  m.impl("spmm_plus_max", TORCH_BOX(&spmm_plus_max<Cpu>));
  m.impl("spmm_where", TORCH_BOX(&spmm_where<Cpu>));
  m.impl("spmm_backward", TORCH_BOX(&spmm_backward<Cpu>));
}

}  // namespace gnnfast
