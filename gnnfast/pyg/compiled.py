"""What ``torch.compile`` traces in place of PyG's functions: short functions that lead to one op over the user's ``edge_index``
(:mod:`gnnfast.pyg.compiled_ops`), or return ``NotImplemented``, so that PyG's own body is compiled.

What a module computes is asked while tracing, of the real object (:func:`_ask`). Compiled code stays as it was decided then until
the compiler traces again, as all code does that it has traced: it does so when an option or a method of the instance is another,
and not when somebody replaces one of a class.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.comptime import comptime
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from gnnfast import _native
from gnnfast.config import settings
from gnnfast.dispatch.passes import serves_attention
from gnnfast.dispatch.select import Layer, cannot_win, linear_first
from gnnfast.graph.formats import BY_DST, BY_SRC
from gnnfast.patching import class_of, is_dispatched
from gnnfast.pyg import attention as eager
from gnnfast.pyg import compiled_ops as ops
from gnnfast.pyg import pna
from gnnfast.pyg.aggregations import is_softened, kinds_of, may_be_several, softens, temperature
from gnnfast.pyg.compiled_rows import Call, Graph, follow, reduced
from gnnfast.pyg.kinds import Exists
from gnnfast.pyg.known import replaced_in_softmax
from gnnfast.pyg.layers import GCN, GRAPH, REORDERED, SAGE, SG, Form, is_product, parts_of
from gnnfast.pyg.messages import DOT_ATTENTION, GINE, RELU_FORMS, means_relu
from gnnfast.pyg.norm import keeps_to_itself
from gnnfast.pyg.propagate import weight_of
from gnnfast.pyg.verdict import OfClass, check_module, check_steps, message_of, reduction_of
from gnnfast.reporting import fell_back, ran
from gnnfast.types import FEATURE_DTYPES, INDEX_DTYPES, KINDS, LINEAR
from gnnfast.unsupported import Unsupported

_PLAIN = (Tensor, torch.nn.Parameter)
# As many times as a sum's do what the compiler makes of an extremum and of attention move rows of edges.
EXTREMUM_TIMES, ATTENTION_TIMES, SOFTMAX_TIMES = 3, 2, 4
STATISTICS_TIMES = {"max": EXTREMUM_TIMES, "min": EXTREMUM_TIMES, "var": 2, "std": 2}
# And as many times where PyG adds self loops, which are not as many in each call, so that its code waits for the device.
LOOPED_TIMES = 8
USUAL_WIDTH = 64  # of layers that do not say theirs
TOO_SMALL = "PyG's own", "too small to gain in compiled code"


# ---- questions while tracing -------------------------------------------------------------------------------------------------
class Traced(NamedTuple):
    """A tensor that is traced: its stand-in without values, whether it is an input of the compiled code, which nothing in the code
    has written into (then it is the user's own when the code runs), and what it is in the compiler's graph."""

    fake: Any
    kind: type
    given: bool
    node: Any


class _State(threading.local):
    """``frame`` is the one of :func:`_ask`, while its question is answered; ``said`` a layer of which it is said why PyG's forward
    runs, until it calls ``propagate``; ``messages`` what the ``message()`` that is traced is called with."""

    frame: Any = None
    answer: Any = None
    said: Any = None
    messages: Any = None


_state = _State()


def _ask(question: Callable[..., Any], *things: Any) -> Any:
    """``question(*things)`` while tracing, of real objects and :class:`Traced` tensors. The answer, made of tuples, strings and
    numbers, is a constant of the compiled code; that holds as long as the options among the ``things`` are the same. ``None`` means
    that PyG's own must run."""
    comptime(_answer)
    return _answered()


def _answer(ctx: Any) -> None:
    _state.frame = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    question, things = (_state.frame.symbolic_locals[name].realize() for name in ("question", "things"))
    try:
        # Exported programs must run without gnnfast. Asked here: torch 2.10 takes is_exporting() for true in all that it traces.
        exports = torch.compiler.is_exporting() or _state.frame.output.export
        _state.answer = None if exports else question.as_python_constant()(*map(_real, things.items))
    except GuardOnDataDependentSymNode:  # sizes that are computed within the code: as PyG wrote it
        _state.answer = None
    finally:
        _state.frame = None


def _real(variable: Any) -> Any:
    """What the compiler's stand-in for a value stands for."""
    variable = variable.realize()
    if isinstance(variable, torch._dynamo.variables.TensorVariable):
        node = variable.as_proxy().node
        fake = node.meta["example_value"]
        # Inputs of inner graphs, such as a checkpointed part's, may be made in between.
        given = (
            node.op in ("placeholder", "get_attr") and node.graph is _state.frame.output.root_tracer.graph and fake._version == 0
        )
        return Traced(fake, variable.python_type(), given, node)
    if isinstance(variable, torch._dynamo.variables.SymNodeVariable):
        return variable.sym_num
    if variable.is_python_constant():
        return variable.as_python_constant()
    return getattr(variable, "value", variable)


def _make(question: Callable[..., Any], messages: Any, *things: Any) -> Any:
    """Two tensors, each ``None`` if there is none, of nodes that ``question(messages, *things)`` has put into the compiler's
    graph."""
    out = None
    comptime(_put)
    return out, messages


def _put(ctx: Any) -> None:
    frame = _state.frame = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    question, messages, things = (frame.symbolic_locals[name].realize() for name in ("question", "messages", "things"))
    try:
        nodes = question.as_python_constant()(_real(messages), *map(_real, things.items))
    except (Exists, GuardOnDataDependentSymNode):
        nodes = None, None
    finally:
        _state.frame = None
    for name, node in zip(("out", "messages"), nodes):
        if node is not None:
            del node.meta["example_value"]  # wrap_fx_proxy makes its own
            proxy = torch.fx.Proxy(node, frame.output.current_tracer)
            frame.symbolic_locals[name] = torch._dynamo.variables.builder.wrap_fx_proxy(frame, proxy)


def _caller(frames: int) -> Any:
    """The traced frame so many calls above the one that asks; ``None`` where the compiler began below it."""
    found = _state.frame.parent
    for _ in range(frames - 1):
        found = None if found is None else found.parent
    return found


@torch.compiler.assume_constant_result
def _answered() -> Any:
    answer, _state.answer = _state.answer, None
    return answer


def _context() -> str:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform is active"
    return "forward-mode AD is active" if torch.autograd.forward_ad._current_level >= 0 else ""


def _check_edges(edge_index: Any) -> None:
    """Raises Unsupported if an op does not take it, or would not know it again."""
    if not isinstance(edge_index, Traced) or edge_index.kind is not Tensor or edge_index.fake.layout is not torch.strided:
        raise Unsupported(f"the adjacency is a {getattr(edge_index, 'kind', type(edge_index)).__name__}")
    fake = edge_index.fake
    if fake.dim() != 2 or fake.shape[0] != 2 or fake.dtype not in INDEX_DTYPES:
        raise Unsupported(f"edge_index is {fake.dtype} of {fake.dim()} dimensions")
    if not edge_index.given:
        raise Unsupported("edge_index is computed within the compiled code")


def _check_operand(name: str, t: Any, edge_index: Traced) -> None:
    if not isinstance(t, Traced) or t.kind not in _PLAIN:
        raise Unsupported(f"{name} is a {getattr(t, 'kind', type(t)).__name__}")
    if t.fake.layout is not torch.strided or t.fake.dtype not in FEATURE_DTYPES:
        raise Unsupported(f"{name} is {t.fake.dtype} of layout {t.fake.layout}")
    if t.fake.device != edge_index.fake.device:
        raise Unsupported(f"{name} and edge_index are on different devices")
    missing = _native.missing(t.fake.device.type)
    if missing:
        raise Unsupported(missing)


def _is_constant(weight: Any) -> bool:
    """Whether values may be derived from a weight and kept."""
    return weight is not None and weight.given and weight.kind is Tensor and not weight.fake.requires_grad


def _is_small(edge_index: Traced, width: Any, dtype: torch.dtype, times: int = 1) -> bool:
    """Whether the compiler does as well with PyG's operations, which move rows of such a width so many ``times`` as often as those
    of a sum, over a graph of the size that is met now. It does not bind the compiled code: with a bound for each width a model of
    some layers would soon be traced more often than the compiler allows."""
    nbytes = times * _hint(edge_index.fake.shape[1]) * _hint(width) * dtype.itemsize
    return cannot_win(nbytes, torch.is_grad_enabled(), settings(), "compiled" if edge_index.fake.is_cuda else "compiled cpu")


def _hint(size: Any) -> int:
    """The size that is met now, which decides nothing but the order of operations: it must not bind the compiled code."""
    return size if isinstance(size, int) else int(size.node.hint) if size.node.has_hint() else 0


# ---- propagate ---------------------------------------------------------------------------------------------------------------
class Normalised(NamedTuple):
    """What a layer that only passes it on to ``propagate`` gets for the weights of ``gcn_norm``: how to make them."""

    weight: Tensor | None
    constant: bool
    improved: bool
    loops: bool
    dtype: torch.dtype
    original: Any


def propagate(module: Any, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
    """Stands in for the ``propagate`` that PyG generates for a class."""
    if not torch.compiler.is_dynamo_compiling():
        return NotImplemented
    message = _ask(_message, module, *_parts(module))
    if message is None:
        operands = [t for found in kwargs.values() for t in (found if isinstance(found, (tuple, list)) else (found,))]
        tensors = [t for t in operands if isinstance(t, Tensor)]
        steps = _ask(_steps, module, edge_index, tuple(kwargs), *_parts(module), *tensors)
        return NotImplemented if steps is None else _in_steps(module, edge_index, size, kwargs, *steps)
    feature, weighs, update, adds = message
    given: Any = kwargs.get(feature)
    x, x_dst, weight, to_target = given, None, kwargs.get(weighs), module.flow == "source_to_target"
    normed = weight if isinstance(weight, Normalised) else None
    if isinstance(given, (tuple, list)):
        if len(given) != 2 or not to_target:
            return NotImplemented
        x, x_dst = given
    of_src, of_dst = (None, None) if size is None else size if to_target else size[::-1]
    if normed is None:
        plan = _ask(_plan, module, edge_index, x, x_dst, weight, weighs in kwargs, of_src, of_dst)
    else:
        plan = _ask(_plan_normalised, module, edge_index, x, normed.dtype, x_dst, of_src, of_dst)
    if plan is None:
        if normed is None:
            return NotImplemented
        options = normed.improved, normed.loops, module.flow, normed.dtype
        edge_index, weight = normed.original(edge_index, normed.weight, x.shape[module.node_dim], *options)
        return module.propagate(edge_index, size=size, **(kwargs | {weighs: weight}))
    reduce, per_head, constant, place = plan
    dim = module.node_dim % x.dim()
    num_src = x.shape[dim]
    num_dst = of_dst if of_dst is not None else num_src if x_dst is None else x_dst.shape[dim]
    if normed is not None:
        x = x.to(normed.dtype)
    elif adds is not None:
        weight = getattr(module, adds)(weight) if adds else weight
    elif weight is not None:
        weight = weight.reshape(-1, x.shape[1]) if per_head else weight if weight.dim() == 1 else weight.reshape(-1)
        if weight.dtype != x.dtype:
            dtype = torch.promote_types(x.dtype, weight.dtype)
            x, weight = x.to(dtype), weight.to(dtype)
    moved = x if dim == 0 else x.movedim(dim, 0)
    shape = moved.shape[1:]
    flat = moved.reshape(num_src, math.prod(shape))
    edges = edge_index, num_src, num_dst, to_target, "given", place
    if normed is not None:
        out = _times(normed, flat, edge_index, to_target, reduce == "mean", place)
    elif adds is not None:
        out = ops.RELU(flat, weight, _needs_grad(flat, weight), *edges)[0]
    elif reduce == "sum" or reduce == "mean":
        out = ops.SPMM(flat, weight, reduce == "mean", constant, _needs_grad(flat, weight), False, *edges)
    else:
        out = ops.EXTREMUM(flat, weight, reduce == "min", _needs_grad(flat, weight), *edges)[0]
    out = out.view(num_dst, *shape)
    out = out if dim == 0 else out.movedim(0, dim).contiguous()
    return out if update is None else module.update(out, **{name: kwargs[name] for name in update if name in kwargs})


def _parts(module: Any) -> tuple[Any, ...]:
    """What of a module decides: code is traced again when one of these is another."""
    methods = module.message, module.aggregate, module.update, module.propagate, module.message_and_aggregate
    return module.flow, module.node_dim, module.explain, module.aggr_module, *methods


def _left(module: Any, reason: str) -> None:
    fell_back(f"pyg {type(module).__name__}", f"compiled: {reason}")


def _is_several(module: Any) -> bool:
    """Whether PyG makes a layer's aggregation of many operations."""
    aggregation = module.__dict__["_modules"].get("aggr_module")
    return is_softened(module) or may_be_several(aggregation)


def _leave_small(module: Any) -> None:
    ran(f"pyg {type(module).__name__}", *TOO_SMALL)
    _state.said = module


def _message(module: Any, *_: Any) -> Any:
    """The names of features and weights, what update() asks for, and where the ReLU of a sum is aggregated the linear layer of what
    is added (empty: there is none); ``None`` if PyG's own must run, or its steps."""
    if _state.said is module or _is_several(module):
        return None
    try:
        reason = _context()
        if reason:
            raise Unsupported(reason)
        verdict = check_module(module)
        if verdict.message is DOT_ATTENTION and is_dispatched(type(module).forward):
            _state.said = module  # by which it is said why
            return None
        if verdict.message is DOT_ATTENTION:
            raise Unsupported("attention of another forward than the layer's")
    except Unsupported as error:
        if not (isinstance(error, OfClass) and reduction_of(module)):  # else of its steps
            _left(module, str(error))
            _state.said = module
        return None
    message, adds = verdict.message, None
    if message.form in RELU_FORMS:
        adds = "lin" if message is GINE and module.lin is not None else ""
    return message.feature, message.weight or "", verdict.update, adds


def _plan(
    module: Any, edge_index: Any, x: Any, x_dst: Any, weight: Any, passed: bool, of_src: Any, of_dst: Any
) -> tuple[Any, ...] | None:
    """The reduction, whether there are weights per head, whether these are constant, and the place of the report."""
    try:
        verdict = check_module(module)
        message = verdict.message
        dim = _check_sizes(module, edge_index, x, x_dst, of_src, of_dst)
        per_head = False
        if message.weight is not None and weight is None and not (message.optional and passed):
            raise Unsupported(f"message() uses {message.weight}, which was not passed to propagate()")
        if message.form in RELU_FORMS:
            _check_added(module, message, edge_index, x, weight, dim)
        elif weight is not None:
            _check_operand(message.weight or "", weight, edge_index)
            per_head = weight_of(message, edge_index.fake.shape[1], x.fake, weight.fake, dim).dim() == 2
    except Unsupported as error:
        _left(module, str(error))
        return None
    width = math.prod(n for at, n in enumerate(x.fake.shape) if at != dim)
    if _is_small(edge_index, width, x.fake.dtype, 1 if verdict.reduce in LINEAR else EXTREMUM_TIMES):
        ran(verdict.place, *TOO_SMALL)
        return None
    # Weights that change their dtype or shape on the way are other tensors in each call.
    constant = _is_constant(weight) and weight.fake.dim() == 1 and weight.fake.dtype == x.fake.dtype
    return verdict.reduce, per_head, constant, verdict.place


def _check_added(module: Any, message: Any, edge_index: Any, x: Any, added: Any, dim: int) -> None:
    """Raises Unsupported if the ReLU of ``x_j`` and what is ``added`` is not what kernels sum."""
    _check_operand(message.weight, added, edge_index)
    if not means_relu(message.form, type(module).message):
        raise Unsupported("what message() calls is not torch's ReLU")
    rows, like, lin = added.fake, x.fake, module.lin if message is GINE else None
    if like.dim() != 2 or dim != 0 or rows.dim() != 2 or rows.shape[0] != edge_index.fake.shape[1]:
        raise Unsupported("sizes do not fit together")
    width = rows.shape[1]
    if lin is not None:
        if not is_product(lin) or type(lin.weight) not in _PLAIN or torch.is_autocast_enabled(like.device.type):
            raise Unsupported("what is added is made by more than a linear layer")
        if lin.weight.dtype != rows.dtype or lin.weight.shape[1] != width:
            raise Unsupported("edge features do not fit their linear layer")
        width = lin.weight.shape[0]
    if width != like.shape[1] or rows.dtype != like.dtype:
        raise Unsupported(f"edge features are {rows.dtype}, or not as wide as those of nodes")


def _plan_normalised(
    module: Any, edge_index: Any, x: Any, dtype: torch.dtype, x_dst: Any, of_src: Any, of_dst: Any
) -> tuple[Any, ...] | None:
    """The same where ``gcn_norm`` gives the weights."""
    try:
        verdict = check_module(module)
        dim = _check_sizes(module, edge_index, x, x_dst, of_src, of_dst)
        if x_dst is not None or of_dst is not None or verdict.message.form != "view" or dim != x.fake.dim() - 2:
            raise Unsupported("an argument is not served")
        if verdict.reduce not in LINEAR or torch.promote_types(x.fake.dtype, dtype) != dtype:
            raise Unsupported(f"features are {x.fake.dtype}")
    except Unsupported as error:
        _left(module, str(error))
        return None
    return verdict.reduce, False, False, verdict.place


def _check_sizes(module: Any, edge_index: Any, x: Any, x_dst: Any, of_src: Any, of_dst: Any) -> int:
    """The dimension of the nodes. Raises Unsupported if features and sizes do not fit together."""
    _check_edges(edge_index)
    _check_operand("x", x, edge_index)
    dims, dim = x.fake.dim(), module.node_dim
    if not -dims <= dim < dims or dims < 2:
        raise Unsupported("sizes do not fit together")
    if x_dst is not None:
        _check_operand("x", x_dst, edge_index)
        if x_dst.fake.dim() <= dim % dims or (of_dst is not None and of_dst != x_dst.fake.shape[dim]):
            raise Unsupported("sizes do not fit together")
    if of_src is not None and of_src != x.fake.shape[dim]:
        raise Unsupported("sizes do not fit together")
    return dim % dims  # type: ignore[no-any-return]


# ---- aggregations of many operations ---------------------------------------------------------------------------------------------
def _steps(module: Any, edge_index: Any, names: tuple[str, ...], *things: Any) -> tuple[Any, ...] | None:
    """What propagate() does one by one where messages of any code are aggregated by what PyG makes of many operations, softmax or
    several reductions: which rows are lifted from nodes, what message() and update() ask for, whether messages are the rows
    themselves, the reductions, none of which is softmax, and the place of the report; ``None`` if PyG's own must run."""
    said, _state.said = _state.said is module, None
    if said:
        return None  # it is said why
    try:
        reason, steps, aggregation = _context(), check_steps(module), module.aggr_module
        if reason or steps.collected is None or not steps.known_aggregate:
            raise Unsupported(reason or "message() asks for adj_t, or aggregate() is overridden")
        if not {*steps.collected.given} <= {*names} or not {of_nodes for _, of_nodes, _ in steps.collected.lifted} <= {*names}:
            raise Unsupported("message() asks for what was not passed to propagate()")
        kinds = () if steps.reduce or softens(aggregation) else kinds_of(aggregation)
        _check_edges(edge_index)
        given = [t for t in things if isinstance(t, Traced)]
        if module.node_dim not in (-2, 0) or any(t.kind not in _PLAIN or t.fake.layout is not torch.strided for t in given):
            raise Unsupported("an operand is not served")
    except Unsupported as error:
        _left(module, str(error))
        return None
    widths = [(_hint(t.fake.shape[1]), t.fake.dtype) for t in given if t.fake.dim() == 2]
    width, dtype = max(widths, key=lambda found: found[0], default=(USUAL_WIDTH, torch.float32))
    times = sum(STATISTICS_TIMES.get(kind, 1) for kind in kinds or (steps.reduce,)) if kinds or steps.reduce else SOFTMAX_TIMES
    if _is_small(edge_index, width, dtype, times):
        ran(steps.place, *TOO_SMALL)
        return None
    message = inspect.getattr_static(type(module), "message")
    found = message_of(message)
    plain = found is not None and found.weight is None and found.form not in RELU_FORMS
    plain = plain and [name for name, *_ in steps.collected.lifted] == [*steps.message] and steps.message[0] not in steps.update
    return steps.collected.lifted, steps.message, steps.update, plain, steps.reduce, kinds, steps.place


def _in_steps(
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
    """``propagate`` as PyG writes it, but for the aggregation, which is one op."""
    to_target = module.flow == "source_to_target"
    i, j = (1, 0) if to_target else (0, 1)
    sizes: list[Any] = [None, None] if size is None else [size[0], size[1]]
    found, rows = dict(kwargs), {}
    for name, of_nodes, at_i in lifted:
        x, end = kwargs[of_nodes], i if at_i else j
        pair = isinstance(x, (tuple, list))
        if pair and (len(x) != 2 or not to_target):
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
    if plain:
        messages = rows[asked[0]][0]
    else:
        found |= {"edge_index": edge_index, "edge_index_i": ids[0], "edge_index_j": ids[1], "index": ids[0], "ptr": None}
        found |= {"size": sizes, "size_i": num_dst, "size_j": num_src, "dim_size": num_dst}
        gathered = []
        for name, (x, end) in rows.items():
            found[name] = None if x is None else x.index_select(0, ids[0 if end == i else 1])
            if x is not None:
                gathered += [found[name], x, end == i]
        _ask(_begin, *ids, *edges, *gathered)
        messages = module.message(**{name: found[name] for name in asked})
    out = None
    if isinstance(messages, Tensor) and (plain or messages.shape[0] == edge_index.shape[1]):
        if not plain:
            out, messages = _make(_follow, messages, module, reduce)
        if out is None and not reduce:
            out = _several(module.aggr_module, messages, kinds, edges)
    if out is None and plain:
        return _declined(module)
    if out is None:
        if reduce:
            _ask(_left, module, "messages of such a message() must exist")
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
    _state.messages = _Messages(dst, src, ops.Edges(edge_index.fake, num_src, num_dst, to_target, "given", place), gathered)


@contextlib.contextmanager
def _entered(like: Traced) -> Iterator[Graph]:
    """The compiler's graph, whose last node is the last that was traced. Raises Exists where nothing may be put into it."""
    output = _state.frame.output
    if torch.is_autocast_enabled(like.fake.device.type) or output.root_tracer.graph is not output.graph:
        raise Exists
    with _state.frame.fake_mode, enable_python_dispatcher(), Graph(output.graph) as graph:
        yield graph


def _follow(messages: Any, module: Any, reduce: str) -> tuple[Any, Any]:
    """The nodes of the reduced messages, if kernels reduce them without making them, and of messages that must exist, if they are
    made of products at nodes."""
    (dst, src, edges, gathered), _state.messages = _state.messages, None
    with _entered(dst) as graph:
        since = min(gathered, default=messages.node)
        call = Call(edges, (dst.fake, src.fake), _hint)
        rows = follow(graph, call, gathered, [node for node in graph.nodes if since < node])
        found = None
        if reduce and messages.node in rows:
            found = reduced(graph, rows[messages.node], module.node_dim, reduce, module.training)
        return None if found is None else graph.node_of(found), graph.replaced.get(messages.node)


def softmax(src: Any, index: Any, ptr: Any, num_nodes: Any, dim: Any) -> Any:
    """What is traced for ``softmax``: served where a ``message()`` asks for that over the edges at each destination."""
    if not torch.compiler.is_dynamo_compiling() or not isinstance(src, Tensor):
        return NotImplemented
    out = _make(_softmax, src, index, ptr, num_nodes, dim)[0]
    return NotImplemented if out is None else out


def _softmax(src: Any, index: Any, ptr: Any, num_nodes: Any, dim: Any) -> tuple[Any, Any]:
    of, fake = _state.messages, src.fake
    if of is None or not isinstance(index, Traced) or index.node is not of.dst.node or ptr is not None or replaced_in_softmax():
        return None, None
    if dim not in (0, -fake.dim()) or fake.dim() not in (1, 2) or fake.dtype not in FEATURE_DTYPES or src.kind not in _PLAIN:
        return None, None
    if num_nodes != of.edges.num_dst or fake.shape[0] != of.edges.edge_index.shape[1] or fake.device != of.dst.fake.device:
        return None, None
    with _entered(index) as graph:
        graph.after = next(iter(reversed(graph.nodes)))
        share = ops.SOFTMAX(fake if fake.dim() == 2 else fake.unsqueeze(1), None, None, 1.0, *of.edges)
        return graph.node_of(share if fake.dim() == 2 else share.squeeze(1)), None


def _declined(module: Any) -> Any:
    _ask(_left, module, "sizes do not fit together, or kernels do not take the operands")
    return NotImplemented


def _several(aggregation: Any, rows: Tensor, kinds: tuple[str, ...], edges: Any) -> Tensor | None:
    """What an aggregation makes of ``rows [N, F]``; ``None`` if there is no kernel."""
    if rows.dim() != 2 or rows.dtype not in REORDERED or rows.device != edges[0].device:
        return None
    if kinds:
        return ops.REDUCTIONS(rows, None, [KINDS[kind] for kind in kinds], _needs_grad(rows), *edges)[0]  # type: ignore[no-any-return]
    by = temperature(aggregation, rows)
    return None if by is None else ops.SOFTENED(rows, by.t, by.scale, _needs_grad(rows, by.t), *edges)[0]


# ---- what the compiler stops at ----------------------------------------------------------------------------------------------
def _uncompiled(original: FunctionType) -> Callable[..., Any]:
    """A function as it is where nothing is compiled. The compiler stops at it."""

    @torch.compiler.disable
    def run(*arguments: Any) -> Any:
        return getattr(sys.modules[original.__module__], original.__name__)(*arguments)

    return run


def _is_in_pieces() -> bool:
    """Whether the compiler has stopped at a function of PyG that asks, and now traces it alone, or what follows where it stopped in
    a layer."""
    asks, root = _caller(2), _state.frame
    while root.parent is not None:
        root = root.parent
    in_layer = "torch_geometric" in root.f_code.co_filename and root.f_code.co_name.startswith("torch_dynamo_resume_in_forward")
    return asks is None or asks is root or in_layer


def make_loops(original: FunctionType) -> Callable[..., Any]:
    """What is traced for functions that add or remove self loops. How many edges there are then only their values tell, which stops
    the compiler, but for those who let it go on. Where it has stopped, they run uncompiled, by which their results are known
    again."""
    uncompiled = _uncompiled(original)

    def loops(*arguments: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() or not _ask(_is_in_pieces):
            return NotImplemented
        return uncompiled(*arguments)

    return loops


# ---- gcn_norm ----------------------------------------------------------------------------------------------------------------
_norms: dict[CodeType, Callable[..., Any]] = {}


def make_gcn_norm(original: FunctionType) -> Callable[..., Any]:
    """What is traced for ``gcn_norm``."""
    uncompiled = _uncompiled(original)

    def gcn_norm(
        edge_index: Any, edge_weight: Any, num_nodes: Any, improved: Any, add_self_loops: Any, flow: Any, dtype: Any
    ) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return NotImplemented
        constant = _ask(_only_propagates, edge_index, edge_weight, dtype, add_self_loops)
        if constant is None and _ask(_is_in_pieces):
            return uncompiled(edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype)
        if constant is None:
            return NotImplemented
        return edge_index, Normalised(edge_weight, constant, improved, add_self_loops, dtype, original)

    return _norms.setdefault(original.__code__, gcn_norm)  # the same, so that nothing is traced again when gnnfast was off


def _only_propagates(edge_index: Any, weight: Any, dtype: Any, loops: bool) -> bool | None:
    """Whether the weights are constant, if it is a layer of PyG that asks, which lets nobody see what it gets; else ``None``."""
    caller = _caller(3)  # of PyG's function, which called the one that is traced in its place
    if caller is None:
        return None
    module: Any = _real(caller.symbolic_locals["self"]) if "self" in caller.symbolic_locals else None
    forward: Any = getattr(type(module), "forward", None)
    if not is_dispatched(forward) or caller.f_code is not forward.__code__ or class_of(forward) is not type(module):
        return None
    reduce = "" if _context() else keeps_to_itself(module, type(module))
    if reduce not in LINEAR or (module.training and module.__dict__.get("dropout")) or dtype not in FEATURE_DTYPES:
        return None  # APPNP leaves edges out
    try:
        _check_edges(edge_index)
        constant = weight is None or _check_weight(weight, edge_index, dtype)
    except Unsupported:
        return None
    widths = [own for name in ("in_channels", "out_channels") if type(own := getattr(module, name, None)) is int]
    if _is_small(edge_index, max(widths, default=USUAL_WIDTH), dtype, LOOPED_TIMES if loops else 1):
        if loops:
            _leave_small(module)
        return None
    return constant if constant or reduce == "sum" else None


def _check_weight(weight: Any, edge_index: Any, dtype: torch.dtype) -> bool:
    """Whether weights that are to be normalised are constant. Raises Unsupported."""
    _check_operand("edge_weight", weight, edge_index)
    if weight.fake.dim() != 1 or weight.fake.dtype != dtype or weight.fake.shape != edge_index.fake.shape[1:]:
        raise Unsupported("edge_weight does not fit")
    return _is_constant(weight)


def _times(normed: Normalised, x: Tensor, edge_index: Tensor, to_target: bool, mean: bool, place: str) -> Tensor:
    """One aggregation over the edges as ``gcn_norm`` makes them."""
    nodes, weight = x.shape[0], normed.weight
    if weight is None or normed.constant:
        edges = edge_index, nodes, nodes, to_target, "looped" if normed.loops else "given", place
        return ops.GCN(x, weight, normed.improved, mean, _needs_grad(x), False, *edges)  # type: ignore[no-any-return]
    # D^-1/2 (A + L) D^-1/2 x, with L the loops, which has one row a node whatever the edges are.
    row, col = edge_index[0].long(), edge_index[1].long()
    among, of_loops = weight, None
    if normed.loops:
        own = row == col
        among = torch.where(own, 0.0, weight)
        at = torch.where(own, row, nodes)  # the others are written to a row that is cut off
        of_loops = weight.new_full((nodes + 1,), 2.0 if normed.improved else 1.0).scatter(0, at, weight)[:nodes]
    degree = weight.new_zeros(nodes).scatter_add(0, col if to_target else row, among)
    degree = degree if of_loops is None else degree + of_loops
    root = degree.pow(-0.5)
    root = root.masked_fill(root == math.inf, 0.0).unsqueeze(1)
    edges = edge_index, nodes, nodes, to_target, "given", place
    out = ops.SPMM(root * x, among, False, False, _needs_grad(x, among), False, *edges)
    out = out if of_loops is None else out + of_loops.unsqueeze(1) * (root * x)
    return root * out  # type: ignore[no-any-return]


# ---- layers that are linear up to their bias ---------------------------------------------------------------------------------
def make_layer(form: Form) -> Callable[[FunctionType], Callable[..., Any]]:
    """What makes the ``forward(x, edge_index, ...)`` that is traced for a layer: as PyG's, but normalised within the op that
    aggregates, and with the product first where that is cheaper."""

    @functools.cache
    def made(known: Any, weighted: bool) -> Callable[..., Any]:
        def question(*things: Any) -> Any:
            return _look(form, known, weighted, *things)

        def forward(module: Any, x: Any, edge_index: Any, *rest: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                return NotImplemented
            pair = isinstance(x, tuple)
            if pair and len(x) != 2:
                return NotImplemented
            x_src, x_dst = x if pair else (x, x)
            weight = rest[0] if weighted else None
            size = rest[-1] if form.root else None
            plan = _ask(question, module, x_src, x_dst, pair, edge_index, weight, *_options(form, module))
            if plan is None:
                return NotImplemented
            first, constant, hops, mean, place = plan
            lin, out = getattr(module, form.lin), x_src
            if form.first:
                out = torch.nn.functional.linear(out, lin.weight)
                out = out.to(torch.promote_types(out.dtype, x_src.dtype))  # as autocast leaves it, and weights do not
            elif first:
                out = torch.nn.functional.linear(out, lin.weight)
            if form.normalised:
                normed = Normalised(weight, constant, getattr(module, "improved", False), module.add_self_loops, out.dtype, None)
                for _ in range(hops):
                    out = _times(normed, out, edge_index, module.flow == "source_to_target", mean, place)
            elif weighted:
                out = module.propagate(edge_index, x=(out, x_dst), edge_weight=weight, size=size)
            else:
                out = module.propagate(edge_index, x=(out, x_dst), size=size)
            if not first:
                return torch.nn.functional.linear(out, lin.weight, lin.bias)
            bias = module.bias if form.bias else lin.bias
            out = out if bias is None else out + bias
            if form.root and x_dst is not None and (not form.has_root or getattr(module, form.has_root)):
                out = out + getattr(module, form.root)(x_dst)
            return torch.nn.functional.normalize(out, p=2.0, dim=-1) if form.unit and getattr(module, form.unit) else out

        return forward

    return lambda original: made(class_of(original), "edge_weight" in inspect.signature(original).parameters)


def _options(form: Form, module: Any) -> tuple[Any, ...]:
    """The options that decide, so that code is traced again when they are others."""
    names = (*form.refused, *((form.hops,) if form.hops else ()), *(("add_self_loops",) if form.normalised else ()))
    names += ("normalize", "cached", "improved") if form.normalised and form.first else ()
    return *_parts(module), *[getattr(module, name) for name in names]


def _look(
    form: Form, known: Any, weighted: bool, module: Any, x: Any, x_dst: Any, pair: bool, edge_index: Any, weight: Any, *_: Any
) -> Any:
    """Whether the product comes first, whether weights are constant, how many hops, whether they are means, and the place of the
    report; ``None`` if PyG's own forward is as good: what it calls is served, or says why not."""
    parts = None if _context() else parts_of(form, known, module, weighted)
    own = module.__dict__
    if parts is None or (pair and not form.root) or own.get("cached") or not own.get("normalize" if form.normalised else "", True):
        return None
    try:
        _check_edges(edge_index)
        _check_operand("x", x, edge_index)
        if x_dst is not None:
            _check_operand("x", x_dst, edge_index)
        constant = weight is None or not form.normalised or _check_weight(weight, edge_index, x.fake.dtype)
    except Unsupported:
        return None
    of_lin, autocast = parts.lin.weight, torch.is_autocast_enabled(x.fake.device.type)
    if x.fake.dim() != 2 or x.fake.dtype != of_lin.dtype or not (constant or parts.reduce == "sum"):
        return None
    first = form.first
    times = LOOPED_TIMES if form.normalised and own.get("add_self_loops") else 1
    if _is_small(edge_index, of_lin.shape[0] if first else x.fake.shape[1], x.fake.dtype, times):
        return None
    if not first and x.fake.dtype in REORDERED and not autocast:
        grad, rows = torch.is_grad_enabled(), x_dst if isinstance(x_dst, Traced) else x
        num_src, num_dst, edges = (_hint(size) for size in (x.fake.shape[0], rows.fake.shape[0], edge_index.fake.shape[1]))
        sizes = num_src, num_dst, edges, of_lin.shape[1], of_lin.shape[0], parts.hops
        first = linear_first(Layer(x.fake.device.type, *sizes, grad and x.fake.requires_grad, grad and of_lin.requires_grad))
    if not first and not form.normalised:
        return None
    return first, constant, parts.hops, parts.reduce == "mean", parts.verdict.place


# ---- attention ---------------------------------------------------------------------------------------------------------------
def _make_attention(parts: Any, run: Callable[..., Tensor]) -> Callable[[FunctionType], Callable[..., Any]]:
    """What makes the ``forward(x, edge_index, edge_attr, ..., return_attention_weights)`` that is traced for a layer."""

    @functools.cache
    def made(known: Any) -> Callable[..., Any]:
        def question(*things: Any) -> Any:
            return _look_at_attention(known, parts, *things)

        def forward(module: Any, x: Any, edge_index: Any, edge_attr: Any, *rest: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                return NotImplemented
            pair = x if isinstance(x, tuple) else (x, x)
            if len(pair) != 2:
                return NotImplemented
            given = all(argument is None for argument in rest)
            options = module.dropout, module.training, module.heads, getattr(module, "fill_value", None), *_parts(module)
            place = _ask(question, module, *pair, edge_index, edge_attr, given, *options)
            if place is None:
                return NotImplemented
            loops = getattr(module, "add_self_loops", False)
            form = "given" if not loops else "looped" if edge_attr is None else "listed"
            edges = edge_index, pair[0].shape[0], pair[1].shape[0], True, form, place
            if edge_attr is not None and edge_attr.dim() == 1:
                edge_attr = edge_attr.unsqueeze(1)
            return run(module, x, pair, edge_attr, float(module.dropout if module.training else 0), edges)

        return forward

    return lambda original: made(class_of(original))


def _look_at_attention(
    known: Any, parts: Any, module: Any, x: Any, x_dst: Any, edge_index: Any, edge_attr: Any, given: bool, *_: Any
) -> str | None:
    """The place of the report; ``None`` if PyG's own must run."""
    try:
        reason = _context()
        if reason or not given:
            raise Unsupported(reason or "an argument is not served")
        eager.check_layer(known, parts, module)
        _check_edges(edge_index)
        like = None if parts.parameter is None else module._parameters.get(parts.parameter)
        for t in (x, x_dst):
            _check_operand("x", t, edge_index)
            if t.fake.dim() != 2 or eager.summed_dtype(t.fake) != eager.summed_dtype(x.fake if like is None else like):
                raise Unsupported("features and parameters do not agree")
        if torch.is_autocast_enabled(edge_index.fake.device.type):
            eager.check_autocast(parts, x.fake if like is None else like, edge_attr)
        if edge_attr is not None or (module._modules.get("lin_edge") is not None and parts.message is DOT_ATTENTION):
            _check_features(module, edge_index, edge_attr, x)
        dropout = module.dropout if module.training else 0.0
        rows = x.fake.new_empty(0, dtype=eager.summed_dtype(x.fake))
        if not serves_attention(rows, module.heads, module.out_channels, dropout):
            raise Unsupported("there is no kernel for heads so wide, or the dropout")
    except Unsupported as error:
        _left(module, str(error))
        return None
    place, width = f"pyg {known.__name__}", module.heads * module.out_channels
    if not getattr(module, "add_self_loops", False) and _is_small(edge_index, width, x.fake.dtype, ATTENTION_TIMES):
        ran(place, *TOO_SMALL)
        return None
    return place


def _check_features(module: Any, edge_index: Any, edge_attr: Any, x: Any) -> None:
    """Raises Unsupported if the features of edges are not multiplied by a matrix, or loops have features of another kind."""
    lin, width = module._modules.get("lin_edge"), module.heads * module.out_channels
    if lin is None:
        raise Unsupported("edge features of a layer that takes none")
    _check_operand("edge_attr", edge_attr, edge_index)
    rows = edge_attr.fake
    if not is_product(lin) or lin.bias is not None or type(lin.weight) not in _PLAIN or rows.dtype not in REORDERED:
        raise Unsupported("edge features are no products of float32 or float64")
    if not rows.dtype == lin.weight.dtype == x.fake.dtype or lin.weight.shape != (width, rows.shape[1] if rows.dim() == 2 else 1):
        raise Unsupported("edge features do not fit their linear layer")
    if rows.dim() not in (1, 2) or rows.shape[0] != edge_index.fake.shape[1]:
        raise Unsupported("edge_attr does not fit")
    att = getattr(module, "att_edge", None)
    if att is not None and (type(att) not in _PLAIN or att.shape != (1, module.heads, module.out_channels)):
        raise Unsupported("edge features do not fit their linear layer")
    if getattr(module, "add_self_loops", False) and type(module.fill_value) not in (int, float) and module.fill_value != "mean":
        raise Unsupported("features of self loops that are neither a number nor a mean")


def _needs_grad(*operands: Any) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)


def _seed(dropout: float, edges: Any) -> Any:
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=edges[0].device) if dropout else None


def _with_loops(module: Any, rows: Tensor, edges: Any) -> Tensor:
    """``rows`` of edges as :class:`gnnfast.pyg.compiled_ops.Edges` lists them."""
    if edges[4] != "listed":
        return rows
    return ops.WITH_LOOPS(rows, None if module.fill_value == "mean" else float(module.fill_value), *edges)  # type: ignore[no-any-return]


def _shares(dropout: float, score: Any, dst: Any, src: Any, slope: float, edges: Any) -> Tensor:
    """The coefficients of edges after dropout, drawn as PyG draws it."""
    share = ops.SOFTMAX(score, dst, src, slope, *edges)
    return torch.nn.functional.dropout(share, dropout) if dropout else share


def _gat(module: Any, x: Any, pair: Any, edge_attr: Any, dropout: float, edges: Any) -> Tensor:
    res, h_src, _, a_src, a_dst = eager.gat_operands(module, x, pair)
    slope = float(module.negative_slope)
    if edge_attr is None:
        train = _needs_grad(h_src, a_src, a_dst)
        out = ops.ATTENTION(h_src, a_dst, a_src, slope, dropout, _seed(dropout, edges), train, *edges)[0]
        return eager.finish(module, out, res, True)
    score = torch.nn.functional.linear(_with_loops(module, edge_attr, edges), eager.edge_score_weight(module))
    share = _shares(dropout, score, a_dst, a_src, slope, edges)
    out = ops.SPMM(h_src, share, False, False, _needs_grad(h_src, share), False, *edges)
    return eager.finish(module, out, res, False)


def _gatv2(module: Any, x: Any, pair: Any, edge_attr: Any, dropout: float, edges: Any) -> Tensor:
    res, left, right = eager.gatv2_operands(module, x, pair)
    att, edge = module.att.view(-1), None if edge_attr is None else module.lin_edge(_with_loops(module, edge_attr, edges))
    train = _needs_grad(left, right, att, edge)
    numbers = module.heads, float(module.negative_slope), dropout, _seed(dropout, edges), train
    return eager.finish(module, ops.PAIR_ATTENTION(right, left, None, att, edge, *numbers, *edges)[0], res, True)


def _transformer(module: Any, x: Any, pair: Any, edge_attr: Any, dropout: float, edges: Any) -> Tensor:
    query, key, value = eager.transformer_operands(module, pair)
    heads, scale = module.heads, 1 / math.sqrt(module.out_channels)
    if edge_attr is None:
        numbers = heads, scale, dropout, _seed(dropout, edges), _needs_grad(query, key, value)
        out = ops.PAIR_ATTENTION(query, key, value, None, None, *numbers, *edges)[0]
        return eager.finish_transformer(module, out, pair[1], True)
    incidence = *edges[:4], "incidence", edges[5]
    of_keys = ops.SDDMM(query, key, heads, False, *edges)
    ask, rows, restore = eager.products_of_edges(module, edge_attr)
    score = (of_keys + ops.SDDMM(ask(query), rows, heads, False, *incidence)) * scale
    share = _shares(dropout, score, None, None, 1.0, edges)
    out = ops.SPMM(value, share, False, False, _needs_grad(value, share), False, *edges)
    out = out + restore(ops.SPMM(rows, share, False, False, _needs_grad(rows, share), False, *incidence))
    return eager.finish_transformer(module, out, pair[1], False)


# ---- PNAConv -----------------------------------------------------------------------------------------------------------------
def make_pna_conv(original: FunctionType) -> Callable[..., Any]:
    """What is traced for the ``forward(x, edge_index, edge_attr)`` of PNAConv."""
    return _pna_conv(class_of(original))


@functools.cache
def _pna_conv(known: Any) -> Callable[..., Any]:
    def question(*things: Any) -> Any:
        return _look_at_pna(known, *things)

    def forward(module: Any, x: Any, edge_index: Any, edge_attr: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return NotImplemented
        options = module.towers, module.divide_input, tuple(module.aggr_module.scaler), *_parts(module)
        plan = _ask(question, module, x, edge_index, edge_attr, *options)
        if plan is None:
            return NotImplemented
        kinds, place = plan
        nodes, to_target = x.shape[0], module.flow == "source_to_target"
        edges, of_kinds = (edge_index, nodes, nodes, to_target, "given", place), [KINDS[kind] for kind in kinds]

        def reduce(to_src: Tensor, to_dst: Tensor, of_edges: Any) -> Tensor:
            if of_edges is None:
                return ops.REDUCTIONS(to_src, to_dst, of_kinds, _needs_grad(to_src, to_dst), *edges)[0]  # type: ignore[no-any-return]
            messages = of_edges + _gather(to_src, edges)
            at = *edges[:4], "incidence", place
            return ops.REDUCTIONS(messages, to_dst, of_kinds, _needs_grad(messages, to_dst), *at)[0]  # type: ignore[no-any-return]

        degree = ops.DEGREE(*edges).to(x.dtype).unsqueeze(1)
        parts = pna.parts_of(module, edge_attr is not None, kinds)
        of_nodes = lambda least: degree if least is None else torch.log(degree.clamp(min=least) + 1)  # noqa: E731
        return pna.forward(module, parts, x, edge_attr, reduce, of_nodes)

    return forward


def _look_at_pna(known: Any, module: Any, x: Any, edge_index: Any, edge_attr: Any, *_: Any) -> tuple[tuple[str, ...], str] | None:
    """The kinds of statistics, and the place of the report; ``None`` if PyG's own must run."""
    try:
        reason = _context()
        if reason:
            raise Unsupported(reason)
        parts = pna.check_layer(known, module, edge_attr is not None)
        _check_edges(edge_index)
        _check_operand("x", x, edge_index)
        if edge_attr is not None:
            _check_operand("edge_attr", edge_attr, edge_index)
            pna.check_memory(module, _hint(edge_index.fake.shape[1]), x.fake)
        if any(type(t) not in _PLAIN for t in pna.tensors_of(module, parts)):
            raise Unsupported("a parameter is no plain tensor")
        pna.check_shapes(module, parts, x.fake, edge_index.fake, None if edge_attr is None else edge_attr.fake)
    except Unsupported as error:
        _left(module, str(error))
        _state.said = module
        return None
    times = sum(STATISTICS_TIMES.get(kind, 1) for kind in parts.kinds)
    if _is_small(edge_index, module.towers * module.F_in, x.fake.dtype, times):
        _leave_small(module)
        return None
    return parts.kinds, f"pyg {known.__name__}"


def _gather(x: Tensor, edges: Any) -> Tensor:
    """``x [N, F]`` at the sources of edges: the edges' incidence with them, transposed, so that the gradient is a sum."""
    edge_index, num_src, num_dst, to_target, _, place = edges
    of_sources = edge_index, num_dst, num_src, not to_target, "incidence", place
    return ops.SPMM(x, None, False, False, _needs_grad(x), True, *of_sources)  # type: ignore[no-any-return]


TRACED: dict[str, Callable[[FunctionType], Callable[..., Any]]] = {
    "MessagePassing.propagate": lambda _: propagate,
    "gcn_norm": make_gcn_norm,
    "softmax": lambda _: softmax,
    "add_self_loops": make_loops,
    "remove_self_loops": make_loops,
    "GCNConv.forward": make_layer(GCN),
    "SGConv.forward": make_layer(SG),
    "SAGEConv.forward": make_layer(SAGE),
    "GraphConv.forward": make_layer(GRAPH),
    "GATConv.forward": _make_attention(eager.GAT, _gat),
    "GATv2Conv.forward": _make_attention(eager.GATV2, _gatv2),
    "PNAConv.forward": make_pna_conv,
    "TransformerConv.forward": _make_attention(eager.TRANSFORMER, _transformer),
}
