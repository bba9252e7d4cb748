"""``propagate`` step by step: a ``message()`` of any code, which is traced as it is, and any aggregation that is known."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher

from gnnfast.graph.formats import BY_DST, BY_SRC
from gnnfast.lazy.kinds import Exists
from gnnfast.pyg.aggregations import is_softened, kinds_of, may_be_several, softens, temperature
from gnnfast.pyg.compiled import ops
from gnnfast.pyg.compiled.questions import (
    PLAIN,
    SOFTMAX_TIMES,
    STATISTICS_TIMES,
    TOO_SMALL,
    USUAL_WIDTH,
    Traced,
    ask,
    check_edges,
    context,
    hint,
    is_small,
    left,
    make,
    needs_grad,
    state,
)
from gnnfast.pyg.compiled.rows import Call, Graph, follow, reduced
from gnnfast.pyg.known import replaced_in_softmax
from gnnfast.pyg.messages import RELU_FORMS
from gnnfast.pyg.verdict import check_steps, message_of
from gnnfast.reporting import ran
from gnnfast.types import FEATURE_DTYPES, KINDS, REORDERED
from gnnfast.unsupported import Unsupported


def is_several(module: Any) -> bool:
    """Whether PyG makes a layer's aggregation of many operations."""
    aggregation = module.__dict__["_modules"].get("aggr_module")
    return is_softened(module) or may_be_several(aggregation)


def steps_of(module: Any, collect: str, edge_index: Any, names: tuple[str, ...], *things: Any) -> tuple[Any, ...] | None:
    """What propagate() does one by one: which rows are lifted from nodes, what message() and update() ask for, whether several
    reductions are of the rows themselves, the one reduction (empty: there is not one), or several of them (none: softmax), and the
    place of the report; ``None`` if PyG's own must run."""
    said, state.said = state.said is module, None
    if said:
        return None  # it is said why
    try:
        reason, steps, aggregation = context(), check_steps(module, collect), module.aggr_module
        if reason or steps.collected is None or not steps.known_aggregate:
            raise Unsupported(reason or "message() asks for adj_t, or aggregate() is overridden")
        if not {*steps.collected.given} <= {*names} or not {of_nodes for _, of_nodes, _ in steps.collected.lifted} <= {*names}:
            raise Unsupported("message() asks for what was not passed to propagate()")
        kinds = () if steps.reduce or softens(aggregation) else kinds_of(aggregation)
        check_edges(edge_index)
        given = [t for t in things if isinstance(t, Traced)]
        if module.node_dim not in (-2, 0) or any(t.kind not in PLAIN or t.fake.layout is not torch.strided for t in given):
            raise Unsupported("an operand is not served")
    except Unsupported as error:
        left(module, str(error))
        return None
    widths = [(hint(math.prod(t.fake.shape[1:])), t.fake.dtype) for t in given if t.fake.dim() > 1]
    width, dtype = max(widths, key=lambda found: found[0], default=(USUAL_WIDTH, torch.float32))
    reductions = (steps.reduce,) if steps.reduce else kinds
    times = sum(STATISTICS_TIMES.get(kind, 1) for kind in reductions) if reductions else SOFTMAX_TIMES
    if is_small(edge_index, width, dtype, times):
        ran(steps.place, *TOO_SMALL)
        return None
    message = inspect.getattr_static(type(module), "message")
    found = message_of(message)
    plain = not steps.reduce and found is not None and found.weight is None and found.form not in RELU_FORMS
    plain = plain and [name for name, *_ in steps.collected.lifted] == [*steps.message] and steps.message[0] not in steps.update
    return steps.collected.lifted, steps.message, steps.update, plain, steps.reduce, kinds, steps.place


def in_steps(
    module: Any,
    edge_index: Any,
    size: Any,
    kwargs: dict[str, Any],
    lifted: Any,
    asked: Any,
    update: Any,
    plain: bool,
    reduce: str,
    kinds: tuple[str, ...],
    place: str,
) -> Any:
    """``propagate`` as PyG writes it, but for the aggregation, which is one op; with what of messages need not exist."""
    to_target = module.flow == "source_to_target"
    i, j = (1, 0) if to_target else (0, 1)
    sizes: list[Any] = [None, None] if size is None else [size[0], size[1]]
    found, rows = dict(kwargs), {}
    for name, of_nodes, at_i in lifted:
        x, end = kwargs[of_nodes], i if at_i else j
        pair = isinstance(x, (tuple, list))
        if pair and (len(x) != 2 or not (to_target or x[0] is x[1])):
            return _declined(module)
        for n, t in enumerate(x) if pair else ((end, x),):
            if t is not None and (not isinstance(t, Tensor) or (t.dim() != 2 and module.node_dim)):
                return _declined(module)
            if t is not None and sizes[n] is None:
                sizes[n] = t.shape[0]
            if t is not None and sizes[n] != t.shape[0]:
                return _declined(module)
        rows[name] = x[end] if pair else x, end
    num_dst = sizes[j] if sizes[i] is None else sizes[i]
    num_src = sizes[i] if sizes[j] is None else sizes[j]
    if num_dst is None:
        return _declined(module)
    messages: Any
    edges = edge_index, num_src, num_dst, to_target, "given" if plain else "incidence", place
    ids = edge_index[i], edge_index[j]
    found |= {"edge_index": edge_index, "edge_index_i": ids[0], "edge_index_j": ids[1], "index": ids[0], "ptr": None}
    found |= {"size": sizes, "size_i": num_dst, "size_j": num_src, "dim_size": num_dst}
    if plain:
        messages = rows[asked[0]][0]
    else:
        gathered = []
        for name, (x, end) in rows.items():
            found[name] = None if x is None else x.index_select(0, ids[0 if end == i else 1])
            if x is not None:
                gathered += [found[name], x, end == i]
        ask(_begin, *ids, *edges, *gathered)
        messages = module.message(**{name: found[name] for name in asked})
    out = None
    if isinstance(messages, Tensor) and (plain or messages.shape[0] == edge_index.shape[1]):
        if not plain:
            out, messages = make(_follow, messages, module, reduce)
        if out is None and not reduce:
            out = _several(module.aggr_module, messages, kinds, edges)
    if out is None and plain:
        return _declined(module)
    if out is None:
        if reduce:
            ask(left, module, "messages of such a message() must exist")
        out = module.aggregate(messages, index=ids[0], ptr=None, dim_size=num_dst)
    return module.update(out, **{name: found[name] for name in update})


