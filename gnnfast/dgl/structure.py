"""The structure of DGL's graphs, as graphs of gnnfast in the one cache.

A ``HeteroGraphIndex`` never changes: whatever changes a DGL graph gives it another one. It is neither hashable nor comparable, so
what is known of it, and the tensor by which the cache knows its structure, lie in its own dictionary and die with it.
``g.update_all`` makes a new index for its relation in every call, and backward passes one for the reverse: they share it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from gnnfast.cache import cache, usable_later
from gnnfast.graph import Graph, formats
from gnnfast.graph.checks import MOST_EDGES, MOST_NODES
from gnnfast.graph.formats import BY_DST, BY_SRC

_KNOWN = "_gnnfast"
FEW_EDGES = 1 << 18
MOST_ON_HOST = 1 << 20  # edges up to which the host counts what a graph on a GPU is asked for: it need not wait


class _Shared:
    """What indices of the same edges have in common: the ``key``, an empty tensor, by which the cache knows them."""

    key: Tensor | None = None


class Known:
    """What is known of an index: whether it has one edge type, once that was asked for (:meth:`single`), and if so, once
    :func:`sized`, its device and sizes, and whether these are more than kernels can count to. ``shared`` lives as long as an index
    of these edges, ``flipped`` or not; ``calls`` counts the ops that were asked for; ``starves`` says whether a
    destination has no in-edges, once that was asked for (:func:`starves`). To know nothing costs nothing: most indices of
    mini-batches meet one op, which is left to DGL."""

    calls, flipped = 0, False
    num_src = num_dst = num_edges = num_etypes = -1
    device = ""
    too_large = False
    starves: bool | None = None

    @functools.cached_property
    def relations(self) -> dict[int, Known]:
        return {}

    def single(self, gidx: Any) -> bool:
        if self.num_etypes < 0:
            self.num_etypes = gidx.number_of_etypes()
        return self.num_etypes == 1

    @functools.cached_property
    def shared(self) -> _Shared:
        return _Shared()

    def shared_key(self) -> Tensor:
        shared = self.shared
        if shared.key is None:
            # Inference tensors have no version, and the cache keeps nothing for them.
            with usable_later():
                shared.key = torch.empty(0)
        return shared.key

    def size(self, gidx: Any) -> None:
        source, target = gidx.metagraph.find_edge(0)
        self.num_src, self.num_dst = gidx.number_of_nodes(source), gidx.number_of_nodes(target)
        # What the bridge has put on a GPU. A DGL with CUDA of its own calls the device "gpu", and is left alone.
        self.device = "cuda" if hasattr(type(gidx), "ends") else str(gidx.ctx)[:3]
        edges = gidx.number_of_edges(0)
        self.too_large = max(self.num_src, self.num_dst) >= MOST_NODES or edges >= MOST_EDGES
        self.num_edges = edges  # last: it says that the others are there

    def reverse(self) -> Known:
        other, own = Known(), {"shared": self.shared, **self.__dict__}  # at once: another thread may be about to size it
        sizes = {"num_src": own.get("num_dst", -1), "num_dst": own.get("num_src", -1)}
        other.__dict__.update(own, flipped=not own.get("flipped", False), starves=None, **sizes)
        return other


def known(gidx: Any) -> Known:
    """What is known of an index."""
    found = gidx.__dict__.get(_KNOWN)
    return gidx.__dict__.setdefault(_KNOWN, Known()) if found is None else found  # type: ignore[no-any-return]


def sized(gidx: Any) -> Known:
    """What is known of an index with one edge type, with its sizes, which are looked up once."""
    of = known(gidx)
    if of.num_edges < 0:
        of.size(gidx)
    return of


def starves(g: Any) -> bool:
    """Whether a node of a DGL graph has no in-edges. Layers ask in every call, and DGL would wait for a GPU to answer."""
    gidx = g._graph
    of = known(gidx)
    if type(g).in_degrees is not sys.modules["dgl"].DGLGraph.in_degrees or not of.single(gidx):
        return bool((g.in_degrees() == 0).any())
    if of.starves is None:
        counted = sized(gidx).num_edges <= MOST_ON_HOST and getattr(gidx, "in_degrees_on_host", None)
        of.starves = bool(((counted() if counted else g.in_degrees()) == 0).any())
    return of.starves


def structure(gidx: Any) -> Graph:
    """The graph of an index with one edge type. Made anew if the cache has let it go."""
    of = sized(gidx)
    graph: Graph = cache.get((of.shared_key(),), "dgl", functools.partial(_make, gidx, of))
    return graph.reverse() if of.flipped else graph


def _make(gidx: Any, of: Known) -> Graph:
    if hasattr(type(gidx), "ends"):  # it is on a GPU
        src, dst = gidx.ends()
        graph = Graph.of_ids(src, dst, of.num_src, of.num_dst, of.num_edges)
    else:
        # COO is used as it is where that costs less than to convert.
        kind, arrays = host_edges(gidx, 0, of.num_edges <= FEW_EDGES)
        if kind == "coo":
            graph = Graph.of_ids(arrays[0], arrays[1], of.num_src, of.num_dst, of.num_edges)
        else:
            graph = Graph(of.num_src, of.num_dst, of.num_edges, arrays[0].device)
            with torch.inference_mode(False):
                indptr, indices, ids = arrays
                perm = formats.int32(ids) if ids.numel() else None  # empty: slots are edge ids
                made = formats.from_arrays(formats.int32(indptr), formats.int32(indices), perm)
                graph.set_format(BY_DST if kind == "csc" else BY_SRC, made)
    graph.edges.checked = True
    return graph.reverse() if of.flipped else graph


def host_edges(gidx: Any, etype: int, prefer_coo: bool = True) -> tuple[str, list[Tensor]]:
    """The edges of a relation in a format that DGL has: ``coo`` with ``(src, dst)`` by edge id, with ``prefer_coo`` wherever it is
    there, or ``csc`` by destination or ``csr`` by source with ``(indptr, indices, edge ids)``, of which the ids are empty where
    slots are edge ids."""
    # DGL's own calls: the methods of the index around them take five times as long, more than a small graph's aggregation.
    dgl_index = sys.modules["dgl.heterograph_index"]
    made = {str(name) for name in dgl_index._CAPI_DGLHeteroGetCreatedFormats(gidx)}
    if "coo" in made and ("csc" not in made or prefer_coo):
        return "coo", _tensors(dgl_index._CAPI_DGLHeteroEdges(gidx, etype, "eid"), 2)
    kind = "csc" if "csc" in made else "csr"
    return kind, _tensors(dgl_index._CAPI_DGLHeteroGetAdj(gidx, etype, kind == "csc", "csr"), 3)


def ends(gidx: Any) -> tuple[Tensor, Tensor]:
    """Source and destination of each edge of an index with one edge type, by edge id."""
    if hasattr(type(gidx), "ends"):  # it is on a GPU
        return gidx.ends()  # type: ignore[no-any-return]
    kind, arrays = host_edges(gidx, 0)
    if kind == "coo":
        return arrays[0], arrays[1]
    indptr, far, ids = arrays
    near = torch.arange(indptr.numel() - 1, dtype=far.dtype).repeat_interleave(indptr.diff())
    if ids.numel():
        order = ids.long()
        near, far = (torch.empty_like(far).index_copy_(0, order, t) for t in (near, far))
    return (far, near) if kind == "csc" else (near, far)


def share(gidx: Any, other: Any) -> None:
    """Lets another index of the same edges know what is known of this one."""
    other.__dict__[_KNOWN] = known(gidx)


def _tensors(arrays: Any, count: int) -> list[Tensor]:
    """The first of an array of DGL's arrays, which share their memory."""
    return [from_dlpack(arrays(i).to_dlpack()) for i in range(count)]


def make_get_relation_graph(original: Any) -> Any:
    """Replaces ``HeteroGraphIndex.get_relation_graph``: what is known of the result is found again."""

    @functools.wraps(original)
    def get_relation_graph(self: Any, etype: int) -> Any:
        relation, of = original(self, etype), known(self)
        if not of.single(self):
            of = of.relations.get(int(etype)) or of.relations.setdefault(int(etype), Known())
        relation.__dict__[_KNOWN] = of
        return relation

    return get_relation_graph


def make_reverse(original: Any) -> Any:
    """Replaces ``HeteroGraphIndex.reverse``: the result shares the structure."""

    @functools.wraps(original)
    def reverse(self: Any) -> Any:
        other = original(self)
        of = known(self)
        if of.single(self):
            other.__dict__[_KNOWN] = of.reverse()
        return other

    return reverse
