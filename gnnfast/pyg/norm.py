"""Graph processing that is remembered with the user's graph: GCN normalisation, and ChebConv's.

Layers build a new ``edge_index`` with self loops and new weights in every forward pass. To use the same tensors again saves that
work and, as they are the same objects, lets the graph cache find their CSR. Whoever can keep what ``gcn_norm`` returns, or write
into it, gets copies: only a layer whose forward pass lets nobody see it shares what is remembered. If it only sums over the graph,
that is made in one operation (:mod:`gnnfast.ops.gcn_norm`), which on a GPU does not list loops as PyG lists them. One
operation lists everything that is made here as PyG does (:mod:`gnnfast.pyg.listed`).
"""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.cache import Sightings, cache, is_constant, keep_if_captured, usable_later
from gnnfast.dispatch.execute import reproducibly
from gnnfast.graph import Graph, ids
from gnnfast.graph.checks import MOST_EDGES, MOST_NODES, saved_tensors_are_watched
from gnnfast.patching import class_of, is_dispatched
from gnnfast.pyg import known, listed
from gnnfast.pyg.adjacency import Listed, running
from gnnfast.pyg.matrices import is_matrix, weighed
from gnnfast.pyg.small import are_few, is_new_and_tiny
from gnnfast.pyg.sparse import is_small_on_cpu
from gnnfast.pyg.verdict import check_module, is_by_name
from gnnfast.reporting import ran
from gnnfast.types import FEATURE_DTYPES, INDEX_DTYPES, LINEAR, REORDERED
from gnnfast.unsupported import Unsupported

_PLACE = "pyg gcn_norm"
_ops = torch.ops.gnnfast


class _State(threading.local):
    """``edge_index`` is the one of a layer that may share the result of its next call of ``gcn_norm``; ``sums``: of which it
    only makes sums. ``passing`` is one of few edges that a layer with a ``__norm__`` of its own meets for the first time."""

    edge_index: Any = None
    passing: Any = None
    values: Any = None
    sums = False


_state = _State()


