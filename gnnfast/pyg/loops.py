"""Self loops that layers remove and add in every forward pass, edges that they turn around, and those of several types that they
put side by side: remembered with the user's ``edge_index`` from its second use on. Users get copies, which are known to equal what
is kept, so that the graph of these is found again. And the graphs of layers that add a loop to each node, with its features."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast import _native, guards
from gnnfast.cache import Sightings, cache, keep_if_captured, usable_later
from gnnfast.dispatch import edges
from gnnfast.dispatch.several import degrees
from gnnfast.graph import Graph
from gnnfast.patching import class_of, is_dispatched
from gnnfast.pyg import listed
from gnnfast.pyg.adjacency import Listed
from gnnfast.pyg.known import replaced_in_loops
from gnnfast.pyg.matrices import is_matrix
from gnnfast.pyg.norm import keeps_to_itself
from gnnfast.pyg.small import are_few, bounds
from gnnfast.pyg.verdict import global_hooks, module_hooks
from gnnfast.types import INDEX_DTYPES, REORDERED
from gnnfast.unsupported import Unsupported

if _native.cpu.loaded:
    from gnnfast.ops.loop_means import LOOP_MEANS
    from gnnfast.ops.spmm import call

_sightings = Sightings()


def make_remove_self_loops(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``remove_self_loops(edge_index, edge_attr)``."""

    def remove_self_loops(edge_index: Any, edge_attr: Any) -> Any:
        if edge_attr is not None or is_matrix(edge_index):
            return NotImplemented
        if _is_left(edge_index) or not _is_known(edge_index):
            return _listed(edge_index, 0, True)
        return _copy_of_kept(edge_index, "no self loops", lambda: _made(original, edge_index))

    return remove_self_loops


