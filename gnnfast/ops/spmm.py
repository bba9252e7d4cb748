"""SpMM over CSR (GAR). Contract and citations: ``plugin_src/spmm/spmm_args.h``.

The first arguments of an op, ``graph`` here, are those of a :class:`gnnfast.types.Matrix`; a backward pass transposes it.
Letters in comments: N columns (sources), M rows (destinations), E edges, H heads, F features, H divides F.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast.ops.convert import derived, inverse, out_of_memory
from gnnfast.types import TIES, Matrix, split

_ops = torch.ops.gnnfast
GRAPH_ARGS = len(Matrix._fields)
MANY_EDGES = 1 << 17  # kPermuteFirst in plugin_src/spmm/spmm_cuda.cu


def swap_weights(weight: Tensor | None, weight_t: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The weights for A^T: the other slot order, or the same by edge ids."""
    return (weight, None) if weight_t is None else (weight_t, weight)


below_autograd: Callable[[], AbstractContextManager[None]] = getattr(torch._C, "_AutoDispatchBelowAutograd", nullcontext)


class Formula(NamedTuple):
    """An op and its autograd formula. Inputs, and which of them need a gradient, are those after the graph.

    ``keep(ctx, needs, output, *inputs)`` returns the tensors that the backward pass wants, and puts what is no tensor into ``ctx``;
    ``backward(ctx, graph, kept, needs, *grads)`` returns the gradients of the inputs. With ``hides``, only the first output is a
    result: the others are for the backward pass.
    """

    op: Any
    keep: Callable[..., tuple[Tensor | None, ...]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    hides: bool = False


class Eager(torch.autograd.Function):
    """The formulas that are registered with ``torch.library`` for the compiler, run directly: the registered way costs about 100 us
    of host time a call, as much as a whole layer on a small graph."""

    @staticmethod
    def forward(ctx: Any, graph: Matrix | tuple[()], formula: Formula, *inputs: Any) -> Any:
        ctx.graph, ctx.formula = graph, formula.backward  # the graph's arrays are ours and never change: no need to save them
        output = _below(formula.op, *graph, *inputs)
        ctx.save_for_backward(*formula.keep(ctx, ctx.needs_input_grad[2:], output, *inputs))
        return output[0] if formula.hides else output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, None, *ctx.formula(ctx, ctx.graph, ctx.saved_tensors, ctx.needs_input_grad[2:], *grads))


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What ``function.apply`` does after some preparations for functorch, which take as long again."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


_apply = apply_of(Eager)


def register(formula: Formula, graph_args: int = GRAPH_ARGS) -> Formula:
    """Registers a formula for its op, whose first arguments are a graph's."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if formula.hides:
            ctx.mark_non_differentiable(*output[1:])
        graph, needs = inputs[:graph_args], ctx.needs_input_grad[graph_args:]
        ctx.graph = [None if isinstance(t, Tensor) else t for t in graph]  # the layouts
        ctx.save_for_backward(
            *(t if isinstance(t, Tensor) else None for t in graph), *formula.keep(ctx, needs, output, *inputs[graph_args:])
        )

    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        s = ctx.saved_tensors
        arrays = (t if other is None else other for t, other in zip(s, ctx.graph))
        graph = Matrix(*arrays) if graph_args else ()
        needs = ctx.needs_input_grad[graph_args:]
        return *(None,) * graph_args, *formula.backward(ctx, graph, s[graph_args:], needs, *(grads[:1] if formula.hides else grads))

    torch.library.register_autograd(formula.op, backward, setup_context=setup)
    return formula


def call(formula: Formula, needs_grad: bool, graph: Matrix | tuple[()], *arguments: Any) -> Any:
    """Runs an op so that it can be differentiated if ``needs_grad``. Returns its result, or results."""
    if torch.compiler.is_compiling():
        output = formula.op(*graph, *arguments)
    elif needs_grad:
        apply = Eager.apply if torch._C._are_functorch_transforms_active() else _apply
        return apply(graph, formula, *arguments)
    else:
        output = _below(formula.op, *graph, *arguments)
    return output[0] if formula.hides else output


def run(op: Any, *arguments: Any) -> Any:
    """Runs an op within a formula: a second derivative is asked for seldom, and only then must it pass through autograd."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return op(*arguments)
    return _below(op, *arguments)


def _below(op: Any, *arguments: Any) -> Any:
    """Runs an op without its registered autograd kernel, which is Python: passing through it costs as much as a small graph."""
    try:
        with below_autograd():
            return op(*arguments)
    except RuntimeError as error:
        raise out_of_memory(error) from None


