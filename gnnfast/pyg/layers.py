"""Layers that are linear up to their bias. Each declares its parts (:class:`Form`); one place decides the order of product and
aggregation, as PyG writes it or the cheaper one, and runs all as one node of autograd."""

from __future__ import annotations

import functools
import inspect
import operator
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gnnfast import features, guards
from gnnfast.cache import Sightings, cache
from gnnfast.config import settings
from gnnfast.dispatch.bias import biased
from gnnfast.dispatch.execute import Linear, linear_layer, listed_layer, reproducible
from gnnfast.dispatch.select import FEW_BYTES, Layer, cannot_win, linear_first, saves_little
from gnnfast.graph import ids
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.hardware import relative_bandwidth
from gnnfast.patching import class_of, is_dispatched
from gnnfast.pyg import listed
from gnnfast.pyg.adjacency import ends_of_new, found_graph, graph_of, regrets, running
from gnnfast.pyg.as_written import reduced
from gnnfast.pyg.known import option
from gnnfast.pyg.matrices import aggregated, is_matrix
from gnnfast.pyg.norm import make_normalising, normalised, over_list, sharing
from gnnfast.pyg.products import fits, is_csr, is_product, lin_parameters, placeholder, sparse_product
from gnnfast.pyg.small import ALONE, SMALL, are_few, bounds, is_new, is_new_and_tiny, most_ids, of_sums, remember
from gnnfast.pyg.verdict import check_module, global_hooks, keeps_methods, reduction_of, served, watch_of
from gnnfast.reporting import ran
from gnnfast.stream import is_capturing
from gnnfast.types import EXTREMA, FEATURE_DTYPES, LINEAR, REORDERED
from gnnfast.unsupported import Unsupported

_PLAIN = ("add", "sum", "mean", "max", "min")
_LEFT = (*LINEAR, *EXTREMA)  # what may be left for its size; the rest is linear
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
            if is_matrix(edge_index):
                if form.normalised:
                    return over_list(lambda _, *given: forward(*given), original, known, 2, module, x, edge_index, *rest)
                return _over_matrix(form, known, module, x, edge_index)
            few = _has_kept_few(module) if form.normalised else _is_few(form, module, x, edge_index)
            plain = bool(form.root) and rest[0] is None and rest[-1] is None
            if guards.context() or (few and not plain):
                return NotImplemented
            if form.hops and is_new_and_tiny(x, edge_index, module, "tiny sums cpu") and _keeps_order(form, module, edge_index):
                return NotImplemented
            weight, size = (None if at is None else rest[at] for at in (at_weight, at_size))
            parts = parts_of(form, known, module, at_weight is not None, _LEFT if few else LINEAR)
            if parts is None:
                return NotImplemented
            if plain:
                out = (_alone if few else _at_once)(form, parts, module, x, edge_index)
                if out is not None:
                    return _unit(form, module, out)
            if few:
                return NotImplemented
            call = _look(form, parts, module, x, edge_index, weight, size)
            if call is None:
                return NotImplemented
            first = form.first or _is_cheaper_first(module, call)
            if not first and (call.hops != 1 or _is_watched(weight)):
                return in_order(module, x, edge_index, *rest)
            if form.normalised:
                # By other names: what runs in place of this layer gets the user's.
                edges, weights, graph = normalise(module, call.x, call.edge_index, call.edge_weight, call.reduce, original)
                call = call._replace(edge_index=edges, edge_weight=weights, graph=graph)
            out = _in_one(module, call, first)
            if out is None:
                if not first:
                    return in_order(module, x, edge_index, *rest)
                out = _in_parts(module, call, {} if at_size is None else {"size": size}, at_weight is not None, bool(form.root))
            return _unit(form, module, out)

        return forward

    return make


def _unit(form: Form, module: Any, out: Tensor) -> Tensor:
    return functional.normalize(out, p=2.0, dim=-1) if form.unit and getattr(module, form.unit) else out


def _over_matrix(form: Form, known: Any, module: Any, x: Any, adj: Any) -> Any:
    """The layer over a matrix, where its operations, of which PyG has one more, and few questions are all."""
    if type(x) is not Tensor or not x.is_cuda:
        return NotImplemented
    own = module.__dict__
    modules = own["_modules"]
    lin, root = modules.get(form.lin), modules.get(form.root)
    if any(own.get(option) for option in form.refused) or any(global_hooks) or not is_product(lin):
        return NotImplemented
    weight, bias = lin_parameters(lin)
    if type(weight) not in guards.PLAIN or (bias is not None and type(bias) not in guards.PLAIN):
        return NotImplemented
    root_weight = None
    if not form.has_root or own.get(form.has_root):
        root_weight, root_bias = lin_parameters(root) if root is not None and is_product(root, type(lin)) else ("", "")
        if type(root_weight) not in guards.PLAIN or root_bias is not None:
            return NotImplemented
    out = aggregated(module, known, x, adj)
    if out is None:
        return NotImplemented
    try:
        return _unit(form, module, _multiplied(root, Linear(x, weight, bias, None, root_weight), out))
    except RuntimeError:  # PyG raises its own
        return NotImplemented


