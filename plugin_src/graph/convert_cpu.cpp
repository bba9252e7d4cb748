#include <torch/csrc/stable/library.h>

#include <limits>
#include <memory>

#include "convert.h"
#include "loops.h"

namespace gnnfast {
namespace {

template <class I>
Bounds find_bounds(const I* row, const I* col, int64_t num_edges) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max(), kMin = std::numeric_limits<int64_t>::min();
  const int64_t chunks = thread_count(num_edges, 65536);
  std::vector<Bounds> found(chunks, Bounds{kMax, kMin, kMax, kMin, 1});
  parallel_chunks(chunks, [&](int64_t c) {
    const int64_t begin = num_edges * c / chunks, end = num_edges * (c + 1) / chunks;
    I r0 = std::numeric_limits<I>::max(), r1 = std::numeric_limits<I>::min(), c0 = r0, c1 = r1;
    bool sorted = true;
    for (int64_t e = begin; e < end; ++e) {
      r0 = std::min(r0, row[e]), r1 = std::max(r1, row[e]);
      c0 = std::min(c0, col[e]), c1 = std::max(c1, col[e]);
      sorted &= e == 0 || row[e - 1] <= row[e];
    }
    found[c] = {r0, r1, c0, c1, sorted};
  });
  Bounds all = found[0];
  for (const Bounds& b : found) {
    all.row_min = std::min(all.row_min, b.row_min), all.row_max = std::max(all.row_max, b.row_max);
    all.col_min = std::min(all.col_min, b.col_min), all.col_max = std::max(all.col_max, b.col_max);
    all.sorted &= b.sorted;
  }
  return all;
}

// Counting sort: each thread counts the rows of its range of edges, a prefix sum over (row, thread) gives every thread the slot
// of its next edge of a row, and a second pass places the edges. Stable because threads hold ascending ranges.
template <class I>
void sort_by_row(const I* row, const I* column, const CooArgs& args, int32_t* rowptr, int32_t* col, int32_t* perm) {
  const int64_t rows = args.num_rows, edges = args.num_edges;
  // A thread's counters cost a pass over all rows: worth it only where it has several edges a row.
  const int64_t chunks = std::min(thread_count(edges, 65536), std::max<int64_t>(1, 2 * edges / std::max<int64_t>(rows, 1)));
  const std::unique_ptr<int32_t[]> next(new int32_t[chunks * rows]());
  auto range = [&](int64_t c) { return edges * c / chunks; };
  parallel_chunks(chunks, [&](int64_t c) {
    int32_t* count = next.get() + c * rows;
    for (int64_t e = range(c); e < range(c + 1); ++e) ++count[row[e]];
  });
  int32_t slot = 0;
  for (int64_t r = 0; r < rows; ++r) {
    rowptr[r] = slot;
    for (int64_t c = 0; c < chunks; ++c) {
      const int32_t count = next[c * rows + r];
      next[c * rows + r] = slot;
      slot += count;
    }
  }
  rowptr[rows] = slot;
  parallel_chunks(chunks, [&](int64_t c) {
    int32_t* place = next.get() + c * rows;
    for (int64_t e = range(c); e < range(c + 1); ++e) {
      const int32_t s = place[row[e]]++;
      col[s] = static_cast<int32_t>(column[e]);
      perm[s] = static_cast<int32_t>(e);
    }
  });
}

template <class I>
void copy_sorted(const I* row, const I* column, const CooArgs& args, int32_t* rowptr, int32_t* col) {
  int64_t r = 0;
  for (int64_t e = 0; e < args.num_edges; ++e) {
    while (r <= row[e]) rowptr[r++] = static_cast<int32_t>(e);
    col[e] = static_cast<int32_t>(column[e]);
  }
  while (r <= args.num_rows) rowptr[r++] = static_cast<int32_t>(args.num_edges);
}

Tensor find_facts(const CooArgs& args, const Tensor& ref) {
  Tensor facts = make_empty(ref, {5}, ScalarType::Long);
  dispatch_index("edge_index", args.index, [&](auto type) {
    using I = typename decltype(type)::type;
    *reinterpret_cast<Bounds*>(facts.mutable_data_ptr<int64_t>()) =
        find_bounds(static_cast<const I*>(args.row), static_cast<const I*>(args.column), args.num_edges);
  });
  return facts;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> coo_to_csr(const Tensor& row_, const Tensor& column_, int64_t num_rows,
                                                      int64_t num_cols) {
  const Tensor row = as_contiguous(row_), column = as_contiguous(column_);
  const CooArgs args = check_coo_input(row, column, num_rows, num_cols);
  const Tensor facts = find_facts(args, row);
  const Bounds bounds = *reinterpret_cast<const Bounds*>(facts.const_data_ptr<int64_t>());
  Tensor rowptr = make_zeros(row, {num_rows + 1}, ScalarType::Int);
  Tensor col = make_empty(row, {args.num_edges}, ScalarType::Int);
  Tensor perm = make_empty(row, {bounds.sorted ? 0 : args.num_edges}, ScalarType::Int);
  if (args.num_edges == 0 || bounds.row_min < 0 || bounds.row_max >= num_rows) return {rowptr, col, perm, facts};
  dispatch_index("edge_index", args.index, [&](auto type) {
    using I = typename decltype(type)::type;
    const I *r = static_cast<const I*>(args.row), *c = static_cast<const I*>(args.column);
    if (bounds.sorted)
      copy_sorted(r, c, args, rowptr.mutable_data_ptr<int32_t>(), col.mutable_data_ptr<int32_t>());
    else
      sort_by_row(r, c, args, rowptr.mutable_data_ptr<int32_t>(), col.mutable_data_ptr<int32_t>(),
                  perm.mutable_data_ptr<int32_t>());
  });
  return {rowptr, col, perm, facts};
}

Tensor coo_facts(const Tensor& row_, const Tensor& column_) {
  const Tensor row = as_contiguous(row_), column = as_contiguous(column_);
  return find_facts(check_coo_input(row, column, 0, 0), row);
}

template <class I>
Tensor list_loops(const Tensor& edge_index, int64_t num_nodes, bool remove) {
  const int64_t num_edges = edge_index.size(1);
  const WithoutLoops<I> others(edge_index.const_data_ptr(), num_edges, thread_count(num_edges, 65536));
  const int64_t kept = remove ? others.count() : num_edges;
  Tensor made = make_empty(edge_index, {2, kept + num_nodes}, ScalarType::Long);
  int64_t *out = made.mutable_data_ptr<int64_t>(), *out2 = out + kept + num_nodes;
  auto put = [&](int64_t k, int64_t e) { out[k] = others.source[e], out2[k] = others.target[e]; };
  if (kept < num_edges)
    others.each(put);
  else
    for (int64_t e = 0; e < num_edges; ++e) put(e, e);
  for (int64_t i = 0; i < num_nodes; ++i) out[kept + i] = out2[kept + i] = i;
  return made;
}

Tensor loops_listed(const Tensor& edge_index_, int64_t num_nodes, bool remove) {
  const Tensor edge_index = check_listed(edge_index_, num_nodes);
  Tensor made;
  dispatch_index("edge_index", edge_index.scalar_type(),
                 [&](auto type) { made = list_loops<typename decltype(type)::type>(edge_index, num_nodes, remove); });
  return made;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("coo_to_csr", TORCH_BOX(&coo_to_csr));
  m.impl("loops_listed", TORCH_BOX(&loops_listed));
  m.impl("coo_facts", TORCH_BOX(&coo_facts));
}

}  // namespace gnnfast
