// Threads of the CPU kernels: torch's own, over ranges of equal work.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gnnfast {

// Number of threads worth starting for `work` units, when one should have at least `grain` of them.
inline int64_t thread_count(int64_t work, int64_t grain) {
  return std::max<int64_t>(1, std::min<int64_t>(torch::stable::get_num_threads(), work / grain));
}

// Multiply-adds that a thread should have: about 10 us, several times what it takes to wake a thread that waits by spinning,
// and a fraction of what it takes to wake one that sleeps (OMP_WAIT_POLICY=passive) or has lost its core to somebody else.
constexpr int64_t kGrain = 65536;

// As many multiply-adds an edge takes that makes fewer: its ids, and rows that are as far away as wider ones. One feature on
// 88,648 edges: sums in 90 us on two threads, not 180 on one.
inline int64_t work_of_edge(int64_t multiply_adds) { return std::max<int64_t>(multiply_adds, 8); }

// Calls f(chunk) for chunk in [0, chunks), one chunk a thread.
template <class F>
void parallel_chunks(int64_t chunks, const F& f) {
  if (chunks == 1) return f(0);
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) f(c);
  });
}

// Calls f(row_begin, row_end, chunk) over ranges of rows that hold about equally many edges and rows: cost(i) = rowptr[i] + i
// is monotone, so each cut is a binary search. There are at most as many chunks as threads.
template <class F>
void parallel_row_chunks(const int32_t* rowptr, int64_t num_rows, int64_t work_per_edge, const F& f) {
  const int64_t total = int64_t{rowptr[num_rows]} + num_rows;
  const int64_t chunks = thread_count(total * work_of_edge(work_per_edge), kGrain);
  auto cut = [&](int64_t chunk) {
    const int64_t target = total * chunk / chunks;
    int64_t lo = 0, hi = num_rows;
    while (lo < hi) {
      const int64_t mid = (lo + hi) / 2;
      if (rowptr[mid] + mid < target)
        lo = mid + 1;
      else
        hi = mid;
    }
    return lo;
  };
  parallel_chunks(chunks, [&](int64_t c) { f(cut(c), c + 1 == chunks ? num_rows : cut(c + 1), c); });
}

template <class F>
void parallel_rows(const int32_t* rowptr, int64_t num_rows, int64_t work_per_edge, const F& f) {
  parallel_row_chunks(rowptr, num_rows, work_per_edge, [&](int64_t begin, int64_t end, int64_t) { f(begin, end); });
}

}  // namespace gnnfast
