// CPU edge softmax: a row and head at a time, its scores side by side in a buffer, so that the exponentials are vectors.
#include "edge_softmax_cpu_kernel.h"

#include <cmath>
#include <limits>

#include "common/simd.h"

namespace gnnfast::GNNFAST_ISA {
namespace {

// exp(x) for x <= 0 in vectors: 2^n times a polynomial of the rest (coefficients as in Cephes' expf; 2 ulp). 0 below the
// smallest normal number, NaN for NaN. x is in [first, count) of an array that becomes the result; returns the sum.
inline float exp_sum(float* x, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float v = x[i], clamped = v < -87.3f ? -87.3f : v;
    const float shifted = clamped * 1.44269504088896341f + 12582912.f;  // rounds to an integer in the lowest bits
    const float n = shifted - 12582912.f;
    const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.f;
    const float e = bit_cast<float>(bit_cast<int32_t>(y) + (bit_cast<int32_t>(shifted) << 23));
    x[i] = v < -87.3f ? 0.f : v != v ? v : e;
  }
  for (int64_t i = 0; i < count; ++i) sum += x[i];
  return sum;
}

inline double exp_sum(double* x, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i] = std::exp(x[i]);
  return sum;
}

template <class T>
struct Row {
  using A = acc_t<T>;
  const EdgeSoftmaxArgs& p;
  int64_t row, begin, end;

  int64_t at(int64_t slot, int64_t h) const { return (p.m.perm ? int64_t{p.m.perm[slot]} : slot) * p.heads + h; }
  A raw(int64_t slot, int64_t h, A of_row) const {
    A s = of_row;
    if (p.score) s += load(static_cast<const T*>(p.score) + at(slot, h));
    if (p.src) s += load(static_cast<const T*>(p.src) + int64_t{p.m.col[slot]} * p.heads + h);
    return s;
  }
};

template <class T>
void rows(const EdgeSoftmaxArgs& p, int64_t row_begin, int64_t row_end, acc_t<T>* s) {
  using A = acc_t<T>;
  const A slope = static_cast<A>(p.slope), inf = std::numeric_limits<A>::infinity();
  T* out = static_cast<T*>(p.out);
  const T *prob = static_cast<const T*>(p.prob), *grad = static_cast<const T*>(p.grad);
  for (int64_t i = row_begin; i < row_end; ++i) {
    const Row<T> row{p, i, p.m.rowptr[i], p.m.rowptr[i + 1]};
    const int64_t count = row.end - row.begin;
    for (int64_t h = 0; h < p.heads; ++h) {
      const A of_row = p.dst ? load(static_cast<const T*>(p.dst) + i * p.heads + h) : A{0};
      if (prob) {
        A total = 0;
        for (int64_t e = row.begin; e < row.end; ++e) total += load(prob + row.at(e, h)) * load(grad + row.at(e, h));
        A sum = 0;
        for (int64_t e = row.begin; e < row.end; ++e) {
          const int64_t at = row.at(e, h);
          const A factor = slope == 1 || row.raw(e, h, of_row) > 0 ? A{1} : slope;
          const A found = load(prob + at) * (load(grad + at) - total) * factor;
          store(out + at, found);
          sum += found;
        }
        if (p.to_dst) static_cast<A*>(p.to_dst)[i * p.heads + h] = sum;
        continue;
      }
      A most = -inf;
      for (int64_t k = 0; k < count; ++k) {
        const A raw = row.raw(row.begin + k, h, of_row);
        s[k] = raw > 0 ? raw : slope * raw;
        most = s[k] > most ? s[k] : most;
      }
      for (int64_t k = 0; k < count; ++k) s[k] -= most;
      const A sum = exp_sum(s, count), over = most == inf ? std::numeric_limits<A>::quiet_NaN() : A{1} / sum;
      for (int64_t k = 0; k < count; ++k) store(out + row.at(row.begin + k, h), s[k] * over);
    }
  }
}

}  // namespace

void edge_softmax_rows(const EdgeSoftmaxArgs& p, DType dtype, int64_t row_begin, int64_t row_end, void* scratch) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    rows<T>(p, row_begin, row_end, static_cast<acc_t<T>*>(scratch));
  });
}

}  // namespace gnnfast::GNNFAST_ISA