class _Messages(NamedTuple):
    """What a ``message()`` is called with: the ids at both ends, the edges of the kernel that reduces its messages, and of rows
    that are gathered the features and their side, by node."""

    dst: Traced
    src: Traced
    edges: ops.Edges
    gathered: dict[Any, tuple[Any, int]]


def _begin(dst: Any, src: Any, edge_index: Any, *things: Any) -> None:
    num_src, num_dst, to_target, _, place, *rows = things
    gathered = {row.node: (x.fake, BY_DST if is_dst else BY_SRC) for row, x, is_dst in zip(*[iter(rows)] * 3)}
    state.messages = _Messages(dst, src, ops.Edges(edge_index.fake, num_src, num_dst, to_target, "given", place), gathered)


@contextlib.contextmanager
def _entered(like: Traced) -> Iterator[Graph]:
    """The compiler's graph, whose last node is the last that was traced. Raises Exists where nothing may be put into it."""
    output = state.frame.output
    if torch.is_autocast_enabled(like.fake.device.type) or output.root_tracer.graph is not output.graph:
        raise Exists
    with state.frame.fake_mode, enable_python_dispatcher(), Graph(output.graph) as graph:
        yield graph


def _follow(messages: Any, module: Any, reduce: str) -> tuple[Any, Any]:
    """The nodes of the reduced messages, if kernels reduce them without making them, and of messages that must exist, if they are
    made of products at nodes."""
    (dst, src, edges, gathered), state.messages = state.messages, None
    with _entered(dst) as graph:
        since = min(gathered, default=messages.node)
        call = Call(graph, edges, (dst.fake, src.fake), hint)
        rows = follow(graph, call, gathered, [node for node in graph.nodes if since < node])
        found = None
        if reduce and messages.node in rows:
            found = reduced(graph, rows[messages.node], module.node_dim, reduce, module.training)
        return None if found is None else graph.node_of(found), graph.replaced.get(messages.node)


def softmax(src: Any, index: Any, ptr: Any, num_nodes: Any, dim: Any) -> Any:
    """What is traced for ``softmax``: served where a ``message()`` asks for that over the edges at each destination."""
    if not torch.compiler.is_dynamo_compiling() or not isinstance(src, Tensor):
        return NotImplemented
    out = make(_softmax, src, index, ptr, num_nodes, dim)[0]
    return NotImplemented if out is None else out


def _softmax(src: Any, index: Any, ptr: Any, num_nodes: Any, dim: Any) -> tuple[Any, Any]:
    of, fake = state.messages, src.fake
    if of is None or not isinstance(index, Traced) or index.node is not of.dst.node or ptr is not None or replaced_in_softmax():
        return None, None
    if dim not in (0, -fake.dim()) or fake.dim() not in (1, 2) or fake.dtype not in FEATURE_DTYPES or src.kind not in PLAIN:
        return None, None
    if (
        num_nodes not in (None, of.edges.num_dst)
        or fake.shape[0] != of.edges.edge_index.shape[1]
        or fake.device != of.dst.fake.device
    ):
        return None, None
    with _entered(index) as graph:
        graph.after = next(iter(reversed(graph.nodes)))
        share = ops.SOFTMAX(fake if fake.dim() == 2 else fake.unsqueeze(1), None, None, 1.0, *of.edges)
        return graph.node_of(share if fake.dim() == 2 else share.squeeze(1)), None


def _declined(module: Any) -> Any:
    ask(left, module, "sizes do not fit together, or kernels do not take the operands")
    return NotImplemented


def _several(aggregation: Any, rows: Tensor, kinds: tuple[str, ...], edges: Any) -> Tensor | None:
    """What an aggregation makes of ``rows [N, F]``; ``None`` if there is no kernel."""
    if rows.dim() != 2 or rows.dtype not in REORDERED or rows.device != edges[0].device:
        return None
    if kinds:
        return ops.REDUCTIONS(rows, None, [KINDS[kind] for kind in kinds], needs_grad(rows), *edges)[0]  # type: ignore[no-any-return]
    by = temperature(aggregation, rows)
    return None if by is None else ops.SOFTENED(rows, by.t, by.scale, needs_grad(rows, by.t), *edges)[0]
