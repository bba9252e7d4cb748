"""GINConv, and GINEConv over small graphs: a sum over edges and ``(1 + eps) * x`` by few operations, then the layer's network."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast import features, guards
from gnnfast.cache import Sightings, cache
from gnnfast.config import Settings, settings
from gnnfast.dispatch.execute import aggregate, listed_shifted_sum, shifted_sum
from gnnfast.dispatch.select import cannot_win
from gnnfast.graph import Graph, ids
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.patching import class_of, is_dispatched
from gnnfast.pyg import listed
from gnnfast.pyg.adjacency import ends_of_new, found_graph, graph_of, regrets
from gnnfast.pyg.matrices import aggregated, is_matrix
from gnnfast.pyg.messages import GINE
from gnnfast.pyg.products import fits, is_csr, is_product, placeholder, through
from gnnfast.pyg.small import ALONE, SMALL, of_sums
from gnnfast.pyg.verdict import check_module, keeps_methods
from gnnfast.reporting import ran
from gnnfast.types import FEATURE_DTYPES, LINEAR
from gnnfast.unsupported import Unsupported

_STRIDED = torch.strided


def make_gin_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``GINConv.forward(x, edge_index, size)``."""

    known = class_of(original)

    def gin_conv(module: Any, x: Any, edge_index: Any, size: Any) -> Any:
        plain = type(x) is Tensor and size is None and x.layout is _STRIDED
        if plain and is_matrix(edge_index):
            return _over_matrix(known, module, x, edge_index) if x.is_cuda else NotImplemented  # its product is all that is served
        if guards.context():
            return NotImplemented
        if plain:
            return _gin(known, module, x, edge_index)
        x_src, x_dst = _pair(x)
        if not is_csr(x_dst) or features.unsupported(x_dst):
            return NotImplemented
        out = module.propagate(edge_index, x=(x_src, placeholder(x_dst)), size=size)
        return module.nn(out + (1 + module.eps) * x_dst.to_dense())  # torch cannot scale torch.sparse_csr

    return gin_conv


def make_gine_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``GINEConv.forward(x, edge_index, edge_attr, size)``."""

    known = class_of(original)

    def gine_conv(module: Any, x: Any, edge_index: Any, edge_attr: Any, size: Any) -> Any:
        plain = type(x) is Tensor and size is None and x.layout is _STRIDED and type(edge_attr) is Tensor
        if not plain or guards.context() or not guards.has_kernels(x) or torch.is_autocast_enabled(x.device.type):
            return NotImplemented
        lin, width = module.__dict__["_modules"].get("lin"), x.shape[-1]
        if lin is not None:
            if not is_product(lin) or not fits(edge_attr, lin.weight, lin.bias):
                return NotImplemented
            width = lin.weight.shape[0]
        alike = edge_attr.dim() == 2 and edge_attr.dtype is x.dtype and not guards.operand("edge_attr", edge_attr)
        if not alike or edge_attr.device != x.device or (edge_attr.shape[1] if lin is None else width) != x.shape[-1]:
            return NotImplemented
        return _gin(known, module, x, edge_index, edge_attr)

    return gine_conv


def _gin(known: Any, module: Any, x: Tensor, edge_index: Any, edge_attr: Tensor | None = None) -> Any:
    """The layer over one graph with as few operations as there can be; with ``edge_attr``, GINE's, if it is small."""
    if type(edge_index) is not Tensor or edge_index.layout is not _STRIDED or edge_index.dim() != 2 or x.dim() != 2:
        return NotImplemented
    own, is_cuda = module.__dict__, x.is_cuda
    training, row_bytes = torch.is_grad_enabled(), x.shape[1] * x.element_size()
    nbytes, current = edge_index.shape[1] * row_bytes, settings()
    if is_cuda:
        small = cannot_win(nbytes, training, current)
    else:
        tiny, new = of_sums(x, "sum") if edge_attr is None else ("tiny cpu", "cpu")
        small = cannot_win(nbytes, training, current, new)
        if small and not cannot_win(nbytes, training, current, tiny):
            # A format wins from the second step on, if it is over the same graph.
            small = not (saved_tensors_are_watched() or _met.again(edge_index, id(module)))
    eps = own["_buffers"].get("eps", own["_parameters"].get("eps"))
    if guards.operand("x", x) or x.dtype not in FEATURE_DTYPES:
        return NotImplemented
    if own["node_dim"] not in (-2, 0):
        return NotImplemented
    if not isinstance(eps, Tensor) or guards.operand("eps", eps) or eps.dtype is not x.dtype or eps.get_device() != x.get_device():
        return NotImplemented
    if eps.dim() != 1 or eps.numel() != 1 or not keeps_methods(type(module), known) or "propagate" in own:
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
            to_target, nodes = own["flow"] == "source_to_target", x.shape[0]
            scale, graph = 1 + eps, found_graph(edge_index, nodes, nodes, to_target)
            if graph is not None:
                cache.hits += 1
            made = _over_new(x, scale, edge_index, to_target, verdict) if graph is None else None
            if made is None:
                graph = graph or graph_of(edge_index, nodes, nodes, to_target)
                made = _over_graph(module, x, scale, graph, verdict, current)
            out = made
    except (Unsupported, IndexError, ValueError):  # PyG raises its own
        return NotImplemented
    return through(module.nn, out)


