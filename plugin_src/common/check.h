// Argument checks shared by the CPU and the CUDA half of every op. Messages name the argument, what was expected and what came.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "huge_pages.h"

namespace gnnfast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  message << "gnnfast: ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// Raises RuntimeError("gnnfast: ..."). Unlike STD_TORCH_CHECK it does not tell users where this file lay on the build machine.
#define GNNFAST_CHECK(condition, ...)               \
  do {                                              \
    if (!(condition)) ::gnnfast::fail(__VA_ARGS__); \
  } while (0)

inline std::string shape_str(const Tensor& t) {
  std::string s = "[";
  for (int64_t d = 0; d < t.dim(); ++d) s += (d ? ", " : "") + std::to_string(t.size(d));
  return s + "]";
}

inline void check_dim(const char* name, const Tensor& t, int64_t dim) {
  GNNFAST_CHECK(t.dim() == dim, name, " must have ", dim, " dimensions, got shape ", shape_str(t));
}

inline void check_size(const char* name, const Tensor& t, int64_t dim, int64_t size) {
  GNNFAST_CHECK(t.size(dim) == size, name, " must have size ", size, " in dimension ", dim, ", got shape ", shape_str(t));
}

inline void check_dtype(const char* name, const Tensor& t, ScalarType want) {
  GNNFAST_CHECK(t.scalar_type() == want, name, " must have dtype ", torch::headeronly::toString(want), ", got ",
                torch::headeronly::toString(t.scalar_type()));
}

inline void check_same_device(const char* name, const Tensor& t, const Tensor& ref) {
  GNNFAST_CHECK(t.is_cuda() == ref.is_cuda() && t.get_device_index() == ref.get_device_index(), name,
                " is on another device than the features");
}

// Asking costs less than a call of the dispatcher that does nothing.
inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// What torch says where an array does not fit: programs that then take a smaller batch look for these words.
[[noreturn]] inline void fail_to_allocate(const Tensor& ref, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  std::ostringstream shape;
  for (const int64_t* s = sizes.begin(); s != sizes.end(); ++s) shape << (s == sizes.begin() ? "" : ", ") << *s;
  const char* what =
      ref.is_cuda() ? "CUDA out of memory. Tried" : "DefaultCPUAllocator: can't allocate memory: out of memory. Tried";
  throw std::runtime_error(std::string(what) + " to allocate [" + shape.str() + "] of " + torch::headeronly::toString(dtype) +
                           " in gnnfast");
}

// An uninitialised, contiguous tensor on the device of `ref`, without a call of the dispatcher: small graphs feel each.
inline Tensor make_empty(const Tensor& ref, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  int64_t strides[4] = {1, 1, 1, 1};
  const int64_t* size = sizes.begin();
  for (int64_t d = static_cast<int64_t>(sizes.size()) - 2; d >= 0; --d)
    strides[d] = strides[d + 1] * std::max<int64_t>(size[d + 1], 1);
  int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(ref.get(), &device));
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), size, strides, static_cast<int32_t>(dtype), device,
                               ref.get_device_index(), &handle) != AOTI_TORCH_SUCCESS)
    fail_to_allocate(ref, sizes, dtype);
  Tensor made(handle);
  if (!made.is_cuda()) ask_for_huge_pages(made.const_data_ptr(), made.numel() * static_cast<int64_t>(made.element_size()));
  return made;
}

// The same, of zeros.
inline Tensor make_zeros(const Tensor& ref, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  Tensor made = make_empty(ref, sizes, dtype);
  return torch::stable::zero_(made);
}

// Numbers that the host knows.
template <class Numbers>
Tensor make_on_cpu(const Numbers& numbers) {
  const int64_t size = static_cast<int64_t>(numbers.size()), stride = 1;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, static_cast<int32_t>(ScalarType::Long),
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  Tensor out(handle);
  std::copy(numbers.begin(), numbers.end(), out.mutable_data_ptr<int64_t>());
  return out;
}

// A graph array: int32, one-dimensional, contiguous, on the device of the features.
inline const int32_t* check_index(const char* name, const Tensor& t, const Tensor& ref) {
  check_dtype(name, t, ScalarType::Int);
  GNNFAST_CHECK(t.is_contiguous(), name, " must be contiguous");
  check_same_device(name, t, ref);
  return t.const_data_ptr<int32_t>();
}

inline const int32_t* check_index(const char* name, const OptTensor& t, const Tensor& ref) {
  return t.has_value() ? check_index(name, *t, ref) : nullptr;
}

// Features [rows, width], made contiguous: a kernel reads whole rows, so a copy of a strided input is cheaper than its gather.
inline Tensor check_features(const char* name, const Tensor& t, int64_t rows) {
  check_dim(name, t, 2);
  if (rows >= 0) check_size(name, t, 0, rows);
  return as_contiguous(t);
}

}  // namespace gnnfast
