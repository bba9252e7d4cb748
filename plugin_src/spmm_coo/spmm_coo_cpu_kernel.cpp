// CPU SpMM over COO. The edges of the thread's rows are picked a few hundred at a time, without a branch that would depend on
// ids in no order, and then reduced into the output, which is in the caches for as long as the graph is small enough for COO.
#include "spmm_coo_cpu_kernel.h"
#include "common/simd.h"

namespace gnnfast::GNNFAST_ISA {
namespace {

struct Picked {
  static constexpr int kMost = 256;
  int64_t edge[kMost], row[kMost], column[kMost];
};

// Of the edges [begin, end) those of the rows [row_begin, row_end) whose ids exist; returns how many these are.
template <class I>
int pick(const SpmmCooArgs& p, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end, Picked& picked) {
  const I *rows = static_cast<const I*>(p.row), *columns = static_cast<const I*>(p.column);
  int count = 0;
  for (int64_t e = begin; e < end; ++e) {
    const int64_t row = rows[e], column = columns ? static_cast<int64_t>(columns[e]) : e;
    picked.edge[count] = e;
    picked.row[count] = row;
    picked.column[count] = column;
    count += (row >= row_begin) & (row < row_end) & (static_cast<uint64_t>(column) < static_cast<uint64_t>(p.num_cols));
  }
  return count;
}

template <class T, int OP, bool WEIGHT, bool SHARE>
void reduce_picked(const SpmmCooArgs& p, const Picked& picked, int count) {
  using A = acc_t<T>;
  const T *x = static_cast<const T*>(p.x), *weight = static_cast<const T*>(p.weight);
  const int64_t width = p.width, heads = WEIGHT ? p.heads : 1, segment = width / heads;
  const A sign = p.negate ? -1 : 1;
  for (int i = 0; i < count; ++i) {
    const int64_t id = picked.edge[i] * heads;
    const T* source = x + picked.column[i] * width;
    const T* self = OP == kCooSumAndDot ? static_cast<const T*>(p.self) + picked.row[i] * width : nullptr;
    A* target = static_cast<A*>(p.out) + picked.row[i] * width;
    [[maybe_unused]] A share = 1;
    if constexpr (SHARE) share = static_cast<A>(p.x_degree[picked.column[i]] > 1 ? p.x_degree[picked.column[i]] : 1);
    for (int64_t h = 0; h < heads; ++h, source += segment, target += segment, self += OP == kCooSumAndDot ? segment : 0) {
      const A w = WEIGHT ? load(weight + id + h) : A{1};
      A product = 0;
      for_blocks<T, 1>(segment, [&](auto lanes, auto, int64_t f) {
        constexpr int L = decltype(lanes)::value;
        auto v = load_vector<L>(source + f);
        const auto before = load_vector<L>(target + f);
        if constexpr (SHARE) v = v / share;
        if constexpr (OP == kCooSumAndDot) product += add_lanes(load_vector<L>(self + f) * v);
        if constexpr (WEIGHT) v = w * v;
        if constexpr (OP == kCooMax) {
          if constexpr (WEIGHT && sizeof(T) < sizeof(A))  // the framework compares messages of the features' dtype
            v = round_vector<L, T>(v);
          store_vector<L>(target + f, (sign * v > sign * before) | (v != v) ? v : before);
        } else {
          store_vector<L>(target + f, before + v);
        }
      });
      if constexpr (OP == kCooSumAndDot) store(static_cast<T*>(p.dot) + id + h, product);
    }
  }
}

template <class T, int OP>
void reduce_weighted(const SpmmCooArgs& p, const Picked& picked, int count) {
  if constexpr (OP != kCooSumAndDot)  // which is never without weights
    if (!p.weight)
      return p.x_degree ? reduce_picked<T, OP, false, true>(p, picked, count)
                        : reduce_picked<T, OP, false, false>(p, picked, count);
  return p.x_degree ? reduce_picked<T, OP, true, true>(p, picked, count) : reduce_picked<T, OP, true, false>(p, picked, count);
}

// Returns how many edges the rows have.
template <class T>
int64_t reduce_rows(const SpmmCooArgs& p, int64_t row_begin, int64_t row_end) {
  using A = acc_t<T>;
  const int64_t rows = row_end - row_begin, width = p.width;
  A* out = static_cast<A*>(p.out) + row_begin * width;
  const A before = p.op != kCooMax ? A{0} : static_cast<A>(p.negate ? __builtin_inf() : -__builtin_inf());
  for (int64_t f = 0; f < rows * width; ++f) out[f] = before;
  // Rows without edges hold 0; what is infinite in others is their maximum.
  const bool counts = p.mean || p.op == kCooMax;
  int32_t* degree = p.mean ? p.degree + row_begin : p.op == kCooMax ? new int32_t[rows] : nullptr;
  for (int64_t row = 0; counts && row < rows; ++row) degree[row] = 0;

  Picked picked;
  int64_t taken = 0;
  for (int64_t begin = 0; begin < p.num_edges; begin += Picked::kMost) {
    const int64_t end = begin + Picked::kMost < p.num_edges ? begin + Picked::kMost : p.num_edges;
    const int count = p.index64 ? pick<int64_t>(p, row_begin, row_end, begin, end, picked)
                                : pick<int32_t>(p, row_begin, row_end, begin, end, picked);
    taken += count;
    for (int i = 0; counts && i < count; ++i) degree[picked.row[i] - row_begin] += 1;
    switch (p.op) {
      case kCooSum:
        reduce_weighted<T, kCooSum>(p, picked, count);
        break;
      case kCooMax:
        reduce_weighted<T, kCooMax>(p, picked, count);
        break;
      case kCooSumAndDot:
        reduce_weighted<T, kCooSumAndDot>(p, picked, count);
        break;
    }
  }

  for (int64_t row = 0; counts && row < rows; ++row, out += width) {
    const A edges = static_cast<A>(degree[row] > 1 ? degree[row] : 1);
    if (p.op == kCooMax && degree[row] == 0)
      for (int64_t f = 0; f < width; ++f) out[f] = 0;
    if (p.mean && degree[row] > 1)
      for (int64_t f = 0; f < width; ++f) out[f] /= edges;
  }
  if (p.op == kCooMax) delete[] degree;
  return taken;
}

}  // namespace

int64_t spmm_coo_rows(const SpmmCooArgs& p, DType dtype, int64_t row_begin, int64_t row_end) {
  int64_t taken = 0;
  dispatch_dtype(dtype, [&](auto type) { taken = reduce_rows<typename decltype(type)::type>(p, row_begin, row_end); });
  return taken;
}

}  // namespace gnnfast::GNNFAST_ISA
