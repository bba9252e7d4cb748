"""A graph in the formats kernels want, made when first needed."""

from __future__ import annotations

import reprlib
import threading
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gnnfast import _native
from gnnfast.cache import Held, is_constant, is_watching, keep_if_captured, usable_later
from gnnfast.graph import formats, ids
from gnnfast.graph.checks import (
    MOST_EDGES,
    MOST_NODES,
    brief,
    check_count,
    check_ids,
    saved_tensors_are_watched,
)
from gnnfast.graph.draws import Draws
from gnnfast.graph.edge_values import EdgeValues
from gnnfast.graph.formats import BY_DST, BY_SRC, NO_CSR, Csr
from gnnfast.graph.plan import Plan, Tuned
from gnnfast.stream import Started, is_capturing
from gnnfast.types import Matrix
from gnnfast.unsupported import Unsupported

if _native.cpu.loaded:
    from gnnfast.ops.convert import check_facts, coo_facts, own

MOST_TOGETHER = 1 << 22  # edges of which both formats are made at once, in the host's time for one; more take the device longer


class Edges(Held):
    """What a graph and its reverse share: the edges in all formats, and what was made of them.

    ``coo`` are ``(src, dst)`` as given, or ``None`` where each node has a loop in place of those in ``without_loops``, with ids
    that go on where theirs end; ``formats`` those by destination and by source; ``checked`` whether all ids are known to be in
    range; ``uses`` counts aggregations, and ``regret`` is the time in milliseconds by which they took longer over COO; ``choices``
    are those of the selector until now (:func:`gnnfast.dispatch.execute.choose`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.coo: tuple[Tensor, Tensor] | None = None
        self.without_loops: tuple[Tensor, Tensor] | None = None
        self.formats: list[Csr | None] = [None, None]
        self.checked = False
        self.uses = 0
        self.regret = 0.0
        self.choices: dict[Any, Any] = {}
        self.lock = threading.RLock()
        self.converting: Started | None = None

    # Most graphs that are new in each step need none of these.
    @cached_property
    def plan(self) -> Plan:
        return self._part(Plan())

    @cached_property
    def values(self) -> EdgeValues:
        return self._part(EdgeValues())

    @cached_property
    def draws(self) -> Draws:
        return self._part(Draws())

    def _part(self, part: Any) -> Any:
        part.account = self
        return part


class Graph:
    """A graph whose edges carry messages from ``num_src`` sources to ``num_dst`` destinations.

    Build one with :meth:`from_edge_index`, :meth:`from_csr` or :meth:`from_csc`. Formats are made when first needed, on the device
    of the tensors, in time linear in the number of edges. Edge ids, and so the order of edge weights, are those of the input.
    Graphs must not be changed through the tensors they were made from; the adapters' cache notices if they are.
    """

    def __init__(self, num_src: int, num_dst: int, num_edges: int, device: torch.device) -> None:
        self.num_src, self.num_dst, self.num_edges, self.device = num_src, num_dst, num_edges, device
        self.is_cuda = device.type == "cuda"
        self.flipped = False
        self.edges = Edges()

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
            IndexError: an id is out of range; the message names the bound and the value. Raised by the first use; on a GPU by the
                first later use, or ``torch.cuda.synchronize()``, that finds out without waiting.
            RuntimeError: gnnfast has no kernels for the device.

        Example:
            >>> graph = gnnfast.Graph.from_edge_index(torch.tensor([[0, 1, 1], [2, 2, 0]]), num_nodes=(2, 3))
            >>> graph.num_src, graph.num_dst, graph.num_edges
            (2, 3, 3)
        """
        edge_index = check_ids("edge_index", edge_index, 2)
        if edge_index.shape[0] != 2:
            raise ValueError(f"edge_index must have shape [2, num_edges], got {list(edge_index.shape)}")
        if num_nodes is None:
            num_nodes = max(int(edge_index.max()) + 1, 0) if edge_index.numel() else 0
        elif isinstance(num_nodes, (tuple, list)) and len(num_nodes) != 2:
            raise ValueError(f"num_nodes must be an integer or (num_src, num_dst), got {reprlib.repr(num_nodes)}")
        if isinstance(num_nodes, (tuple, list)):
            num_src, num_dst = (check_count(f"num_nodes[{i}]", n) for i, n in enumerate(num_nodes))
        else:
            num_src = num_dst = check_count("num_nodes", num_nodes)
        rows = edge_index.detach()  # so that they do not keep the user's tensor object alive as their base
        return cls.from_coo(rows[0], rows[1], num_src, num_dst)

    @classmethod
    def from_coo(cls, src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Graph:
        """From two id tensors ``[num_edges]``; otherwise as :meth:`from_edge_index`.

        Example:
            >>> gnnfast.Graph.from_coo(torch.tensor([0, 1]), torch.tensor([1, 2]), num_src=2, num_dst=3).num_edges
            2
        """
        src, dst = check_ids("src", src, 1), check_ids("dst", dst, 1)
        if src.shape != dst.shape or src.dtype != dst.dtype or src.device != dst.device:
            raise ValueError(f"src and dst must agree in shape, dtype and device, got {brief(src)} and {brief(dst)}")
        sizes = check_count("num_src", num_src), check_count("num_dst", num_dst), check_count("num_edges", src.numel())
        return cls.of_ids(src, dst, *sizes)

    @classmethod
    def of_ids(cls, src: Tensor, dst: Tensor, num_src: int, num_dst: int, num_edges: int) -> Graph:
        """From two id tensors and sizes that are known to be right, except that an id may be out of range."""
        graph = cls(num_src, num_dst, num_edges, src.device)
        if src.is_inference():
            with torch.inference_mode(False):  # made under inference_mode they could not be saved for a backward pass
                src, dst = src.clone(), dst.clone()
        graph.edges.coo = src, dst
        return graph

    @classmethod
    def with_loops(cls, edge_index: Tensor, num_src: int, num_dst: int) -> Graph:
        """From an ``edge_index`` on a GPU whose shape and dtype are known to be right: each of the ``min(num_src, num_dst)`` nodes
        has one loop in place of those it had. How many these are only the device knows, so that some edge ids are nobody's."""
        graph = cls(num_src, num_dst, edge_index.shape[1] + min(num_src, num_dst), edge_index.device)
        graph.edges.without_loops = edge_index.detach().unbind()  # type: ignore[assignment]
        return graph

    @classmethod
    def from_checked(cls, edge_index: Tensor, num_src: int, num_dst: int, to_target: bool) -> Graph:
        """From an ``edge_index`` whose shape, dtype and device are known to be right, and sizes of tensors; without ``to_target``
        edges go from row 1 to row 0."""
        first, second = edge_index.detach().unbind()  # detached, the rows do not keep the user's tensor object alive as their base
        if max(num_src, num_dst) >= MOST_NODES or edge_index.shape[1] >= MOST_EDGES:
            return cls.from_coo(first, second, num_src, num_dst)  # which says what is wrong
        return cls.of_ids(*((first, second) if to_target else (second, first)), num_src, num_dst, edge_index.shape[1])

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

        Example:
            >>> graph = gnnfast.Graph.from_csr(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]))  # 0 and 1 -> 0, 1 -> 1
            >>> gnnfast.spmm(graph, torch.tensor([[1.0], [2.0]])).tolist()
            [[3.0], [2.0]]
        """
        return cls._from_compressed(BY_DST, ("rowptr", rowptr), ("col", col), ("num_src", num_src), perm)

    @classmethod
    def from_csc(cls, colptr: Tensor, row: Tensor, num_dst: int | None = None, perm: Tensor | None = None) -> Graph:
        """From CSC by source: the destinations of source ``j`` are ``row[colptr[j]:colptr[j + 1]]``. Otherwise as
        :meth:`from_csr`.

        Example:
            >>> graph = gnnfast.Graph.from_csc(torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1]))  # 0 -> 0, 1 -> 0 and 1
            >>> gnnfast.spmm(graph, torch.tensor([[1.0], [2.0]])).tolist()
            [[3.0], [2.0]]
        """
        return cls._from_compressed(BY_SRC, ("colptr", colptr), ("row", row), ("num_dst", num_dst), perm)

    @classmethod
    def _from_compressed(
        cls, side: int, named_ptr: tuple[str, Any], named_idx: tuple[str, Any], named_size: tuple[str, Any], perm: Any
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
        rows = check_count(f"the number of rows in {ptr_name}", ptr.numel() - 1)
        columns = rows if columns is None else check_count(size_name, columns)
        edges = check_count("num_edges", idx.numel())
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
            graph = cls(*((columns, rows) if side == BY_DST else (rows, columns)), edges, idx.device)
            arrays = formats.int32(ptr), formats.int32(idx), None if perm is None else formats.int32(perm)
            graph.set_format(side, formats.from_arrays(*arrays))
        return graph

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold the edges as they were given; what was made of them is made anew."""
        coo = self.edges.coo
        if coo is not None:
            src, dst = reversed(coo) if self.flipped else coo
            return Graph.from_coo, (src, dst, self.num_src, self.num_dst)
        csc = (self.edges.formats[BY_DST] is not None) == self.flipped
        csr = self.csc if csc else self.csr
        make, columns = (Graph.from_csc, self.num_dst) if csc else (Graph.from_csr, self.num_src)
        return make, (csr.rowptr, csr.col, columns, csr.perm)

    def reverse(self) -> Graph:
        """The graph with every edge turned around; it shares all formats with this one.

        Example:
            >>> graph = gnnfast.Graph.from_edge_index(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
            >>> gnnfast.spmm(graph.reverse(), torch.tensor([[1.0], [2.0], [4.0]])).tolist()
            [[4.0], [4.0], [0.0]]
        """
        graph = Graph(self.num_dst, self.num_src, self.num_edges, self.device)
        graph.edges, graph.flipped = self.edges, not self.flipped
        return graph

    def incidence(self) -> Graph:
        """The graph whose sources are the edges of this one, which it has as COO: each goes to its own destination, under the same
        id. Formats by destination are shared."""
        coo, csr = self.coo, self.csr
        assert coo is not None
        with torch.no_grad(), torch.inference_mode(False):
            edges = torch.arange(self.num_edges, dtype=coo[1].dtype, device=self.device)
            slots = edges.to(torch.int32) if csr.perm is None else csr.perm
        graph = Graph.of_ids(edges, coo[1], self.num_edges, self.num_dst, self.num_edges)
        graph.set_format(BY_DST, csr._replace(col=slots, perm=csr.perm))
        graph.edges.checked = self.edges.checked
        return graph

    # ---- formats ---------------------------------------------------------------------------------------------------------
    @property
    def coo(self) -> tuple[Tensor, Tensor] | None:
        """``(src, dst)`` as given, or ``None`` for a graph made from a compressed format. On a CPU raises IndexError if an id is
        out of range."""
        edges = self.edges
        if edges.coo is None:
            return None
        src, dst = edges.coo
        if self.flipped:
            src, dst = dst, src
        if not edges.checked and not torch.compiler.is_compiling():
            if self.is_cuda:
                ids.watch(src)
            else:
                check_facts(coo_facts(dst, src).tolist(), self.num_dst, self.num_src, self.num_edges)
            edges.checked = True
        if self.is_cuda:
            keep_if_captured(edges.coo)
        return src, dst

    @property
    def csr(self) -> Csr:
        """By destination. Raises IndexError if it is made now and an id is out of range."""
        return self._format(BY_SRC if self.flipped else BY_DST)

    @property
    def csc(self) -> Csr:
        """By source."""
        return self._format(BY_DST if self.flipped else BY_SRC)

    def has(self, csc: bool) -> bool:
        """Whether CSR, and with ``csc`` also CSC, have been made."""
        made = self.edges.formats
        return made[int(self.flipped)] is not None and (not csc or made[int(not self.flipped)] is not None)

    def set_format(self, side: int, csr: Csr) -> None:
        """Puts a format in place that is known to be right."""
        self.edges.formats[side] = csr
        self.edges.grew(csr.nbytes)
        for array in (csr.rowptr, csr.perm):
            if array is not None:
                own(array, self.edges)

    def _format(self, side: int, both: bool = False) -> Csr:
        edges = self.edges
        found = edges.formats[side]
        if edges.converting is not None:
            edges.converting.wait(self.device)
        if found is None:
            if self.is_cuda and is_capturing():
                raise Unsupported(
                    "a CUDA graph is being captured and this graph has not been converted yet; run once before capturing"
                )
            with edges.lock:
                found = edges.formats[side]
                if found is None:
                    for made_side, made in self._convert(side, both).items():
                        self.set_format(made_side, made)
                    if self.is_cuda:
                        edges.converting = Started(self.device)
                    edges.checked = True
                    found = edges.formats[side]
                    assert found is not None
        return found

    def _convert(self, side: int, both: bool) -> dict[int, Csr]:
        """The format of a ``side`` and, if ``both`` will be needed and that is faster, the other one."""
        edges, other_side = self.edges, BY_SRC if side == BY_DST else BY_DST
        sizes = (self.num_dst, self.num_src) if (side == BY_DST) != self.flipped else (self.num_src, self.num_dst)
        with usable_later():
            coo = edges.coo or edges.without_loops
            if coo is None:
                other = edges.formats[other_side]
                assert other is not None
                return {side: formats.transposed(other, sizes[0])}
            row, column = (coo[1], coo[0]) if side == BY_DST else coo
            both = both and edges.formats[other_side] is None
            if not self.is_cuda:
                made = formats.from_coo(row, column, *sizes, both)
            else:
                together = both and self.num_edges <= MOST_TOGETHER
                made = formats.on_cuda(row, column, *sizes, loops=edges.coo is None, both=together)
            return dict(zip((side, other_side), made))

    def make_exact(self) -> None:
        """Waits, if need be, until each format has a schedule of nothing but work, as the kernels for sampling and for sparse
        features want it."""
        edges = self.edges
        if all(csr is None or csr.exact for csr in edges.formats):
            return
        if is_capturing():
            raise Unsupported("a CUDA graph is being captured, and the schedule's sizes are not known; run it more often before")
        with edges.lock:
            for side, csr in enumerate(edges.formats):
                if csr is not None and not csr.exact:
                    exact = edges.formats[side] = formats.Exactly(csr).result()
                    self.plan.args.clear()
                    self.plan.exactly.pop(side, None)
                    edges.grew(exact.nbytes - csr.nbytes)

    # ---- what ops take ---------------------------------------------------------------------------------------------------
    def args(self, csc: bool, row_bytes: int = 0, permuted: bool = True, tuned: Tuned | None = None, exact: bool = False) -> Matrix:
        """The graph arguments of the CSR ops: CSR and, with ``csc``, its transpose, for features of
        ``row_bytes`` a node. Without ``permuted``, weights are given in slot order and the perms are left out. ``tuned``: the
        schedule, and the slab of the forward pass; if not given, the schedule that the settings ask for. ``exact`` as
        :meth:`make_exact`."""
        plan, flipped = self.plan, self.flipped
        if tuned is None:
            tuned = plan.default(self.is_cuda, row_bytes, self.num_edges, self.num_dst)
        key = (flipped, csc, permuted, exact, tuned)
        found = plan.args.get(key)
        if found is None:
            sides = (int(flipped), int(not flipped)) if csc else (int(flipped),)
            made = [self._format(side, csc) for side in sides]
            if exact:
                self.make_exact()
                made = [self._format(side) for side in sides]
            with self.lock:
                made = [
                    plan.with_schedule(side, csr, tuned.schedule, self.num_src == self.num_dst) for side, csr in zip(sides, made)
                ]
            if not permuted:
                made = [csr._replace(perm=None) for csr in made]
            if tuned.slab:
                layout = made[0].layout
                made[0] = made[0]._replace(layout=[*layout[:4], tuned.slab, *layout[5:]])
            found = plan.args[key] = Matrix(*made[0].args, *(made[1].args if csc else NO_CSR))
        elif self.edges.converting is not None:
            self.edges.converting.wait(self.device)
        if self.is_cuda:  # these very arrays: the graph itself may go on to better ones
            keep_if_captured(found)
        return found

    def used(self, x_bytes: int) -> None:
        """Called before each aggregation over a format: ``x_bytes`` are those of the gathered features. Counts, and lets the plan
        be improved."""
        edges = self.edges
        edges.uses += 1
        if self.is_cuda and edges.nbytes and not edges.plan.settled(edges.formats, x_bytes):
            with edges.lock:
                edges.plan.improve(edges.formats, edges.uses - 1, x_bytes, self.num_src == self.num_dst, self)

    def slot_weights(self, weight: Tensor, csc: bool) -> tuple[Tensor, Tensor | None] | None:
        """The weight ``[num_edges]`` or ``[num_edges, H]`` in the slot orders of CSR and CSC: itself where there is no ``perm``,
        else, if it is a constant, a copy that is kept from the second time the same, unchanged tensor is used on; else ``None``."""
        first, second = int(self.flipped), int(not self.flipped)
        perm, perm_t = self.csr.perm, self.csc.perm if csc else None
        if perm is None and perm_t is None:
            return (weight, weight) if csc else (weight, None)
        if not is_constant(weight) or (torch.is_grad_enabled() and saved_tensors_are_watched()):
            return None
        values = self.edges.values
        if self.is_cuda and is_capturing():
            # Replays read what the weights are then, unless somebody looks before each whether they still are.
            orders = values.find(weight, (first, second) if csc else (first,)) if is_watching() else None
            keep_if_captured(orders)
        else:
            orders = values.find(weight, (first, second) if csc else (first,))
            if orders is None:
                orders = values.get(weight, {first: perm, second: perm_t} if csc else {first: perm})
        return None if orders is None else (orders[first], orders.get(second) if csc else None)

    # ---- facts -----------------------------------------------------------------------------------------------------------
    @property
    def plan(self) -> Plan:
        return self.edges.plan

    @property
    def draws(self) -> Draws:
        return self.edges.draws

    @property
    def lock(self) -> threading.RLock:
        return self.edges.lock

    @property
    def uses(self) -> int:
        """Aggregations so far: a graph seen again is worth converting."""
        return self.edges.uses

    @property
    def order(self) -> Tensor | None:
        """The rows in an order in which neighbours are near, where one was found to pay."""
        return self.plan.used_order

    @property
    def average_degree(self) -> float:
        """``num_edges / num_dst``."""
        return self.num_edges / max(self.num_dst, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the formats, schedules, draws and weights kept, without the user's own tensors."""
        return self.edges.nbytes

    @property
    def held(self) -> Edges:
        """Who says to an account that :attr:`nbytes` changes."""
        return self.edges

    @property
    def format_schedule_nbytes(self) -> int:
        """Of :attr:`nbytes`, those of the schedule of each format."""
        return sum(csr.schedule.nbytes for csr in self.edges.formats if csr is not None and csr.schedule is not None)

    @property
    def schedule_nbytes(self) -> int:
        """Of :attr:`nbytes`, those of the schedules besides the one of each format."""
        parts = (vars(self.edges).get(name) for name in ("plan", "draws"))
        return sum(part.schedule_nbytes for part in parts if part is not None)

    def __repr__(self) -> str:
        found = self.edges.coo, *self.edges.formats
        names = "+".join(name for name, made in zip(("coo", "csr", "csc"), found) if made is not None)
        return (
            f"Graph(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges}, device={str(self.device)!r}, "
            f"formats={names})"
        )