def _multiplied(root: Any, operands: Linear, out: Tensor) -> Tensor:
    """What the products of a layer, the second by ``root``, make of the aggregated features."""
    x, weight, bias, _, root_weight = operands
    out = functional.linear(out, weight, bias)
    if root_weight is None:
        return out
    hidden = x.requires_grad or not features.large(x)  # else they may be used compressed
    if hidden and x.is_cuda and not torch.is_autocast_enabled("cuda"):
        return out.addmm_(x, root_weight.t())  # a launch less than a product and a sum, which on a CPU have other last bits
    return out + (functional.linear(x, root_weight) if hidden else root(x))


def _operands(form: Form, parts: _Parts, module: Any, x: Any, edge_index: Any) -> Linear | None:
    """What a layer multiplies, if it has one tensor of features and one of edges, and all are plain and fit together; not where
    somebody would see other calls than PyG's."""
    if type(x) is not Tensor or x.layout is not _STRIDED or x.dim() != 2 or guards.function_modes():
        return None
    device, dtype, lin, root, root_weight = x.device, x.dtype, parts.lin, parts.root, None
    if type(edge_index) is not Tensor or edge_index.dim() != 2 or edge_index.device != device:
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


def _alone(form: Form, parts: _Parts, module: Any, x: Any, edge_index: Any) -> Tensor | None:
    """A layer that is left to PyG for its size, by PyG's operations alone: on small graphs what calls them takes as long. ``None``:
    PyG's forward must run."""
    operands = _operands(form, parts, module, x, edge_index)
    if operands is None or edge_index.dtype is not torch.int64:
        return None
    if x.is_cuda:
        ids.check()
    nodes, reduce = x.shape[0], parts.reduce
    try:
        pays, to_target = listed.pays(edge_index, x), parts.to_target
        out = listed.aggregate(edge_index, to_target, None, x, nodes, reduce) if pays else NotImplemented
        if out is NotImplemented:
            src, dst = edge_index.unbind() if to_target else reversed(edge_index.unbind())
            out = reduced(module, parts.aggr, x.index_select(0, src), dst, nodes, reduce)
        out = _multiplied(parts.root, operands, out)
    except (IndexError, ValueError, RuntimeError):  # PyG raises its own
        return None
    left.edge_index = None
    ran(parts.verdict.place, "PyG's own", ALONE[SMALL])
    return out


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
    if operands is None or (features.large(x) and not x.requires_grad):
        return None
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):  # to ask a device for its type takes as long again
        return None
    if torch.is_grad_enabled() and saved_tensors_are_watched():
        return None
    weight = operands.weight
    if x.dtype not in FEATURE_DTYPES or guards.operand("x", x) or guards.operand("weight", weight):
        return None
    if _saves_much(x, nodes, edge_index.shape[1], weight, 1):
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
    if not few or is_capturing() or reproducible.asked or torch.are_deterministic_algorithms_enabled():
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

    __slots__ = ("aggr", "code", "fetch", "hops", "kind", "lin", "options", "reduce", "root", "to_target", "verdict", "watch")

    def __init__(self, form: Form, known: Any, module: Any, weighted: bool) -> None:
        """Raises Unsupported if the layer is not what it declares."""
        own, cls = module.__dict__, type(module)
        modules = own["_modules"]
        self.lin, self.root, self.aggr = modules.get(form.lin), modules.get(form.root), modules.get("aggr_module")
        # Whoever has replaced a function in between would see features of another width.
        if not keeps_methods(cls, known) or "propagate" in own:
            raise Unsupported("a method is another than the layer's")
        self.verdict, self.watch, self.kind = check_module(module), watch_of(module), type(self.aggr)
        message = self.verdict.message
        shape = ("edge_weight", "view") if weighted else (None, "plain")
        if self.verdict.update is not None or self.verdict.reduce not in _LEFT or message.feature != "x" or message[1:3] != shape:
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
        if type(aggr) is not self.kind:
            return False
        cls = type(module)
        return (
            is_product(lin)
            and "propagate" not in own
            and self.fetch(own) == self.options
            and own.get("_cached_x") is None
            and not (form.bias and lin._parameters.get("bias") is not None)
            and self.watch.of_instance(cls, own, aggr) is self.verdict
            and cls.propagate.__code__ is self.code
        )


@functools.cache
def _fetcher(form: Form) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """What gets the options from a layer that decide how it is computed."""
    options = "flow", "node_dim", *form.refused, form.hops, form.has_root
    return operator.itemgetter(*filter(None, options))


_parts: dict[int, tuple[weakref.ref[Any], _Parts]] = {}


