"""Ops over the user's own ``edge_index``, which a compiler cannot look into: what its code calls in place of the operations that
graphs are made and used by. Each finds the graph by the tensor, as uncompiled calls do: a model compiled once serves any graph, and
one that was seen before costs nothing.

Only tensors that users own may be known by identity: a compiler writes other values into buffers that it made, without a sign of
it. So ``edge_index`` must be an input of the compiled code, and ``constant`` says that ``weight`` is; :mod:`gnnfast.pyg.compiled`
sees to it. What ops return is new, and they stay outside of CUDA graphs, as they make graphs when first met.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast.cache import note_variable
from gnnfast.dispatch import execute, gates, passes
from gnnfast.graph import Graph
from gnnfast.ops.edge_relu import kept_unit
from gnnfast.ops.multi_reduce import sizes as reduce_sizes
from gnnfast.pyg.adjacency import graph_of, incidence_of
from gnnfast.pyg.attention import looped_graph, others, with_loops
from gnnfast.pyg.loops import kept_edges
from gnnfast.pyg.norm import normalised, sharing

_library = torch.library.Library("gnnfast", "FRAGMENT")
_ops = torch.ops.gnnfast
_TAGS = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, name))


class Edges(NamedTuple):
    """The last arguments of all: an ``edge_index [2, E]`` and the sizes of its graph, what the graph is made of, and the place of
    the report. ``form`` is one of

    - ``given``: the edges as they are;
    - ``looped``: with self loops, as :func:`gnnfast.pyg.attention.looped_graph`, or as ``gcn_norm`` adds them;
    - ``listed``: the former, in PyG's order where there are values for each edge;
    - ``incidence``: from the edges, which have features of their own, to where they end.
    """

    edge_index: Tensor
    num_src: int
    num_dst: int
    to_target: bool
    form: str
    place: str

    @property
    def looped(self) -> tuple[Graph, Tensor]:
        """The graph with self loops, and its edges if they are listed."""
        listed = self.form == "listed" or not self.edge_index.is_cuda
        return looped_graph(self.edge_index, self.num_src, self.num_dst, listed)

    @property
    def graph(self) -> Graph:
        if self.form in ("looped", "listed"):
            return self.looped[0]
        graph = graph_of(self.edge_index, self.num_src, self.num_dst, self.to_target)
        return incidence_of(self.edge_index, graph, self.to_target) if self.form == "incidence" else graph

    @property
    def sources(self) -> int:
        return self.edge_index.shape[1] if self.form == "incidence" else self.num_src

    @property
    def rows(self) -> int:
        """Of values for each edge: as many as there can be, as only values tell how many loops are added. The last ones are 0."""
        return self.edge_index.shape[1] + (min(self.num_src, self.num_dst) if self.form in ("looped", "listed") else 0)

    def padded(self, t: Tensor) -> Tensor:
        missing = self.rows - t.shape[0]
        return torch.nn.functional.pad(t, (0, 0) * (t.dim() - 1) + (0, missing)) if missing else t


def _of_edges(graph: Graph, t: Tensor) -> Tensor:
    """Of values for each edge those that there are."""
    return t.contiguous()[: graph.num_edges]


# Compilers keep code that calls ops on disk, for who runs the same program again: maybe with another release of gnnfast.
_VERSION = f"v{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]}"
_EDGES = "Tensor edge_index, SymInt num_src, SymInt num_dst, bool to_target, str form, str place"


def _op(name: str, arguments: str, results: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """An op, and another overload, its kernel, which has no gradient. The first is made of the second, so that it is the latter
    that compiled code calls: torch's way to an op with a gradient in Python takes as long again as the call."""
    whole, alone = _VERSION, f"{_VERSION}_kernel"
    for overload in (whole, alone):
        _library.define(f"{name}.{overload}({arguments}{', ' if arguments else ''}{_EDGES}) -> {results}", tags=_TAGS)

    def run(*given: Any) -> Any:
        if not torch.is_grad_enabled():
            return kernel(*given)
        with torch.no_grad():
            return kernel(*given)

    for key in ("CPU", "CUDA"):
        _library.impl(f"{name}.{alone}", run, key)
    _library.impl(f"{name}.{alone}", torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"gnnfast::{name}.{alone}", fake, lib=_library)
    op = getattr(getattr(_ops, name), whole)
    differentiated[op] = getattr(getattr(_ops, name), alone)
    _library.impl(f"{name}.{whole}", lambda *given: differentiated[op](*given), "CompositeImplicitAutograd")
    return op


# What each op is made of: its kernel, or what differentiates it.
differentiated: dict[Any, Callable[..., Any]] = {}


