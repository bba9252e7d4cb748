"""Layers that are linear up to their bias. Each declares its parts (:class:`Form`); one place decides the order of product and
aggregation, as PyG writes it or the cheaper one, and runs all as one node of autograd. And products with constant sparse features.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gnnfast import features, guards
from gnnfast.cache import Sightings, cache
from gnnfast.config import settings
from gnnfast.dispatch.bias import FEWEST_ROWS, are_many, biased, linears
from gnnfast.dispatch.bias import linear as linear_of
from gnnfast.dispatch.execute import Linear, aggregate, linear_layer, listed_layer
from gnnfast.dispatch.select import FEW_BYTES, Layer, cannot_win, linear_first, saves_little
from gnnfast.graph import ids
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.guards import tracing_state
from gnnfast.hardware import relative_bandwidth
from gnnfast.patching import class_of, is_dispatched
from gnnfast.pyg import listed
from gnnfast.pyg.adjacency import ends_of_new, found_graph, graph_of, regrets, running
from gnnfast.pyg.as_written import reduced
from gnnfast.pyg.known import is_linear
from gnnfast.pyg.messages import GINE
from gnnfast.pyg.norm import make_normalising, normalised, sharing
from gnnfast.pyg.small import are_few, bounds, is_new, is_new_and_tiny, most_ids, of_sums, remember
from gnnfast.pyg.verdict import check_module, global_hooks, is_plain, module_hooks, reduction_of, served, watch_of
from gnnfast.reporting import fell_back, ran
from gnnfast.stream import is_capturing
from gnnfast.types import FEATURE_DTYPES, LINEAR, REORDERED
from gnnfast.unsupported import Unsupported

_PLAIN = ("add", "sum", "mean", "max", "min")
_methods = operator.attrgetter("message", "aggregate", "update", "message_and_aggregate", "forward")
_STRIDED = torch.strided


class Form(NamedTuple):
    """What a layer computes: ``K`` aggregations of the features, a product and a bias, and a product of the destinations' own.

    ``lin`` and ``root`` are the names of its linear layers (the latter empty: it has none), ``has_root`` that of the option which
    says whether the root is there (empty: it is); ``bias``: it has one of its own; ``first``: PyG puts the product before the
    aggregation; ``hops``: the name of the option ``K``, else 1; ``normalised``: ``gcn_norm`` gives the weights; ``unit``: the
    option by which rows get length 1 at the end; ``refused``: options with which PyG's own forward runs."""

    lin: str
    root: str = ""
    bias: bool = False
    first: bool = False
    hops: str = ""
    normalised: bool = False
    has_root: str = ""
    unit: str = ""
    refused: tuple[str, ...] = ()


GCN = Form("lin", bias=True, first=True, normalised=True)
SAGE = Form("lin_l", "lin_r", has_root="root_weight", unit="normalize", refused=("project",))
GRAPH = Form("lin_rel", "lin_root")
SG = Form("lin", hops="K", normalised=True, refused=("cached",))


class _Call(NamedTuple):
    """A call that was looked at: ``x_dst`` is ``x`` where the layer was given one tensor; ``root`` is ``None`` where nothing is
    to be added; ``copies``: PyG keeps no ``x`` for the backward pass, so that the user may write into it before."""

    x: Tensor
    x_dst: Any
    edge_index: Tensor
    edge_weight: Any
    size: Any
    lin: Any
    root: Any
    bias: Tensor | None
    reduce: str
    hops: int
    copies: bool
    to_target: bool
    place: str
    graph: Any = None  # that of edge_index, where it is known


def make_layer(form: Form) -> Callable[[FunctionType], Callable[..., Any]]:
    """What makes a dispatcher for the ``forward(x, edge_index, ...)`` of a layer."""

    def make(original: FunctionType) -> Callable[..., Any]:
        known, names = class_of(original), list(inspect.signature(original).parameters)[3:]
        at_weight, at_size = (names.index(n) if n in names else None for n in ("edge_weight", "size"))
        in_order = make_normalising(original, False) if form.normalised and not form.first else lambda *_: NotImplemented

        def forward(module: Any, x: Any, edge_index: Any, *rest: Any) -> Any:
            few = _has_kept_few(module) if form.normalised else _is_few(form, module, x, edge_index)
            plain = bool(form.root) and rest[0] is None and rest[-1] is None
            if guards.context() or (few and not plain):
                return NotImplemented
            if form.hops and is_new_and_tiny(x, edge_index, module, "tiny sums cpu") and _keeps_order(form, module, edge_index):
                return NotImplemented
            weight, size = (None if at is None else rest[at] for at in (at_weight, at_size))
            parts = parts_of(form, known, module, at_weight is not None)
            if parts is None:
                return NotImplemented
            if plain:
                out = (_alone if few else _at_once)(form, parts, module, x, edge_index)
                if out is not None:
                    return functional.normalize(out, p=2.0, dim=-1) if form.unit and getattr(module, form.unit) else out
            if few:
                return NotImplemented
            call = _look(form, parts, module, x, edge_index, weight, size)
            if call is None:
                return NotImplemented
            first = form.first or _is_cheaper_first(module, call)
            if not first and (call.hops != 1 or _is_watched(weight)):
                return in_order(module, x, edge_index, *rest)
            if form.normalised:
                edge_index, weight, graph = normalise(module, call.x, call.edge_index, call.edge_weight, call.reduce, original)
                call = call._replace(edge_index=edge_index, edge_weight=weight, graph=graph)
            out = _in_one(module, call, first)
            if out is None:
                if not first:
                    return in_order(module, x, edge_index, *rest)
                out = _in_parts(module, call, {} if at_size is None else {"size": size}, at_weight is not None, bool(form.root) and parts.to_target)
            return functional.normalize(out, p=2.0, dim=-1) if form.unit and getattr(module, form.unit) else out

        return forward

    return make


