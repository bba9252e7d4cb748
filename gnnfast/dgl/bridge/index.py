"""The index of a graph on a GPU. Imported once DGL is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from dgl import heterograph_index
from dgl._ffi.runtime_ctypes import DGLContext
from dgl.base import DGLError
from dgl.heterograph_index import HeteroGraphIndex
from torch import Tensor

from gnnfast.dgl.bridge import restore
from gnnfast.dgl.structure import host_edges, share

CPU, GPU = 1, 2  # in a DGLContext
TAG = "_gnnfast_device"  # the attribute of whatever is on a device in DGL's eyes
MOST_PINNED = 1 << 26  # bytes of edges that go through pinned memory: more costs the host more than it saves

met = False  # whether there was ever a graph on a GPU


class Edges:
    """The edges of one relation on a device, made once and shared by all indices of them: ``coo`` are source and destination of
    each edge, in int32 where that holds the graph; ``degrees`` those of the nodes, by whether these are the destinations."""

    def __init__(self) -> None:
        self.coo: tuple[Tensor, Tensor] | None = None
        self.degrees: dict[bool, Tensor] = {}


class CudaIndex(HeteroGraphIndex):
    """An index that DGL takes for one on a GPU. In DGL's library it is one on the host. What is asked in every step is answered
    from :class:`Edges`, and of the rest :mod:`.calls` moves the answers. Ids are handed out as copies, in the graph's dtype."""

    _edges: dict[int, Edges]
    _flipped: bool  # whether ours go from the targets to the sources of _edges

    # ---- where it is ---------------------------------------------------------------------------------------------------------
    @property
    def device(self) -> torch.device:
        return self.__dict__[TAG]  # type: ignore[no-any-return]

    @property
    def ctx(self) -> Any:
        return DGLContext(GPU, self.device.index or 0)

    def copy_to(self, ctx: Any) -> Any:
        other = on_host(self)
        if ctx.device_type == CPU:
            return other
        other = on_device(other, device_of(ctx))
        return self._shared(other) if other.device == self.device else other

    def pin_memory_(self) -> Any:
        raise DGLError("The graph structure must be on CPU to be pinned.")

    def shared_memory(self, *args: Any, **named: Any) -> Any:
        raise DGLError("A graph on a GPU cannot go into shared memory; move it back with g.cpu() first")

    def record_stream(self, stream: Any) -> Any:
        for edges in self._edges.values():
            for t in (*(edges.coo or ()), *edges.degrees.values()):
                t.record_stream(stream)
        return self

    def __reduce__(self) -> Any:
        return restore, (on_host(self), str(self.device))

    # ---- indices of the same edges -------------------------------------------------------------------------------------------
    def _shared(self, other: Any, flipped: bool = False) -> Any:
        """Another index of the same relations: it shares what is on the device."""
        other._edges, other._flipped = self._edges, self._flipped != flipped
        if not flipped:  # the reverse is known already
            share(self, other)
        return other

    def reverse(self) -> Any:
        return self._shared(super().reverse(), flipped=True)

    def formats(self, formats: Any = None) -> Any:
        found = super().formats(formats)
        return found if formats is None else self._shared(found)

    def asbits(self, bits: int) -> Any:
        return self._shared(super().asbits(bits))

    def get_relation_graph(self, etype: int) -> Any:
        relation = super().get_relation_graph(etype)
        relation._edges, relation._flipped = {0: self._of(etype)}, self._flipped
        return relation

    def flatten_relations(self, etypes: Any) -> Any:
        return _Flattened(super().flatten_relations(etypes), self.device)

    # ---- edges ---------------------------------------------------------------------------------------------------------------
    def _of(self, etype: int) -> Edges:
        return self._edges.setdefault(int(etype), Edges())

    def ends(self, etype: int = 0) -> tuple[Tensor, Tensor]:
        """Source and destination of each edge, by edge id, which nobody may write into."""
        edges = self._of(etype)
        if edges.coo is None:
            src, dst = _upload(self, int(etype))
            edges.coo = (dst, src) if self._flipped else (src, dst)
        src, dst = edges.coo
        return (dst, src) if self._flipped else (src, dst)

    def _id_dtype(self) -> torch.dtype:
        return torch.int32 if self.dtype == "int32" else torch.int64

    def edges(self, etype: int, order: Any = None) -> Any:
        if order not in (None, "eid"):
            return super().edges(etype, order)
        dtype = self._id_dtype()
        src, dst = (t.to(dtype, copy=True) for t in self.ends(etype))
        return src, dst, torch.arange(src.numel(), dtype=dtype, device=self.device)

    def find_edges(self, etype: int, eid: Tensor) -> Any:
        src, dst = self.ends(etype)
        return src.index_select(0, eid).to(eid.dtype), dst.index_select(0, eid).to(eid.dtype), eid

    def in_degrees(self, etype: int, v: Tensor) -> Any:
        return self._degrees(etype, v, of_dst=True)

    def out_degrees(self, etype: int, v: Tensor) -> Any:
        return self._degrees(etype, v, of_dst=False)

    def _degrees(self, etype: int, v: Tensor, of_dst: bool) -> Tensor:
        """The degrees at one end of the edges, counted once."""
        kept, key = self._of(etype).degrees, of_dst != self._flipped
        if key not in kept:
            nodes = self.ends(etype)[int(of_dst)]
            count = self.num_nodes(self.metagraph.find_edge(int(etype))[int(of_dst)])
            with torch.inference_mode(False):
                ones, zeros = torch.ones_like(nodes), torch.zeros(count, dtype=nodes.dtype, device=self.device)
                kept[key] = zeros.scatter_add_(0, nodes.long(), ones)
        degrees = kept[key]
        # All nodes are asked for in every step, which must not wait; and who asks for others may be wrong.
        if v.numel() not in (0, degrees.numel()) and not bool(((v >= 0) & (v < degrees.numel())).all()):
            raise DGLError(f"Node IDs must be at least 0 and below {degrees.numel()}")
        return degrees.index_select(0, v).to(self._id_dtype())

    def in_degrees_on_host(self) -> Tensor:
        """Those of all destinations of the one relation, from what DGL has: nobody waits for the device."""
        count = self.num_nodes(self.metagraph.find_edge(0)[1])
        return on_host(self).in_degrees(0, torch.arange(count, dtype=self._id_dtype()))  # type: ignore[no-any-return]

    def has_nodes(self, ntype: int, vids: Tensor) -> Any:
        return ((vids >= 0) & (vids < self.num_nodes(ntype))).to(vids.dtype)


