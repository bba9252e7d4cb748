// CPU edge softmax: a row at a time, its scores side by side in a buffer, so that the exponentials are vectors.
#include "edge_softmax_cpu_kernel.h"

#include <limits>

#include "common/simd.h"
#include "common/vector_math.h"

namespace gnnfast::GNNFAST_ISA {
namespace {

// L neighbouring heads of a row, from `head` on, as vectors.
template <class T, int L>
struct Heads {
  using A = acc_t<T>;
  using V = vec_t<T, L>;
  static constexpr size_t kBytes = L * sizeof(A);
  const EdgeSoftmaxArgs& p;
  int64_t head;
  V of_row, slope;

  Heads(const EdgeSoftmaxArgs& args, int64_t row, int64_t h)
      : p(args), head(h), of_row(V{} + A{0}), slope(V{} + static_cast<A>(args.slope)) {
    if (p.dst) of_row = get(p.dst, row);
  }
  V get(const void* from, int64_t row) const {
    const T* at = static_cast<const T*>(from) + row * p.heads + head;
    V v{};
    for (int i = 0; i < L; ++i) v[i] = load(at + i);
    return v;
  }
  void put(int64_t edge, V v) const {
    T* at = static_cast<T*>(p.out) + edge * p.heads + head;
    for (int i = 0; i < L; ++i) store(at + i, v[i]);
  }
  int64_t edge(int64_t slot) const { return p.m.perm ? p.m.perm[slot] : slot; }
  V raw(int64_t slot) const {
    V s = of_row;
    if (p.score) s += get(p.score, edge(slot));
    if (p.src) s += get(p.src, p.m.col[slot]);
    return s;
  }

  // With room for L numbers a slot.
  void softmax(int64_t begin, int64_t end, A* room) const {
    const A inf = std::numeric_limits<A>::infinity();
    V most = V{} - inf, sum = V{};
    const int64_t count = end - begin;
    for (int64_t k = 0; k < count; ++k) {
      const V raw_ = raw(begin + k), v = raw_ > 0 ? raw_ : slope * raw_;
      std::memcpy(room + k * L, &v, kBytes);
      most = v > most ? v : most;
    }
    for (int64_t k = 0; k < count; ++k) {
      V v{};
      std::memcpy(&v, room + k * L, kBytes);
      v -= most;
      std::memcpy(room + k * L, &v, kBytes);
    }
    exp_all(room, count * L);
    for (int64_t k = 0; k < count; ++k) {
      V v{};
      std::memcpy(&v, room + k * L, kBytes);
      sum += v;
    }
    const V over = most == inf ? V{} + std::numeric_limits<A>::quiet_NaN() : 1 / sum;
    for (int64_t k = 0; k < count; ++k) {
      V v{};
      std::memcpy(&v, room + k * L, kBytes);
      put(edge(begin + k), v * over);
    }
  }

  // Returns the sum over the row.
  V gradient(int64_t begin, int64_t end) const {
    constexpr int kPrefetch = 16;  // edges ahead, of this row and the next
    V total = V{}, sum = V{};
    for (int64_t slot = begin; slot < end; ++slot) {
      if (p.m.perm && slot + kPrefetch < p.m.num_edges) {
        const int64_t next = p.m.perm[slot + kPrefetch] * p.heads + head;
        __builtin_prefetch(static_cast<const T*>(p.prob) + next);
        __builtin_prefetch(static_cast<const T*>(p.grad) + next);
        __builtin_prefetch(static_cast<const T*>(p.out) + next, 1);
      }
      total += get(p.prob, edge(slot)) * get(p.grad, edge(slot));
    }
    for (int64_t slot = begin; slot < end; ++slot) {
      V found = get(p.prob, edge(slot)) * (get(p.grad, edge(slot)) - total);
      if (p.slope != 1) found = raw(slot) > 0 ? found : slope * found;
      put(edge(slot), found);
      sum += found;
    }
    return sum;
  }
};

template <class T, int L>
void row_heads(const EdgeSoftmaxArgs& p, int64_t row, int64_t head, acc_t<T>* room) {
  const Heads<T, L> heads(p, row, head);
  const int64_t begin = p.m.rowptr[row], end = p.m.rowptr[row + 1];
  if (!p.prob) return heads.softmax(begin, end, room);
  const typename Heads<T, L>::V sum = heads.gradient(begin, end);
  if (p.to_dst)
    for (int i = 0; i < L; ++i) static_cast<acc_t<T>*>(p.to_dst)[row * p.heads + head + i] = sum[i];
}

}  // namespace

void edge_softmax_rows(const EdgeSoftmaxArgs& p, DType dtype, int64_t row_begin, int64_t row_end, void* scratch) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    acc_t<T>* room = static_cast<acc_t<T>*>(scratch);
    for (int64_t row = row_begin; row < row_end; ++row) {
      int64_t h = 0;
      for (; h + 8 <= p.heads; h += 8) row_heads<T, 8>(p, row, h, room);
      for (; h + 4 <= p.heads; h += 4) row_heads<T, 4>(p, row, h, room);
      for (; h < p.heads; ++h) row_heads<T, 1>(p, row, h, room);
    }
  });
}

}  // namespace gnnfast::GNNFAST_ISA