def _operands(form: Form, parts: _Parts, module: Any, x: Any, edge_index: Any) -> Linear | None:
    """What a layer multiplies, if it has one tensor of features and one of edges, and all are plain and fit together; not where
    somebody would see other calls than PyG's."""
    if type(x) is not Tensor or x.layout is not _STRIDED or x.dim() != 2 or guards.function_modes():
        return None
    device, dtype, lin, root, root_weight = x.device, x.dtype, parts.lin, parts.root, None
    if type(edge_index) is not Tensor or edge_index.layout is not _STRIDED or edge_index.dim() != 2 or edge_index.device != device:
        return None
    weight, bias = lin_parameters(lin)
    if type(weight) not in guards.PLAIN or weight.dim() != 2:
        return None
    shape = (weight.shape[0], x.shape[1])
    if weight.shape != shape or weight.dtype is not dtype or weight.device != device:
        return None
    if not form.has_root or module.__dict__.get(form.has_root):
        if root is None or not is_product(root, type(lin)):
            return None
        root_weight, root_bias = lin_parameters(root)
        if type(root_weight) not in guards.PLAIN or root_bias is not None:
            return None
        if root_weight.shape != shape or root_weight.dtype is not dtype or root_weight.device != device:
            return None
    if bias is not None and (type(bias) not in guards.PLAIN or bias.shape != shape[:1] or bias.dtype is not dtype):
        return None
    return Linear(x, weight, bias, None, root_weight)


def lin_parameters(lin: Any) -> Any:
    """The weight and the bias of a linear layer that is a product; what is not there is no tensor, a bias that it was made without
    ``None``."""
    parameters = lin._parameters
    return parameters.get("weight", ""), parameters.get("bias", "")


def _alone(form: Form, parts: _Parts, module: Any, x: Any, edge_index: Any) -> Tensor | None:
    """A layer that is left to PyG for its size, by PyG's operations alone: on small graphs what calls them takes as long. ``None``:
    PyG's forward must run."""
    operands = _operands(form, parts, module, x, edge_index)
    if operands is None or edge_index.dtype is not torch.int64:
        return None
    if x.is_cuda:
        ids.check()
    _, weight, bias, _, root = operands
    nodes, reduce = x.shape[0], parts.reduce
    try:
        pays, to_target = listed.pays(edge_index, x), parts.to_target
        out = listed.aggregate(edge_index, to_target, None, x, nodes, reduce) if pays else NotImplemented
        if out is NotImplemented:
            src, dst = edge_index.unbind() if to_target else reversed(edge_index.unbind())
            out = reduced(module, parts.aggr, x.index_select(0, src), dst, nodes, reduce)
        out = functional.linear(out, weight, bias)
        if root is not None:
            hidden = x.requires_grad or not features.large(x)  # else they may be used compressed
            out = out + (functional.linear(x, root) if hidden else parts.root(x))
    except (IndexError, ValueError, RuntimeError):  # PyG raises its own
        return None
    left.edge_index = None
    ran(parts.verdict.place, "PyG's own", ALONE)
    return out


ALONE = "too small to gain: its operations alone"


