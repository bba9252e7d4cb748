// Activations and their derivatives on both devices. `Math` says how functions of V, a number or a vector of such, are made.
#pragma once

#include "common/host_device.h"
#include "edge_gate_args.h"

namespace gnnfast {
namespace {  // compiled once per instruction set: no copy may stand in for another

// A call would compute both where one is wanted, and pass vectors through memory: hence always inlined.
template <class Math, class V>
GNNFAST_HOST_DEVICE V activate(Activation act, const V& v, V& slope) {
  const V one = V{} + 1;
  switch (act) {
    case kRelu: {
      slope = v <= 0 ? V{} : one;
      return v <= 0 ? V{} : v;
    }
    case kSigmoid: {
      const auto of = Math::logistic(-Math::absolute(v));
      slope = of.large * of.small;
      return v < 0 ? of.small : of.large;
    }
    case kTanh: {
      const auto of = Math::logistic(-2 * Math::absolute(v));
      slope = 4 * of.large * of.small;
      return Math::hyperbolic_tangent(v, of);
    }
    case kSoftplus: {
      const auto of = Math::logistic(-Math::absolute(v));
      const V soft = Math::log_one_plus(of.e) + (v < 0 ? V{} : v);
      slope = v > 20 ? one : v < 0 ? of.small : of.large;
      return v > 20 ? v : soft;
    }
    case kSilu: {
      const auto of = Math::logistic(-Math::absolute(v));
      const V s = v < 0 ? of.small : of.large;
      slope = s + v * of.large * of.small;
      return v * s;
    }
    case kAbs: {
      slope = v > 0 ? one : v < 0 ? -one : V{};
      return Math::absolute(v);
    }
    default:
      slope = one;
      return v;
  }
}

// What of a gradient `d` passes an activation of that slope. As in torch, where a ReLU is flat that is nothing, infinite as it
// may be: 0 times infinity is no number.
template <class V>
GNNFAST_HOST_DEVICE V passed(Activation act, const V& slope, const V& d) {
  if (act == kRelu) return slope == 0 ? V{} : d;
  return d * slope;
}

}  // namespace
}  // namespace gnnfast
