// CPU kernels of edge_relu: a block of features of one row stays in registers while its edges are walked, in their order, so
// that float and double sums equal a sequential scatter's bit for bit.
#include "edge_relu_cpu_kernel.h"

#include "common/simd.h"

namespace gnnfast::GNNFAST_ISA {
namespace {

// A byte for each element of a vector.
template <class V>
struct Bytes {
  typedef uint8_t type __attribute__((vector_size(sizeof(V) / sizeof(V{}[0]))));
};

// N vectors of L features from f on.
template <class T, bool BACKWARD, int L, int N>
inline void walk_block(const EdgeReluArgs& p, int64_t row, int64_t f) {
  using V = vec_t<T, L>;
  using Mask = decltype(V{} > V{});
  using Kept = typename Bytes<V>::type;
  const T *x = static_cast<const T*>(p.x) + f, *w = static_cast<const T*>(p.w) + f;
  T* to_w = BACKWARD && p.to_w ? static_cast<T*>(p.to_w) + f : nullptr;
  uint8_t* kept = p.kept ? p.kept + f : nullptr;
  const int64_t begin = p.a.rowptr[row], end = p.a.rowptr[row + 1], last = p.a.num_edges - 1;
  V acc[N]{};
  for (int64_t e = begin; e < end; ++e) {
    const int64_t ahead = e + kPrefetch < last ? e + kPrefetch : last;
    const int64_t at = (p.a.perm ? p.a.perm[e] : e) * p.width, at_ahead = (p.a.perm ? p.a.perm[ahead] : ahead) * p.width;
    const T *source = x + p.a.col[e] * p.width, *source_ahead = x + p.a.col[ahead] * p.width;
#pragma GCC unroll 8
    for (int n = 0; n < N; n += 64 / static_cast<int>(L * sizeof(T)) + (L * sizeof(T) > 64)) {
      __builtin_prefetch(source_ahead + n * L);
      if (!BACKWARD) __builtin_prefetch(w + at_ahead + n * L);
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      V found = load_vector<L>(source + n * L);
      Kept bytes{};
      if constexpr (BACKWARD) {
        std::memcpy(&bytes, kept + at + n * L, L);
        found = __builtin_convertvector(bytes, Mask) != 0 ? found : V{};
        if (to_w) store_vector<L>(to_w + at + n * L, found);
      } else {
        found += load_vector<L>(w + at + n * L);
        const Mask none = found <= 0;
        found = none ? V{} : found;
        if (kept) {
          bytes = __builtin_convertvector(none + 1, Kept);  // a mask is -1 where it holds
          std::memcpy(kept + at + n * L, &bytes, L);
        }
      }
      acc[n] += found;
    }
  }
  for (int n = 0; n < N; ++n) store_vector<L>(static_cast<T*>(p.out) + row * p.width + f + n * L, acc[n]);
}

template <class T, bool BACKWARD>
void walk_rows(const EdgeReluArgs& p, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row)
    for_overlapping_blocks<T, 4>(p.width, [&](auto lanes, auto vectors, int64_t f, int64_t) {
      walk_block<T, BACKWARD, decltype(lanes)::value, decltype(vectors)::value>(p, row, f);
    });
}

}  // namespace

void edge_relu_rows(const EdgeReluArgs& p, DType dtype, int64_t row_begin, int64_t row_end) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    p.backward ? walk_rows<T, true>(p, row_begin, row_end) : walk_rows<T, false>(p, row_begin, row_end);
  });
}

}  // namespace gnnfast::GNNFAST_ISA