def make_add_self_loops(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``add_self_loops(edge_index, edge_attr, fill_value, num_nodes)``."""

    def add_self_loops(edge_index: Any, edge_attr: Any, fill_value: Any, num_nodes: Any) -> Any:
        if edge_attr is not None or is_matrix(edge_index) or type(num_nodes) not in (int, type(None)):
            return NotImplemented
        if _is_left(edge_index) or not _is_known(edge_index):
            return _listed(edge_index, num_nodes, False)
        origin = cache.origin(edge_index)
        origin = edge_index if origin is None else origin
        return _copy_of_kept(origin, ("self loops added", num_nodes), lambda: _made(original, origin, None, None, num_nodes))

    return add_self_loops


def _listed(edge_index: Any, num_nodes: int | None, remove: bool) -> Any:
    """What the two functions return, without attributes, of edges of which nothing is kept."""
    made = NotImplemented if replaced_in_loops() else listed.loops(edge_index, num_nodes, remove)
    return made if made is NotImplemented else (made, None)


def flipped(edge_index: Any, layer: Any) -> Any:
    """``edge_index.flip([0])`` for a ``layer``, which gets what is kept where it is PyG's own and nobody sees what it is given."""
    bound = bounds.get(id(layer))
    if (bound is not None and bound.are_few(edge_index)) or not _is_known(edge_index):
        return edge_index.flip([0])

    def make() -> Tensor:
        with usable_later():
            return edge_index.flip([0])

    kept = _kept((edge_index,), "flipped", make)
    if kept is None:
        return edge_index.flip([0])
    forward: Any = getattr(type(layer), "forward", None)
    of_pyg = is_dispatched(forward) and class_of(forward) is type(layer)
    if of_pyg and not any(module_hooks(layer.__dict__)) and not any(global_hooks) and keeps_to_itself(layer, type(layer)):
        return kept
    return _copy(kept)


def make_side_by_side(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``construct_bipartite_edge_index(edge_index_dict, src_offset_dict, dst_offset_dict, edge_attr_dict,
    num_nodes)``, which HGTConv calls: edges of all types, with ids that count the nodes of all."""

    def side_by_side(edges: Any, src_offsets: Any, dst_offsets: Any, attributes: Any, num_nodes: Any) -> Any:
        try:
            listed = tuple(edges[name] for name in src_offsets)
            offsets = tuple((src, dst_offsets[name[-1]]) for name, src in src_offsets.items())
            of_edges = None if attributes is None else [_of_type(attributes, name) for name in src_offsets]
        except (AttributeError, KeyError, IndexError, TypeError):  # PyG raises its own
            return NotImplemented
        if not listed or any(type(n) is not int for pair in offsets for n in pair):
            return NotImplemented
        if all(map(_is_left, listed)) or not _are_known(listed):
            return NotImplemented

        def make() -> Tensor:
            return _made(original, edges, src_offsets, dst_offsets, None, num_nodes)

        kept = _kept(listed, ("side by side", offsets), make)
        if kept is None:
            return NotImplemented
        if of_edges is None:
            return _copy(kept), None
        counts = [edge_index.shape[1] for edge_index in listed]
        rows = [t if t.size(0) == n else t.expand(n, -1) for t, n in zip(of_edges, counts)]
        return _copy(kept), torch.cat(rows, dim=0)

    return side_by_side


def _of_type(attributes: Any, name: Any) -> Any:
    return attributes["__".join(name) if isinstance(attributes, torch.nn.ParameterDict) else name]


def _are_known(listed: tuple[Any, ...]) -> bool:
    """Whether all of several were used before, and can be put side by side."""
    known = [_is_known(edge_index) for edge_index in listed]  # each of which is now met
    return all(known) and len({(edge_index.dtype, edge_index.device) for edge_index in listed}) == 1


def with_self_loops(edge_index: Tensor, num_nodes: int) -> Tensor:
    """What the two functions make of an ``edge_index`` one after the other."""
    with usable_later():
        return torch.ops.gnnfast.loops_listed.default(edge_index, num_nodes, True)  # type: ignore[no-any-return]


def kept_edges(edge_index: Tensor, graph: Listed) -> Tensor:
    """The ids of the edges that are no self loops, int64: kept with the ``graph`` in which each node has one. Raises
    Unsupported."""
    if graph.kept is None:
        if guards.capturing(edge_index.device):
            raise Unsupported("a CUDA graph is being captured, and the self loops are not known; run once before")
        with torch.no_grad(), usable_later():
            first, second = edge_index.unbind()
            graph.kept = (first != second).nonzero().view(-1)
        graph.edges.grew(graph.kept.nbytes)
    elif edge_index.is_cuda:
        keep_if_captured(graph.kept)
    return graph.kept


def _is_left(edge_index: Any) -> bool:
    """Whether there are so few edges that to find and copy what is kept takes longer than to make it."""
    return type(edge_index) is Tensor and edge_index.is_cpu and edge_index.dim() == 2 and are_few(edge_index, ROW_BYTES)


ROW_BYTES = 128  # of an edge with 32 features: so that sums over what is made of fewer are left alone, too


def _is_known(edge_index: Any) -> bool:
    """Whether an ``edge_index`` was used before, or is a copy of what is kept."""
    if type(edge_index) is not Tensor or not (_sightings.again(edge_index) or cache.origin(edge_index) is not None):
        return False  # at once, where graphs are new
    if edge_index.layout is not torch.strided or edge_index.dtype not in INDEX_DTYPES or edge_index.dim() != 2:
        return False
    return not (guards.context() or guards.operand("edge_index", edge_index) or edge_index.is_inference() or replaced_in_loops())


def _made(original: FunctionType, *arguments: Any) -> Tensor:
    with torch.no_grad(), torch.inference_mode(False):
        return original(*arguments)[0]  # type: ignore[no-any-return]


def _kept(of: tuple[Tensor, ...], key: Hashable, make: Callable[[], Tensor]) -> Tensor | None:
    """What is made of each ``edge_index`` once; ``None`` if it would be made while a CUDA graph is captured."""
    if not guards.capturing(of[0].device):
        return cache.get(of, key, make)  # type: ignore[no-any-return]
    kept: Tensor | None = cache.find(of, key)
    if kept is not None:
        keep_if_captured(kept)
    return kept


def _copy(kept: Tensor) -> Tensor:
    copy = kept.clone()
    cache.add_copy(copy, kept)
    return copy


def _copy_of_kept(edge_index: Tensor, key: Hashable, make: Callable[[], Tensor]) -> Any:
    """A copy of that, and no attributes of edges."""
    kept = _kept((edge_index,), key, make)
    return NotImplemented if kept is None else (_copy(kept), None)  # PyG's own would wait for the device


def looped_graph(edge_index: Tensor, num_src: int, num_dst: int, listed: bool) -> tuple[Any, Tensor]:
    """The graph with self loops, and its edges if they are ``listed``, else as given: kept with the user's ``edge_index``. Raises
    Unsupported."""
    key = "self loops" if listed else "a loop at each node", num_src, num_dst

    def make() -> Graph:
        if not listed:
            return Graph.with_loops(edge_index, num_src, num_dst)
        return Listed(with_self_loops(edge_index, min(num_src, num_dst)), num_src, num_dst, True)

    if guards.capturing(edge_index.device):
        found: Any = cache.find((edge_index,), key)
        if found is None:
            raise Unsupported("a CUDA graph is being captured, and the self loops are not known; run once before")
        keep_if_captured(found)
    else:
        found = cache.get((edge_index,), key, make)
    return found, found.edge_index if listed else edge_index


def with_loops(rows: Tensor, edge_index: Tensor, graph: Listed, looped: Tensor, fill: Any) -> Tensor:
    """``rows`` of a user's edges ``[E, D]`` as PyG lists edges: of those of ``edge_index`` that are no loops, and then of the self
    loops that a layer adds with its ``fill_value``."""
    nodes = min(graph.num_src, graph.num_dst)
    if not _needs_kept(edge_index, fill) and rows.dtype in REORDERED:
        needs_grad = torch.is_grad_enabled() and rows.requires_grad
        given = edge_index.clone() if needs_grad else edge_index  # into which the user may write before the backward pass
        return call(LOOP_MEANS, needs_grad, (), given, rows, looped.shape[1] - nodes, nodes)  # type: ignore[no-any-return]
    kept = kept_edges(edge_index, graph)
    rows = rows if kept.numel() == rows.shape[0] else rows.index_select(0, kept)
    if not isinstance(fill, str) or fill != "mean":
        from torch_geometric.utils.loop import compute_loop_attr

        return torch.cat([rows, compute_loop_attr(looped[:, : kept.numel()], rows, nodes, False, fill)])
    # Sums over all edges, of which loops have none yet, by how many the others are.
    ends = edges.Ends(looped[1], looped[0], lambda: graph)
    sums = edges.reduce(torch.cat([rows, rows.new_zeros(nodes, rows.shape[1])]), ends, "sum")[:nodes]
    return torch.cat([rows, sums / others(graph, rows.dtype)])


def prepare_loops(edge_index: Tensor, graph: Listed, fill: Any) -> None:
    """What :func:`with_loops` will need. Raises Unsupported."""
    if _needs_kept(edge_index, fill):
        kept_edges(edge_index, graph)


def _needs_kept(edge_index: Tensor, fill: Any) -> bool:
    return edge_index.is_cuda or not isinstance(fill, str) or fill != "mean"


def others(graph: Graph, dtype: torch.dtype) -> Tensor:
    """By how many edges other than its loop a node's mean is divided, ``[N, 1]``."""
    return (degrees(graph, dtype)[: min(graph.num_src, graph.num_dst)] - 1).clamp(min=1)