class _Flattened:
    """A flattened graph, whose parts DGL reads as attributes of a C++ object."""

    def __init__(self, flat: Any, device: torch.device) -> None:
        self._flat, self._device = flat, device

    def __getattr__(self, name: str) -> Any:
        from gnnfast.dgl.bridge.calls import moved

        return moved(getattr(self._flat, name), self._device)


def entries(activate: Callable[[], None]) -> Iterable[tuple[Any, str, Any]]:
    """What is replaced from the start: how an index comes to a GPU."""
    original = HeteroGraphIndex.copy_to

    def copy_to(self: Any, ctx: Any) -> Any:
        if ctx.device_type != GPU:
            return original(self, ctx)
        activate()
        return on_device(on_host(self), device_of(ctx))

    return ((HeteroGraphIndex, "copy_to", copy_to),)


def device_of(ctx: Any) -> torch.device:
    """The device of a DGLContext."""
    from dgl import backend

    return backend.to_backend_ctx(ctx)  # type: ignore[no-any-return]


def on_host(index: Any) -> Any:
    """A new index of the same structure, which it shares."""
    other = heterograph_index._CAPI_DGLHeteroCopyTo(index, CPU, 0)
    if type(other) is CudaIndex:
        other.__class__ = HeteroGraphIndex
        for name in (TAG, "_edges", "_flipped"):
            del other.__dict__[name]
    return other


def on_device(index: Any, device: torch.device) -> Any:
    """Makes an index on the host, which nobody else has, one on the device."""
    global met
    met = True
    index.__class__ = CudaIndex
    index.__dict__[TAG] = device
    index._edges, index._flipped = {}, False
    return index


def _upload(index: Any, etype: int) -> tuple[Tensor, Tensor]:
    """The edges of a relation, without a wait for the device."""
    device = index.device
    source, target = index.metagraph.find_edge(etype)
    sizes, count = (index.num_nodes(source), index.num_nodes(target)), index.num_edges(etype)
    dtype = torch.int32 if max(*sizes, count) < 2**31 else torch.int64
    kind, host = host_edges(heterograph_index._CAPI_DGLHeteroGetRelationGraph(on_host(index), etype), 0)
    with torch.inference_mode(False):
        size = sum(t.numel() for t in host)
        pinned = device.type == "cuda" and size * dtype.itemsize <= MOST_PINNED
        staged = torch.empty(size, dtype=dtype, pin_memory=pinned)  # int32 half way: the bus has less to carry
        parts = staged.split([t.numel() for t in host])
        for part, t in zip(parts, host):
            part.copy_(t)
        first, second, *rest = staged.to(device, non_blocking=True).split([t.numel() for t in host])
        if kind == "coo":
            return first, second
        # Rows, and of each slot the column and the edge id.
        rows = torch.arange(first.numel() - 1, dtype=dtype, device=device)
        row, column = torch.repeat_interleave(rows, first.diff(), output_size=count), second
        if rest[0].numel():  # else slots are edge ids
            ids = rest[0].long()
            row, column = (torch.empty_like(t).scatter_(0, ids, t) for t in (row, column))
        return (column, row) if kind == "csc" else (row, column)
