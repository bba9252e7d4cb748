#include "softmax_coo.h"

#include <torch/csrc/stable/library.h>

#include <array>
#include <cmath>
#include <limits>

#include "common/parallel.h"

namespace gnnfast {
namespace {

// The exponentials are torch's, whose bits others do not have.
void exp_in_place(Tensor& t) {
  std::array<StableIValue, 1> stack{torch::stable::detail::from(t)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::exp_", "", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // which the stack owns
}

// Rows, and the groups that they belong to.
template <class T, class I>
class Groups {
 public:
  explicit Groups(const SoftmaxCooArgs& args)
      : p(args), index(static_cast<const I*>(p.index)), in(static_cast<const T*>(p.in)), out(static_cast<T*>(p.out)) {
    for (int64_t e = 0; e < p.num_rows; ++e)
      GNNFAST_CHECK(index[e] >= 0 && index[e] < p.num_groups, "index ", index[e], " is out of range [0, ", p.num_groups, ")");
  }

  void shift() const {
    std::vector<T> most(p.num_groups * p.width, -std::numeric_limits<T>::infinity());
    each(most, [&](T& m, int64_t i) { m = in[i] <= m || m != m ? m : in[i]; });  // NaN stays
    in_parallel(most, [&](T m, int64_t i) { out[i] = in[i] - m; });
  }

  void divide() const {
    std::vector<T> sum(p.num_groups * p.width);
    each(sum, [&](T& s, int64_t i) { s += out[i]; });
    for (T& s : sum) s += static_cast<T>(1e-16);
    in_parallel(sum, [&](T s, int64_t i) { out[i] /= s; });
  }

  void gradient() const {
    const T* grad = static_cast<const T*>(p.grad);
    std::vector<T> sum(p.num_groups * p.width);
    each(sum, [&](T& s, int64_t i) { s += in[i] * grad[i]; });
    in_parallel(sum, [&](T s, int64_t i) { out[i] = in[i] * (grad[i] - s); });
  }

 private:
  // Calls f(number of the group, position of a number) for the rows [begin, end), in order.
  template <class F>
  void rows(std::vector<T>& of_groups, int64_t begin, int64_t end, const F& f) const {
    for (int64_t e = begin; e < end; ++e) {
      T* group = of_groups.data() + index[e] * p.width;
      for (int64_t d = 0; d < p.width; ++d) f(group[d], e * p.width + d);
    }
  }

  // What changes the numbers of groups: in order, by one thread.
  template <class F>
  void each(std::vector<T>& of_groups, const F& f) const {
    rows(of_groups, 0, p.num_rows, f);
  }

  template <class F>
  void in_parallel(std::vector<T>& of_groups, const F& f) const {
    const int64_t chunks = thread_count(p.num_rows * p.width, kGrain);
    parallel_chunks(chunks, [&](int64_t c) { rows(of_groups, p.num_rows * c / chunks, p.num_rows * (c + 1) / chunks, f); });
  }

  const SoftmaxCooArgs& p;
  const I* index;
  const T* in;
  T* out;
};

// Calls f(groups) of what is contiguous.
template <class F>
Tensor run(const Tensor& in, const Tensor* grad, const Tensor& index_, int64_t num_groups, const F& f) {
  const Tensor index = as_contiguous(index_);
  Tensor out = torch::stable::empty_like(in);
  const SoftmaxCooArgs args = check_softmax_coo(in, grad, index, num_groups, out);
  dispatch_index("index", index.scalar_type(), [&](auto type) {
    using I = typename decltype(type)::type;
    in.scalar_type() == ScalarType::Float ? f(Groups<float, I>(args), out) : f(Groups<double, I>(args), out);
  });
  return out;
}

Tensor softmax_coo(const Tensor& src, const Tensor& index, int64_t num_groups) {
  return run(as_contiguous(src), nullptr, index, num_groups, [](const auto& groups, Tensor& out) {
    groups.shift();
    exp_in_place(out);
    groups.divide();
  });
}

Tensor softmax_coo_backward(const Tensor& prob, const Tensor& grad_, const Tensor& index, int64_t num_groups) {
  const Tensor grad = as_contiguous(grad_);
  return run(as_contiguous(prob), &grad, index, num_groups, [](const auto& groups, Tensor&) { groups.gradient(); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("softmax_coo", TORCH_BOX(&softmax_coo));
  m.impl("softmax_coo_backward", TORCH_BOX(&softmax_coo_backward));
}

}  // namespace gnnfast