def _differentiate(op: Any, keep: Callable[..., tuple[Any, ...]], backward: Callable[..., tuple[Any, ...]]) -> None:
    """Registers the gradient of an op: ``keep(ctx, output, *inputs)`` returns the tensors that ``backward(ctx, *tensors, *grads)``
    gets, which returns the gradients of the first inputs. ``ctx.needs`` says of which there must be some."""
    kernel = differentiated[op]
    lists = [n for n, argument in enumerate(op._schema.arguments) if str(argument.type) == "List[Tensor]"]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, sizes: list[int], *flat: Any) -> Any:
            """``sizes`` of the lists of tensors among the arguments, whose tensors are arguments of their own here."""
            ctx.needs, inputs = _nested(ctx.needs_input_grad[1:], lists, sizes), _nested(flat, lists, sizes)
            output = kernel(*inputs)
            ctx.save_for_backward(*keep(ctx, output, *inputs))
            ctx.rest = tuple(None if isinstance(t, Tensor) or n in lists else t for n, t in enumerate(inputs))
            ctx.count = len(flat)
            return tuple(output) if isinstance(output, list) else output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            found = _flat(backward(ctx, *ctx.saved_tensors, *grads), lists)
            return None, *found, *(None,) * (ctx.count - len(found))

    def run(*given: Any) -> Any:
        if not torch.is_grad_enabled() or not torch._C._any_requires_grad(*given):
            return kernel(*given)
        return Function.apply([len(given[n]) for n in lists], *_flat(given, lists))  # type: ignore[no-untyped-call]

    differentiated[op] = run


def _flat(values: Any, lists: list[int]) -> list[Any]:
    """Values, with the items of those that are ``lists`` in their place."""
    return [item for n, value in enumerate(values) for item in (value if n in lists else (value,))]


def _nested(flat: Any, lists: list[int], sizes: list[int]) -> list[Any]:
    """Values of which ``lists`` have so many items."""
    found = [*flat]
    for n, size in zip(lists, sizes):
        found[n : n + size] = [found[n : n + size]]
    return found


def _once(op: Any) -> None:
    """Registers that an op, which is a gradient, has none itself."""

    def refuse(*_: Any) -> Any:
        raise RuntimeError(f"{op} has no second derivative: call the model uncompiled")

    _differentiate(op, lambda *_: (), refuse)


def _empty(like: Tensor, *shape: int, dtype: Any = None) -> Tensor:
    return like.new_empty(shape, dtype=like.dtype if dtype is None else dtype)


# ---- sum and mean ------------------------------------------------------------------------------------------------------------
# A is the adjacency with its weights [E] | [E, H] | None, over the degrees for a mean. Three ops, each linear in each of its
# floating-point operands, so that they are the derivatives of one another.
#   edge_index_spmm(x [N, F], weight, mean, constant, train, turned, edges) -> A x [M, F]; turned: A^T x, of x [M, F]
#   edge_index_sddmm(a [M, F], b [N, F], heads, mean, edges) -> <a[dst], b[src]> [E, heads]; a over the degrees for a mean
#   edge_index_spmm_backward(grad [M, F], x [N, F], weight, mean, edges) -> A^T grad, and sddmm(grad, x) in the shape of the weight


