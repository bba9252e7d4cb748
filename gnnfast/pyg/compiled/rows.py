"""What ``message()`` makes of rows of edges that do not exist, in compiled code.

The compiler traces ``message()`` on gathered rows, with its own guards on all that it reads. What it has put into its graph is then
followed with rows that do not exist in place of the gathered ones, by the handlers that uncompiled calls run by
(:mod:`gnnfast.lazy.operations`), on the compiler's stand-ins for tensors; what they compute becomes nodes of the graph, and so does
the kernel that reduces such messages. Nobody reads what was there before, so the compiler drops it. Where messages must exist, they
stay as they were traced, but for what is computed at nodes and gathered then, such as the first layer of a perceptron.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gnnfast.dispatch import gates, passes
from gnnfast.graph.formats import BY_DST
from gnnfast.lazy.kinds import Exists, Gate, Gathered, Pair
from gnnfast.lazy.rows import HANDLERS, ROWS, aggregated, kind_of, writes
from gnnfast.lazy.scores import Dots, Scores, Shares, Sums
from gnnfast.pyg.compiled import ops
from gnnfast.types import LINEAR

# Functions that Python's operators call.
_OPERATORS = {
    getattr(operator, name): getattr(Tensor, f"__{name}__")
    for name in ("add", "sub", "mul", "truediv", "neg", "matmul", "abs", "pow", "getitem")
}
_PRODUCTS = {functional.linear, Tensor.matmul, torch.matmul, Tensor.mm, torch.mm, Tensor.__matmul__}


class Rows:
    """Stands for what a ``node`` of the compiler's graph gives, which has a row for each edge."""

    def __init__(self, kind: Any, node: fx.Node) -> None:
        self.kind, self.node = kind, node

    exists = True
    shape = property(lambda self: self.kind.shape)
    dtype = property(lambda self: self.kind.like.dtype)

    def dim(self) -> int:
        return len(self.kind.shape)

    def value(self) -> Tensor:
        return self.node.meta["example_value"]  # type: ignore[no-any-return]

    def is_written(self) -> bool:
        return False


ROWS.add(Rows)  # type: ignore[arg-type]