def _at_once(form: Form, parts: _Parts, module: Any, x: Any, edge_index: Any) -> Tensor | None:
    """The layer where nothing else is to be decided, as in most calls: over a small graph that is new, what looks at calls takes
    longer than kernels. ``None``: it must be looked at."""
    if type(x) is not Tensor or type(edge_index) is not Tensor or x.dim() != 2 or edge_index.dim() != 2:
        return None
    nodes, reduce, place, ends = x.shape[0], parts.reduce, parts.verdict.place, None
    graph = found_graph(edge_index, nodes, nodes, parts.to_target)
    if graph is None:
        ends = ends_of_new(edge_index, parts.to_target)
        if ends is None:
            return None
    operands = _operands(form, parts, module, x, edge_index)
    if operands is None or (features.large(x) and not x.requires_grad) or torch.is_autocast_enabled(x.device.type):
        return None
    if torch.is_grad_enabled() and saved_tensors_are_watched():
        return None
    weight = operands.weight
    if x.dtype not in FEATURE_DTYPES or guards.operand("x", x) or guards.operand("weight", weight):
        return None
    if not saves_little(x.device.type, edge_index.shape[1], weight.shape[1], weight.shape[0], 1):
        return None
    if x.is_cuda:
        ids.check()
    try:
        if graph is not None:
            cache.hits += 1
            return linear_layer(graph, operands, None, reduce, first=False, place=place, owners=(module, parts.root))
        assert ends is not None
        made = listed_layer(ends, operands, reduce, regrets.of(edge_index), place)
    except (Unsupported, IndexError, ValueError):
        return None
    if made is None:
        return None
    regrets.set(edge_index, made[1])
    return made[0]


