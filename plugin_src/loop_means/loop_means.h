// Rows of edges, and of the loop that a layer puts at each node (CPU only).
//
//   out[k]        = rows[e]                      of the k-th edge e that is no loop, of which there are `kept`
//   out[kept + n] = the mean of rows[e]          over the edges e -> n that are no loops; zeros if there are none
//
// edge_index [2, E] has sources and destinations; rows are [E, D], out [kept + num_nodes, D]. Each mean is added up in the
// order of the edges. loop_means_backward: of the gradient of out that of rows, which is zero for loops.
#pragma once

#include "common/dtype.h"
#include "graph/loops.h"

namespace gnnfast {

template <class I>
class Listed : WithoutLoops<I> {
  using Edges = WithoutLoops<I>;
  using Edges::begin, Edges::chunks, Edges::num_edges, Edges::source, Edges::start, Edges::target;

 public:
  Listed(const Tensor& edge_index, int64_t kept, int64_t num_nodes, int64_t width)
      : Edges(edge_index.const_data_ptr(), edge_index.size(1), thread_count(edge_index.size(1) * work_of_edge(width), kGrain)),
        num_nodes(num_nodes),
        width(width) {
    GNNFAST_CHECK(this->count() == kept, "kept must be the number of edges that are no loops, ", this->count(), ", got ", kept);
  }

  template <class T>
  void forward(const T* rows, T* out) const {
    T* means = out + this->count() * width;
    this->each([&](int64_t k, int64_t e) { std::copy_n(rows + e * width, width, out + k * width); });
    by_nodes([&](int64_t first, int64_t last) {
      std::fill(means + first * width, means + last * width, T{0});
      const std::vector<int32_t> degree = add_up(first, last, [&](int64_t e, int64_t n) {
        for (int64_t d = 0; d < width; ++d) means[n * width + d] += rows[e * width + d];
      });
      for (int64_t n = first; n < last; ++n)
        for (int64_t d = 0; d < width; ++d) means[n * width + d] /= static_cast<T>(std::max(degree[n - first], 1));
    });
  }

  template <class T>
  void backward(const T* grad, T* to_rows) const {
    const T* of_means = grad + this->count() * width;
    std::vector<int32_t> degree(num_nodes);
    by_nodes([&](int64_t first, int64_t last) {
      const std::vector<int32_t> found = add_up(first, last, [](int64_t, int64_t) {});
      std::copy(found.begin(), found.end(), degree.begin() + first);
    });
    parallel_chunks(chunks, [&](int64_t c) {
      const T* from = grad + start[c] * width;
      for (int64_t e = begin(c); e < begin(c + 1); ++e) {
        T* to = to_rows + e * width;
        const int64_t n = target[e];
        if (source[e] == n) {
          std::fill_n(to, width, T{0});
          continue;
        }
        const bool inside = n >= 0 && n < num_nodes;
        for (int64_t d = 0; d < width; ++d)
          to[d] = from[d] + (inside ? of_means[n * width + d] / static_cast<T>(degree[n]) : T{0});
        from += width;
      }
    });
  }

 private:
  // Calls f(first, last) over ranges of nodes, each of which looks at all edges.
  template <class F>
  void by_nodes(const F& f) const {
    parallel_chunks(chunks, [&](int64_t c) { f(num_nodes * c / chunks, num_nodes * (c + 1) / chunks); });
  }

  // Calls f(edge, node) for the edges that are no loops and end at nodes [first, last), in order. Returns how many each has.
  template <class F>
  std::vector<int32_t> add_up(int64_t first, int64_t last, const F& f) const {
    std::vector<int32_t> degree(last - first);
    for (int64_t e = 0; e < num_edges; ++e) {
      const int64_t n = target[e];
      if (n < first || n >= last || source[e] == n) continue;
      ++degree[n - first];
      f(e, n);
    }
    return degree;
  }

  const int64_t num_nodes, width;
};

// Calls f(listed, Type<T>{}).
template <class F>
void dispatch_listed(const Tensor& edge_index, const Tensor& rows, int64_t kept, int64_t num_nodes, const F& f) {
  check_dim("edge_index", edge_index, 2);
  check_size("edge_index", edge_index, 0, 2);
  GNNFAST_CHECK(num_nodes >= 0, "the number of nodes must not be negative, got ", num_nodes);
  const ScalarType dtype = rows.scalar_type();
  GNNFAST_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, "rows must be float32 or float64");
  dispatch_index("edge_index", edge_index.scalar_type(), [&](auto type) {
    const Listed<typename decltype(type)::type> listed(edge_index, kept, num_nodes, rows.size(1));
    dtype == ScalarType::Float ? f(listed, Type<float>{}) : f(listed, Type<double>{});
  });
}

}  // namespace gnnfast
