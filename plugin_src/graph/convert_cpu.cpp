#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>

#include "convert.h"
#include "loops.h"

namespace gnnfast {
namespace {

// What one pass over the edges finds.
struct Found {
  int64_t row_min, row_max, col_min, col_max;
  bool rows_sorted, cols_sorted;
};

template <class I>
Found look_at(const I* row, const I* col, int64_t num_edges) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max(), kMin = std::numeric_limits<int64_t>::min();
  const int64_t chunks = thread_count(num_edges, 65536);
  std::vector<Found> found(chunks, Found{kMax, kMin, kMax, kMin, true, true});
  parallel_chunks(chunks, [&](int64_t c) {
    const int64_t begin = num_edges * c / chunks, end = num_edges * (c + 1) / chunks;
    I r0 = std::numeric_limits<I>::max(), r1 = std::numeric_limits<I>::min(), c0 = r0, c1 = r1;
    bool rows_sorted = true, cols_sorted = true;
    for (int64_t e = begin; e < end; ++e) {
      r0 = std::min(r0, row[e]), r1 = std::max(r1, row[e]);
      c0 = std::min(c0, col[e]), c1 = std::max(c1, col[e]);
      rows_sorted &= e == 0 || row[e - 1] <= row[e];
      cols_sorted &= e == 0 || col[e - 1] <= col[e];
    }
    found[c] = {r0, r1, c0, c1, rows_sorted, cols_sorted};
  });
  Found all = found[0];
  for (const Found& b : found) {
    all.row_min = std::min(all.row_min, b.row_min), all.row_max = std::max(all.row_max, b.row_max);
    all.col_min = std::min(all.col_min, b.col_min), all.col_max = std::max(all.col_max, b.col_max);
    all.rows_sorted &= b.rows_sorted, all.cols_sorted &= b.cols_sorted;
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

Found look_at(const CooArgs& args) {
  Found found;
  dispatch_index("edge_index", args.index, [&](auto type) {
    using I = typename decltype(type)::type;
    found = look_at(static_cast<const I*>(args.row), static_cast<const I*>(args.column), args.num_edges);
  });
  return found;
}

Tensor facts_of(const Found& found) {
  return make_on_cpu(std::array{found.row_min, found.row_max, found.col_min, found.col_max});
}

struct Format {
  Tensor rowptr, col, perm;
};

// The rows' ids ascend if they are `sorted`; if they are not all `in_range`, the arrays hold anything.
Format make_format(const CooArgs& args, const Tensor& ref, bool sorted, bool in_range) {
  Format made{make_empty(ref, {args.num_rows + 1}, ScalarType::Int), make_empty(ref, {args.num_edges}, ScalarType::Int),
              make_empty(ref, {sorted ? 0 : args.num_edges}, ScalarType::Int)};
  int32_t *rowptr = made.rowptr.mutable_data_ptr<int32_t>(), *col = made.col.mutable_data_ptr<int32_t>();
  if (args.num_edges == 0 || !in_range) {
    std::fill_n(rowptr, args.num_rows + 1, 0);
    return made;
  }
  dispatch_index("edge_index", args.index, [&](auto type) {
    using I = typename decltype(type)::type;
    const I *r = static_cast<const I*>(args.row), *c = static_cast<const I*>(args.column);
    if (sorted)
      copy_sorted(r, c, args, rowptr, col);
    else
      sort_by_row(r, c, args, rowptr, col, made.perm.mutable_data_ptr<int32_t>());
  });
  return made;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> coo_to_csr(const Tensor& row_, const Tensor& column_,
                                                                              int64_t num_rows, int64_t num_cols, bool both) {
  const Tensor row = as_contiguous(row_), column = as_contiguous(column_);
  const CooArgs args = check_coo_input(row, column, num_rows, num_cols);
  const CooArgs turned{args.column, args.row, args.index, args.num_edges, num_cols, num_rows};
  const Found found = look_at(args);
  const bool rows_fit = found.row_min >= 0 && found.row_max < num_rows,
             cols_fit = found.col_min >= 0 && found.col_max < num_cols;
  const Format made = make_format(args, row, found.rows_sorted, rows_fit);
  const auto none = [&] { return make_empty(row, {0}, ScalarType::Int); };
  const Format other = both ? make_format(turned, row, found.cols_sorted, cols_fit) : Format{none(), none(), none()};
  return {made.rowptr, made.col, made.perm, other.rowptr, other.col, other.perm, facts_of(found)};
}

Tensor coo_facts(const Tensor& row_, const Tensor& column_) {
  const Tensor row = as_contiguous(row_), column = as_contiguous(column_);
  return facts_of(look_at(check_coo_input(row, column, 0, 0)));
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
