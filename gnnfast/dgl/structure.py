"""The structure of DGL's graphs, as graphs of gnnfast in the one cache.

A ``HeteroGraphIndex`` never changes: whatever changes a DGL graph gives it another one. It is neither hashable nor comparable, so
what is known of it, and the tensor by which the cache knows its structure, lie in its own dictionary and die with it.
``g.update_all`` makes a new index for its relation in every call, and backward passes one for the reverse: they share it.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import torch
from torch import Tensor

from gnnfast.cache import cache
from gnnfast.graph import Graph, formats
from gnnfast.graph.checks import MOST_EDGES, MOST_NODES
from gnnfast.graph.formats import BY_DST, BY_SRC

_KNOWN = "_gnnfast"


class Known:
    """What is known of an index: the number of its edge types, and if that is one, once :func:`sized`, its device and sizes, and
    whether these are more than kernels can count to. ``key`` is an empty tensor that lives as long as an index of these edges,
    ``flipped`` or not; ``met`` says that an op has been asked for."""

    def __init__(self, gidx: Any) -> None:
        self.num_etypes: int = gidx.number_of_etypes()
        self.relations: dict[int, Known] = {}
        self.met = self.flipped = False
        self.key: Tensor | None = None

    def size(self, gidx: Any) -> None:
        source, target = gidx.metagraph.find_edge(0)
        self.num_src, self.num_dst = gidx.number_of_nodes(source), gidx.number_of_nodes(target)
        self.num_edges, self.device = gidx.number_of_edges(0), str(gidx.ctx)[:3]
        self.too_large = max(self.num_src, self.num_dst) >= MOST_NODES or self.num_edges >= MOST_EDGES
        with torch.inference_mode(False):  # inference tensors have no version, and the cache keeps nothing for them
            self.key = torch.empty(0)

    def reverse(self) -> Known:
        other = copy.copy(self)
        other.num_src, other.num_dst, other.flipped = self.num_dst, self.num_src, not self.flipped
        return other


def known(gidx: Any) -> Known:
    """What is known of an index."""
    found = gidx.__dict__.get(_KNOWN)
    return gidx.__dict__.setdefault(_KNOWN, Known(gidx)) if found is None else found  # type: ignore[no-any-return]


def sized(gidx: Any) -> Known:
    """What is known of an index with one edge type, with its sizes, which are looked up once."""
    of = known(gidx)
    if of.key is None:
        of.size(gidx)
    return of


def structure(gidx: Any) -> Graph:
    """The graph of an index with one edge type. Made anew if the cache has let it go."""
    of = sized(gidx)
    assert of.key is not None
    graph: Graph = cache.get((of.key,), "dgl", functools.partial(_make, gidx, of))
    return graph.reverse() if of.flipped else graph


def _make(gidx: Any, of: Known) -> Graph:
    created = sys.modules["dgl.heterograph_index"]._CAPI_DGLHeteroGetCreatedFormats(gidx)  # gidx.formats() takes five times as long
    made = {str(name) for name in created}
    if "csc" not in made and "coo" in made:
        src, dst, _ = gidx.edges(0, "eid")
        graph = Graph.of_ids(src, dst, of.num_src, of.num_dst, of.num_edges)
    else:
        by_dst = "csc" in made
        _, _, indptr, indices, ids = gidx.adjacency_matrix_tensors(0, by_dst, "csr")
        graph = Graph(of.num_src, of.num_dst, of.num_edges, ids.device)
        with torch.inference_mode(False):
            perm = formats.int32(ids) if ids.numel() else None  # empty: slots are edge ids
            arrays = formats.from_arrays(formats.int32(indptr), formats.int32(indices), perm)
            graph.set_format(BY_DST if by_dst else BY_SRC, arrays)
    graph.edges.checked = True
    return graph.reverse() if of.flipped else graph


def make_get_relation_graph(original: Any) -> Any:
    """Replaces ``HeteroGraphIndex.get_relation_graph``: what is known of the result is found again."""

    @functools.wraps(original)
    def get_relation_graph(self: Any, etype: int) -> Any:
        relation, of = original(self, etype), known(self)
        if of.num_etypes > 1:
            of = of.relations.get(int(etype)) or of.relations.setdefault(int(etype), Known(relation))
        relation.__dict__[_KNOWN] = of
        return relation

    return get_relation_graph


def make_reverse(original: Any) -> Any:
    """Replaces ``HeteroGraphIndex.reverse``: the result shares the structure."""

    @functools.wraps(original)
    def reverse(self: Any) -> Any:
        other = original(self)
        if known(self).num_etypes == 1:
            other.__dict__[_KNOWN] = sized(self).reverse()
        return other

    return reverse