def _spmm(x: Tensor, weight: Any, mean: bool, constant: bool, train: bool, turned: bool, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    graph = edges.graph
    if weight is not None:
        weight = _of_edges(graph, weight)
        if not constant:
            note_variable(weight)
    reduce = "mean" if mean else "sum"
    if turned:
        return passes.transposed(graph, x, weight, reduce)
    return passes.aggregate(graph, x, weight, reduce, train, edges.place)


def _spmm_fake(x: Tensor, weight: Any, mean: bool, constant: bool, train: bool, turned: bool, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    return _empty(x, edges.sources if turned else edges.num_dst, x.shape[1])


SPMM = _op(
    "edge_index_spmm", "Tensor x, Tensor? weight, bool mean, bool constant, bool train, bool turned", "Tensor", _spmm, _spmm_fake
)


def _sddmm(a: Tensor, b: Tensor, heads: int, mean: bool, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    return edges.padded(passes.dot(edges.graph, a, b, heads, "mean" if mean else "sum", edges.place))


def _sddmm_fake(a: Tensor, b: Tensor, heads: int, mean: bool, *rest: Any) -> Tensor:
    return _empty(a, Edges(*rest).rows, heads)


SDDMM = _op("edge_index_sddmm", "Tensor a, Tensor b, SymInt heads, bool mean", "Tensor", _sddmm, _sddmm_fake)


def _spmm_backward(grad: Tensor, x: Tensor, weight: Tensor, mean: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    edges = Edges(*rest)
    graph = edges.graph
    to_x, to_weight = passes.both_gradients(graph, x, _of_edges(graph, weight), grad, "mean" if mean else "sum")
    return to_x, edges.padded(to_weight)


def _spmm_backward_fake(grad: Tensor, x: Tensor, weight: Tensor, mean: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty(x, *x.shape), _empty(weight, *weight.shape)


SPMM_BACKWARD = _op(
    "edge_index_spmm_backward",
    "Tensor grad, Tensor x, Tensor weight, bool mean",
    "(Tensor, Tensor)",
    _spmm_backward,
    _spmm_backward_fake,
)


def _times(ctx: Any, edge_index: Tensor, weight: Any, mean: bool, x: Tensor, turned: bool) -> Tensor:
    """A x or A^T x over the edges of ``ctx``, by weights that need not be constant."""
    return SPMM(x, weight, mean, False, True, turned, edge_index, *ctx.rest[-5:])  # type: ignore[no-any-return]


def _dot(ctx: Any, edge_index: Tensor, ends: tuple[Tensor, Tensor], mean: bool, like: Tensor) -> Tensor:
    heads = like.shape[1] if like.dim() == 2 else 1
    return SDDMM(*ends, heads, mean, edge_index, *ctx.rest[-5:]).view(like.shape)  # type: ignore[no-any-return]


def _spmm_keep(ctx: Any, _: Any, x: Tensor, weight: Any, mean: bool, constant: bool, train: bool, turned: bool, *rest: Any) -> Any:
    return x if ctx.needs[1] else None, weight, rest[0]


def _spmm_gradient(ctx: Any, x: Any, weight: Any, edge_index: Tensor, grad: Tensor) -> tuple[Any, ...]:
    mean, constant, _, turned = ctx.rest[2:6]
    if ctx.needs[0] and ctx.needs[1] and not turned:
        return SPMM_BACKWARD(grad, x, weight, mean, edge_index, *ctx.rest[-5:])  # type: ignore[no-any-return]
    to_x = to_weight = None
    if ctx.needs[0]:
        to_x = SPMM(grad, weight, mean, constant, True, not turned, edge_index, *ctx.rest[-5:])
    if ctx.needs[1]:
        to_weight = _dot(ctx, edge_index, (x, grad) if turned else (grad, x), mean, weight)
    return to_x, to_weight


def _sddmm_keep(ctx: Any, _: Any, a: Tensor, b: Tensor, heads: int, mean: bool, *rest: Any) -> Any:
    return a, b, rest[0]


def _sddmm_gradient(ctx: Any, a: Tensor, b: Tensor, edge_index: Tensor, grad: Tensor) -> tuple[Any, ...]:
    mean = ctx.rest[3]
    return tuple(
        _times(ctx, edge_index, grad, mean, other, turned) if ctx.needs[turned] else None
        for turned, other in ((False, b), (True, a))
    )


def _spmm_backward_keep(ctx: Any, _: Any, grad: Tensor, x: Tensor, weight: Tensor, mean: bool, *rest: Any) -> Any:
    return grad, x, weight, rest[0]


def _spmm_backward_gradient(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, edge_index: Tensor, of_x: Tensor, of_weight: Tensor
) -> tuple[Any, ...]:
    mean = ctx.rest[3]
    to_grad = _times(ctx, edge_index, weight, mean, of_x, False) + _times(ctx, edge_index, of_weight, mean, x, False)
    return to_grad, _times(ctx, edge_index, of_weight, mean, grad, True), _dot(ctx, edge_index, (grad, of_x), mean, weight)


_differentiate(SPMM, _spmm_keep, _spmm_gradient)
_differentiate(SDDMM, _sddmm_keep, _sddmm_gradient)
_differentiate(SPMM_BACKWARD, _spmm_backward_keep, _spmm_backward_gradient)


# ---- GCN ---------------------------------------------------------------------------------------------------------------------
# edge_index_gcn(x [N, F], weight [E] | None, improved, mean, train, turned, edges) -> [N, F]: edges and constant weights as
# gcn_norm makes them. The weight gets no gradient.


def _gcn(x: Tensor, weight: Any, improved: bool, mean: bool, train: bool, turned: bool, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    flow = "source_to_target" if edges.to_target else "target_to_source"
    arguments = edges.edge_index, weight, edges.num_src, improved, edges.form == "looped", flow, x.dtype
    made = None if mean else normalised(*arguments)
    if made is None:
        gcn_norm = sys.modules["torch_geometric.nn.conv.gcn_conv"].gcn_norm
        made = *sharing(edges.edge_index, False, gcn_norm, *arguments), None
    normed, weight, graph = made
    if graph is None:
        graph = graph_of(normed, edges.num_src, edges.num_dst, edges.to_target)
    reduce = "mean" if mean else "sum"
    if turned:
        return passes.transposed(graph, x, weight, reduce)
    return passes.aggregate(graph, x, weight, reduce, train, edges.place)


GCN = _op(
    "edge_index_gcn",
    "Tensor x, Tensor? weight, bool improved, bool mean, bool train, bool turned",
    "Tensor",
    _gcn,
    lambda x, *_: _empty(x, *x.shape),
)


def _gcn_keep(ctx: Any, _: Any, x: Tensor, weight: Any, *rest: Any) -> Any:
    return weight, rest[4]


def _gcn_gradient(ctx: Any, weight: Any, edge_index: Tensor, grad: Tensor) -> tuple[Any, ...]:
    improved, mean, _, turned = ctx.rest[2:6]
    return (GCN(grad, weight, improved, mean, True, not turned, edge_index, *ctx.rest[-5:]),)


_differentiate(GCN, _gcn_keep, _gcn_gradient)


# ---- maximum and minimum -----------------------------------------------------------------------------------------------------
# edge_index_extremum(x [N, F], weight, minimum, train, edges) -> [M, F], aux int32 [M, F], empty without train
# edge_index_extremum_backward(grad, x, weight, out, aux, minimum, to_x, to_weight, edges) -> both gradients, empty if not asked for


def _extremum(x: Tensor, weight: Any, minimum: bool, train: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    edges = Edges(*rest)
    weight = None if weight is None else weight.contiguous()
    if weight is not None:
        note_variable(weight)
    return passes.extremum(edges.graph, x, weight, "min" if minimum else "max", train, edges.place)


def _extremum_fake(x: Tensor, weight: Any, minimum: bool, train: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    rows = rest[2]
    return _empty(x, rows, x.shape[1]), _empty(x, rows if train else 0, x.shape[1], dtype=torch.int32)


EXTREMUM = _op(
    "edge_index_extremum", "Tensor x, Tensor? weight, bool minimum, bool train", "(Tensor, Tensor)", _extremum, _extremum_fake
)


def _extremum_backward(
    grad: Tensor, x: Tensor, weight: Any, out: Tensor, aux: Tensor, minimum: bool, to_x: bool, to_weight: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    edges = Edges(*rest)
    weight = None if weight is None else weight.contiguous()
    of_weight, of_x = passes.extremum_gradients(edges.graph, x, weight, out, aux, grad, minimum, to_weight, to_x)
    return _empty(x, 0) if of_x is None else of_x, _empty(x, 0) if of_weight is None else of_weight


def _extremum_backward_fake(
    grad: Tensor, x: Tensor, weight: Any, out: Tensor, aux: Tensor, minimum: bool, to_x: bool, to_weight: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    return _empty(x, *(x.shape if to_x else (0,))), _empty(x, *(weight.shape if to_weight else (0,)))


EXTREMUM_BACKWARD = _op(
    "edge_index_extremum_backward",
    "Tensor grad, Tensor x, Tensor? weight, Tensor out, Tensor aux, bool minimum, bool to_x, bool to_weight",
    "(Tensor, Tensor)",
    _extremum_backward,
    _extremum_backward_fake,
)


def _extremum_keep(ctx: Any, output: Any, x: Tensor, weight: Any, minimum: bool, train: bool, *rest: Any) -> Any:
    ctx.mark_non_differentiable(output[1])
    return x, weight, *output, rest[0]


def _extremum_gradient(
    ctx: Any, x: Tensor, weight: Any, out: Tensor, aux: Tensor, edge_index: Tensor, grad: Tensor, _: Any
) -> tuple[Any, ...]:
    minimum, train = ctx.rest[2:4]
    _must_train(train, EXTREMUM)
    needs = ctx.needs[:2]
    found = EXTREMUM_BACKWARD(grad, x, weight, out, aux, minimum, *needs, edge_index, *ctx.rest[-5:])
    return tuple(t if need else None for t, need in zip(found, needs))


def _must_train(train: bool, op: Any) -> None:
    if not train:
        raise RuntimeError(f"{op} was called with train=False, which keeps nothing for a gradient")


_differentiate(EXTREMUM, _extremum_keep, _extremum_gradient)
_once(EXTREMUM_BACKWARD)


# ---- several reductions ------------------------------------------------------------------------------------------------------
# edge_index_reductions(x [N, F], shift [M, F] | None, kinds, train, edges) -> [M, K F], and what the backward pass wants
# edge_index_reductions_backward(grad, x, shift, out, kept, ties, kinds, to_x, to_shift, edges) -> both gradients, empty if not
#     asked for


def _reductions(x: Tensor, shift: Any, kinds: list[int], train: bool, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    edges = Edges(*rest)
    return passes.reductions(edges.graph, x, shift, kinds, train, edges.place)


def _reductions_fake(x: Tensor, shift: Any, kinds: list[int], train: bool, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, width, (kept, ties, _) = Edges(*rest).num_dst, x.shape[1], reduce_sizes(kinds)
    saved = rows if train else 0
    return (
        _empty(x, rows, len(kinds) * width),
        _empty(x, saved, kept * width),
        _empty(x, saved, ties * width, dtype=torch.int32),
    )


REDUCTIONS = _op(
    "edge_index_reductions",
    "Tensor x, Tensor? shift, int[] kinds, bool train",
    "(Tensor, Tensor, Tensor)",
    _reductions,
    _reductions_fake,
)


def _several_backward(gradients: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The backward pass of this op and of the next, whose operands are alike."""

    def run(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        *kept, which, to_x, to_other = given[:8]
        found = gradients(Edges(*given[8:]).graph, grad, tuple(kept), which, (to_x, to_other))
        return tuple(_empty(grad, 0) if t is None else t for t in found)  # type: ignore[return-value]

    return run


def _several_backward_fake(grad: Tensor, x: Tensor, other: Any, *given: Any) -> tuple[Tensor, Tensor]:
    to_x, to_other = given[4:6]
    return _empty(x, *(x.shape if to_x else (0,))), _empty(x, *(other.shape if to_other else (0,)))


REDUCTIONS_BACKWARD = _op(
    "edge_index_reductions_backward",
    "Tensor grad, Tensor x, Tensor? shift, Tensor out, Tensor kept, Tensor ties, int[] kinds, bool to_x, bool to_shift",
    "(Tensor, Tensor)",
    _several_backward(passes.reductions_gradients),
    _several_backward_fake,
)


# edge_index_softened(x [N, F], t [F] | None, scale, train, edges) -> the sums weighted by the softmax of t x, or of scale x [M, F],
#     and what the backward pass wants
# edge_index_softened_backward(grad, x, t, out, most, total, scale, to_x, to_t, edges) -> both gradients, empty if not asked for


def _softened(x: Tensor, t: Any, scale: float, train: bool, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    edges = Edges(*rest)
    return passes.softened(edges.graph, x, t, scale, train, edges.place)


def _softened_fake(x: Tensor, t: Any, scale: float, train: bool, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = Edges(*rest).num_dst, x.shape[1]
    return _empty(x, rows, width), *(_empty(x, rows if train else 0, width) for _ in range(2))  # type: ignore[return-value]


SOFTENED = _op(
    "edge_index_softened",
    "Tensor x, Tensor? t, float scale, bool train",
    "(Tensor, Tensor, Tensor)",
    _softened,
    _softened_fake,
)


SOFTENED_BACKWARD = _op(
    "edge_index_softened_backward",
    "Tensor grad, Tensor x, Tensor? t, Tensor out, Tensor most, Tensor total, float scale, bool to_x, bool to_t",
    "(Tensor, Tensor)",
    _several_backward(passes.softened_gradients),
    _several_backward_fake,
)


def _several_keep(ctx: Any, output: Any, x: Tensor, other: Any, *inputs: Any) -> Any:
    ctx.mark_non_differentiable(*output[1:])
    return x, other, *output, inputs[2]


def _several_gradient(op: Any, backward: Any) -> Callable[..., tuple[Any, ...]]:
    def gradient(ctx: Any, *kept: Any) -> tuple[Any, ...]:
        *rows, edge_index, grad, _, _ = kept
        which, train = ctx.rest[2:4]
        _must_train(train, op)
        needs = ctx.needs[:2]
        found = backward(grad, *rows, which, *needs, edge_index, *ctx.rest[-5:])
        return tuple(t if need else None for t, need in zip(found, needs))

    return gradient


for _forward, _backward in ((REDUCTIONS, REDUCTIONS_BACKWARD), (SOFTENED, SOFTENED_BACKWARD)):
    _differentiate(_forward, _several_keep, _several_gradient(_forward, _backward))
    _once(_backward)


# edge_index_degree(edges) -> int32 [M]
DEGREE = _op(
    "edge_index_degree",
    "",
    "Tensor",
    lambda *rest: Edges(*rest).graph.csr.rowptr.diff(),
    lambda *rest: _empty(rest[0], Edges(*rest).num_dst, dtype=torch.int32),
)


# ---- attention ---------------------------------------------------------------------------------------------------------------
# edge_index_attention(x [N, F], dst [M, H], src [N, H], slope, dropout, seed, train, edges) -> [M, F], stats
# edge_index_attention_backward(grad, x, dst, src, out, stats, slope, dropout, seed, edges) -> the gradients of x, dst and src


def _wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype is torch.float64 else torch.float32


def _attention(
    x: Tensor, dst: Tensor, src: Tensor, slope: float, dropout: float, seed: Any, train: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    edges = Edges(*rest)
    out, stats = passes.attention(edges.graph, x, dst, src, slope, dropout, seed, train, edges.place)
    if not x.is_cuda:  # stats are the coefficients
        stats = edges.padded(stats) if train else _empty(x, 0, dst.shape[1])
    return out, stats


def _attention_fake(
    x: Tensor, dst: Tensor, src: Tensor, slope: float, dropout: float, seed: Any, train: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    out, heads = _empty(x, dst.shape[0], x.shape[1]), dst.shape[1]
    if not x.is_cuda:
        return out, _empty(x, Edges(*rest).rows if train else 0, heads)
    return out, _empty(x, dst.shape[0] if train else 0, heads, 4, dtype=_wide(x))


ATTENTION = _op(
    "edge_index_attention",
    "Tensor x, Tensor dst, Tensor src, float slope, float dropout, Tensor? seed, bool train",
    "(Tensor, Tensor)",
    _attention,
    _attention_fake,
)


def _attention_backward(
    grad: Tensor, x: Tensor, dst: Tensor, src: Tensor, out: Tensor, stats: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    numbers, edges = arguments[:3], Edges(*arguments[3:])
    graph = edges.graph
    stats = stats if x.is_cuda else _of_edges(graph, stats)
    return passes.attention_gradients(graph, x, dst, src, out, stats, grad, *numbers)


ATTENTION_BACKWARD = _op(
    "edge_index_attention_backward",
    "Tensor grad, Tensor x, Tensor dst, Tensor src, Tensor out, Tensor stats, float slope, float dropout, Tensor? seed",
    "(Tensor, Tensor, Tensor)",
    _attention_backward,
    lambda grad, x, dst, src, *_: tuple(_empty(t, *t.shape) for t in (x, dst, src)),
)


def _attention_keep(
    ctx: Any, output: Any, x: Tensor, dst: Tensor, src: Tensor, slope: float, dropout: float, seed: Any, train: bool, *rest: Any
) -> Any:
    ctx.mark_non_differentiable(output[1])
    return x, dst, src, *output, seed, rest[0]


def _attention_gradient(ctx: Any, *kept: Any) -> tuple[Any, ...]:
    x, dst, src, out, stats, seed, edge_index, grad, _ = kept
    slope, dropout, _, train = ctx.rest[3:7]
    _must_train(train, ATTENTION)
    found = ATTENTION_BACKWARD(grad, x, dst, src, out, stats, slope, dropout, seed, edge_index, *ctx.rest[-5:])
    return tuple(t if need else None for t, need in zip(found, ctx.needs))


_differentiate(ATTENTION, _attention_keep, _attention_gradient)
_once(ATTENTION_BACKWARD)


# edge_index_pair_attention(query [M, F], key [N, F], value [N, F] | None, att [F] | None, edge [E, F] | None, heads, number,
#     dropout, seed, train, edges) -> [M, F], stats
# edge_index_pair_attention_backward(grad, query, key, value, att, edge, out, stats, heads, number, dropout, seed, edges)
#     -> the gradients of query, key, value or att, and edge, or nothing


def _pair(
    query: Tensor,
    key: Tensor,
    value: Any,
    att: Any,
    edge: Any,
    heads: int,
    number: float,
    dropout: float,
    seed: Any,
    train: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    edges = Edges(*rest)
    graph = edges.graph
    edge = None if edge is None else _of_edges(graph, edge)
    return passes.pair_attention(graph, query, key, value, att, edge, heads, number, dropout, seed, train, edges.place)


def _pair_fake(query: Tensor, key: Tensor, value: Any, att: Any, edge: Any, heads: int, *rest: Any) -> tuple[Tensor, Tensor]:
    train = rest[3]
    return _empty(query, *query.shape), _empty(query, query.shape[0] if train else 0, heads, 4, dtype=_wide(query))


PAIR_ATTENTION = _op(
    "edge_index_pair_attention",
    "Tensor query, Tensor key, Tensor? value, Tensor? att, Tensor? edge, SymInt heads, float number, float dropout, "
    "Tensor? seed, bool train",
    "(Tensor, Tensor)",
    _pair,
    _pair_fake,
)


def _pair_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Any, att: Any, edge: Any, out: Tensor, stats: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    numbers, edges = arguments[:4], Edges(*arguments[4:])
    graph = edges.graph
    given = None if edge is None else _of_edges(graph, edge)
    *found, to_edge = passes.pair_attention_gradients(graph, query, key, value, att, given, out, stats, grad, *numbers)
    return *found, _empty(query, 0) if to_edge is None else edges.padded(to_edge)


def _pair_backward_fake(_: Tensor, query: Tensor, key: Tensor, value: Any, att: Any, edge: Any, *__: Any) -> tuple[Tensor, ...]:
    *found, to_edge = (
        _empty(query, 0) if t is None else _empty(t, *t.shape) for t in (query, key, value if att is None else att, edge)
    )
    return *found, to_edge


PAIR_ATTENTION_BACKWARD = _op(
    "edge_index_pair_attention_backward",
    "Tensor grad, Tensor query, Tensor key, Tensor? value, Tensor? att, Tensor? edge, Tensor out, Tensor stats, SymInt heads, "
    "float number, float dropout, Tensor? seed",
    "(Tensor, Tensor, Tensor, Tensor)",
    _pair_backward,
    _pair_backward_fake,
)


def _pair_keep(ctx: Any, output: Any, *inputs: Any) -> Any:
    ctx.mark_non_differentiable(output[1])
    *rows, _, _, _, seed, _ = inputs[:10]
    return *rows, *output, seed, inputs[10]


def _pair_gradient(ctx: Any, *kept: Any) -> tuple[Any, ...]:
    query, key, value, att, edge, out, stats, seed, edge_index, grad, _ = kept
    heads, number, dropout, _, train = ctx.rest[5:10]
    _must_train(train, PAIR_ATTENTION)
    numbers = heads, number, dropout, seed
    to_query, to_key, third, to_edge = PAIR_ATTENTION_BACKWARD(
        grad, query, key, value, att, edge, out, stats, *numbers, edge_index, *ctx.rest[-5:]
    )
    found = to_query, to_key, third if att is None else None, third if att is not None else None, to_edge
    return tuple(t if need else None for t, need in zip(found, ctx.needs))


_differentiate(PAIR_ATTENTION, _pair_keep, _pair_gradient)
_once(PAIR_ATTENTION_BACKWARD)


# edge_index_softmax(score [E, H] | None, dst [M, H] | None, src [N, H] | None, slope, edges) -> [E, H]
# edge_index_softmax_backward(grad, share, score, dst, src, slope, edges) -> the gradients of the three, or nothing


def _softmax(score: Any, dst: Any, src: Any, slope: float, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    graph = edges.graph
    score = None if score is None else _of_edges(graph, score)
    return edges.padded(execute.softmax(graph, score, dst, src, slope, place=edges.place))


def _softmax_fake(score: Any, dst: Any, src: Any, slope: float, *rest: Any) -> Tensor:
    like = next(t for t in (score, dst, src) if t is not None)
    return _empty(like, Edges(*rest).rows, like.shape[1])


SOFTMAX = _op("edge_index_softmax", "Tensor? score, Tensor? dst, Tensor? src, float slope", "Tensor", _softmax, _softmax_fake)


def _softmax_backward(grad: Tensor, share: Tensor, score: Any, dst: Any, src: Any, slope: float, *rest: Any) -> tuple[Tensor, ...]:
    edges = Edges(*rest)
    graph = edges.graph
    grad, share = _of_edges(graph, grad), _of_edges(graph, share)
    given = None if score is None else _of_edges(graph, score), dst, src
    to_score, *found = passes.softmax_gradients(graph, share, grad, *given, slope)
    found = [None if to_score is None else edges.padded(to_score), *found]
    return tuple(_empty(share, 0) if t is None else t for t in found)


def _softmax_backward_fake(grad: Tensor, share: Tensor, score: Any, dst: Any, src: Any, *_: Any) -> tuple[Tensor, ...]:
    return tuple(_empty(share, *((0,) if t is None else t.shape)) for t in (score, dst, src))


SOFTMAX_BACKWARD = _op(
    "edge_index_softmax_backward",
    "Tensor grad, Tensor share, Tensor? score, Tensor? dst, Tensor? src, float slope",
    "(Tensor, Tensor, Tensor)",
    _softmax_backward,
    _softmax_backward_fake,
)


def _softmax_keep(ctx: Any, share: Tensor, score: Any, dst: Any, src: Any, slope: float, *rest: Any) -> Any:
    return share, score, dst, src, rest[0]


def _softmax_gradient(ctx: Any, share: Tensor, score: Any, dst: Any, src: Any, edge_index: Tensor, grad: Tensor) -> tuple[Any, ...]:
    found = SOFTMAX_BACKWARD(grad, share, score, dst, src, ctx.rest[3], edge_index, *ctx.rest[-5:])
    return tuple(t if need else None for t, need in zip(found, ctx.needs))


_differentiate(SOFTMAX, _softmax_keep, _softmax_gradient)
_once(SOFTMAX_BACKWARD)


# edge_index_with_loops(rows [E, D], fill, edges) -> [E + N, D]: of the edges that are listed, with those of the loops that are
# added filled with a number, or for None the means of the rows that end there
# edge_index_with_loops_backward(grad [E + N, D], mean, edges) -> [E, D]


def _with_loops(rows: Tensor, fill: float | None, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    graph, looped = edges.looped
    return edges.padded(with_loops(rows, kept_edges(edges.edge_index), graph, looped, "mean" if fill is None else fill))


WITH_LOOPS = _op(
    "edge_index_with_loops",
    "Tensor rows, float? fill",
    "Tensor",
    _with_loops,
    lambda rows, _, *rest: _empty(rows, Edges(*rest).rows, rows.shape[1]),
)


def _with_loops_backward(grad: Tensor, mean: bool, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    (graph, looped), kept = edges.looped, kept_edges(edges.edge_index)
    to_kept, to_loops = grad[: kept.numel()], grad[kept.numel() : graph.num_edges]
    if mean:
        to_kept = to_kept + (to_loops / others(graph, grad.dtype))[looped[1, : kept.numel()]]
    return grad.new_zeros(edges.edge_index.shape[1], grad.shape[1]).index_copy(0, kept, to_kept)


WITH_LOOPS_BACKWARD = _op(
    "edge_index_with_loops_backward",
    "Tensor grad, bool mean",
    "Tensor",
    _with_loops_backward,
    lambda grad, _, edge_index, *__: _empty(grad, edge_index.shape[1], grad.shape[1]),
)
_differentiate(
    WITH_LOOPS,
    lambda ctx, _, rows, fill, edge_index, *__: (edge_index,),
    lambda ctx, edge_index, grad: (WITH_LOOPS_BACKWARD(grad, ctx.rest[1] is None, edge_index, *ctx.rest[-5:]),),
)
_once(WITH_LOOPS_BACKWARD)


# ---- relu(x_j + edge) --------------------------------------------------------------------------------------------------------
# edge_index_relu(x [N, F], w [E, F], train, edges) -> the sums of the ReLU of x[src] + w [M, F], and what the backward pass wants
# edge_index_relu_backward(grad [M, F], kept, to_w, edges) -> the gradients of x and of w, the latter empty if not asked for


def _relu(x: Tensor, w: Tensor, train: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    edges = Edges(*rest)
    return passes.edge_relu(edges.graph, x, w, train, edges.place)


def _relu_fake(x: Tensor, w: Tensor, train: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    kept = _empty(x, w.shape[0] if train else 0, x.shape[1] // kept_unit(x), dtype=torch.uint8)
    return _empty(x, Edges(*rest).num_dst, x.shape[1]), kept


RELU = _op("edge_index_relu", "Tensor x, Tensor w, bool train", "(Tensor, Tensor)", _relu, _relu_fake)


def _relu_backward(grad: Tensor, kept: Tensor, to_w: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    return passes.edge_relu_gradients(Edges(*rest).graph, kept, grad, to_w)


def _relu_backward_fake(grad: Tensor, kept: Tensor, to_w: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty(grad, Edges(*rest).num_src, grad.shape[1]), _empty(grad, kept.shape[0] if to_w else 0, grad.shape[1])


RELU_BACKWARD = _op(
    "edge_index_relu_backward", "Tensor grad, Tensor kept, bool to_w", "(Tensor, Tensor)", _relu_backward, _relu_backward_fake
)


def _relu_keep(ctx: Any, output: Any, *inputs: Any) -> Any:
    ctx.mark_non_differentiable(output[1])
    return output[1], inputs[3]


def _relu_gradient(ctx: Any, kept: Tensor, edge_index: Tensor, grad: Tensor, _: Any) -> tuple[Any, ...]:
    _must_train(ctx.rest[2], RELU)
    needs = ctx.needs[:2]
    found = RELU_BACKWARD(grad, kept, needs[1], edge_index, *ctx.rest[-5:])
    return tuple(t if need else None for t, need in zip(found, needs))


_differentiate(RELU, _relu_keep, _relu_gradient)
_once(RELU_BACKWARD)


# ---- gates -------------------------------------------------------------------------------------------------------------------
# edge_index_gate(parts, roles, acts, mean, train, edges) -> [M, F]: as :mod:`gnnfast.ops.edge_gate`
# edge_index_gate_backward(grad, parts, roles, acts, mean, needs, edges) -> the gradients of the parts that need one


def _gate(parts: list[Tensor], roles: list[int], acts: list[int], mean: bool, train: bool, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    parts = [t.contiguous() for t in parts]
    args = gates.adjacency(edges.graph, parts, "mean" if mean else "sum", train, edges.place)
    return gates.gated(args, roles, acts, mean, *parts)


def _gate_fake(parts: list[Tensor], roles: list[int], acts: list[int], mean: bool, train: bool, *rest: Any) -> Tensor:
    return _empty(parts[0], Edges(*rest).num_dst, parts[0].shape[1])


GATE = _op("edge_index_gate", "Tensor[] parts, int[] roles, int[] acts, bool mean, bool train", "Tensor", _gate, _gate_fake)


def _gate_backward(
    grad: Tensor, parts: list[Tensor], roles: list[int], acts: list[int], mean: bool, needs: list[bool], *rest: Any
) -> list[Tensor]:
    parts = [t.contiguous() for t in parts]
    args = Edges(*rest).graph.args(True, parts[0].shape[1] * parts[0].element_size())
    return [t for t in gates.gradients(args, parts, roles, acts, mean, grad, needs) if t is not None]


def _gate_backward_fake(grad: Tensor, parts: list[Tensor], *rest: Any) -> list[Tensor]:
    return [_empty(t, *t.shape) for t, need in zip(parts, rest[3]) if need]


GATE_BACKWARD = _op(
    "edge_index_gate_backward",
    "Tensor grad, Tensor[] parts, int[] roles, int[] acts, bool mean, bool[] needs",
    "Tensor[]",
    _gate_backward,
    _gate_backward_fake,
)


def _gate_keep(ctx: Any, _: Any, parts: list[Tensor], *rest: Any) -> Any:
    return *parts, rest[4]


def _gate_gradient(ctx: Any, *kept: Any) -> tuple[Any, ...]:
    *parts, edge_index, grad = kept
    roles, acts, mean = ctx.rest[1:4]
    needs = [*ctx.needs[0]]
    found = iter(GATE_BACKWARD(grad, parts, roles, acts, mean, needs, edge_index, *ctx.rest[-5:]))
    return ([next(found) if need else None for need in needs],)


_differentiate(GATE, _gate_keep, _gate_gradient)
_once(GATE_BACKWARD)
