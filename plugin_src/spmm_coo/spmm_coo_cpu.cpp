#include <torch/csrc/stable/library.h>

#include <limits>

#include "common/parallel.h"
#include "spmm_coo.h"
#include "torch/headeronly/util/BFloat16.h"
#include "torch/headeronly/util/Half.h"

namespace gnnfast {
namespace {

// Rows [row_begin, row_end) of the output, by one thread: no atomics, and sums in edge order.
template <class T, class I>
void scatter_rows(const SpmmCooArgs& p, int64_t row_begin, int64_t row_end) {
  using A = acc_t<T>;
  const I *rows = static_cast<const I*>(p.row), *columns = static_cast<const I*>(p.column);
  const T *x = static_cast<const T*>(p.x), *weight = static_cast<const T*>(p.weight), *self = static_cast<const T*>(p.self);
  A* out = static_cast<A*>(p.out);
  const int64_t segment = p.width / p.heads;
  const A sign = p.negate ? -1 : 1;
  std::fill_n(out + row_begin * p.width, (row_end - row_begin) * p.width, A{0});
  if (p.mean) std::fill_n(p.degree + row_begin, row_end - row_begin, 0);
  std::vector<bool> seen(p.op == kCooMax ? row_end - row_begin : 0);
  for (int64_t e = 0; e < p.num_edges; ++e) {
    const int64_t row = rows[e], column = columns[e];
    if (row < row_begin || row >= row_end || column < 0 || column >= p.num_cols) continue;
    const T* source = x + column * p.width;
    A* target = out + row * p.width;
    if (p.mean) p.degree[row] += 1;
    const A share = p.x_degree ? static_cast<A>(std::max(p.x_degree[column], 1)) : A{1};
    const bool first = p.op == kCooMax && !seen[row - row_begin];
    if (first) seen[row - row_begin] = true;
    if (p.op == kCooSum && !p.x_degree) {  // apart, so that it becomes vectors
      for (int64_t h = 0; h < p.heads; ++h) {
        const A w = weight ? static_cast<A>(weight[e * p.heads + h]) : A{1};
#pragma GCC ivdep  // the output is nobody else's
        for (int64_t f = h * segment; f < (h + 1) * segment; ++f) target[f] += w * static_cast<A>(source[f]);
      }
      continue;
    }
    for (int64_t h = 0; h < p.heads; ++h) {
      const A w = weight ? static_cast<A>(weight[e * p.heads + h]) : A{1};
      A sum = 0;
      for (int64_t f = h * segment; f < (h + 1) * segment; ++f) {
        const A v = p.x_degree ? static_cast<A>(source[f]) / share : static_cast<A>(source[f]);
        if (p.op == kCooMax) {
          const A message = weight ? static_cast<A>(static_cast<T>(w * v)) : v;
          if (first || sign * message > sign * target[f] || message != message) target[f] = message;
        } else {
          target[f] += weight ? w * v : v;
        }
        if (p.op == kCooSumAndDot) sum += static_cast<A>(self[row * p.width + f]) * v;
      }
      if (p.op == kCooSumAndDot) static_cast<T*>(p.dot)[e * p.heads + h] = static_cast<T>(sum);
    }
  }
  if (p.mean)
    for (int64_t row = row_begin; row < row_end; ++row)
      for (int64_t f = 0; f < p.width; ++f) out[row * p.width + f] /= static_cast<A>(std::max(p.degree[row], 1));
}

template <class T>
void scatter(const SpmmCooArgs& p) {
  const int64_t chunks = std::min(thread_count(p.num_edges * work_of_edge(p.width), kGrain), p.num_rows);
  parallel_chunks(chunks, [&](int64_t c) {
    const int64_t begin = p.num_rows * c / chunks, end = p.num_rows * (c + 1) / chunks;
    p.index64 ? scatter_rows<T, int64_t>(p, begin, end) : scatter_rows<T, int32_t>(p, begin, end);
  });
}

}  // namespace

void Cpu::spmm_coo(const SpmmCooArgs& args, const Tensor& x) {
  switch (dtype_of("x", x)) {
    case kFloat:
      return scatter<float>(args);
    case kDouble:
      return scatter<double>(args);
    case kHalf:
      return scatter<torch::headeronly::Half>(args);
    case kBFloat16:
      return scatter<torch::headeronly::BFloat16>(args);
  }
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("spmm_coo", TORCH_BOX(&spmm_coo<Cpu>));
  m.impl("spmm_coo_backward", TORCH_BOX(&spmm_coo_backward<Cpu>));
}

}  // namespace gnnfast
