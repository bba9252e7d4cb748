"""A graph in the formats kernels want, made when first needed."""

from __future__ import annotations

import contextlib
import operator
import reprlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast import _native, schedule
from gnnfast.cache import Seen, cache, is_constant, keep_if_captured
from gnnfast.config import settings
from gnnfast.reporting import scheduled

INDEX_DTYPES = (torch.int32, torch.int64)
_SERVED = frozenset(device for device in ("cpu", "cuda") if not _native.missing(device))
_KEPT = 4  # weights, and draws, of a graph


class Csr(NamedTuple):
    """One compressed format, int32: by destination (CSR) or by source (CSC).

    ``rowptr [rows + 1]``; ``col [num_edges]``; ``perm [num_edges]`` maps a slot to the user's edge id (``None``: they are equal);
    ``schedule [items, 4]`` lists the work of the CUDA kernels and ``layout`` the sizes of its sections (see
    ``plugin_src/graph/schedule.h``; ``None`` and empty on CPU).
    """

    rowptr: Tensor
    col: Tensor
    perm: Tensor | None
    schedule: Tensor | None
    layout: list[int]


class Tuned(NamedTuple):
    """How an aggregation is run: ``gas`` or ``gar``, the kind of schedule as in ``GNNFAST_SCHEDULE``, and the bytes of features
    that a pass over the edges covers (0: the kernel decides)."""

    kernel: str
    schedule: str
    slab: int


# The slab is the same in both: it decides in which order the lanes of a warp add up, and so the last bits of a result.
ID_ORDER, LOCALITY = Tuned("gar", "off", 0), Tuned("gar", "locality", 0)


