// Exponentials and what is made of them, for vectors of float or double of any length; only <op>_cpu_kernel.cpp files include
// this. Errors are a few units in the last place; NaN stays NaN.
#pragma once

#include "simd.h"

namespace gnnfast::GNNFAST_ISA {

template <class V>
using element_t = std::remove_const_t<std::remove_reference_t<decltype(V{}[0])>>;

// What exp needs of an element type: `shift` rounds to an integer in the lowest bits, ln 2 is the sum of two parts of which the
// first times an exponent is exact, and below `least` results are less than the smallest normal number.
template <class A>
struct ExpOf;

template <>
struct ExpOf<float> {
  static constexpr float kLeast = -87.3f, kShift = 12582912.f, kLn2 = 0.693359375f, kLn2Rest = -2.12194440e-4f;
  static constexpr int kMantissa = 23;
  // As in Cephes' expf, from the highest power down to the second.
  static constexpr float kPowers[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                      4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
};

template <>
struct ExpOf<double> {
  static constexpr double kLeast = -708.3, kShift = 6755399441055744.0, kLn2 = 6.93145751953125e-1,
                          kLn2Rest = 1.42860682030941723212e-6;
  static constexpr int kMantissa = 52;
  // Taylor's: the rest is at most 0.35^14 / 14! = 5e-18.
  static constexpr double kPowers[] = {1. / 6227020800, 1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320,
                                       1. / 5040,       1. / 720,       1. / 120,      1. / 24,      1. / 6,      1. / 2};
};

// exp(v) for v <= 0: 2^n times a polynomial of the rest. 0 below the smallest normal number.
template <class V>
inline V exp_nonpositive(const V& v) {
  using A = element_t<V>;
  using Bits = decltype(v > v);
  using Of = ExpOf<A>;
  const V clamped = v < Of::kLeast ? V{} + Of::kLeast : v;
  const V shifted = clamped * static_cast<A>(1.44269504088896340736) + Of::kShift, n = shifted - Of::kShift;
  const V r = (clamped - n * Of::kLn2) - n * Of::kLn2Rest;
  V y = V{} + Of::kPowers[0];
#pragma GCC unroll 16
  for (size_t i = 1; i < sizeof(Of::kPowers) / sizeof(A); ++i) y = y * r + Of::kPowers[i];
  y = y * r * r + r + A{1};
  const V e = bit_cast<V>(bit_cast<Bits>(y) + (bit_cast<Bits>(shifted) << Of::kMantissa));
  return v < Of::kLeast ? V{} : v == v ? e : v;
}

// x = exp(x) for x <= 0
template <class A>
inline void exp_all(A* x, int64_t count) {
  for_blocks<A, 1>(count, [&](auto lanes, auto, int64_t i) {
    constexpr int L = decltype(lanes)::value;
    store_vector<L>(x + i, exp_nonpositive(load_vector<L>(x + i)));
  });
}

template <class V>
inline V absolute(const V& v) {
  return v < 0 ? -v : v;
}

// What functions of exp(-|v|) are made of: e, 1 / (1 + e), and 1 - 1 / (1 + e) without a difference that cancels.
template <class V>
struct Logistic {
  V e, large, small;
  explicit Logistic(const V& minus_absolute) : e(exp_nonpositive(minus_absolute)), large(1 / (1 + e)), small(e * large) {}
};

// Given Logistic(-2 |v|).
template <class V>
inline V hyperbolic_tangent(const V& v, const Logistic<V>& of) {
  using A = element_t<V>;
  // Near 0 a difference of exponentials would cancel: Cephes' rational function.
  constexpr A kOver[] = {-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3},
              kUnder[] = {1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3};
  const V z = v * v, over = (kOver[0] * z + kOver[1]) * z + kOver[2], under = ((z + kUnder[0]) * z + kUnder[1]) * z + kUnder[2];
  const V far = of.large - of.small;
  return absolute(v) < A{0.625} ? v + v * z * (over / under) : v < 0 ? -far : far;
}

// log(1 + e) for 0 <= e <= 1: twice the area tangent of e / (2 + e), which is at most 1/3.
template <class V>
inline V log_one_plus(const V& e) {
  using A = element_t<V>;
  constexpr int kTerms = sizeof(A) == 8 ? 17 : 8;
  const V s = e / (2 + e), z = s * s;
  V y = V{} + A{1} / (2 * kTerms - 1);
#pragma GCC unroll 16
  for (int k = kTerms - 2; k >= 0; --k) y = y * z + A{1} / (2 * k + 1);
  return 2 * s * y;
}

}  // namespace gnnfast::GNNFAST_ISA
