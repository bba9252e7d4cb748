// CPU kernels on sparse features. A thread accumulates a row in a buffer that stays in its L2 cache and is zero again once the
// row is stored; entries are added in the order of the edges, so that results equal those of the dense kernel bit for bit.
#include "sparse_features_cpu_kernel.h"
#include "common/simd.h"

namespace gnnfast::GNNFAST_ISA {
namespace {

constexpr int64_t kBufferBytes = 1 << 17;
constexpr int kPrefetch = 4;  // edges ahead

template <class T>
void features_rows(const SparseFeaturesArgs& p, int64_t row_begin, int64_t row_end) {
  using A = acc_t<T>;
  constexpr int L = kLanes<A>;
  constexpr int64_t kMost = kBufferBytes / sizeof(A);
  const T *weight = static_cast<const T*>(p.weight), *xval = static_cast<const T*>(p.xval);
  const int64_t last_slot = p.a.num_edges - 1;
  A* acc = new A[p.width < kMost ? p.width : kMost]();
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t begin = p.a.rowptr[row], end = p.a.rowptr[row + 1];
    const A degree = p.mean && end > begin + 1 ? static_cast<A>(end - begin) : A{1};
    for (int64_t c0 = 0; c0 < p.width; c0 += kMost) {
      const int64_t size = p.width - c0 < kMost ? p.width - c0 : kMost;
      for (int64_t e = begin; e < end; ++e) {
        const int32_t ahead = p.xrowptr[p.a.col[e + kPrefetch < last_slot ? e + kPrefetch : last_slot]];
        __builtin_prefetch(p.xcol + ahead);
        __builtin_prefetch(xval + ahead);
        const int64_t source = p.a.col[e];
        const A w = weight ? load(weight + (p.a.perm ? p.a.perm[e] : e)) : A{1};
        for (int64_t k = p.xrowptr[source]; k < p.xrowptr[source + 1]; ++k) {
          const int64_t c = p.xcol[k] - c0;
          if (static_cast<uint64_t>(c) < static_cast<uint64_t>(size)) acc[c] += w * load(xval + k);
        }
      }
      T* out = static_cast<T*>(p.out) + row * p.width + c0;
      int64_t f = 0;
      for (; f + L <= size; f += L) {
        store_vector<L>(out + f, load_vector<L>(acc + f) / degree);
        store_vector<L>(acc + f, vec_t<A, L>{});
      }
      for (; f < size; ++f) store(out + f, acc[f] / degree), acc[f] = 0;
    }
  }
  delete[] acc;
}

// Rows are those of X; a block of their entries is kept in a buffer while the edges pass by.
template <class T>
void values_rows(const SparseFeaturesArgs& p, int64_t row_begin, int64_t row_end) {
  using A = acc_t<T>;
  constexpr int64_t kMost = 256;
  const T *weight = static_cast<const T*>(p.weight), *grad = static_cast<const T*>(p.grad);
  T* out = static_cast<T*>(p.out);
  A acc[kMost];
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t k = p.xrowptr[row]; k < p.xrowptr[row + 1]; k += kMost) {
      const int64_t left = p.xrowptr[row + 1] - k, size = left < kMost ? left : kMost;
      for (int64_t i = 0; i < size; ++i) acc[i] = 0;
      for (int64_t e = p.a.rowptr[row]; e < p.a.rowptr[row + 1]; ++e) {
        const A w = weight ? load(weight + (p.a.perm ? p.a.perm[e] : e)) : A{1};
        const T* target = grad + p.a.col[e] * p.width;
        for (int64_t i = 0; i < size; ++i) acc[i] += w * load(target + p.xcol[k + i]);
      }
      for (int64_t i = 0; i < size; ++i) store(out + k + i, acc[i]);
    }
  }
}

template <class T>
void edges_rows(const SparseFeaturesArgs& p, int64_t row_begin, int64_t row_end) {
  const T *xval = static_cast<const T*>(p.xval), *grad = static_cast<const T*>(p.grad);
  T* out = static_cast<T*>(p.out);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* target = grad + row * p.width;
    for (int64_t e = p.a.rowptr[row]; e < p.a.rowptr[row + 1]; ++e) {
      const int64_t source = p.a.col[e];
      acc_t<T> sum = 0;
      for (int64_t k = p.xrowptr[source]; k < p.xrowptr[source + 1]; ++k) sum += load(xval + k) * load(target + p.xcol[k]);
      store(out + (p.a.perm ? p.a.perm[e] : e), sum);
    }
  }
}

}  // namespace

void sparse_features_rows(const SparseFeaturesArgs& p, DType dtype, int64_t row_begin, int64_t row_end) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    switch (p.op) {
      case kFeatures:
        return features_rows<T>(p, row_begin, row_end);
      case kValues:
        return values_rows<T>(p, row_begin, row_end);
      case kEdges:
        return edges_rows<T>(p, row_begin, row_end);
    }
  });
}

}  // namespace gnnfast::GNNFAST_ISA