class Graph:
    """A graph whose edges carry messages from ``num_src`` sources to ``num_dst`` destinations.

    Build one with :meth:`from_edge_index`, :meth:`from_csr` or :meth:`from_csc`. Formats are made when first needed, on the device
    of the tensors, in time linear in the number of edges. Edge ids, and so the order of edge weights, are those of the input.
    Graphs must not be changed through the tensors they were made from; the adapters' cache notices if they are.
    """

    def __init__(self, num_src: int, num_dst: int, num_edges: int, device: torch.device) -> None:
        self.num_src, self.num_dst, self.num_edges, self.device = num_src, num_dst, num_edges, device
        self._on_cuda = device.type == "cuda"
        self.uses = 0  # aggregations so far: a graph seen again is worth converting
        self._flipped = False
        self._shared: dict[Any, Any] = {
            "lock": threading.RLock(),
            "weights": OrderedDict(),
            "drawn": OrderedDict(),
            "asked": {},
            "args": {},
        }
        self._args: dict[Any, tuple[Any, ...]] = self._shared["args"]

    # ---- construction ----------------------------------------------------------------------------------------------------
    @classmethod
    def from_edge_index(cls, edge_index: Tensor, num_nodes: int | tuple[int, int] | None = None) -> Graph:
        """From COO.

        Args:
            edge_index: ``[2, num_edges]``, int32 or int64; row 0 holds sources, row 1 destinations, in any order; duplicates and
                self loops are allowed.
            num_nodes: the number of nodes, or ``(num_src, num_dst)``; integers of Python, NumPy or torch. Taken from the largest
                index if not given.

        Raises:
            TypeError: the ids are no tensor of int32 or int64, or a size is no integer.
            ValueError: the shape is not ``[2, num_edges]``, a size is negative, or there are 2^31 - 1 nodes or
                2^31 - 2^16 edges or more.
            IndexError: raised by the first use: an id is out of range; the message names the bound and the value.
            RuntimeError: gnnfast has no kernels for the device.
        """
        edge_index = check_ids("edge_index", edge_index, 2)
        if edge_index.shape[0] != 2:
            raise ValueError(f"edge_index must have shape [2, num_edges], got {list(edge_index.shape)}")
        if num_nodes is None:
            num_nodes = max(int(edge_index.max()) + 1, 0) if edge_index.numel() else 0
        elif isinstance(num_nodes, (tuple, list)) and len(num_nodes) != 2:
            raise ValueError(f"num_nodes must be an integer or (num_src, num_dst), got {reprlib.repr(num_nodes)}")
        if isinstance(num_nodes, (tuple, list)):
            num_src, num_dst = (_size(f"num_nodes[{i}]", n) for i, n in enumerate(num_nodes))
        else:
            num_src = num_dst = _size("num_nodes", num_nodes)
        rows = edge_index.detach()  # so that they do not keep the user's tensor object alive as their base
        return cls.from_coo(rows[0], rows[1], num_src, num_dst)

    @classmethod
    def from_coo(cls, src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Graph:
        """From two id tensors ``[num_edges]``; otherwise as :meth:`from_edge_index`."""
        src, dst = check_ids("src", src, 1), check_ids("dst", dst, 1)
        if src.shape != dst.shape or src.dtype != dst.dtype or src.device != dst.device:
            raise ValueError(f"src and dst must agree in shape, dtype and device, got {_brief(src)} and {_brief(dst)}")
        graph = cls(_size("num_src", num_src), _size("num_dst", num_dst), _size("num_edges", src.numel()), src.device)
        with torch.inference_mode(False):  # made under inference_mode they could not be saved for a backward pass
            graph._shared["coo"] = tuple(t.clone() if t.is_inference() else t for t in (src, dst))
        return graph

    @classmethod
    def from_csr(cls, rowptr: Tensor, col: Tensor, num_src: int | None = None, perm: Tensor | None = None) -> Graph:
        """From CSR by destination: the sources of destination ``i`` are ``col[rowptr[i]:rowptr[i + 1]]``.

        Args:
            rowptr: ``[num_dst + 1]``, int32 or int64, ascending from 0 to ``num_edges``.
            col: ``[num_edges]``, sources.
            num_src: number of sources; ``num_dst`` if not given.
            perm: ``[num_edges]``, int32 or int64, the edge id of each slot, each id once; slots are edge ids if not given.

        The graph holds copies: changes of these tensors do not reach it.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: as :meth:`from_edge_index`, but at once. ValueError also if ``rowptr``
                is not ascending or ``perm`` is no permutation.
        """
        return cls._from_compressed("by_dst", ("rowptr", rowptr), ("col", col), ("num_src", num_src), perm)

    @classmethod
    def from_csc(cls, colptr: Tensor, row: Tensor, num_dst: int | None = None, perm: Tensor | None = None) -> Graph:
        """From CSC by source: the destinations of source ``j`` are ``row[colptr[j]:colptr[j + 1]]``. Otherwise as
        :meth:`from_csr`."""
        return cls._from_compressed("by_src", ("colptr", colptr), ("row", row), ("num_dst", num_dst), perm)

    @classmethod
    def _from_compressed(
        cls, side: str, named_ptr: tuple[str, Any], named_idx: tuple[str, Any], named_size: tuple[str, Any], perm: Any
    ) -> Graph:
        (ptr_name, _), (idx_name, _), (size_name, columns) = named_ptr, named_idx, named_size
        ptr, idx = check_ids(*named_ptr, 1), check_ids(*named_idx, 1)
        perm = None if perm is None else check_ids("perm", perm, 1)
        if ptr.numel() == 0:
            raise ValueError(f"{ptr_name} must have at least one element")
        for name, t in ((ptr_name, ptr), ("perm", perm)):
            if t is not None and t.device != idx.device:
                raise ValueError(f"{name} is on {t.device} but {idx_name} is on {idx.device}; move one of them")
        if perm is not None and perm.shape != idx.shape:
            raise ValueError(f"perm must have the shape of {idx_name} {list(idx.shape)}, got {list(perm.shape)}")
        rows = _size(f"the number of rows in {ptr_name}", ptr.numel() - 1)
        columns = rows if columns is None else _size(size_name, columns)
        edges = _size("num_edges", idx.numel())
        with torch.no_grad(), torch.inference_mode(False):
            # Steps are of what is in range: others could pass by overflow.
            facts = [ptr[0], ptr[-1], ptr.min(), ptr.max(), ptr.clamp(0, edges).diff().min() if rows else ptr[0]]
            if edges:
                facts += [idx.min(), idx.max()]
                if perm is not None:
                    met = torch.zeros(edges, dtype=torch.bool, device=idx.device)
                    met[perm.clamp(0, edges - 1).long()] = True
                    facts += [perm.min(), perm.max(), met.all()]
            first, last, low, high, step, *bounds = torch.stack([f.long() for f in facts]).tolist()
            if first != 0 or last != edges or low < 0 or high > edges or step < 0:
                raise ValueError(
                    f"{ptr_name} must ascend from 0 to num_edges = {edges}, got {first} to {last}, smallest step {step}"
                )
            for name, size, (low, high) in ((idx_name, columns, bounds[:2]), ("perm", edges, bounds[2:4]))[: len(bounds) // 2]:
                if low < 0 or high >= size:
                    raise IndexError(f"{name} index {low if low < 0 else high} is out of range [0, {size})")
            if len(bounds) > 4 and not bounds[4]:
                raise ValueError("perm must hold each edge id once, but some are missing and others repeated")
            graph = cls(columns, rows, edges, idx.device) if side == "by_dst" else cls(rows, columns, edges, idx.device)
            graph._shared[side] = _with_schedule(_int32(ptr), _int32(idx), None if perm is None else _int32(perm))
        return graph

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold the edges as they were given; what was made of them is made anew."""
        coo = self._shared.get("coo")
        if coo is not None:
            src, dst = reversed(coo) if self._flipped else coo
            return Graph.from_coo, (src, dst, self.num_src, self.num_dst)
        csc = ("by_dst" in self._shared) == self._flipped
        csr = self.csc if csc else self.csr
        make, columns = (Graph.from_csc, self.num_dst) if csc else (Graph.from_csr, self.num_src)
        return make, (csr.rowptr, csr.col, columns, csr.perm)

    def reverse(self) -> Graph:
        """The graph with every edge turned around; it shares all formats with this one."""
        graph = Graph(self.num_dst, self.num_src, self.num_edges, self.device)
        graph._shared, graph._flipped, graph.uses = self._shared, not self._flipped, self.uses
        graph._args = self._args
        return graph

    # ---- formats ---------------------------------------------------------------------------------------------------------
    @property
    def coo(self) -> tuple[Tensor, Tensor] | None:
        """``(src, dst)`` as given and checked, or ``None`` for a graph made from a compressed format."""
        coo = self._shared.get("coo")
        if coo is None:
            return None
        if not self._shared.get("checked"):
            from gnnfast.ops.convert import check_facts, coo_facts

            sizes = (self.num_dst, self.num_src) if not self._flipped else (self.num_src, self.num_dst)
            check_facts(coo_facts(coo[1], coo[0]).tolist(), *sizes, self.num_edges)
            self._shared["checked"] = True
        return (coo[1], coo[0]) if self._flipped else coo

    @property
    def csr(self) -> Csr:
        """By destination. Raises IndexError if it is made now and an id is out of range."""
        return self._format("by_src" if self._flipped else "by_dst")

    @property
    def csc(self) -> Csr:
        """By source."""
        return self._format("by_dst" if self._flipped else "by_src")

    def has(self, csc: bool) -> bool:
        """Whether CSR, and with ``csc`` also CSC, have been made."""
        shared = self._shared
        if csc:
            return "by_dst" in shared and "by_src" in shared
        return ("by_src" if self._flipped else "by_dst") in shared

    def _format(self, side: str) -> Csr:
        found = self._shared.get(side)
        if found is None:
            with self._shared["lock"]:
                found = self._shared.get(side)
                if found is None:
                    found = self._shared[side] = self._convert(side)
            cache.grew()
        return found

    def _convert(self, side: str) -> Csr:
        from gnnfast.ops.convert import FACTS, check_facts, coo_to_csr

        sizes = (self.num_dst, self.num_src) if (side == "by_dst") != self._flipped else (self.num_src, self.num_dst)
        # Formats outlive this call: made under inference_mode they could not be saved for a later backward pass.
        with torch.no_grad(), torch.inference_mode(False):
            perm = None
            if "coo" in self._shared:
                src, dst = self._shared["coo"]
                row, column = (dst, src) if side == "by_dst" else (src, dst)
            else:
                other: Csr = self._shared["by_src" if side == "by_dst" else "by_dst"]
                row, perm = other.col, other.perm
                nodes = torch.arange(other.rowptr.numel() - 1, dtype=torch.int32, device=self.device)
                column = torch.repeat_interleave(nodes, other.rowptr.diff(), output_size=self.num_edges)
            rowptr, col, order, facts = coo_to_csr(row, column, *sizes)
            items, layout = _schedule(rowptr, self.num_edges)
            # The one time that the device is waited for.
            numbers = facts.tolist() if layout is None else torch.cat([facts, layout]).tolist()
            is_sorted = check_facts(numbers[:FACTS], *sizes, self.num_edges)
            self._shared["checked"] = True
            if not is_sorted:
                perm = order if perm is None else perm[order]
            return Csr(rowptr, col, perm, items, numbers[FACTS:])

    def args(self, csc: bool, row_bytes: int = 0, permuted: bool = True, tuned: Tuned | None = None) -> tuple[Any, ...]:
        """The graph arguments of the CSR ops (see :mod:`gnnfast.ops.spmm`): CSR and, with ``csc``, its transpose, for features of
        ``row_bytes`` a node. Without ``permuted``, weights are given in slot order and the perms are left out. ``tuned``: the
        schedule, and the slab of the forward pass; if not given, the schedule that the settings ask for."""
        if tuned is None:
            tuned = self._default(row_bytes)
        if self._on_cuda:
            keep_if_captured(self._shared)
        key = (self._flipped, csc, permuted, tuned)
        found = self._args.get(key)
        if found is None:
            forward, backward = self.csr, self.csc if csc else Csr(None, None, None, None, [])  # type: ignore[arg-type]
            sides = ("by_src", "by_dst") if self._flipped else ("by_dst", "by_src")
            forward = self._scheduled(sides[0], forward, tuned.schedule)
            if csc:
                backward = self._scheduled(sides[1], backward, tuned.schedule)
            if tuned.slab:
                forward = forward._replace(layout=[*forward.layout, tuned.slab])
            if not permuted:
                forward, backward = forward._replace(perm=None), backward._replace(perm=None)
            found = self._args[key] = (*forward, *backward)
        return found

    def sampled_args(self, csc: bool) -> tuple[Any, ...]:
        """The graph arguments of the sampled ops (see :mod:`gnnfast.ops.spmm_sampled`), with ``csc`` those of a backward pass."""
        from gnnfast.ops.convert import inverse

        if self._on_cuda:
            keep_if_captured(self._shared)
        key = "sampled", self._flipped, csc
        found = self._shared.get(key)
        if found is None:
            forward, backward = self.csr, self.csc if csc else Csr(None, None, None, None, [])  # type: ignore[arg-type]
            if csc and forward.perm is not None:
                slot = inverse(forward.perm)
                assert slot is not None  # nothing is sampled for the first time in a capture
                with torch.no_grad(), torch.inference_mode(False):
                    backward = backward._replace(perm=slot if backward.perm is None else slot[backward.perm.long()])
            found = self._shared[key] = (*forward, *backward)
            cache.grew()
        return found

    def draws(self, width: int) -> tuple[int, int]:
        """The most edges of a row, and how many edges at most ``width`` of each row are. Waits for the device the first time."""
        key = "draws", self._flipped, width
        if key not in self._shared:
            degree = self.csr.rowptr.diff()
            longest = degree.max() if self.num_dst else degree.sum()
            self._shared[key] = tuple(torch.stack([longest.long(), degree.clamp(max=width).sum()]).tolist())
        return self._shared[key]

    def drawn(self, strategy: int, width: int) -> tuple[Graph, Tensor] | None:
        """The edges that a strategy without chance (see :mod:`gnnfast.ops.spmm_sampled`) draws, side by side: a graph whose edge
        ids are those of this one, and edges over draws of each row, ``[num_dst]`` float64. Made at the second request and kept for
        the last few; ``None`` before, if there is no memory, and if it would be made while a CUDA graph is captured."""
        shared, key = self._shared, (self._flipped, strategy, width)
        kept: OrderedDict[Any, tuple[Graph, Tensor]] = shared["drawn"]
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with shared["lock"]:
            if key not in kept:
                may = shared["asked"].get(key)
                if may is None or capturing:
                    shared["asked"].setdefault(key, True)
                    return None
                if not may:
                    return None
                try:
                    kept[key] = self._draw(strategy, width)
                except RuntimeError:  # no memory; the user's call must not fail for it
                    shared["asked"][key] = False
                    return None
                while len(kept) > _KEPT:
                    kept.popitem(last=False)
                cache.grew()
            kept.move_to_end(key)
            found = kept[key]
            if capturing:  # replays read it, whatever is kept then
                shared.setdefault("captured", {})[key] = found
            else:
                found[0]._follow(self)
        return found

    def _draw(self, strategy: int, width: int) -> tuple[Graph, Tensor]:
        csr = self.csr
        with torch.no_grad(), torch.inference_mode(False):
            degree = csr.rowptr.diff()
            draws = degree.clamp(max=width)
            rowptr = torch.cat([draws.new_zeros(1), draws.cumsum(0, dtype=torch.int32)])
            scale = degree.double() / draws.clamp(min=1)
            slot = torch.ops.gnnfast.draw(csr.rowptr, rowptr, self.draws(width)[1], width, strategy)
            graph = Graph(self.num_src, self.num_dst, slot.numel(), self.device)
            perm = slot if csr.perm is None else csr.perm.index_select(0, slot)
            graph._shared["by_dst"] = _with_schedule(rowptr, csr.col.index_select(0, slot), perm)
            return graph, scale

    def _follow(self, other: Graph) -> None:
        """Takes over the order in which the rows of another graph are worked on."""
        wanted = {"order": other._shared["order"]} if "order" in other._shared else {}
        if other.order is not None:
            wanted["locality"] = other._shared["locality"]
        if any(self._shared.get(key) is not value for key, value in wanted.items()):
            self._shared.update(wanted)
            self._scheduled("by_dst", self.csr, "locality")

    def prepared(self, width: int, csc: bool) -> bool:
        """Whether an aggregation of at most ``width`` edges a row needs nothing that is not there."""
        return ("draws", self._flipped, width) in self._shared and ("sampled", self._flipped, csc) in self._shared

    @property
    def order(self) -> Tensor | None:
        """The rows in an order in which neighbours are near, where one was found to pay (see :meth:`consider_locality`)."""
        return self._shared["order"] if isinstance(self._shared.get("locality"), dict) else None

    def _default(self, row_bytes: int) -> Tuned:
        """What the settings ask for. ``auto`` is the locality schedule once there is one, where rows gather enough to outweigh that
        their indices are then read out of order."""
        if self.device.type != "cuda" or torch.compiler.is_compiling():
            return ID_ORDER
        kind = settings().schedule
        if kind != "auto":
            return Tuned("gar", kind, 0)
        if isinstance(self._shared.get("locality"), dict) and row_bytes * self.num_edges >= schedule.MIN_GATHERED * self.num_dst:
            return LOCALITY
        return ID_ORDER

    def _scheduled(self, side: str, csr: Csr, kind: str) -> Csr:
        """A format with the schedule of a kind."""
        if kind == "off" or not self.num_edges:
            return csr
        schedules = self._shared.setdefault("schedules", {})
        if (side, kind) not in schedules:
            with self._shared["lock"], torch.no_grad(), torch.inference_mode(False):
                if kind == "degree":
                    order = schedule.by_degree(csr.rowptr)
                elif self.num_src != self.num_dst:
                    return csr  # clusters are of a graph's nodes; sources and destinations are different ones here
                else:
                    if "order" not in self._shared:
                        job = schedule.Locality({side: csr}, self.num_edges)
                        job.wait()
                        self._shared["order"] = job.order
                    order = self._shared["order"]
                items, layout = schedule.build(csr.rowptr, self.num_edges, order)
                schedules[side, kind] = schedule.Schedule(items, layout.tolist())
            cache.grew()
        found = schedules[side, kind]
        return csr._replace(schedule=found.items, layout=found.layout)

    def consider_locality(self, x_bytes: int) -> None:
        """Called before each aggregation of so many bytes of features on CUDA: after some uses of a graph that it is expected to
        help, starts to make a locality schedule, and takes it over once it is there. Waits for nothing."""
        if self.uses < schedule.USES:
            return
        state = self._shared.get("locality")
        if isinstance(state, (str, dict)) or settings().schedule != "auto":
            return
        if state is None:
            if self.num_src != self.num_dst or not schedule.large_enough(self.num_dst, self.num_edges):
                self._shared["locality"] = "too small, too sparse or bipartite"
                return
            if not schedule.exceeds_cache(x_bytes, self.device):
                return
            sides = {side: self._shared[side] for side in ("by_dst", "by_src") if side in self._shared}
            if sides and not torch.cuda.is_current_stream_capturing():
                try:
                    self._shared["locality"] = schedule.Locality(sides, self.num_edges)
                except RuntimeError:  # no memory; the user's call must not fail for it
                    self._shared["locality"] = "no memory"
            return
        if torch.cuda.is_current_stream_capturing() or not state.ready():
            return
        with self._shared["lock"]:
            before, after = state.near
            if not state.pays:
                self._shared["locality"] = "id order is as good"
            else:
                self._shared["order"] = state.order
                self._shared.setdefault("schedules", {}).update({(s, "locality"): v for s, v in state.schedules().items()})
                self._shared["locality"] = {"near": (before, after), "milliseconds": state.milliseconds}
                for key in list(self._args):
                    if key[-1].schedule == "locality":
                        self._args.pop(key, None)  # of an order that was asked for before
        scheduled(repr(self), before, after, state.milliseconds, state.pays)
        cache.grew()

    def slot_weights(self, weight: Tensor, csc: bool) -> tuple[Tensor, Tensor | None] | None:
        """The weight ``[num_edges]`` or ``[num_edges, H]`` in the slot orders of CSR and CSC: itself where there is no ``perm``,
        else, if it is a constant, a copy that is kept from the second time the same, unchanged tensor is used on; else ``None``."""
        first, second = ("by_src", "by_dst") if self._flipped else ("by_dst", "by_src")
        if self.csr.perm is None and (not csc or self.csc.perm is None):
            return (weight, weight) if csc else (weight, None)
        # Replays of a captured CUDA graph read what the weights are then.
        capturing = self._on_cuda and torch.cuda.is_current_stream_capturing()
        if capturing or not is_constant(weight) or (torch.is_grad_enabled() and saved_tensors_are_watched()):
            return None
        kept: OrderedDict[int, tuple[Seen, dict[str, Tensor]]] = self._shared["weights"]
        entry = kept.get(id(weight))
        if entry is not None and entry[0].still(weight):
            orders = entry[1]
            if first in orders and (not csc or second in orders):  # without the lock: each call of a layer comes here
                return orders[first], orders[second] if csc else None
        with self._shared["lock"]:
            entry = kept.get(id(weight))
            if entry is None or not entry[0].still(weight):
                kept[id(weight)] = Seen(weight, kept, id(weight)), {}
                while len(kept) > _KEPT:
                    kept.popitem(last=False)
                return None
            orders = entry[1]
            for side in (first, second) if csc else (first,):
                if side not in orders:
                    perm = self._format(side).perm
                    with torch.no_grad(), torch.inference_mode(False):
                        orders[side] = weight.detach() if perm is None else weight.detach().index_select(0, perm)
                    cache.grew()
        return orders[first], orders.get(second) if csc else None

    @property
    def average_degree(self) -> float:
        """``num_edges / num_dst``."""
        return self.num_edges / max(self.num_dst, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the formats, schedules, draws and weights kept, without the user's own tensors."""
        from gnnfast.ops.convert import kept_of

        return _nbytes(t for array in _tensors(self) for t in (array, *kept_of(array)))

    @property
    def format_schedule_nbytes(self) -> int:
        """Of :attr:`nbytes`, those of the schedule of each format."""
        formats = [self._shared[side].schedule for side in ("by_dst", "by_src") if side in self._shared]
        return _nbytes(t for t in formats if t is not None)

    @property
    def schedule_nbytes(self) -> int:
        """Of :attr:`nbytes`, those of the schedules besides the one of each format."""
        shared = self._shared
        others = [shared.get("order"), list(shared.get("schedules", {}).values())]
        drawn = [found[0] for found in list(shared["drawn"].values())]
        return _nbytes(_tensors([others, [[g.csr.schedule, list(g._shared.get("schedules", {}).values())] for g in drawn]]))

    def __repr__(self) -> str:
        formats = [n for n, k in (("coo", "coo"), ("csr", "by_dst"), ("csc", "by_src")) if k in self._shared]
        return (
            f"Graph(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges}, device={str(self.device)!r}, "
            f"formats={'+'.join(formats)})"
        )


def saved_tensors_are_watched() -> bool:
    """Whether hooks get what autograd saves. Activation checkpointing compares what a forward pass and its repetition save, so that
    nothing may then depend on what has been used before."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors that a value holds, maybe some of them twice; of a graph, those that it made."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Graph):
        yield from _tensors([v for k, v in list(value._shared.items()) if k not in ("coo", "asked", "args")])
    elif isinstance(value, (tuple, list, dict)):
        for v in list(value.values()) if isinstance(value, dict) else value:
            yield from _tensors(v)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in {id(t): t for t in tensors}.values())


def _brief(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}"


def check_tensor(name: str, t: Any) -> None:
    """Raises TypeError or ValueError if ``t`` is no tensor with plain memory."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.layout is not torch.strided or t.is_nested:
        kind = "nested" if t.is_nested else str(t.layout)
        raise ValueError(f"{name} must be a dense tensor (torch.strided), got one of layout {kind}; convert it with .to_dense()")
    if torch.autograd.forward_ad._current_level >= 0:
        raise RuntimeError(f"gnnfast has no forward-mode derivatives, and {name} is used under forward-mode AD; use reverse mode")
    if is_emptied(t):
        raise ValueError(f"{name} has shape {list(t.shape)}, but its storage holds {t.untyped_storage().nbytes()} bytes")


def is_emptied(t: Tensor) -> bool:
    """Whether the storage of a plain tensor was made too small for it, as FSDP and offloading do."""
    if torch.compiler.is_compiling() or type(t) not in (Tensor, torch.nn.Parameter) or t.is_meta or t._is_zerotensor():
        return False
    if not t.numel() or torch._C._functorch.is_functorch_wrapped_tensor(t):
        return False
    last = t.storage_offset() + sum((n - 1) * step for n, step in zip(t.shape, t.stride()))
    return t.untyped_storage().nbytes() < (last + 1) * t.element_size()


def check_ids(name: str, ids: Any, dim: int) -> Tensor:
    """Ids as a plain tensor of that many dimensions. Raises TypeError, ValueError or RuntimeError if they are none."""
    check_tensor(name, ids)
    if hasattr(ids, "as_tensor"):  # PyG's EdgeIndex and Index
        ids = ids.as_tensor()
    if type(ids) is not Tensor:
        if type(ids).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise TypeError(f"{name} must be a plain torch.Tensor, got {type(ids).__name__}, which holds its data elsewhere")
        ids = ids.as_subclass(Tensor)
    if ids.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name} holds ids and must be int32 or int64, got {ids.dtype}; convert it with .long()")
    if ids.dim() != dim:
        raise ValueError(f"{name} must have {dim} dimensions, got shape {list(ids.shape)}")
    check_device(name, ids)
    return ids


def check_device(name: str, t: Tensor) -> None:
    """Raises RuntimeError if there are no kernels for the device of ``t``."""
    if t.device.type not in _SERVED:
        reason = _native.missing(t.device.type)
        raise RuntimeError(f"gnnfast has no kernels for {t.device}, where {name} is: {reason}")


def check_integer(name: str, value: Any) -> int:
    """An integer of Python, NumPy or torch as one of Python. Raises TypeError if it is none."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # tensors raise them all
            return operator.index(value)
    raise TypeError(f"{name} must be an integer, got {type(value).__name__} {reprlib.repr(value)}")


def _size(name: str, value: Any) -> int:
    number = check_integer(name, value)
    # Kernels count slots in int32, up to a block's edges ahead.
    most, text = (2**31 - 2**16, "2^31 - 2^16") if name == "num_edges" else (2**31 - 1, "2^31 - 1")
    if not 0 <= number < most:
        raise ValueError(f"{name} must be at least 0 and below {text}, got {number}")
    return number


def _int32(t: Tensor) -> Tensor:
    """A copy, which the caller of the constructor cannot change."""
    return t.detach().to(torch.int32, copy=True).contiguous()


def _with_schedule(rowptr: Tensor, col: Tensor, perm: Tensor | None) -> Csr:
    items, layout = _schedule(rowptr, col.numel())
    return Csr(rowptr, col, perm, items, [] if layout is None else layout.tolist())


def _schedule(rowptr: Tensor, num_edges: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    return schedule.build(rowptr, num_edges) if rowptr.device.type == "cuda" else (None, None)
