// CPU kernels of head_dots: a row is read once for all vectors.
#include "head_dots_cpu_kernel.h"

#include "common/simd.h"

namespace gnnfast::GNNFAST_ISA {
namespace {

template <class T>
void dots(const HeadDotsArgs& p, int64_t row_begin, int64_t row_end) {
  const int64_t segment = p.width / p.heads;
  for (int64_t row = row_begin; row < row_end; ++row)
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t k = 0; k < p.vectors; ++k)
        store(static_cast<T*>(p.out) + (k * p.num_rows + row) * p.heads + h,
              dot(static_cast<const T*>(p.x) + row * p.width + h * segment,
                  static_cast<const T*>(p.a) + k * p.width + h * segment, segment));
}

// Features f .. f + L - 1, which are of one head, of some rows; adds to `sums` [K, F].
template <class T, int L>
void backward_columns(const HeadDotsArgs& p, acc_t<T>* sums, int64_t row_begin, int64_t row_end, int64_t f) {
  using V = vec_t<T, L>;
  const int64_t head = f / (p.width / p.heads);
  const T *x = static_cast<const T*>(p.x) + f, *a = static_cast<const T*>(p.a) + f, *g = static_cast<const T*>(p.grad) + head;
  T* to_x = p.to_x ? static_cast<T*>(p.to_x) + f : nullptr;
  const bool two = p.vectors == 2;
  const V a0 = to_x ? load_vector<L>(a) : V{}, a1 = to_x && two ? load_vector<L>(a + p.width) : V{};
  V sum0{}, sum1{};
  for (int64_t row = row_begin; row < row_end; ++row) {
    const V v = load_vector<L>(x + row * p.width);
    const acc_t<T> g0 = p.grad ? load(g + row * p.heads) : acc_t<T>{1},
                   g1 = two ? load(g + (p.num_rows + row) * p.heads) : acc_t<T>{0};
    sum0 += v * g0;
    if (two) sum1 += v * g1;
    if (to_x) store_vector<L>(to_x + row * p.width, two ? V(a0 * g0 + a1 * g1) : V(a0 * g0));
  }
  for (int l = 0; l < L; ++l) {
    sums[f + l] += sum0[l];
    if (two) sums[p.width + f + l] += sum1[l];
  }
}

// A few rows at a time, so that they are in the cache for all their columns.
template <class T>
void backward(const HeadDotsArgs& p, acc_t<T>* sums, int64_t row_begin, int64_t row_end) {
  constexpr int L = kLanes<acc_t<T>>, kRows = 32;
  const int64_t segment = p.width / p.heads;
  std::memset(sums, 0, p.vectors * p.width * sizeof(acc_t<T>));
  for (int64_t begin = row_begin; begin < row_end; begin += kRows) {
    const int64_t end = begin + kRows < row_end ? begin + kRows : row_end;
    for (int64_t h = 0; h < p.heads; ++h) {
      int64_t f = h * segment;
      for (; f + L <= (h + 1) * segment; f += L) backward_columns<T, L>(p, sums, begin, end, f);
      for (; f + L / 2 <= (h + 1) * segment; f += L / 2) backward_columns<T, L / 2>(p, sums, begin, end, f);
      for (; f < (h + 1) * segment; ++f) backward_columns<T, 1>(p, sums, begin, end, f);
    }
  }
}

}  // namespace

void head_dots_rows(const HeadDotsArgs& p, DType dtype, int64_t row_begin, int64_t row_end) {
  dispatch_dtype(dtype, [&](auto type) { dots<typename decltype(type)::type>(p, row_begin, row_end); });
}

void head_dots_backward_rows(const HeadDotsArgs& p, DType dtype, void* sums, int64_t part, int64_t row_begin, int64_t row_end) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    backward<T>(p, static_cast<acc_t<T>*>(sums) + part * p.vectors * p.width, row_begin, row_end);
  });
}

void head_dots_combine(const HeadDotsArgs& p, DType dtype, const void* sums, int64_t parts) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t size = p.vectors * p.width;
    for (int64_t i = 0; i < size; ++i) {
      acc_t<T> total = 0;
      for (int64_t part = 0; part < parts; ++part) total += static_cast<const acc_t<T>*>(sums)[part * size + i];
      store(static_cast<T*>(p.to_a) + i, total);
    }
  });
}

}  // namespace gnnfast::GNNFAST_ISA