def sharing(edge_index: Any, sums: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function that normalises ``edge_index`` once and lets nobody see the result, which may then be shared; ``sums``: nor
    how its loops are listed."""
    _state.edge_index, _state.sums = edge_index, sums
    try:
        return function(*arguments)
    finally:
        _state.edge_index = running.graph = running.passing = None


def passing(edge_index: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function that normalises the few edges of an ``edge_index`` that it meets for the first time: nothing of them is
    kept."""
    _state.passing = edge_index
    try:
        return function(*arguments)
    finally:
        _state.passing = running.passing = None


def normalised(
    edge_index: Tensor, edge_weight: Any, num_nodes: Any, improved: bool, add_self_loops: bool, flow: str, dtype: Any
) -> tuple[Tensor, Tensor, Graph | None] | None:
    """The edges and weights of ``gcn_norm`` for somebody who shares them and only sums over them, remembered, and the graph of the
    edges where these are new; ``None`` if PyG's own must make them."""
    if type(edge_index) is not Tensor or edge_index.dtype not in INDEX_DTYPES or edge_index.is_inference():
        return None
    shape, is_cuda = edge_index.shape, edge_index.is_cuda
    if guards.operand("edge_index", edge_index) or len(shape) != 2 or shape[0] != 2 or type(num_nodes) is not int:
        return None
    if num_nodes >= MOST_NODES or shape[1] + num_nodes >= MOST_EDGES:
        return None
    if not add_self_loops and edge_index.dtype is not torch.int64:  # releases of torch differ in whether they scatter by int32
        return None
    keys: tuple[Tensor, ...] = (edge_index,)
    if edge_weight is not None:
        if guards.operand("edge_weight", edge_weight) or not is_constant(edge_weight) or edge_weight.shape != shape[1:]:
            return None
        if edge_weight.device != edge_index.device or (is_cuda and torch.are_deterministic_algorithms_enabled()):
            return None
        keys, dtype = (edge_index, edge_weight), edge_weight.dtype
    elif dtype is None:
        dtype = torch.get_default_dtype()
    if dtype not in FEATURE_DTYPES or flow not in _FLOWS or known.replaced_in_norm():
        return None
    key, to_target = ("gcn_norm for sums", num_nodes, improved, add_self_loops, flow, dtype), flow == "source_to_target"
    make = _ops.gcn_norm_coo.default if is_cuda or dtype not in REORDERED else _ops.gcn_norm_listed.default
    # How an operation lists edges depends on no weights: those that are new are weighed over the graph that is kept with the edges.
    weight, key_of_graph = cache.find(keys, key), ("gcn_norm graph", num_nodes, flow, make)
    graph = cache.find((edge_index,), key_of_graph) if add_self_loops else None
    unlisted = add_self_loops and graph is None
    if weight is None or unlisted:
        capturing = guards.capturing(edge_index.device)
        if capturing and (edge_weight is None or unlisted):
            return None
        if is_cuda and not capturing:
            ids.watch(edge_index)
        # PyG weighs loops by `improved` only where edges have weights.
        fill = (2.0 if improved and edge_weight is not None else 1.0) if add_self_loops else None
        try:
            with usable_later():
                made, weight = make(edge_index, edge_weight, num_nodes, fill, to_target, dtype)
                if unlisted:
                    graph = Listed(made, num_nodes, num_nodes, to_target)
                    graph.edges.checked = True  # by the operation
        except RuntimeError:  # an id is out of range: PyG raises its own
            return None
        # On a GPU a capture may follow, which finds only what is kept.
        if unlisted and (is_cuda or edge_weight is None or (shape[1] > LISTED_AGAIN and _is_met(edge_index))):
            cache.add((edge_index,), key_of_graph, graph)
        if edge_weight is None or (not capturing and edge_weight is not _state.values and (is_cuda or _is_met(edge_weight))):
            cache.add(keys, key, weight)
    elif is_cuda:
        keep_if_captured(weight)
    if is_cuda:
        keep_if_captured(graph)
    ran(_PLACE, "in one operation", "for sums that nobody else sees")
    return (edge_index if graph is None else graph.edge_index), weight, graph


def _listed(*arguments: Any) -> Any:
    made = listed.gcn_norm(*arguments)
    if made is not NotImplemented:
        ran(_PLACE, "in one operation", "as PyG lists edges")
    return made


_FLOWS = ("source_to_target", "target_to_source")


def make_gcn_norm(original: FunctionType) -> Any:
    """A dispatcher for ``gcn_norm`` that calls ``original`` once per graph."""

    def gcn_norm(
        edge_index: Any, edge_weight: Any, num_nodes: Any, improved: Any, add_self_loops: Any, flow: Any, dtype: Any
    ) -> Any:
        shares, _state.edge_index = _state.edge_index is edge_index, None
        if is_matrix(edge_index):
            return NotImplemented
        arguments = (num_nodes, improved, add_self_loops, flow, dtype)
        if not shares and _is_left(edge_index, edge_weight):
            if known.replaced_in_norm():
                return NotImplemented
            if not (isinstance(edge_weight, Tensor) and edge_weight.requires_grad and torch.is_grad_enabled()):
                return _listed(edge_index, edge_weight, *arguments)
            anew = None
            if not guards.context() and not guards.operand("edge_weight", edge_weight):
                with contextlib.suppress(IndexError, RuntimeError):
                    anew = _weighed_anew(edge_index, edge_weight, *arguments, keeps=False)
            return NotImplemented if anew is None else anew
        if shares and _state.sums and not guards.context():
            made = normalised(edge_index, edge_weight, *arguments)
            if made is not None:
                running.graph = made[2]
                return made[:2]
        if not _are_plain(edge_index, edge_weight) or type(num_nodes) not in (int, type(None)) or known.replaced_in_norm():
            return NotImplemented
        constant = edge_weight is None or is_constant(edge_weight)
        if not constant or (edge_weight is not None and not _is_met(edge_weight)):
            anew = None
            if not constant or _sightings.again(edge_index):  # else PyG's own is as good: it is not known where the weights go
                with contextlib.suppress(IndexError, RuntimeError):  # PyG raises its own, or counts negative ids from the end
                    anew = _weighed_anew(edge_index, edge_weight, *arguments)
            if anew is None:
                return _listed(edge_index, edge_weight, *arguments)
            ran(_PLACE, "remembered structure", "the weights are new, or require a gradient")
            normed, weight = anew
            if shares or normed is edge_index:
                return anew
            copy = normed.clone()
            cache.add_copy(copy, normed)
            return copy, weight

        def make() -> Any:
            made = listed.gcn_norm(edge_index, edge_weight, *arguments)
            return original(edge_index, edge_weight, *arguments) if made is NotImplemented else made

        return _remembered(edge_index, edge_weight, ("gcn_norm", *arguments), shares, _PLACE, make)

    return gcn_norm


class _Structure(NamedTuple):
    """Edges of which every node has one loop, the last ones ``[2, E' + N]``; the ids of the edges that are no loops (``None``: no
    edge is one), and of those that are, with their nodes."""

    edge_index: Tensor
    kept: Tensor | None
    loops: Tensor
    nodes: Tensor

    @classmethod
    def of(cls, edge_index: Tensor, num_nodes: int) -> _Structure:
        with usable_later():
            made = _ops.loops_listed.default(edge_index, num_nodes, True)
            if made.shape[1] == edge_index.shape[1] + num_nodes:
                none = edge_index.new_empty(0)
                return cls(made, None, none, none)
            is_loop = edge_index[0] == edge_index[1]
            loops = is_loop.nonzero().view(-1)
            return cls(made, (~is_loop).nonzero().view(-1), loops, edge_index[0].index_select(0, loops))


def _weighed_anew(
    edge_index: Tensor,
    edge_weight: Tensor,
    num_nodes: Any,
    improved: bool,
    add_self_loops: bool,
    flow: str,
    dtype: Any,
    keeps: bool = True,
) -> tuple[Tensor, Tensor] | None:
    """``gcn_norm`` of weights that are others in each call, over a structure that is not, and is kept, or of edges that are new;
    ``None`` if PyG's own must run. The same operations on the weights, but for how they are gathered: the gradient of ``t[index]``
    sorts the index."""
    edges = edge_index.shape[1] if edge_index.dim() == 2 and edge_index.shape[0] == 2 else -1
    if flow not in _FLOWS or edge_weight.shape != (edges,) or edge_index.dtype is not torch.int64:
        return None
    if num_nodes is None:  # as PyG finds it, but once
        if guards.capturing(edge_index.device):
            return None
        find = lambda: int(edge_index.max()) + 1 if edges else 0  # noqa: E731
        num_nodes = cache.get((edge_index,), "number of nodes", find) if keeps else find()
    if edge_weight.device != edge_index.device or not edge_weight.is_floating_point():
        return None
    normed, weight = edge_index, edge_weight
    if add_self_loops:
        key = "gcn_norm structure", num_nodes
        if guards.capturing(edge_index.device):
            structure = cache.find((edge_index,), key)
            if structure is None:
                return None
            keep_if_captured(structure)
        elif keeps:
            structure = cache.get((edge_index,), key, lambda: _Structure.of(edge_index, num_nodes))
        else:
            structure = _Structure.of(edge_index, num_nodes)
        normed, loops = structure.edge_index, weight.new_full((num_nodes,), 2.0 if improved else 1.0)
        if structure.kept is not None:
            loops = loops.index_put((structure.nodes,), weight.index_select(0, structure.loops))
            weight = weight.index_select(0, structure.kept)
        weight = torch.cat([weight, loops])
    row, col = normed[0], normed[1]
    root = weight.new_zeros(num_nodes).scatter_add(0, col if flow == "source_to_target" else row, weight).pow_(-0.5)
    root.masked_fill_(root == math.inf, 0)
    return normed, root.index_select(0, row) * weight * root.index_select(0, col)


def make_laplacian(original: FunctionType) -> Any:
    """A dispatcher for ``ChebConv.__norm__``, which calls ``original`` once per graph that is used again."""

    def laplacian(
        module: Any, edge_index: Any, num_nodes: Any, edge_weight: Any, normalization: Any, lambda_max: Any, dtype: Any, batch: Any
    ) -> Any:
        key, arguments = ("laplacian", num_nodes, normalization, lambda_max, dtype), (normalization, lambda_max, dtype)

        def make() -> Any:
            given = edge_index, num_nodes, edge_weight, *arguments
            made = NotImplemented if known.replaced_in_laplacian() else listed.laplacian(*given)
            return original(module, *given, batch) if made is NotImplemented else made

        if edge_index is not None and _state.passing is edge_index:
            _state.passing = None
            _sightings.again(edge_index if edge_weight is None else edge_weight, key)
            made = make()
            running.passing = made[0]
            return made
        shares, _state.edge_index = _state.edge_index is edge_index, None
        if not _are_plain(edge_index, edge_weight) or type(num_nodes) is not int or known.replaced_in_laplacian():
            return NotImplemented
        if type(lambda_max) not in (type(None), int, float) or (edge_weight is not None and not is_constant(edge_weight)):
            return NotImplemented
        if _are_watched():
            return NotImplemented
        if not _sightings.again(edge_index if edge_weight is None else edge_weight, key):
            made = make()
            running.passing = made[0] if shares else None
            return made
        return _remembered(edge_index, edge_weight, key, shares, f"pyg {type(module).__name__}", make)

    return laplacian


def _are_watched() -> bool:
    """Whether what was met before must not decide."""
    return torch.is_grad_enabled() and saved_tensors_are_watched()


def _are_plain(edge_index: Any, edge_weight: Any) -> bool:
    """Whether what is made of edges and weights may be kept, where they are constant."""
    if type(edge_index) is not Tensor or edge_index.layout is not torch.strided or guards.context():
        return False
    if edge_index.is_inference() or guards.operand("edge_index", edge_index):
        return False
    return edge_weight is None or not (guards.operand("edge_weight", edge_weight) or edge_weight.is_inference())


def _remembered(
    edge_index: Tensor, edge_weight: Any, key: tuple[Any, ...], shares: bool, place: str, make: Callable[[], Any]
) -> Any:
    """The edges and weights that ``make()`` gives, computed once per graph: copies, if whoever asks does not share them."""

    def build() -> tuple[Tensor | None, Tensor]:
        # Under inference_mode the tensors could not be used in training later.
        with torch.no_grad(), torch.inference_mode(False):
            normed, weight = make()
        # Holding the key itself would keep it alive for ever.
        return None if normed is edge_index else normed, weight

    keys = (edge_index,) if edge_weight is None else (edge_index, edge_weight)
    key = (*key, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
    if guards.capturing(edge_index.device):  # PyG's own would wait for the device; what is remembered is read in each replay
        found = cache.find(keys, key)
        if found is None:
            return NotImplemented
        keep_if_captured(found)
    else:
        found = cache.get(keys, key, build)
    normed, weight = found
    ran(place, "remembered", "computed once per graph")
    if shares:
        return edge_index if normed is None else normed, weight
    if normed is None:
        return edge_index, weight.clone()
    copy = normed.clone()
    cache.add_copy(copy, normed)
    return copy, weight.clone()


def _is_left(edge_index: Any, edge_weight: Any, *key: str) -> bool:
    """Whether edges or weights are new, and so few that to keep what is made of them takes longer than to make it."""
    if type(edge_index) is not Tensor or not are_few(edge_index, ROW_BYTES, "new cuda" if edge_index.is_cuda else "new cpu"):
        return False
    if _are_watched():
        return False
    # Of edges alone where nothing is kept of weights; and on a GPU, where new weights are weighed over what is kept of edges.
    of_edges = type(edge_weight) is not Tensor or edge_weight.requires_grad or edge_index.is_cuda
    return not _sightings.again(edge_index if of_edges else edge_weight, *key)


def _is_met(t: Tensor) -> bool:
    """Whether to keep what is made of constant weights, or of edges."""
    return _are_watched() or _sightings.again(t)


ROW_BYTES = 16  # of an edge: PyG's own takes 60 us and a few ns an edge, to keep and copy what it gives 45
LISTED_AGAIN = 1 << 14  # edges up to which a CPU lists them again for each new weights sooner than it reorders these
_sightings = Sightings()


def make_normalising(original: FunctionType, asks: bool = True) -> Callable[..., Any]:
    """A dispatcher for the ``forward(x, edge_index, ...)`` of a layer that begins by calling ``gcn_norm``, or a ``__norm__`` of its
    own: it shares the result where nothing but PyG's own code can see it, and the graph is not new and tiny, if it ``asks``."""
    cls, position = class_of(original), list(inspect.signature(original).parameters).index("edge_index")
    of_its_own = hasattr(cls, "__norm__")

    def forward(*arguments: Any) -> Any:
        module = arguments[0]
        if not known.option(original, module, "normalize", True):
            return NotImplemented  # the next call of gcn_norm would be somebody else's
        edge_index = arguments[position]
        if is_matrix(edge_index):
            return NotImplemented if of_its_own else over_list(over_edges, original, cls, position, *arguments)
        if of_its_own and _is_left(edge_index, None, "layer"):
            return passing(edge_index, original, *arguments)
        return over_edges("", *arguments)

    def over_edges(reduce: str, *arguments: Any) -> Any:
        """``reduce`` as :func:`keeps_to_itself` has it, if that was asked and who normalises is PyG."""
        module, edge_index = arguments[0], arguments[position]
        if asks and not of_its_own and is_new_and_tiny(arguments[1], edge_index, module, "tiny sums cpu"):
            return NotImplemented
        if not reduce:
            reduce = "" if guards.context() else keeps_to_itself(module, cls)
            if not reduce or not is_dispatched(getattr(cls, "__norm__", None) or original.__globals__.get("gcn_norm")):
                return NotImplemented  # somebody else's would see what is shared
        # APPNP draws a number for each edge that is listed.
        sums = reduce == "sum" and not (module.training and module.__dict__.get("dropout"))
        return sharing(edge_index, sums, original, *arguments)

    return forward


def over_list(over_edges: Callable[..., Any], original: FunctionType, cls: type, position: int, *arguments: Any) -> Any:
    """The forward of a layer that normalises, over the edges and values of the matrix at the ``position`` of its arguments: PyG's
    ``gcn_norm`` sorts and makes another matrix in each call. ``over_edges(reduce, ...)`` runs it, with the arguments."""
    module, adj, weight = arguments[0], arguments[position], arguments[position + 1]
    found, reduce = None, ""
    fuses = weight is None and module.fuse and not guards.context() and not _hops_are_few(module, adj, arguments[1])
    if type(adj) is Tensor and adj.is_cuda and torch.is_autocast_enabled("cuda"):
        fuses = fuses and _ends_otherwise(module.__dict__)
    if fuses and known.multiplies(cls) and is_dispatched(original.__globals__.get("gcn_norm")):
        reduce = keeps_to_itself(module, cls)
        if reduce in LINEAR and is_by_name(module, reduce):
            found = weighed(original, module, adj, arguments[1])
    if found is None:
        return NotImplemented
    arguments = (*arguments[:position], *found, *arguments[position + 2 :])
    _state.values = found[1]
    try:
        with reproducibly(arguments[1].is_cuda):
            out = over_edges(reduce, *arguments)
            return original(*arguments) if out is NotImplemented else out
    finally:
        _state.values = None


def _ends_otherwise(own: dict[str, Any]) -> bool:
    """Whether the dtype of a layer's result is not that of its product, which under autocast has 16 bits over a matrix on a GPU
    alone: there is a linear layer, and the bias that the layer has besides is not left out."""
    return not own["_modules"].keys().isdisjoint(("lin", "lins")) and own["_parameters"].get("bias", own) is not None


def _hops_are_few(module: Any, adj: Any, x: Any) -> bool:
    """Whether a layer of several hops adds no loops, so that PyG's normalisation sorts nothing, and its products are left to torch
    on a CPU: each takes less than a hop over a list."""
    own = module.__dict__
    if own.get("K", 1) == 1 or own.get("add_self_loops") or torch.is_grad_enabled() or type(x) is not Tensor:
        return False
    return type(adj) is Tensor and adj.is_cpu and is_small_on_cpu(adj, x, False)


def keeps_to_itself(module: Any, cls: type) -> str:
    """How a layer of class ``cls`` reduces, if only PyG's own code sees the graph in its forward pass; else empty."""
    own = module.__dict__
    if type(module) is not cls or own.get("cached") or saved_tensors_are_watched() or not own.keys().isdisjoint(_SEEING):
        return ""
    try:
        verdict = check_module(module)
    except Unsupported:
        return ""
    return "" if verdict.update is not None else verdict.reduce


_SEEING = ("propagate", "forward", "message_and_aggregate", "__norm__")
