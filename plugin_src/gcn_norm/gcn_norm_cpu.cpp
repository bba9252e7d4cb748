#include <torch/csrc/stable/library.h>

#include <atomic>
#include <cmath>
#include <memory>

#include "gcn_norm.h"
#include "graph/loops.h"
#include "torch/headeronly/util/BFloat16.h"
#include "torch/headeronly/util/Half.h"

namespace gnnfast {
namespace {

// What the edges say of a node: `loops` of them are loops, of which the last weighs `loop`.
template <class A>
struct Node {
  A degree, loop;
  int64_t loops;
};

template <class T, class I>
class Norm {
  using A = acc_t<T>;

 public:
  explicit Norm(const GcnNormArgs& args)
      : p(args),
        source(static_cast<const I*>(p.edges)),
        target(source + p.num_edges),
        weight(static_cast<const T*>(p.weight)),
        out(static_cast<T*>(p.out)),
        nodes(new Node<A>[p.num_nodes]) {}

  void run() {
    std::atomic<bool> bad{false};
    const int64_t chunks = thread_count(p.num_edges + p.num_nodes, 65536);
    parallel_chunks(chunks, [&](int64_t c) {
      if (!collect(p.num_nodes * c / chunks, p.num_nodes * (c + 1) / chunks)) bad = true;
    });
    GNNFAST_CHECK(!bad, "an index of an edge is out of range [0, ", p.num_nodes, ")");
    if (p.kept < p.num_edges) WithoutLoops<I>(p.edges, p.num_edges, chunks).each([&](int64_t k, int64_t e) { weigh(k, e); });
    parallel_chunks(chunks, [&](int64_t c) {
      if (p.kept == p.num_edges)
        for (int64_t e = p.num_edges * c / chunks; e < p.num_edges * (c + 1) / chunks; ++e) weigh(e, e);
      if (p.loops) append(p.num_nodes * c / chunks, p.num_nodes * (c + 1) / chunks);
    });
  }

 private:
  // Nodes [begin, end), by one thread: sums in edge order. Returns whether all ids are in range.
  bool collect(int64_t begin, int64_t end) {
    std::fill(nodes.get() + begin, nodes.get() + end, Node<A>{0, static_cast<A>(p.fill), 0});
    const I* index = p.to_target ? target : source;
    bool good = true;
    for (int64_t e = 0; e < p.num_edges; ++e) {
      const int64_t i = index[e];
      good &= inside(source[e]) && inside(target[e]);
      if (i < begin || i >= end) continue;
      const A w = weight ? static_cast<A>(weight[e]) : A{1};
      Node<A>& node = nodes[i];
      if (p.loops && source[e] == target[e])
        node.loop = w, node.loops += !p.listed;
      else
        node.degree += w;
    }
    for (int64_t i = begin; i < end; ++i) {
      Node<A>& node = nodes[i];
      if (p.loops) node.degree += node.loop;
      // The weight of 1 / sqrt(0) is 0; that of a negative number NaN.
      node.degree = node.degree == 0 ? A{0} : 1 / std::sqrt(node.degree);
      node.loop = node.degree * (node.loop / static_cast<A>(node.loops + 1)) * node.degree;
    }
    return good;
  }

  // The k-th edge of the result.
  void weigh(int64_t k, int64_t e) {
    const int64_t from = source[e], to = target[e];
    const A w = weight ? static_cast<A>(weight[e]) : A{1};
    out[k] = static_cast<T>(p.loops && from == to ? nodes[from].loop : nodes[from].degree * w * nodes[to].degree);
    if (p.loops) p.out_edges[k] = from, p.out_edges[p.kept + p.num_nodes + k] = to;
  }

  void append(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      out[p.kept + i] = static_cast<T>(nodes[i].loop);
      p.out_edges[p.kept + i] = p.out_edges[2 * p.kept + p.num_nodes + i] = i;
    }
  }

  bool inside(int64_t id) const { return static_cast<uint64_t>(id) < static_cast<uint64_t>(p.num_nodes); }

  const GcnNormArgs& p;
  const I *source, *target;
  const T* weight;
  T* out;
  const std::unique_ptr<Node<A>[]> nodes;
};

template <class T>
void normalise(const GcnNormArgs& p) {
  p.index64 ? Norm<T, int64_t>(p).run() : Norm<T, int32_t>(p).run();
}

std::tuple<Tensor, Tensor> gcn_norm_listed(const Tensor& edge_index, const OptTensor& weight, int64_t num_nodes,
                                           std::optional<double> fill, bool to_target, ScalarType dtype) {
  auto keep = [](GcnNormArgs& args, const Tensor&, auto type) {
    const int64_t chunks = thread_count(args.num_edges, 65536);
    args.kept = WithoutLoops<typename decltype(type)::type>(args.edges, args.num_edges, chunks).count();
  };
  return run_gcn_norm_listed<Cpu>(edge_index, weight, num_nodes, fill, to_target, dtype, keep);
}

}  // namespace

void Cpu::gcn_norm(const GcnNormArgs& args, const Tensor& out) {
  switch (dtype_of("weight", out)) {
    case kFloat:
      return normalise<float>(args);
    case kDouble:
      return normalise<double>(args);
    case kHalf:
      return normalise<torch::headeronly::Half>(args);
    case kBFloat16:
      return normalise<torch::headeronly::BFloat16>(args);
  }
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) {
  m.impl("gcn_norm_coo", TORCH_BOX(&gcn_norm_coo<Cpu>));
  m.impl("gcn_norm_listed", TORCH_BOX(&gcn_norm_listed));
}

}  // namespace gnnfast
