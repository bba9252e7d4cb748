// From run-time dtypes and flags to template arguments.
#pragma once

#include "check.h"
#include "types.h"

namespace gnnfast {

inline ScalarType acc_dtype(ScalarType t) { return t == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }

inline DType dtype_of(const char* name, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return kFloat;
    case ScalarType::Double:
      return kDouble;
    case ScalarType::Half:
      return kHalf;
    case ScalarType::BFloat16:
      return kBFloat16;
    default:
      fail(name, " has dtype ", torch::headeronly::toString(t.scalar_type()),
           "; accepted are float32, float64, float16 and bfloat16");
  }
}

// Calls f(Type<int32_t>{}) or f(Type<int64_t>{}).
template <class F>
void dispatch_index(const char* name, ScalarType dtype, F&& f) {
  switch (dtype) {
    case ScalarType::Int:
      return f(Type<int32_t>{});
    case ScalarType::Long:
      return f(Type<int64_t>{});
    default:
      fail(name, " has dtype ", torch::headeronly::toString(dtype), "; accepted are int32 and int64");
  }
}

}  // namespace gnnfast