class Call:
    """One ``message()``, as :class:`gnnfast.lazy.rows.Call`: what handlers ask for becomes nodes of ``graph``. ``edges`` are those
    of :class:`gnnfast.pyg.compiled.ops.Edges`, of stand-ins, and ``ids`` the nodes at the ends of edges, by side."""

    adds = False  # what the compiler makes of them is one kernel

    def __init__(self, graph: Graph, edges: ops.Edges, ids: tuple[Tensor, Tensor], hint: Callable[[Any], int]) -> None:
        self.graph, self._edges, self._ids, self._hint = graph, edges, ids, hint
        self.edges, self.grad_enabled, self.gained = edges.edge_index.shape[1], torch.is_grad_enabled(), False

    @property
    def _turned(self) -> ops.Edges:
        edges = self._edges
        return edges._replace(num_src=edges.num_dst, num_dst=edges.num_src, to_target=not edges.to_target)

    def is_fewer(self, x: Tensor) -> bool:
        return self._hint(x.shape[0]) <= self._hint(self.edges)

    def gather(self, x: Tensor, side: int) -> Tensor:
        return x.index_select(0, self._ids[side])

    def used(self, side: int) -> Tensor:
        return ops.DEGREE(*(self._edges if side == BY_DST else self._turned)) > 0  # type: ignore[no-any-return]

    def saved(self, t: Tensor) -> Tensor:
        return t  # a compiler keeps what its gradients want

    def written(self, out: Tensor) -> Tensor:
        return out

    def _needs_grad(self, *operands: Any) -> bool:
        return self.grad_enabled and any(t is not None and t.requires_grad for t in operands)

    def weighted(self, x: Tensor, weight: Tensor | None, reduce: str, *_: Any) -> Tensor:
        train = self._needs_grad(x, weight)
        if reduce in LINEAR:
            return ops.SPMM(x, weight, reduce == "mean", False, train, False, *self._edges)  # type: ignore[no-any-return]
        return ops.EXTREMUM(x, weight, reduce == "min", train, *self._edges)[0]  # type: ignore[no-any-return]

    def combine(self, pair: Pair) -> Tensor:
        return getattr(pair.a.now(), pair.how)(pair.b.now())  # type: ignore[no-any-return]

    def dot(self, a: Tensor, b: Tensor, heads: int) -> Tensor:
        return ops.SDDMM(a, b, heads, False, *self._edges)  # type: ignore[no-any-return]

    def softmax(self, score: Tensor | None, dst: Tensor | None, src: Tensor | None, slope: float) -> Tensor:
        return ops.SOFTMAX(score, dst, src, slope, *self._edges)  # type: ignore[no-any-return]

    def drops(self, *_: Any) -> bool:
        return False  # what draws numbers stays in the compiler's graph, whether or not it is used

    def dot_attention(self, a: Tensor, b: Tensor, x: Tensor, heads: int, number: float, *_: Any) -> Tensor | None:
        if not passes.serves_attention(x, heads, x.shape[1] // heads, 0.0):
            return None
        numbers = heads, float(number), 0.0, None, self._needs_grad(a, b, x)
        return ops.PAIR_ATTENTION(a, b, x, None, None, *numbers, *self._edges)[0]  # type: ignore[no-any-return]

    def attention(self, x: Tensor, dst: Tensor, src: Tensor, slope: float, *_: Any) -> Tensor | None:
        heads = dst.shape[1]
        if not passes.serves_attention(x, heads, x.shape[1] // heads, 0.0):
            return None
        return ops.ATTENTION(x, dst, src, slope, 0.0, None, self._needs_grad(x, dst, src), *self._edges)[0]  # type: ignore[no-any-return]

    def gatv2_attention(self, query: Tensor, key: Tensor, att: Tensor, heads: int, slope: float, *_: Any) -> Tensor | None:
        if not passes.serves_attention(key, heads, key.shape[1] // heads, 0.0):
            return None
        numbers = heads, slope, 0.0, None, self._needs_grad(query, key, att)
        return ops.PAIR_ATTENTION(query, key, None, att, None, *numbers, *self._edges)[0]  # type: ignore[no-any-return]

    def edge_relu(self, x: Tensor, of_edges: Tensor) -> Tensor:
        return ops.RELU(x, of_edges, self._needs_grad(x, of_edges), *self._edges)[0]  # type: ignore[no-any-return]

    def gate(self, factors: tuple[gates.Factor, ...], weight: Tensor | None, reduce: str) -> Tensor:
        ends = sum(t is not None for factor in factors for t in (factor.src, factor.scale, factor.shift))
        if self._edges.edge_index.is_cuda and ends == 1 and sum(factor.edge is not None for factor in factors) > 1:
            raise Exists  # PointTransformerConv, whose rows of edges the compiler makes on the way: 9.2 ms for 10.2 on an H200
        parts, roles, acts = gates.operands(factors, weight)
        return ops.GATE(parts, roles, acts, reduce == "mean", self._needs_grad(*parts), *self._edges)  # type: ignore[no-any-return]

    def degrees(self, dtype: torch.dtype) -> Tensor:
        return ops.DEGREE(*self._edges).to(dtype).unsqueeze(1)  # type: ignore[no-any-return]


def _softmax(score: Any, dst: Any, src: Any, slope: float, *_: Any) -> Any:
    """What is traced for PyG's ``softmax``, by when ``message()`` has not been looked at. Of sums of dot products with a vector at
    nodes, these by the op for them. On a GPU else only of a linear layer's: what Inductor makes of the gradient of
    ``(x * att).sum(-1)``, as of torch 2.11, reads misaligned addresses where that comes from an op."""
    kind = kind_of(score)
    kind = Sums.of(kind) or kind
    if not isinstance(kind, Scores) or dst is not None or src is not None or slope != 1:
        return NotImplemented
    if isinstance(kind, Sums):
        graph, ends = kind.call.graph, (kind.pair.a, kind.pair.b)
        factors = [found for end in ends if (found := graph.factors(end.x)) is not None]
        if len(factors) == 2:
            first, second = (end.of(graph.head_dots(*of_end)) for end, of_end in zip(ends, factors))
            kind = Sums(Pair(first, second, "add"), kind.slope, kind.edge, kind.tail)
        elif kind.like.is_cuda and not all(graph.node_of(end.x).target in _PRODUCTS for end in ends):
            return NotImplemented
    return Shares(kind, kind.tail)


HANDLERS[ops.SOFTMAX] = _softmax
_SYMBOLS = torch.SymInt, torch.SymFloat
_SUM, _MUL = {"sum", torch.sum, Tensor.sum}, {"mul", operator.mul, torch.mul, Tensor.mul, Tensor.__mul__}
_COPIES = {Tensor.add_: Tensor.add}  # what memory a compiler's code takes is not for us to say


class Graph(TorchFunctionMode):
    """The compiler's graph: while it is entered, what is computed of its nodes' stand-ins is put into it, after a node."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self.nodes, self.after = graph.nodes, next(iter(graph.nodes))
        self._graph = graph
        self.replaced: dict[fx.Node, fx.Node] = {}
        self._of: dict[int, fx.Node] = {}
        self._sizes: list[tuple[Any, fx.Node]] = []
        for node in graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, Tensor):
                self._of.setdefault(id(value), node)
            elif isinstance(value, _SYMBOLS):
                self._sizes.append((value, node))

    def node_of(self, value: Tensor) -> fx.Node:
        found = self._of.get(id(value))
        if found is None:
            raise Exists
        return found

    def factors(self, value: Tensor) -> tuple[fx.Node, Tensor, Tensor] | None:
        """``x [N, H, D]`` and ``a [1, H, D]`` of a ``value`` of the graph that is ``(x * a).sum(-1)``, after its node."""
        total = self.node_of(value)
        product = total.args[0] if total.target in _SUM and total.args else None
        dims = [*total.args[1:], *total.kwargs.values()]
        if not isinstance(product, fx.Node) or product.target not in _MUL or len(product.args) != 2 or dims not in ([-1], [(-1,)]):
            return None
        first, second = (n.meta.get("example_value") if isinstance(n, fx.Node) else None for n in product.args)
        for x, a in ((first, second), (second, first)):
            if not (isinstance(x, Tensor) and isinstance(a, Tensor)) or x.dim() != 3 or x.dtype is not a.dtype:
                continue
            if a.shape in (x.shape[1:], (1, *x.shape[1:])):
                return total, x, a
        return None

    def head_dots(self, total: fx.Node, x: Tensor, a: Tensor) -> Tensor:
        """That by the op for it, where it was: nobody has written into the factors since."""
        after, self.after = self.after, total
        found: Tensor = torch.ops.gnnfast.head_dots.default(x.flatten(1), a.reshape(1, -1), x.shape[1]).select(0, 0)
        self.after = after if total < after else self.after
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = _COPIES.get(func, func), kwargs or {}
        if writes(func, args, kwargs):
            raise Exists
        found = func(*args, **kwargs)
        results = found if isinstance(found, tuple) else (found,)
        if not any(isinstance(t, Tensor) and id(t) not in self._of for t in results):
            return found
        if getattr(func, "__name__", "") == "__get__":
            raise Exists
        node = self._add("call_function", func, self._mapped(args), self._mapped(kwargs), found)
        for n, t in enumerate(results if found is results else ()):
            self._add("call_function", operator.getitem, (node, n), {}, t)
        return found

    def _add(self, op: str, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        with self._graph.inserting_after(self.after):
            node = self.after = self._graph.create_node(op, target, args, kwargs)
        node.meta["example_value"] = value
        if isinstance(value, Tensor):
            self._of[id(value)] = node
        return node

    def _mapped(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, _SYMBOLS):
            return self._size(value)
        if isinstance(value, (tuple, list)):
            return (list if type(value) is list else tuple)(map(self._mapped, value))
        if isinstance(value, dict):
            return {k: self._mapped(v) for k, v in value.items()}
        return value

    def _size(self, size: Any) -> fx.Node:
        """A node that gives a number that is not the same in each call: of sizes, one of a tensor that has it."""
        expression = size.node.expr
        for known, node in self._sizes:
            if known.node.expr == expression and node < self.after:
                return node
        for tensor in self.nodes:
            value = tensor.meta.get("example_value")
            for dim, n in enumerate(value.shape if isinstance(value, Tensor) and tensor < self.after else ()):
                if isinstance(n, torch.SymInt) and n.node.expr == expression:
                    node = self._add("call_method", "size", (tensor, dim), {}, n)
                    self._sizes.append((n, node))
                    return node
        raise Exists


def follow(graph: Graph, call: Call, gathered: dict[fx.Node, tuple[Tensor, int]], nodes: list[fx.Node]) -> dict[fx.Node, Rows]:
    """What ``nodes``, which were traced since rows were ``gathered`` of features at a side, make of rows that do not exist. Raises
    Exists if they write into something, or switch gradients or autocast."""
    found = {node: Rows(Gathered(call, x, side), node) for node, (x, side) in gathered.items()}
    calls = [(node, _function_of(node)) for node in nodes if node not in found and node.op in ("call_function", "call_method")]
    # Before any node is replaced: what is written into stays what is used.
    if any(f in _SWITCHES or (writes(f, node.args, node.kwargs) and not _fills(node)) for node, f in calls):
        raise Exists
    for node, function in calls:
        handler = HANDLERS.get(function) if any(n in found for n in node.all_input_nodes) else None
        if handler is None:
            continue
        graph.after = node
        stands_for: Any = lambda n: found.get(n, n.meta.get("example_value"))  # noqa: E731
        args, kwargs = fx.map_arg((node.args, node.kwargs), stands_for)
        try:
            made = handler(*args, **kwargs)
            if made is NotImplemented:
                continue
            if isinstance(made, tuple):  # parts of rows, which are taken out of what the node gives
                taken: Any = {user: user.args[1] for user in node.users if user.target is operator.getitem}
                found.update((user, Rows(made[n], user)) for user, n in taken.items())
                continue
            value = made if isinstance(made, Tensor) else made.value() if _is_better(made, function) else None
        except Exists:
            continue
        exists = node if value is None else graph.node_of(value)
        if exists is not node:
            node.replace_all_uses_with(exists)
            graph.replaced[node] = exists
        if value is not made:
            found[node] = found[exists] = Rows(made, exists)
    return found


def _function_of(node: fx.Node) -> Any:
    target: Any = node.target
    return getattr(Tensor, target, None) if node.op == "call_method" else _OPERATORS.get(target, target)


def _is_better(made: Any, function: Any) -> bool:
    """Whether rows that must exist after all are better made than as they were traced: gathered of what was made at nodes, or dot
    products by their kernel, which has another gradient than one that scatters rows."""
    if isinstance(made, Dots) and made.number != 1:
        return False
    return made.source is None if isinstance(made, (Gathered, Dots)) else function in _PRODUCTS and isinstance(made, Gate)


def _fills(node: fx.Node) -> bool:
    """Whether a node writes into what was made for it, as PyG's scatter does."""
    into = node.args[0] if node.args else None
    return isinstance(into, fx.Node) and into.target in _MADE and len(into.users) == 1 and "out" not in node.kwargs


_MADE = {"new_zeros", "new_full", "new_empty", "new_ones"}
_SWITCHES = {torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast}


def reduced(graph: Graph, messages: Rows, dim: int, reduce: str, training: bool) -> Tensor | None:
    """What a kernel makes of messages; ``None`` where they must exist."""
    graph.after = next(iter(reversed(graph.nodes)))
    try:
        return aggregated(messages, dim, reduce, training)
    except Exists:
        return None