def edges(graph: Matrix) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and user's edge id of each slot that is not left out, as int64."""
    rowptr, col, perm, _, layout, *_ = graph
    some = len(layout) > 5 and layout[5] and type(rowptr) is Tensor and not torch.compiler.is_compiling()
    size = int(rowptr[-1]) if some else col.numel()
    row = torch.repeat_interleave(torch.arange(graph.num_rows, device=col.device), rowptr.diff().long(), output_size=size)
    return row, col[:size].long(), torch.arange(size, device=col.device) if perm is None else perm[:size].long()


def over_degree(rowptr: Tensor, grad: Tensor) -> Tensor:
    """The gradient ``[M, F]`` of a mean for the sum of each row."""
    dtype = torch.float32 if grad.element_size() == 2 else grad.dtype  # 16 bits do not hold every degree

    def make() -> Tensor:
        return rowptr.diff().clamp(min=1).to(dtype).unsqueeze(1)

    # On small graphs these four ops take longer than the aggregation. A tracing compiler must see them.
    kept = derived(rowptr, dtype, make) if type(rowptr) is Tensor and not torch.compiler.is_compiling() else None
    found = grad / (make() if kept is None else kept)
    return found if found.dtype is grad.dtype else found.to(grad.dtype)


LONG_ROW = 1024


def _has_long_rows(graph: Matrix) -> bool:
    """Whether float16 cannot hold what a mean leaves of a gradient: some row has more than about 1,000 edges."""
    rowptr, layout = graph.rowptr, graph.layout
    if layout:
        return layout[1] > 0  # pieces of rows that are longer than a block takes, which is at least LONG_ROW
    if type(rowptr) is not Tensor or torch.compiler.is_compiling() or not rowptr.numel() > 1:
        return False
    longest = derived(rowptr, "longest row", lambda: rowptr.diff().max())
    return longest is not None and int(longest) > LONG_ROW


def wide_means(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """A backward pass that runs in float32 where it is that of a mean in float16 over long rows."""

    def run_backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.mean or grad.dtype is not torch.float16 or not _has_long_rows(graph):
            return backward(ctx, graph, kept, needs, grad)
        wide = (t.float() if isinstance(t, Tensor) and t.dtype is torch.float16 else t for t in kept)
        found = backward(ctx, graph, tuple(wide), needs, grad.float())
        return tuple(None if t is None else t.half() for t in found)

    return run_backward


# ---- sum and mean --------------------------------------------------------------------------------------------------------
# spmm(graph, weight [E] | [E, H] | None, weight_t, x [N, F], mean, scale [M] float64 | None) -> [M, F]. `weight_t`, if given, is
# the weight in the slot order of A^T; `weight` is then in the slot order of A, and neither matrix has a perm. Row i of the result
# is multiplied by scale[i], which gets no gradient.


@torch.library.register_fake("gnnfast::spmm")
def _(*args: Any) -> Tensor:
    graph, (_, _, x, *_) = split(args)
    return x.new_empty(graph.num_rows, x.shape[1])


def _spmm_keep(ctx: Any, needs: Any, _: Any, weight: Any, weight_t: Any, x: Tensor, mean: bool, scale: Any) -> tuple[Any, ...]:
    ctx.mean, ctx.weight_shape = mean, None if weight is None else weight.shape
    # As the framework, keeps weights only for the gradient of x: else they may be written into.
    return weight if needs[2] else None, weight_t if needs[2] else None, x if needs[0] else None, scale


@wide_means
def _spmm_backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    weight, weight_t, x, scale = kept
    need_weight, _, need_x = needs[:3]
    if scale is not None:
        grad = grad * scale.to(grad.dtype).unsqueeze(1)
    if ctx.mean:
        grad = over_degree(graph.rowptr, grad)
    grad_x = grad_weight = None
    if need_x and need_weight:
        grad_x, grad_weight = run(_ops.spmm_backward.default, *graph.transposed, weight, x, grad, _inverse(graph.perm_t))
    elif need_x:
        grad_x = run(_ops.spmm.default, *graph.transposed, *swap_weights(weight, weight_t), grad, False)
    elif need_weight:
        heads = ctx.weight_shape[1] if len(ctx.weight_shape) == 2 else 1
        grad_weight = run(_ops.sddmm.default, *graph, grad, x, heads).view(ctx.weight_shape)
    return grad_weight, None, grad_x, None, None


def _inverse(perm: Tensor | None) -> Tensor | None:
    """What CUDA needs to write many dot products in order."""
    if perm is None or not perm.is_cuda or perm.numel() < MANY_EDGES or torch.compiler.is_compiling():
        return None
    return inverse(perm)


def heads_of(weight: Tensor) -> int:
    return weight.shape[1] if weight.dim() == 2 else 1


SPMM = register(Formula(_ops.spmm.default, _spmm_keep, _spmm_backward))


# spmm_backward(graph of A^T, weight, x [N, F], grad [M, F], inverse of the perm of A^T | None)
#     -> A^T(weight) grad [N, F], <x[column], grad[row]> [E] | [E, H]


@torch.library.register_fake("gnnfast::spmm_backward")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    graph, (weight, _, grad, *_) = split(args)
    return grad.new_empty(graph.num_rows, grad.shape[1]), torch.empty_like(weight, memory_format=torch.contiguous_format)


def _backward_keep(ctx: Any, needs: Any, _: Any, weight: Tensor, x: Tensor, grad: Tensor, inverse: Any) -> tuple[Any, ...]:
    return weight, x, grad


def _backward_backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad_out: Tensor, grad_dot: Tensor) -> tuple[Any, ...]:
    # out = A^T(w) g and dot = <x, g> per edge are linear in each of w, x and g.
    weight, x, grad = kept
    need_weight, need_x, need_grad = needs[:3]
    to_weight = to_x = to_grad = None
    if need_weight:
        to_weight = _ops.sddmm(*graph, grad_out, grad, heads_of(weight)).view_as(weight)
    if need_x:
        to_x = _ops.spmm(*graph, grad_dot, None, grad, False)
    if need_grad:
        to_grad = _ops.spmm(*graph.transposed, weight, None, grad_out, False) + _ops.spmm(
            *graph.transposed, grad_dot, None, x, False
        )
    return to_weight, to_x, to_grad, None


