// Vectors for the CPU kernels, in the compiler's vector extension: as wide as the instruction set the file is compiled for.
// Only <op>_cpu_kernel.cpp files include this; everything lives in a namespace per instruction set (GNNFAST_ISA).
#pragma once

#include <cstring>
#include <type_traits>

#include "types.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define GNNFAST_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define GNNFAST_VECTOR_BYTES 32
#else
#define GNNFAST_VECTOR_BYTES 16
#endif

namespace gnnfast::GNNFAST_ISA {

template <class A>
constexpr int kLanes = GNNFAST_VECTOR_BYTES / sizeof(A);
template <class T>
constexpr bool is_half = false;
template <>
inline constexpr bool is_half<half_t> = true;
template <class T>
constexpr bool is_bf16 = false;
template <>
inline constexpr bool is_bf16<bf16_t> = true;

// L values of type A; L = 1 is a vector as well, so that the last features of a row run through the same code.
template <class A, int L>
struct Vector {
  typedef A type __attribute__((vector_size(L * sizeof(A))));
};
// L elements of type T in the accumulation type, in a register of at least 16 bytes (compilers spill narrower vectors): lanes
// from L on are 0.
template <class T, int L>
using vec_t = typename Vector<acc_t<T>, (L * sizeof(acc_t<T>) < 16 ? 16 / sizeof(acc_t<T>) : L)>::type;

template <class To, class From>
inline To bit_cast(const From& from) {
  To to;
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// ---- 16 bits, in the lower half of 32: of one element or of a vector ----------------------------------------------------
template <int L>
using Words = typename Vector<uint32_t, L>::type;
template <int L>
using Shorts = typename Vector<uint16_t, L>::type;

template <class U, class F>
inline U bf16_bits(const F& v) {  // to nearest, ties to even
  const U bits = bit_cast<U>(v), quiet = U{} + 0x7fc0u;
  return v != v ? quiet : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
}
// Scaling by 2^112 turns a half's exponent, placed as a float's, into the right one, subnormals included.
template <class F, class U>
inline F half_value(const U& half) {
  const U sign = (half & 0x8000u) << 16, magnitude = (half & 0x7fffu) << 13;
  const U finite = bit_cast<U>(bit_cast<F>(magnitude) * bit_cast<float>(0x77800000u)), infinite = magnitude | 0x7f800000u;
  return bit_cast<F>(sign | (magnitude >= 0x0f800000u ? infinite : finite));
}
template <class U, class F>
inline U half_bits(const F& v) {
  const U bits = bit_cast<U>(v), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const U nan = U{} + 0x7e00u, infinite = U{} + 0x7c00u,
          normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  const U subnormal = bit_cast<U>(bit_cast<F>(magnitude) + 0.5f) - 0x3f000000u;  // the adder shifts and rounds
  const U finite = magnitude < 0x38800000u ? subnormal : magnitude < 0x477ff000u ? normal : infinite;
  return sign | (magnitude > 0x7f800000u ? nan : finite);
}

// ---- one element -----------------------------------------------------------------------------------------------------
inline float load(const float* p) { return *p; }
inline double load(const double* p) { return *p; }
inline float load(const bf16_t* p) { return bit_cast<float>(uint32_t{p->bits} << 16); }
inline float load(const half_t* p) {
#if defined(__F16C__)
  return _cvtsh_ss(p->bits);
#else
  return half_value<float>(uint32_t{p->bits});
#endif
}
inline void store(float* p, float v) { *p = v; }
inline void store(double* p, double v) { *p = v; }
inline void store(bf16_t* p, float v) { p->bits = static_cast<uint16_t>(bf16_bits<uint32_t>(v)); }
inline void store(half_t* p, float v) {
#if defined(__F16C__)
  p->bits = _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT);
#else
  p->bits = static_cast<uint16_t>(half_bits<uint32_t>(v));
#endif
}

// ---- L elements, in the accumulation type -------------------------------------------------------------------------------
// 16 bits each, where they fill a register of floats.
template <class T, int L>
inline vec_t<T, L> widened(const Shorts<L>& bits) {
  if constexpr (is_bf16<T>) return bit_cast<vec_t<T, L>>(__builtin_convertvector(bits, Words<L>) << 16);
#if defined(__AVX512F__)
  if constexpr (L == 16) return bit_cast<vec_t<T, L>>(_mm512_cvtph_ps(bit_cast<__m256i>(bits)));
#endif
#if defined(__F16C__)
  if constexpr (L == 8) return bit_cast<vec_t<T, L>>(_mm256_cvtph_ps(bit_cast<__m128i>(bits)));
  if constexpr (L == 4) return bit_cast<vec_t<T, L>>(_mm_cvtph_ps(_mm_cvtsi64_si128(bit_cast<int64_t>(bits))));
#endif
  return half_value<vec_t<T, L>>(__builtin_convertvector(bits, Words<L>));
}
template <class T, int L>
inline Shorts<L> narrowed(const vec_t<T, L>& v) {
  if constexpr (is_bf16<T>) return __builtin_convertvector(bf16_bits<Words<L>>(v), Shorts<L>);
#if defined(__AVX512F__)
  if constexpr (L == 16) return bit_cast<Shorts<L>>(_mm512_cvtps_ph(bit_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#endif
#if defined(__F16C__)
  if constexpr (L == 8) return bit_cast<Shorts<L>>(_mm256_cvtps_ph(bit_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
  if constexpr (L == 4)
    return bit_cast<Shorts<L>>(_mm_cvtsi128_si64(_mm_cvtps_ph(bit_cast<__m128>(v), _MM_FROUND_TO_NEAREST_INT)));
#endif
  return __builtin_convertvector(half_bits<Words<L>>(v), Shorts<L>);
}
template <class T, int L>
constexpr bool is_narrow = sizeof(T) == 2 && sizeof(vec_t<T, L>) == L * sizeof(float);

template <int L, class T>
inline vec_t<T, L> load_vector(const T* p) {
  vec_t<T, L> v{};
  if constexpr (sizeof(v) == L * sizeof(T)) {
    std::memcpy(&v, p, sizeof(v));
  } else if constexpr (is_narrow<T, L>) {
    Shorts<L> bits;
    std::memcpy(&bits, p, sizeof(bits));
    v = widened<T, L>(bits);
  } else {
    for (int l = 0; l < L; ++l) v[l] = load(p + l);
  }
  return v;
}

template <int L, class T>
inline void store_vector(T* p, const vec_t<T, L>& v) {
  if constexpr (sizeof(v) == L * sizeof(T)) {
    std::memcpy(p, &v, sizeof(v));
  } else if constexpr (is_narrow<T, L>) {
    const Shorts<L> bits = narrowed<T, L>(v);
    std::memcpy(p, &bits, sizeof(bits));
  } else {
    for (int l = 0; l < L; ++l) store(p + l, v[l]);
  }
}

// The nearest values that T can hold.
template <class T>
inline acc_t<T> round_to(acc_t<T> v) {
  if constexpr (sizeof(T) == sizeof(acc_t<T>)) return v;
  T t;
  store(&t, v);
  return load(&t);
}
template <int L, class T>
inline vec_t<T, L> round_vector(vec_t<T, L> v) {
  if constexpr (is_narrow<T, L> && is_bf16<T>) return bit_cast<vec_t<T, L>>(bf16_bits<Words<L>>(v) << 16);
  if constexpr (is_narrow<T, L>) return widened<T, L>(narrowed<T, L>(v));
  for (int l = 0; l < L; ++l) v[l] = round_to<T>(v[l]);
  return v;
}

// Edges ahead whose rows are fetched. Rows of edges in no order, which no cache holds: maxima of 1 million of 16 features
// in 8.9 ms with 8, 5.5 with 16, 6.0 with 32; of 100 features in 35.7, 33.7 and 45.4 (an L1 of 32 KB). Rows of nodes hardly
// care.
constexpr int kPrefetch = 16;

// Has the cache fetch `width` elements.
template <int width, class T>
inline void prefetch_row(const T* p) {
  for (int f = 0; f < width; f += 64 / sizeof(T)) __builtin_prefetch(p + f);
}

// What an edge adds to a gradient that goes to those whose message is the maximum or minimum `best` of the row. Where that is
// NaN torch counts no edge and gives each 0 times infinity.
template <class A>
inline A share_of_best(A message, A best, A share) {
  return message == best ? share : best == best ? 0 * share : best;
}

// The sum of all lanes, half by half: one after the other they would wait for each other.
template <class V>
inline auto add_lanes(const V& v) {
  using A = std::remove_const_t<std::remove_reference_t<decltype(v[0])>>;
  constexpr int L = sizeof(V) / sizeof(A);
  if constexpr (L == 1) {
    return v[0];
  } else if constexpr (sizeof(V) > 16) {
    using Half = typename Vector<A, L / 2>::type;
    Half low, high;
    std::memcpy(&low, &v, sizeof(Half));
    std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof(Half), sizeof(Half));
    return add_lanes(low + high);
  } else if constexpr (L == 4) {
    return (v[0] + v[2]) + (v[1] + v[3]);
  } else {
    return v[0] + v[1];
  }
}

// sum over f < n of a[f] * b[f]
template <class T>
inline acc_t<T> dot(const T* a, const T* b, int64_t n) {
  constexpr int L = kLanes<acc_t<T>>;
  int64_t f = 0;
  acc_t<T> total = 0;
  if (n >= L) {  // to add up the lanes of a vector takes longer than a short product
    vec_t<T, L> sum{};
    for (; f + L <= n; f += L) sum += load_vector<L>(a + f) * load_vector<L>(b + f);
    total = add_lanes(sum);
  }
  for (; f < n; ++f) total += load(a + f) * load(b + f);
  return total;
}

// Calls f(Int<L>, Int<N>, Int<P>) where rows of features fit the registers: as N vectors of L, and P of them a head. Returns
// whether they do.
template <class T, int L = kLanes<acc_t<T>>, int N = 8, int P = N, class F>
bool with_vectors(int64_t width, int64_t heads, const F& f) {
  if (width == N * L && heads * P == N) return f(Int<L>{}, Int<N>{}, Int<P>{}), true;
  if constexpr (P > 1)
    return with_vectors<T, L, N, P / 2>(width, heads, f);
  else if constexpr (N > 1)
    return with_vectors<T, L, N / 2>(width, heads, f);
  else if constexpr (L == kLanes<acc_t<T>> && L * sizeof(acc_t<T>) > 16)
    return with_vectors<T, L / 2>(width, heads, f);
  return false;
}

// Calls block(Int<L>, Int<N>, f) for the features from f on: blocks of N vectors of L, the widest that fit.
template <class T, int N, class F>
inline void for_blocks(int64_t width, const F& block) {
  constexpr int L = kLanes<acc_t<T>>;
  int64_t f = 0;
  for (; f + N * L <= width; f += N * L) block(Int<L>{}, Int<N>{}, f);
  for (; f + L <= width; f += L) block(Int<L>{}, Int<1>{}, f);
  if constexpr (L > 8)
    for (; f + 8 <= width; f += 8) block(Int<8>{}, Int<1>{}, f);
  if constexpr (L > 4)
    for (; f + 4 <= width; f += 4) block(Int<4>{}, Int<1>{}, f);
  for (; f < width; ++f) block(Int<1>{}, Int<1>{}, f);
}

// The same as block(Int<L>, Int<N>, f, done), where the features of a block may be written twice: what is left at the end is in
// one more block, of which `done` features were in those before.
template <class T, int N, class F>
inline void for_overlapping_blocks(int64_t width, const F& block) {
  constexpr int L = kLanes<acc_t<T>>;
  int64_t f = 0;
  for (; f + N * L <= width; f += N * L) block(Int<L>{}, Int<N>{}, f, int64_t{0});
  for (; f + L <= width; f += L) block(Int<L>{}, Int<1>{}, f, int64_t{0});
  // Whether all that is left is done, if more than the next narrower block takes is left.
  auto end = [&](auto lanes, int64_t narrower) {
    constexpr int kWidth = decltype(lanes)::value;
    if (f + kWidth <= width) block(lanes, Int<1>{}, f, int64_t{0}), f += kWidth;
    if (width - f <= narrower || width < kWidth) return f == width;
    return block(lanes, Int<1>{}, width - kWidth, f + kWidth - width), true;
  };
  if constexpr (L > 8)
    if (end(Int<L>{}, 8)) return;
  if constexpr (L > 4)
    if (end(Int<8>{}, 4)) return;
  if constexpr (L >= 4)
    if (end(Int<4>{}, 0)) return;
  for (; f < width; ++f) block(Int<1>{}, Int<1>{}, f, int64_t{0});
}

// Calls f with the C++ type of `dtype`.
template <class F>
inline void dispatch_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case kFloat:
      return f(Type<float>{});
    case kDouble:
      return f(Type<double>{});
    case kHalf:
      return f(Type<half_t>{});
    case kBFloat16:
      return f(Type<bf16_t>{});
  }
}

}  // namespace gnnfast::GNNFAST_ISA
