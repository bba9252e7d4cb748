// The edges of a list that are no loops (CPU).
#pragma once

#include <vector>

#include "common/parallel.h"

namespace gnnfast {

// Of `chunks` chunks of the edges, each for one thread: which of those that are no loops each begins with.
template <class I>
class WithoutLoops {
 public:
  WithoutLoops(const void* edges, int64_t num_edges, int64_t chunks)
      : num_edges(num_edges),
        chunks(chunks),
        source(static_cast<const I*>(edges)),
        target(source + num_edges),
        start(chunks + 1) {
    parallel_chunks(chunks, [&](int64_t c) {
      int64_t found = 0;
      for (int64_t e = begin(c); e < begin(c + 1); ++e) found += source[e] != target[e];
      start[c + 1] = found;
    });
    for (int64_t c = 0; c < chunks; ++c) start[c + 1] += start[c];
  }

  int64_t count() const { return start[chunks]; }
  int64_t begin(int64_t chunk) const { return num_edges * chunk / chunks; }

  // Calls f(k, e) for the k-th edge e that is no loop.
  template <class F>
  void each(const F& f) const {
    parallel_chunks(chunks, [&](int64_t c) {
      int64_t k = start[c];
      for (int64_t e = begin(c); e < begin(c + 1); ++e)
        if (source[e] != target[e]) f(k++, e);
    });
  }

  const int64_t num_edges, chunks;
  const I *source, *target;
  std::vector<int64_t> start;
};

}  // namespace gnnfast