register(Formula(_ops.spmm_backward.default, _backward_keep, _backward_backward))


# ---- max and min ---------------------------------------------------------------------------------------------------------
# spmm_max(graph, weight, x, minimum, ties, empty) -> out [M, F], aux int32 [M, F]. ties: 0 no gradient, 1 the first edge takes the
# gradient (DGL), 2 all edges that attain the maximum share it evenly, 3 and so does a 0 that it equals (torch's scatter, and PyG).
# Rows without edges hold `empty`; with None 0, and so does what is infinite, which then has no gradient (ties: 0 or 1).
# On CUDA ALONE more says in aux where a gradient goes that nobody shares, which spmm_max_backward(graph, weight, x | None,
# grad [M, F], out | None, aux, N) -> [N, F] (float32 for 16 bits) brings there by atomics.
FIRST, EVEN, SCATTER, ALONE = 1, 2, 3, 3


def ties_code(ties: str, x: Tensor) -> int:
    """The number of a rule of :data:`gnnfast.types.TIES` for a forward pass that runs now: a compiler traces the backward pass."""
    alone = x.is_cuda and not torch.compiler.is_compiling() and not torch.are_deterministic_algorithms_enabled()
    return TIES[ties] + ALONE if alone else TIES[ties]


@torch.library.register_fake("gnnfast::spmm_max")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    graph, (_, x, _, ties, _) = split(args)
    rows = graph.num_rows
    return x.new_empty(rows, x.shape[1]), x.new_empty(rows if ties else 0, x.shape[1], dtype=torch.int32)


@torch.library.register_fake("gnnfast::spmm_max_backward")
def _(*args: Any) -> Tensor:
    _, (_, _, grad, _, _, num_cols) = split(args)
    return grad.new_empty(num_cols, grad.shape[1], dtype=torch.float32 if grad.element_size() == 2 else grad.dtype)


def _max_keep(ctx: Any, needs: Any, output: Any, weight: Any, x: Tensor, minimum: bool, ties: int, empty: Any) -> tuple[Any, ...]:
    ctx.ties, ctx.minimum = ties, minimum
    out, aux = output
    shared = ties not in (FIRST, FIRST + ALONE)
    return weight, x if shared or needs[0] else None, out if shared else None, aux


