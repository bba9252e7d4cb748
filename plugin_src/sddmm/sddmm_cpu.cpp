#include <torch/csrc/stable/library.h>

#include "common/isa.h"
#include "common/parallel.h"
#include "sddmm.h"
#include "sddmm_cpu_kernel.h"

namespace gnnfast {
namespace {

// out[id, head] += product(id, i, f) for each element i = row * F + f of arg [rows, F] that names an edge; no two rows name
// one.
template <class T, class Product>
void add_at_first(const int32_t* arg, int64_t rows, int64_t width, int64_t heads, int64_t num_edges, T* out,
                  const Product& product) {
  const int64_t segment = width / heads, chunks = thread_count(rows * width, kGrain);
  parallel_chunks(chunks, [&](int64_t c) {
    const int64_t row_end = rows * (c + 1) / chunks;
    for (int64_t row = rows * c / chunks; row < row_end; ++row) {
      const int64_t ahead = row + 1 < row_end ? width : 0;
      for (int64_t f = 0; f < width; ++f) {
        const int64_t i = row * width + f, id = arg[i], head = segment == 1 ? f : f / segment;
        __builtin_prefetch(out + std::max(arg[i + ahead], 0) * heads + head, 1);  // places of the next row
        if (id >= 0 && id < num_edges) out[id * heads + head] += product(id, i, f);
      }
    }
  });
}

// kDotWhereFirst from where it went, in zeros: each element of a row is the product of one edge, however many there are.
template <class T>
void first_products(const SddmmArgs& p) {
  const T *a = static_cast<const T*>(p.a), *b = static_cast<const T*>(p.b);
  T* out = static_cast<T*>(p.out);
  std::vector<int32_t> by_id;
  if (p.m.perm) {
    by_id.resize(p.m.num_edges);
    parallel_rows(p.m.rowptr, p.m.num_rows, 1, [&](int64_t row_begin, int64_t row_end) {
      for (int64_t e = p.m.rowptr[row_begin]; e < p.m.rowptr[row_end]; ++e) by_id[p.m.perm[e]] = p.m.col[e];
    });
  }
  const int32_t* column_of = p.m.perm ? by_id.data() : p.m.col;
  add_at_first(p.arg, p.m.num_rows, p.width, p.heads, p.m.num_edges, out,
               [&](int64_t id, int64_t i, int64_t f) { return a[i] * b[column_of[id] * p.width + f]; });
}

// grad [M, F] at the edges that arg [M, F] names (-1: none), summed over the features of a head: [E, H], float or double. No
// two rows name one edge.
Tensor scatter_first(const Tensor& grad_, const Tensor& arg_, int64_t num_edges, int64_t heads) {
  const Tensor grad = check_features("grad", grad_, -1), arg = as_contiguous(arg_);
  check_dtype("arg", arg, ScalarType::Int);
  check_dim("arg", arg, 2);
  check_size("arg", arg, 0, grad.size(0));
  check_size("arg", arg, 1, grad.size(1));
  check_heads(heads, grad.size(1));
  GNNFAST_CHECK(grad.scalar_type() == ScalarType::Float || grad.scalar_type() == ScalarType::Double,
                "grad must be float32 or float64");
  Tensor out = make_zeros(grad, {num_edges, heads}, grad.scalar_type());
  auto run = [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = grad.const_data_ptr<T>();
    const int32_t* first = arg.const_data_ptr<int32_t>();
    T* to = out.mutable_data_ptr<T>();
    add_at_first(first, grad.size(0), grad.size(1), heads, num_edges, to, [&](int64_t, int64_t i, int64_t) { return from[i]; });
  };
  grad.scalar_type() == ScalarType::Float ? run(Type<float>{}) : run(Type<double>{});
  return out;
}

}  // namespace

void Cpu::sddmm(const SddmmArgs& args, const Tensor& a) {
  const DType dtype = dtype_of("a", a);
  if (args.op == kDotWhereFirst && (dtype == kFloat || dtype == kDouble))
    return dtype == kDouble ? first_products<double>(args) : first_products<float>(args);
  if (args.m.rowptr) {
    parallel_rows(args.m.rowptr, args.m.num_rows, args.width,
                  [&](int64_t begin, int64_t end) { GNNFAST_CALL_ISA(sddmm_rows, args, dtype, begin, end); });
    return;
  }
  const int64_t edges = args.m.num_edges, chunks = thread_count(edges * work_of_edge(args.width), kGrain);
  parallel_chunks(chunks,
                  [&](int64_t c) { GNNFAST_CALL_ISA(sddmm_edges, args, dtype, edges * c / chunks, edges * (c + 1) / chunks); });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("sddmm", TORCH_BOX(&sddmm<Cpu>));
  m.impl("scatter_first", TORCH_BOX(&scatter_first));
  m.impl("sddmm_coo", TORCH_BOX(&sddmm_coo<Cpu>));
}

}  // namespace gnnfast