def _over_graph(module: Any, x: Tensor, scale: Tensor, graph: Graph, verdict: Any, current: Settings) -> Tensor:
    """The reduction over a graph, and ``scale * x``. Raises Unsupported."""
    if graph.device != x.device:
        raise Unsupported("the edges are on another device")
    if verdict.reduce in LINEAR and current.is_free and (x.requires_grad or not features.large(x)):
        return shifted_sum(graph, x, scale, verdict.reduce, current, verdict.place)
    # The product with 1 + eps keeps x where eps needs a gradient, in PyG too.
    how: Any = dict(place=verdict.place, ties="scatter", training=module.training, owner=module, copies=True)
    made = aggregate(graph, x, None, verdict.reduce, **how)
    return made.addcmul_(x, scale) if verdict.reduce in LINEAR else torch.addcmul(made, x, scale)  # a maximum is kept


def _over_new(x: Tensor, scale: Tensor, edge_index: Tensor, to_target: bool, verdict: Any) -> Tensor | None:
    """The sum over a graph on a GPU that is new, and ``scale * x``, if no format of it pays."""
    if not x.is_cuda or edge_index.device != x.device or verdict.reduce not in LINEAR:
        return None
    if torch.is_grad_enabled() and saved_tensors_are_watched():
        return None  # what was met before must not decide there
    ends = ends_of_new(edge_index, to_target)
    made = None if ends is None else listed_shifted_sum(ends, x, scale, verdict.reduce, regrets.of(edge_index), verdict.place)
    if made is None:
        return None
    regrets.set(edge_index, made[1])
    return made[0]


def _over_matrix(known: Any, module: Any, x: Tensor, adj: Any) -> Any:
    """GINConv over a matrix, where its operations, of which PyG has one more, and few questions are all."""
    own = module.__dict__
    eps = own["_buffers"].get("eps", own["_parameters"].get("eps"))
    if type(eps) not in guards.PLAIN or eps.dtype is not x.dtype or eps.shape != (1,):
        return NotImplemented
    out = aggregated(module, known, x, adj)
    if out is None:
        return NotImplemented
    try:
        out.addcmul_(x, 1 + eps)
    except RuntimeError:  # PyG raises its own
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
    ran(place, "PyG's own", ALONE[SMALL])
    return out


def _pair(x: Any) -> tuple[Any, Any]:
    if isinstance(x, Tensor):
        return x, x
    return x if isinstance(x, tuple) and len(x) == 2 else (None, None)