def _max_backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    weight, x, out, aux = kept
    if ctx.ties == 0:
        raise RuntimeError("gnnfast: spmm_max was called with ties=0, which keeps nothing for a gradient; pass ties=1 or more")
    grad_weight, grad_x, rule = None, None, ctx.ties
    if rule > ALONE:
        rule -= ALONE
        # Of shared ones only without weights: an infinite weight makes NaN of the nothing that other edges get, which a look at all
        # edges finds.
        direct = (weight is None or rule == FIRST) and not torch.is_grad_enabled()
        if needs[1] and direct and not torch.are_deterministic_algorithms_enabled():
            kept_x = None if out is None else x
            grad_x = run(_ops.spmm_max_backward.default, *graph, weight, kept_x, grad, out, aux, graph.transposed.num_rows)
            grad_x, needs = grad_x.to(grad.dtype), (needs[0], False)
        if any(needs[:2]):
            aux = _plain(aux, graph, weight, x, ctx.minimum, rule)
    if rule != FIRST and any(needs[:2]):
        grad, aux = grad / aux, None
    if needs[0]:
        grad_weight = run(_ops.sddmm.default, *graph, grad, x, heads_of(weight), weight, out, aux).view_as(weight)
    if needs[1]:
        grad_x = run(_ops.spmm_where.default, *graph.transposed, weight, x, grad, out, aux)
    return grad_weight, grad_x, None, None, None


def _plain(aux: Tensor, graph: Matrix, weight: Tensor | None, x: Tensor | None, minimum: bool, rule: int) -> Tensor:
    """What the forward pass keeps without ALONE."""
    if rule == FIRST:
        slot = -1 - aux
        if graph.perm is not None and graph.num_slots:
            slot = graph.perm[slot.clamp(min=0).long()]
        return torch.where(aux < 0, slot, -1)
    if weight is not None:
        return aux.clamp(min=1)  # one slot is one edge
    # Several edges of one column may have been taken for one.
    return run(_ops.spmm_max.default, *graph, None, x, minimum, rule, 0.0)[1]  # type: ignore[no-any-return]


SPMM_MAX = register(Formula(_ops.spmm_max.default, _max_keep, _max_backward, hides=True))


def attained(
    row: Tensor, column: Tensor, ids: Tensor, weight: Tensor | None, x: Tensor | None, out: Tensor | None, arg: Tensor | None
) -> Tensor:
    """Which edges attained the maximum of their row, ``[E, F]`` bool: the selection that :func:`spmm_where` makes on the fly.
    ``x`` are the source features, ``out`` (ties share) or ``arg`` (first edge) what the forward pass kept."""
    with torch.no_grad():
        if arg is not None:
            return arg[row] == ids.unsqueeze(1)
        assert out is not None and x is not None
        message = x[column] if weight is None else spread(weight[ids], x.shape[1]) * x[column]
        return message == out[row]


def spread(per_head: Tensor, width: int) -> Tensor:
    """``[E]`` or ``[E, H]`` repeated over the features of each head: ``[E, F]``."""
    heads = heads_of(per_head)
    return per_head.view(per_head.shape[0], heads).repeat_interleave(width // heads, dim=1)


# spmm_where(graph of A^T, weight, x [N, F] (with out), grad [M, F], out | None, arg | None) -> [N, F]: the gradient of spmm_max for
# x. Its own derivative is needed for double backward only and is written with torch's ops, edge by edge.


@torch.library.register_fake("gnnfast::spmm_where")
def _(*args: Any) -> Tensor:
    graph, (_, _, grad, *_) = split(args)
    return grad.new_empty(graph.num_rows, grad.shape[1])


def _where_keep(ctx: Any, needs: Any, _: Any, *inputs: Any) -> tuple[Any, ...]:
    return inputs


def _where_backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad_out: Tensor) -> tuple[Any, ...]:
    weight, x, grad, out, arg = kept
    source, row, ids = edges(graph)  # the graph is the transpose: its rows are the sources
    taken = attained(row, source, ids, weight, x, out, arg)
    back = grad_out[source] * taken
    to_weight = to_grad = None
    if needs[0]:
        heads = heads_of(weight)
        per_edge = (back * grad[row]).view(ids.numel(), heads, back.shape[1] // heads).sum(-1)
        to_weight = per_edge.new_zeros(graph.num_slots, heads).index_copy(0, ids, per_edge).view_as(weight)
    if needs[2]:
        if weight is not None:
            back = back * spread(weight[ids], back.shape[1])
        to_grad = torch.zeros_like(grad).index_add(0, row, back)
    return to_weight, None, to_grad, None, None


register(Formula(_ops.spmm_where.default, _where_keep, _where_backward))
