#include <torch/csrc/stable/library.h>

#include "common/parallel.h"
#include "ends.h"

namespace gnnfast {
namespace {

// What is written decides, so no instruction set does.
template <class T, class I, EndsOp OP>
void combine_rows(const EndsArgs& p) {
  const int64_t edges = p.num_edges, width = p.width, chunks = thread_count(edges * work_of_edge(width), kGrain);
  const I *rows = static_cast<const I*>(p.row), *columns = static_cast<const I*>(p.column);
  const T *a = static_cast<const T*>(p.a), *b = static_cast<const T*>(p.b);
  T* out = static_cast<T*>(p.out);
  for (const auto& [ids, size] : {std::pair{rows, p.num_rows}, std::pair{columns, p.num_cols}})
    for (int64_t e = 0; e < edges; ++e)
      GNNFAST_CHECK(ids[e] >= 0 && ids[e] < size, "an id of ", ids[e], " is out of range [0, ", size, ")");
  parallel_chunks(chunks, [&](int64_t c) {
    for (int64_t e = edges * c / chunks; e < edges * (c + 1) / chunks; ++e) {
      const T *x = a + rows[e] * width, *y = b + columns[e] * width;
      T* to = out + e * width;
#pragma GCC ivdep
      for (int64_t f = 0; f < width; ++f) to[f] = OP == kAdd ? x[f] + y[f] : OP == kSubtract ? x[f] - y[f] : x[f] * y[f];
    }
  });
}

template <class T, class I>
void dispatch_op(const EndsArgs& p) {
  if (p.op == kAdd) return combine_rows<T, I, kAdd>(p);
  if (p.op == kSubtract) return combine_rows<T, I, kSubtract>(p);
  combine_rows<T, I, kMultiply>(p);
}

template <class T>
void dispatch_ids(const EndsArgs& p) {
  p.index64 ? dispatch_op<T, int64_t>(p) : dispatch_op<T, int32_t>(p);
}

}  // namespace

void Cpu::ends(const EndsArgs& args, const Tensor& a) {
  GNNFAST_CHECK(a.scalar_type() == ScalarType::Float || a.scalar_type() == ScalarType::Double, "a must be float32 or float64");
  a.scalar_type() == ScalarType::Float ? dispatch_ids<float>(args) : dispatch_ids<double>(args);
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) { m.impl("combine_ends", TORCH_BOX(&combine_ends<Cpu>)); }

}  // namespace gnnfast
