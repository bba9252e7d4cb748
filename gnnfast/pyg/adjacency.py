"""The graph of an ``edge_index``, found again by it."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from gnnfast import guards
from gnnfast.cache import Amounts, cache
from gnnfast.graph import Graph
from gnnfast.graph.checks import MOST_EDGES
from gnnfast.stream import is_capturing
from gnnfast.types import INDEX_DTYPES
from gnnfast.unsupported import Unsupported


class Listed(Graph):
    """A graph whose ``edge_index`` was made here, and nobody else holds; ``key``: as :func:`key_of`; ``kept`` as
    :func:`gnnfast.pyg.loops.kept_edges`."""

    kept: Tensor | None = None

    def __init__(self, edge_index: Tensor, num_src: int, num_dst: int, to_target: bool) -> None:
        super().__init__(num_src, num_dst, edge_index.shape[1], edge_index.device)
        self.edge_index, self.key = edge_index, key_of(num_src, num_dst, to_target)
        first, second = edge_index.unbind()
        self.edges.coo = (first, second) if to_target else (second, first)
        self.edges.grew(edge_index.nbytes)


class _Running(threading.local):
    """Of the layer that runs now: its :class:`Listed` ``graph``; ``passing`` is an ``edge_index`` that it has made and does not
    keep; ``messages`` the ends of the edges whose ``message()`` runs, and the version of their ids then."""

    graph: Any = None
    passing: Any = None
    messages: Any = None


running = _Running()


regrets = Amounts()  # of aggregations over graphs that were new, until there is a graph to count them


def found_graph(edge_index: Tensor, num_src: int, num_dst: int, to_target: bool) -> Graph | None:
    """The cached graph of an edge list that is a plain tensor, if there is one."""
    return cache.find((edge_index,), key_of(num_src, num_dst, to_target))  # type: ignore[no-any-return]


def ends_of_new(edge_index: Tensor, to_target: bool) -> tuple[Tensor, Tensor] | None:
    """Destinations and sources of an edge list on a GPU of which nothing is kept, if it is one and a graph of it could be made:
    views of the user's tensor, so that nothing but autograd may keep them."""
    if not edge_index.is_cuda or edge_index.dtype not in INDEX_DTYPES or edge_index.shape[0] != 2 or running.graph is not None:
        return None
    if edge_index.shape[1] >= MOST_EDGES or edge_index.is_inference() or is_capturing() or guards.operand("edge_index", edge_index):
        return None
    if cache.origin(edge_index) is not None:
        return None
    src, dst = edge_index.unbind()
    return (dst, src) if to_target else (src, dst)


def graph_of(edge_index: Tensor, num_src: int, num_dst: int, to_target: bool) -> Graph:
    """The cached graph of an edge list. Raises Unsupported if it is none."""
    own, key = running.graph, key_of(num_src, num_dst, to_target)
    if own is not None and own.edge_index is edge_index and own.key == key:
        return own  # type: ignore[no-any-return]
    holder = (edge_index,) if type(edge_index) is Tensor else (edge_index, edge_index.as_tensor())  # type: ignore[attr-defined]
    found = cache.find(holder, key)
    if found is not None:
        cache.hits += 1
        return found  # type: ignore[no-any-return]
    if edge_index.dtype not in INDEX_DTYPES or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise Unsupported(f"edge_index is {edge_index.dtype} of shape {list(edge_index.shape)}")
    origin = cache.origin(edge_index)
    if origin is not None:
        graph = graph_of(origin, num_src, num_dst, to_target)
    else:
        reason = guards.operand("edge_index", holder[-1])
        if reason:
            raise Unsupported(reason)
        try:
            graph = Graph.from_checked(holder[-1], num_src, num_dst, to_target)
        except (TypeError, ValueError) as error:
            raise Unsupported(f"invalid input: {error}") from None
        graph.edges.regret = regrets.of(edge_index)
    cache.add(holder, key, graph)
    return graph


def incidence_of(edge_index: Tensor, graph: Graph, to_target: bool) -> Graph:
    """The graph that carries the features of the edges of a ``graph`` to where they end (:meth:`Graph.incidence`): kept with the
    ``edge_index``. Raises Unsupported."""
    key = "incidence", *key_of(graph.num_src, graph.num_dst, to_target)
    if guards.capturing(edge_index.device):
        found = cache.find((edge_index,), key)
        if found is None:
            raise Unsupported("a CUDA graph is being captured, and its edges are not known; run once before")
        return found  # type: ignore[no-any-return]
    return cache.get((edge_index,), key, graph.incidence)  # type: ignore[no-any-return]


def key_of(num_src: int, num_dst: int, to_target: bool) -> tuple[object, ...]:
    """By what, besides the tensor, the graph is kept."""
    return "edge_index", num_src, num_dst, to_target