def parts_of(form: Form, known: Any, module: Any, weighted: bool, reduces: tuple[str, ...] = LINEAR) -> _Parts | None:
    """The parts of a layer, if it is what it declares and has one of the ``reduces``. What is not certain runs as PyG wrote it."""
    key = id(module)
    found = _parts.get(key)
    try:
        if found is not None and found[0]() is module:
            if found[1].hold(form, module):
                return found[1] if found[1].reduce in reduces else None
            del _parts[key]
        if reduction_of(module) not in reduces:
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
    if (pair and (not form.root or len(x) != 2)) or guards.function_modes():
        return None
    x, x_dst = x if pair else (x, x)
    if not parts.to_target and (x_dst is not x or size is not None):
        return None
    if type(edge_index) is not Tensor or edge_index.layout is not _STRIDED or edge_index.dim() != 2:
        return None
    csr = is_csr(x)
    if (csr and features.unsupported(x)) or (not csr and guards.operand("x", x)):
        return None
    if not guards.is_size(size):
        return None
    if not form.first and isinstance(weight, Tensor) and weight.is_inference() and torch.is_grad_enabled():
        return None  # a product that comes first needs weights for its gradient, which autograd does not keep of such
    of_lin, owner = parts.lin._parameters, module if form.bias else parts.lin
    of_bias = owner._parameters
    bias = of_bias["bias"] if "bias" in of_bias else getattr(owner, "bias", owner)
    if not fits(x, of_lin.get("weight"), bias) or (weight is not None and not form.first and _promotes(x, weight)):
        return None
    root = None
    if form.root and x_dst is not None and (not form.has_root or module.__dict__.get(form.has_root)):
        root = parts.root
        if root is None:
            return None  # PyG says what is missing
    copies = not form.first and (root is None or x_dst is not x or not _is_trained(root))
    of_parts = parts.reduce, parts.hops, copies, parts.to_target, parts.verdict.place
    return _Call(x, x_dst, edge_index, weight, size, parts.lin, root, bias, *of_parts)


def _is_trained(lin: Any) -> bool:
    """Whether a linear layer keeps what it multiplies."""
    weight: Any = lin_parameters(lin)[0] if isinstance(lin, torch.nn.Module) else None
    return type(weight) in guards.PLAIN and weight.requires_grad


def normalise(
    module: Any, x: Tensor, edge_index: Tensor, edge_weight: Any, reduce: str, original: FunctionType
) -> tuple[Tensor, Any, Any]:
    """The edges and weights as ``gcn_norm`` gives them to a layer with this ``original`` forward, and their graph if it is known.
    With ``reduce`` of ``"sum"`` nobody may see how loops are listed."""
    own = module.__dict__
    if not option(original, module, "normalize", True):
        return edge_index, edge_weight, None
    kept = option(original, module, "_cached_edge_index")
    if kept is not None:
        return *kept, None
    gcn_norm, num_nodes = original.__globals__["gcn_norm"], x.shape[0]
    options = (option(original, module, "improved", False), own["add_self_loops"], own["flow"], x.dtype)
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
        if root._parameters.get("bias") is not None or not fits(x_dst, root_weight, None) or x_dst.dtype != dtype:
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
    operands = Linear(x, lin_weight, bias, None if x_dst is x or root is None else x_dst, root_weight)
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
            x = (out, placeholder(call.x_dst)) if pair and call.to_target else out  # to sources there is one tensor alone
            out = module.propagate(call.edge_index, x=x, **kwargs)
    finally:
        running.graph = None
    out = out if call.bias is None else biased(out, call.bias)
    return out if call.root is None else out + call.root(call.x_dst)


_met = Sightings()


def _promotes(x: Any, weight: Any) -> bool:
    """Whether weighting changes the dtype of the features, so that PyG's product comes after and fails."""
    tensors = isinstance(x, Tensor) and isinstance(weight, Tensor)
    return tensors and torch.promote_types(x.dtype, weight.dtype) != x.dtype


def _project(module: Any, lin: Any, x: Tensor, copies: bool) -> Tensor:
    """``lin(x)`` without the bias; with ``copies``, the user may write into ``x`` before the backward pass."""
    out = sparse_product(x, lin.weight, lin, f"pyg {type(module).__name__}")
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
    if is_csr(x):
        ran(call.place, "linear first", _change(weight))  # in PyG's order they would have to be gathered
        return True
    if x.dtype not in REORDERED:
        return False
    found = features.measure_sighted(x) if features.sighted(x, module, "order") else None
    shares = [features.share(x, found, what) for what in ("aggregate", "product")] if found else []
    if not _saves_much(x, _num_dst(x, call.x_dst, call.size), call.edge_index.shape[1], weight, call.hops, *shares):
        return False
    ran(call.place, "linear first", _change(weight))
    return True


def _saves_much(x: Tensor, num_dst: int, num_edges: int, weight: Tensor, hops: int, *shares: float) -> bool:
    """Whether ``linear_first`` says so; ``shares`` as it takes them."""
    device, (width_out, width_in) = "cuda" if x.is_cuda else x.device.type, weight.shape
    if not shares and saves_little(device, num_edges, width_in, width_out, hops):
        return False  # at once
    grad = torch.is_grad_enabled()
    grads = grad and x.requires_grad, grad and weight.requires_grad
    return linear_first(Layer(device, x.shape[0], num_dst, num_edges, width_in, width_out, hops, *grads, *shares))


def _change(weight: Tensor) -> str:
    return f"{weight.shape[1]} -> {weight.shape[0]} features"