def _is_few(form: Form, module: Any, x: Any, edge_index: Any) -> bool:
    """Whether there is nothing to gain: on a GPU, but for means, which are only left over a graph that is new, or in training over
    one that is very small; on a CPU where it is new, or tiny in training. ``propagate``, which PyG's own calls next, says so and
    need not ask again. Replays of a captured step do not ask the host."""
    bound = bounds.get(id(module))
    if bound is not None and bound.holds(x, edge_index) and not (bound.on_cuda and is_capturing()):
        left.edge_index = edge_index
        return True
    x = x[0] if type(x) is tuple and x else x
    if type(x) is not Tensor or type(edge_index) is not Tensor:
        return False
    if x.layout is not _STRIDED or x.dim() != 2 or edge_index.layout is not _STRIDED or edge_index.dim() != 2:
        return False
    row_bytes = x.shape[1] * x.element_size()
    if not x.is_cuda:
        return _is_few_on_cpu(form, module, x, edge_index, row_bytes)
    aggr = module.__dict__.get("aggr")
    if aggr not in _PLAIN:  # what PyG makes of several reductions is many operations
        return False
    training, num_edges = torch.is_grad_enabled(), edge_index.shape[1]
    if not training and id(type(module)) not in served:
        return False  # what it computes is found out, by which propagate() sums over the edges as they are listed
    # Where features get no gradient there is no pass backward, which would be the longer one.
    moved = num_edges * row_bytes // (2 if training and not x.requires_grad else 1)
    # A mean's layer is one node of autograd, which pays from where a call without a gradient does.
    few = cannot_win(moved, training and aggr != "mean", settings())
    if not few or is_capturing() or torch.are_deterministic_algorithms_enabled():
        return False
    if aggr != "mean":
        remember(module, "x", x, edge_index, most_ids(x, "cuda"))
    elif training and (num_edges + x.shape[0]) * row_bytes <= FEW_BYTES * relative_bandwidth():
        most = int(FEW_BYTES * relative_bandwidth() // (row_bytes or 1)) - x.shape[0]
        remember(module, "x", x, edge_index, (-1, 2 * most))
    elif (training and saved_tensors_are_watched()) or _met.again(edge_index, id(module)):
        return False  # layers share what a graph is found by, and degrees
    left.edge_index = edge_index
    return True


def _is_few_on_cpu(form: Form, module: Any, x: Tensor, edge_index: Tensor, row_bytes: int) -> bool:
    few, training = False, torch.is_grad_enabled()
    if id(type(module)) in served:
        tiny, new = of_sums(x, reduction_of(module))
        if not (training and saved_tensors_are_watched()) and are_few(edge_index, row_bytes, tiny):
            remember(module, "x", x, edge_index, most_ids(x, tiny))
            few = True
        else:
            few = are_few(edge_index, row_bytes, new) and _keeps_order(form, module, edge_index) and is_new(edge_index, module)
    left.edge_index = edge_index if few else None
    return few


def _keeps_order(form: Form, module: Any, edge_index: Tensor) -> bool:
    """Whether a layer, once it is served, still aggregates before it multiplies: the other order rounds otherwise."""
    lin = module.__dict__["_modules"].get(form.lin)
    weight = None if lin is None else lin._parameters.get("weight")
    hops = module.__dict__.get(form.hops, 1)
    if type(weight) not in guards.PLAIN or type(hops) is not int:
        return False
    return saves_little("cpu", edge_index.shape[1], weight.shape[1], weight.shape[0], hops)  # type: ignore[union-attr]


class _Left(threading.local):
    """``edge_index`` is that of a layer whose forward has found nothing to gain, until it calls ``propagate``."""

    edge_index: Any = None


left = _Left()


def _has_kept_few(module: Any) -> bool:
    """Whether a layer that keeps its normalised edges itself, so that a product and a sum are all it does, has nothing to gain on a
    GPU; ``propagate`` says so."""
    kept = module.__dict__.get("_cached_edge_index")
    edge_index = kept[0] if type(kept) is tuple else None
    if type(edge_index) is not Tensor or not edge_index.is_cuda or edge_index.layout is not _STRIDED:
        return False
    training, nbytes = torch.is_grad_enabled(), edge_index.shape[-1] * module.out_channels * 4
    if not cannot_win(nbytes, training, settings()) or is_capturing():
        return False
    return not (training and saved_tensors_are_watched())  # what is kept must not decide there


def _is_watched(weight: Any) -> bool:
    """Whether a gradient of the weights, or hooks on what is saved, ask for the parts one after the other."""
    return torch.is_grad_enabled() and (saved_tensors_are_watched() or (isinstance(weight, Tensor) and weight.requires_grad))


class _Parts:
    """What was found out about a layer. It holds while its parts, options and functions are the same and nobody watches them, which
    each call asks again (:meth:`hold`): a few operations, since on small graphs they take as long as kernels."""

    __slots__ = ("aggr", "code", "fetch", "hops", "lin", "options", "reduce", "root", "to_target", "verdict", "watch")

    def __init__(self, form: Form, known: Any, module: Any, weighted: bool) -> None:
        """Raises Unsupported if the layer is not what it declares."""
        own, cls = module.__dict__, type(module)
        modules = own["_modules"]
        self.lin, self.root, self.aggr = modules.get(form.lin), modules.get(form.root), modules.get("aggr_module")
        # Whoever has replaced a function in between would see features of another width.
        if not (cls is known or _methods(cls) == _methods(known)) or "propagate" in own:
            raise Unsupported("a method is another than the layer's")
        self.verdict, self.watch = check_module(module), watch_of(module)
        message = self.verdict.message
        shape = ("edge_weight", "view") if weighted else (None, "plain")
        if self.verdict.update is not None or self.verdict.reduce not in LINEAR or message.feature != "x" or message[1:3] != shape:
            raise Unsupported("the layer aggregates something else")
        if not is_product(self.lin) or not (self.root is None or isinstance(self.root, torch.nn.Module)):
            raise Unsupported("its linear layer is more than a product")
        if form.bias and self.lin._parameters.get("bias") is not None:
            raise Unsupported("it has two biases")
        self.reduce = self.verdict.reduce
        self.fetch = _fetcher(form)
        self.options = self.fetch(own)
        hops = own.get(form.hops, 1)
        if any(own.get(option) for option in form.refused) or type(hops) is not int or hops < 1 or own["node_dim"] not in (-2, 0):
            raise Unsupported("an option is not served")
        self.to_target = own["flow"] == "source_to_target"
        self.hops, self.code = hops, cls.propagate.__code__ if is_dispatched(cls.propagate) else None

    def hold(self, form: Form, module: Any) -> bool:
        own = module.__dict__
        modules, lin, aggr = own["_modules"], self.lin, self.aggr
        if modules.get(form.lin) is not lin or modules.get(form.root) is not self.root or modules.get("aggr_module") is not aggr:
            return False
        of_lin, cls = lin.__dict__, type(module)
        return (
            not any(module_hooks(of_lin))
            and "propagate" not in own
            and of_lin.keys().isdisjoint(_OF_LINEAR)
            and self.fetch(own) == self.options
            and own.get("_cached_x") is None
            and not (form.bias and lin._parameters.get("bias") is not None)
            and self.watch.of_instance(cls, own, aggr) is self.verdict
            and cls.propagate.__code__ is self.code
            and is_linear(type(lin))
        )


@functools.cache
def _fetcher(form: Form) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """What gets the options from a layer that decide how it is computed."""
    return operator.itemgetter("flow", "node_dim", *form.refused, *((form.hops,) if form.hops else ()))


_parts: dict[int, tuple[weakref.ref[Any], _Parts]] = {}


def parts_of(form: Form, known: Any, module: Any, weighted: bool) -> _Parts | None:
    """The parts of a layer, if it is what it declares. What is not certain runs as PyG wrote it."""
    key = id(module)
    found = _parts.get(key)
    try:
        if found is not None and found[0]() is module:
            if found[1].hold(form, module):
                return found[1]
            del _parts[key]
        if reduction_of(module) not in LINEAR:
            return None
        parts = _Parts(form, known, module, weighted)
        if not parts.hold(form, module):
            return None
    except (Unsupported, AttributeError, KeyError):
        return None
    _parts[key] = weakref.ref(module, lambda _: _parts.pop(key, None)), parts
    return parts


def _look(form: Form, parts: _Parts, module: Any, x: Any, edge_index: Any, weight: Any, size: Any) -> _Call | None:
    """The call, if kernels take the operands."""
    pair = type(x) is tuple
    if pair and (not form.root or len(x) != 2):
        return None
    x, x_dst = x if pair else (x, x)
    if not parts.to_target and (x_dst is not x or size is not None):
        return None
    if type(edge_index) is not Tensor or edge_index.layout is not _STRIDED or edge_index.dim() != 2:
        return None
    csr = _is_csr(x)
    if (csr and features.unsupported(x)) or (not csr and guards.operand("x", x)):
        return None
    if size is not None and len(size) != 2:
        return None
    of_lin, owner = parts.lin._parameters, module if form.bias else parts.lin
    of_bias = owner._parameters
    bias = of_bias["bias"] if "bias" in of_bias else getattr(owner, "bias", None)
    if not _fits(x, of_lin.get("weight"), bias) or (weight is not None and not form.first and _promotes(x, weight)):
        return None
    root = None
    if form.root and x_dst is not None and (not form.has_root or module.__dict__.get(form.has_root)):
        root = parts.root
        if root is None:
            return None  # PyG says what is missing
    copies = not form.first and (root is None or x_dst is not x)
    of_parts = parts.reduce, parts.hops, copies, parts.to_target, parts.verdict.place
    return _Call(x, x_dst, edge_index, weight, size, parts.lin, root, bias, *of_parts)


def normalise(
    module: Any, x: Tensor, edge_index: Tensor, edge_weight: Any, reduce: str, original: FunctionType
) -> tuple[Tensor, Any, Any]:
    """The edges and weights as ``gcn_norm`` gives them to a layer with this ``original`` forward, and their graph if it is known.
    With ``reduce`` of ``"sum"`` nobody may see how loops are listed."""
    own = module.__dict__
    if not own.get("normalize", True):
        return edge_index, edge_weight, None
    kept = own.get("_cached_edge_index")
    if kept is not None:
        return *kept, None
    gcn_norm, num_nodes = original.__globals__["gcn_norm"], x.shape[0]
    options = (own.get("improved", False), own["add_self_loops"], own["flow"], x.dtype)
    arguments = (edge_index, edge_weight, num_nodes, *options)
    if own.get("cached"):
        kept = module._cached_edge_index = gcn_norm(*arguments)
        return *kept, None
    if saved_tensors_are_watched() or not is_dispatched(gcn_norm):
        return *gcn_norm(*arguments), None
    if reduce == "sum":
        made = normalised(*arguments)
        if made is not None:
            return made
    return *sharing(edge_index, False, gcn_norm, *arguments), None


def _in_one(module: Any, call: _Call, first: bool) -> Tensor | None:
    """The layer as one node of autograd."""
    x, x_dst, weight, root = call.x, call.x_dst, call.edge_weight, call.root
    dtype, device = x.dtype, x.device
    if call.size is not None or call.hops != 1 or x.layout is not _STRIDED or dtype not in FEATURE_DTYPES:
        return None
    if x_dst is not None and x_dst is not x and (guards.operand("x", x_dst) or x_dst.dim() != 2):
        return None
    lin_weight, bias, root_weight = call.lin._parameters["weight"], call.bias, None
    if bias is not None and bias.shape != lin_weight.shape[:1]:
        return None
    if root is not None:
        if not is_product(root, type(call.lin)):
            return None
        root_weight = root._parameters.get("weight")
        if root._parameters.get("bias") is not None or not _fits(x_dst, root_weight, None) or x_dst.dtype != dtype:
            return None
        if root_weight.shape[0] != lin_weight.shape[0]:
            return None
    graph = call.graph
    if graph is None:
        try:
            graph = graph_of(call.edge_index, x.shape[0], _num_dst(x, x_dst, None), call.to_target)
        except Unsupported:
            return None
    if graph.device != device:
        return None
    if weight is not None:
        if guards.operand("edge_weight", weight) or weight.shape != (graph.num_edges,):
            return None
        if weight.dtype != dtype or weight.device != device:
            return None
    if x.is_cuda:
        ids.check()  # of earlier calls; in this one PyG raises its own error
    operands = Linear(x, lin_weight, bias, None if x_dst is x else x_dst, root_weight)
    owners = call.lin if first else module, root
    try:
        return linear_layer(graph, operands, weight, call.reduce, first=first, place=call.place, owners=owners, copies=call.copies)
    except (Unsupported, IndexError, ValueError):  # propagate says why, or PyG raises its own
        return None


def _in_parts(module: Any, call: _Call, kwargs: dict[str, Any], weighted: bool, pair: bool) -> Tensor:
    """Product, aggregations and bias one after the other."""
    if weighted:
        kwargs["edge_weight"] = call.edge_weight
    out = _project(module, call.lin, call.x, call.copies)
    running.graph = call.graph
    try:
        for _ in range(call.hops):
            out = module.propagate(call.edge_index, x=(out, _placeholder(call.x_dst)) if pair else out, **kwargs)
    finally:
        running.graph = None
    out = out if call.bias is None else biased(out, call.bias)
    return out if call.root is None else out + call.root(call.x_dst)


def product(x: Any, module: Any, linear: type) -> Any:
    """``F.linear(x, module.weight, module.bias)`` of PyG's class of ``linear`` layers. Most inputs are hidden activations, or few
    numbers: for these it only looks up parameters where they are, a microsecond less than as attributes of a module, and asks
    nothing else."""
    plain = type(x) is Tensor and x.layout is _STRIDED
    few = plain and (x.requires_grad or tracing_state() is not None or not features.large(x))
    own = module.__dict__
    if few and type(module) is linear and "weight" not in own and "bias" not in own:
        parameters = own["_parameters"]
        try:
            weight, bias = parameters["weight"], parameters["bias"]
            many = x.is_cuda and torch.is_grad_enabled() and tracing_state() is None and x.numel() >= FEWEST_ROWS
            return linear_of(x, weight, bias) if many else functional.linear(x, weight, bias)
        except KeyError:  # somebody has parametrised them
            pass
    weight, bias = module.weight, module.bias
    out = None if few else _multiplied(x, weight, bias, module)
    return linear_of(x, weight, bias) if out is None else out


def products(x: Any, lins: Sequence[Any]) -> Sequence[Tensor]:
    """What linear layers make of the same features: without calling them as modules, which takes as long as the product does on
    small graphs, if that is a product alone."""
    if torch.compiler.is_compiling():
        return [lin(x) for lin in lins]
    hidden = type(x) is Tensor and (x.requires_grad or not features.large(x))  # else they may be used compressed
    known = type(lins[0])
    if hidden and is_linear(known) and all(is_product(lin, known) for lin in lins):
        parameters = [lin_parameters(lin) for lin in lins]
        if all(type(weight) in guards.PLAIN and (bias is None or type(bias) in guards.PLAIN) for weight, bias in parameters):
            return linears(x, *itertools.chain(*parameters))
    return [lin(x) for lin in lins]


def through(nn: Any, x: Any) -> Any:
    """``nn(x)``, its linear layers with many rows on a GPU as :func:`gnnfast.dispatch.bias.linear` has them."""
    rows = type(x) is Tensor and x.is_cuda and x.dim() == 2 and torch.is_grad_enabled()
    if not rows or not isinstance(nn, torch.nn.Module) or not are_many(x, _widest_bias(nn)):
        return nn(x)
    if any(global_hooks) or nn._compiled_call_impl is not None:
        return nn(x)
    if type(nn) is torch.nn.Sequential and is_plain(nn):
        for part in nn._modules.values():
            x = through(part, x)
        return x
    return product(x, nn, type(nn)) if is_product(nn) else nn(x)


def _widest_bias(nn: torch.nn.Module) -> int:
    """The length of the longest bias of a module, or of those that run in turn."""
    if type(nn) is torch.nn.Sequential:
        return max(map(_widest_bias, nn._modules.values()), default=0)  # type: ignore[arg-type]
    bias: Any = lin_parameters(nn)[1] if is_linear(type(nn)) else None
    return bias.numel() if type(bias) in guards.PLAIN else 0


def _multiplied(x: Any, weight: Any, bias: Any, module: Any) -> Tensor | None:
    """The product with features that are compressed; ``None``: torch's own."""
    if type(x) is not Tensor:
        return None
    if x.layout is _STRIDED:
        if not features.sighted(x, module, "product") or guards.context():
            return None
    elif reason := guards.context() or features.unsupported(x):
        fell_back("pyg Linear", reason)
        return None
    if not _fits(x, weight, bias):
        return None
    if bias is not None and x.element_size() == 2 and x.layout is _STRIDED:
        return None  # a bias added to rounded products rounds twice
    out = _product(x, weight, module, "pyg Linear")
    return out if out is None or bias is None else biased(out, bias)


def make_gin_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``GINConv.forward(x, edge_index, size)``."""

    known = class_of(original)

    def gin_conv(module: Any, x: Any, edge_index: Any, size: Any) -> Any:
        if guards.context():
            return NotImplemented
        if type(x) is Tensor and size is None and x.layout is _STRIDED:
            return _gin(known, module, x, edge_index)
        x_src, x_dst = _pair(x)
        if not _is_csr(x_dst) or features.unsupported(x_dst):
            return NotImplemented
        out = module.propagate(edge_index, x=(x_src, _placeholder(x_dst)), size=size)
        return module.nn(out + (1 + module.eps) * x_dst.to_dense())  # torch cannot scale torch.sparse_csr

    return gin_conv


def make_gine_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``GINEConv.forward(x, edge_index, edge_attr, size)``."""

    known = class_of(original)

    def gine_conv(module: Any, x: Any, edge_index: Any, edge_attr: Any, size: Any) -> Any:
        plain = type(x) is Tensor and size is None and x.layout is _STRIDED and type(edge_attr) is Tensor
        if not plain or guards.context() or torch.is_autocast_enabled(x.device.type):
            return NotImplemented
        lin, width = module.__dict__["_modules"].get("lin"), x.shape[-1]
        if lin is not None:
            if not is_product(lin) or not _fits(edge_attr, lin.weight, lin.bias):
                return NotImplemented
            width = lin.weight.shape[0]
        fits = edge_attr.dim() == 2 and edge_attr.dtype is x.dtype and not guards.operand("edge_attr", edge_attr)
        if not fits or edge_attr.device != x.device or (edge_attr.shape[1] if lin is None else width) != x.shape[-1]:
            return NotImplemented
        return _gin(known, module, x, edge_index, edge_attr)

    return gine_conv


def _gin(known: Any, module: Any, x: Tensor, edge_index: Any, edge_attr: Tensor | None = None) -> Any:
    """The layer over one graph with as few operations as there can be; with ``edge_attr``, GINE's, if it is small."""
    if type(edge_index) is not Tensor or edge_index.layout is not _STRIDED or edge_index.dim() != 2 or x.dim() != 2:
        return NotImplemented
    own, is_cuda = module.__dict__, x.is_cuda
    training, row_bytes = torch.is_grad_enabled(), x.shape[1] * x.element_size()
    tiny, new = of_sums(x, "sum") if edge_attr is None else ("tiny cpu", "cpu")
    nbytes, current = edge_index.shape[1] * row_bytes, settings()
    small = cannot_win(nbytes, training, current, "cuda" if is_cuda else new)
    if small and not is_cuda and not cannot_win(nbytes, training, current, tiny):
        # A format wins from the second step on, if it is over the same graph.
        small = not (saved_tensors_are_watched() or _met.again(edge_index, id(module)))
    eps = own["_buffers"].get("eps", own["_parameters"].get("eps"))
    if guards.operand("x", x) or x.dtype not in FEATURE_DTYPES:
        return NotImplemented
    if own["node_dim"] not in (-2, 0):
        return NotImplemented
    if not isinstance(eps, Tensor) or guards.operand("eps", eps) or eps.dtype != x.dtype or eps.device != x.device:
        return NotImplemented
    if eps.shape != (1,) or not (type(module) is known or _methods(type(module)) == _methods(known)) or "propagate" in own:
        return NotImplemented
    if is_cuda:
        ids.check()
    try:
        verdict = check_module(module)
        known_message = verdict.message[:2] == ("x", None) if edge_attr is None else verdict.message is GINE
        if verdict.update is not None or not known_message or not is_dispatched(type(module).propagate):
            return NotImplemented
        if small and verdict.reduce == "sum":
            out = _scattered(module, x, eps, edge_index, edge_attr, verdict.place)
        elif edge_attr is not None or (small and is_cuda):
            return NotImplemented  # propagate says so
        else:
            graph = graph_of(edge_index, x.shape[0], x.shape[0], own["flow"] == "source_to_target")
            if graph.device != x.device:
                return NotImplemented
            # The product with 1 + eps keeps x where eps needs a gradient, in PyG too.
            how: Any = dict(place=verdict.place, ties="scatter", training=module.training, owner=module, copies=True)
            out = aggregate(graph, x, None, verdict.reduce, **how)
            out = out.addcmul_(x, 1 + eps) if verdict.reduce in LINEAR else torch.addcmul(out, x, 1 + eps)  # a maximum is kept
    except (Unsupported, IndexError, ValueError):  # PyG raises its own
        return NotImplemented
    return through(module.nn, out)


_met = Sightings()


def _scattered(module: Any, x: Tensor, eps: Tensor, edge_index: Tensor, edge_attr: Tensor | None, place: str) -> Tensor:
    """The sum over a graph, and ``(1 + eps) * x`` added to it, by few operations of torch: on small graphs the host takes longer
    between these than in them. Raises Unsupported if PyG's own must run."""
    if edge_index.shape[0] != 2 or edge_index.dtype is not torch.int64 or guards.operand("edge_index", edge_index):
        raise Unsupported("the edges are not as PyG wants them")
    if edge_attr is not None and edge_attr.shape[0] != edge_index.shape[1]:
        raise Unsupported("there are not as many edge features as edges")
    to_target = module.__dict__["flow"] == "source_to_target"
    if edge_attr is None and listed.pays(edge_index, x):
        out = listed.aggregate(edge_index, to_target, None, x, x.shape[0], "sum")
        if out is not NotImplemented:
            ran(place, "gas sum", listed.WHY)
            return out.add_((1 + eps) * x)
    src, dst = edge_index.unbind() if to_target else reversed(edge_index.unbind())
    try:
        messages = x.index_select(0, src)
        if edge_attr is not None:
            messages = (messages + (edge_attr if module.lin is None else module.lin(edge_attr))).relu()
        scaled = (1 + eps) * x
        index = dst.unsqueeze(1).expand_as(messages)
        if x.is_cuda:  # where every launch counts, and no order of adding is PyG's
            out = scaled.scatter_add_(0, index, messages)
        else:  # in PyG's order, which rounds alike
            out = torch.zeros_like(x).scatter_add_(0, index, messages).add_(scaled)
    except RuntimeError as error:  # PyG raises its own
        raise Unsupported(str(error)) from None
    ran(place, "PyG's own", ALONE)
    return out


def _pair(x: Any) -> tuple[Any, Any]:
    if isinstance(x, Tensor):
        return x, x
    return x if isinstance(x, tuple) and len(x) == 2 else (None, None)


def _placeholder(x_dst: Any) -> Any:
    """What ``propagate`` takes the number of destinations from: a sparse tensor has no rows that it could select."""
    return x_dst.values().new_empty(()).expand(x_dst.shape) if _is_csr(x_dst) else x_dst


def _promotes(x: Any, weight: Any) -> bool:
    """Whether weighting changes the dtype of the features, so that PyG's product comes after and fails."""
    tensors = isinstance(x, Tensor) and isinstance(weight, Tensor)
    return tensors and torch.promote_types(x.dtype, weight.dtype) != x.dtype


def _is_csr(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.sparse_csr


def _fits(x: Any, weight: Any, bias: Any) -> bool:
    """Whether a product of gnnfast can stand in for ``x @ weight.t() + bias``."""
    if guards.operand("weight", weight) or (bias is not None and guards.operand("bias", bias)):
        return False
    dtype, device = weight.dtype, weight.device
    if x.dim() != 2 or weight.dim() != 2 or x.size(1) != weight.size(1) or x.dtype != dtype or x.device != device:
        return False
    return not torch.is_autocast_enabled(device.type) and (bias is None or bias.dtype == dtype)


def _product(x: Tensor, weight: Tensor, owner: Any, place: str) -> Tensor | None:
    """``x @ weight.t()`` by a sparse kernel, or ``None`` where a dense one is as good."""
    if not _is_csr(x):
        return features.try_multiply(x, weight, owner, place)
    try:
        return features.multiply_csr(x, weight, place)
    except Unsupported as error:
        reason = str(error)
    except (IndexError, ValueError) as error:  # PyG raises its own
        reason = f"invalid input: {error}"
    fell_back(place, reason)
    return None


def _project(module: Any, lin: Any, x: Tensor, copies: bool) -> Tensor:
    """``lin(x)`` without the bias; with ``copies``, the user may write into ``x`` before the backward pass."""
    out = _product(x, lin.weight, lin, f"pyg {type(module).__name__}")
    if out is not None:
        return out
    if copies and torch.is_grad_enabled() and lin.weight.requires_grad:
        x = x.clone()
    return functional.linear(x, lin.weight)


def _num_dst(x_src: Tensor, x_dst: Any, size: Any) -> int:
    if isinstance(x_dst, Tensor):
        return x_dst.shape[0]
    return size[1] if size is not None and size[1] is not None else x_src.shape[0]


def _is_cheaper_first(module: Any, call: _Call) -> bool:
    """Whether ``aggregate(lin(x))`` is so much cheaper than ``lin(aggregate(x))`` that the order changes."""
    x, weight = call.x, call.lin._parameters["weight"]
    if _is_csr(x):
        ran(call.place, "linear first", _change(weight))  # in PyG's order they would have to be gathered
        return True
    if x.dtype not in REORDERED:
        return False
    num_edges = call.edge_index.shape[1]
    sighted = features.sighted(x, module, "order")
    if not sighted and saves_little(x.device.type, num_edges, weight.shape[1], weight.shape[0], call.hops):
        return False  # at once
    grad, found = torch.is_grad_enabled(), features.measure_sighted(x) if sighted else None
    shares = [features.share(x, found, what) for what in ("aggregate", "product")] if found else [1.0, 1.0]
    layer = Layer(
        x.device.type,
        x.shape[0],
        _num_dst(x, call.x_dst, call.size),
        num_edges,
        weight.shape[1],
        weight.shape[0],
        call.hops,
        grad and x.requires_grad,
        grad and weight.requires_grad,
        *shares,
    )
    if not linear_first(layer):
        return False
    ran(call.place, "linear first", _change(weight))
    return True


def _change(weight: Tensor) -> str:
    return f"{weight.shape[1]} -> {weight.shape[0]} features"


def is_product(lin: Any, known: type | None = None) -> bool:
    """Whether calling ``lin`` is a product and a bias and nothing else; that of a class ``known`` is, as was just asked."""
    own = lin.__dict__
    return (type(lin) is known or is_linear(type(lin))) and own.keys().isdisjoint(_OF_LINEAR) and not any(module_hooks(own))


# What of an instance would be called, or used, in place of what its class and its parameters say.
_OF_LINEAR = ("forward", "_call_impl", "weight", "bias")
