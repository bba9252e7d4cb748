"""What sampling remembers of a graph: sizes of draws, and the draws of strategies without chance."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnfast import _native
from gnnfast.cache import Held, keep_if_captured
from gnnfast.graph import formats
from gnnfast.graph.formats import NO_CSR
from gnnfast.stream import is_capturing
from gnnfast.types import STRATEGIES, Matrix

if _native.cpu.loaded:
    from gnnfast.ops.convert import inverse

if TYPE_CHECKING:
    from gnnfast.graph.graph import Graph

KEPT = 4  # draws of a graph


class Draws(Held):
    """Of one graph and its reverse: keys begin with whether it is the reverse."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[tuple[bool, int], tuple[int, int]] = {}
        self._args: dict[tuple[bool, bool], Matrix] = {}
        self.drawn: OrderedDict[tuple[bool, int, int], tuple[Graph, Tensor]] = OrderedDict()
        self._asked: dict[tuple[bool, int, int], bool] = {}  # and whether there was memory
        self._captured: dict[Any, Any] = {}

    def sizes(self, graph: Graph, width: int) -> tuple[int, int]:
        """The most edges of a row, and how many edges at most ``width`` of each row are. Waits for the device the first time."""
        key = graph.flipped, width
        if key not in self._sizes:
            degree = graph.csr.rowptr.diff()
            longest = degree.max() if graph.num_dst else degree.sum()
            numbers = torch.stack([longest.long(), degree.clamp(max=width).sum()]).tolist()
            self._sizes[key] = numbers[0], numbers[1]
        return self._sizes[key]

    def args(self, graph: Graph, csc: bool) -> Matrix:
        """The graph arguments of the sampled ops (see :mod:`gnnfast.ops.spmm_sampled`), with ``csc`` those of a backward pass."""
        key = graph.flipped, csc
        found = self._args.get(key)
        if found is None:
            graph.args(csc, exact=True)
            forward, backward = graph.csr, graph.csc if csc else None
            other = NO_CSR if backward is None else backward.args
            if backward is not None and forward.perm is not None:
                slot = inverse(forward.perm)
                assert slot is not None  # nothing is sampled for the first time in a capture
                with torch.no_grad(), torch.inference_mode(False):
                    slots_t = slot if backward.perm is None else slot[backward.perm.long()]
                other = (*other[:2], slots_t, *other[3:])
                self.grew(slots_t.nbytes)
            found = self._args[key] = Matrix(*forward.args, *other)
        if graph.is_cuda:
            keep_if_captured(found)
        return found

    def prepared(self, graph: Graph, width: int, csc: bool) -> bool:
        """Whether an aggregation of at most ``width`` edges a row needs nothing that is not there."""
        return (graph.flipped, width) in self._sizes and (graph.flipped, csc) in self._args

    def get(self, graph: Graph, strategy: str, width: int) -> tuple[Graph, Tensor] | None:
        """The edges that a strategy without chance (see :mod:`gnnfast.ops.spmm_sampled`) draws, side by side: a graph whose edge
        ids are those of ``graph``, and edges over draws of each row, ``[num_dst]`` float64. Made at the second request and kept
        for the last few; ``None`` before, if there is no memory, and if it would be made while a CUDA graph is captured."""
        key = graph.flipped, STRATEGIES[strategy], width
        capturing = graph.is_cuda and is_capturing()
        with graph.lock:
            if key not in self.drawn:
                may = self._asked.get(key)
                if may is None or capturing:
                    self._asked.setdefault(key, True)
                    return None
                if not may:
                    return None
                try:
                    self.drawn[key] = self._draw(graph, STRATEGIES[strategy], width)
                except RuntimeError:  # no memory; the user's call must not fail for it
                    self._asked[key] = False
                    return None
                self._keep(self.drawn[key], 1)
                while len(self.drawn) > KEPT:
                    self._keep(self.drawn.popitem(last=False)[1], -1)
            self.drawn.move_to_end(key)
            found = self.drawn[key]
            if capturing:  # replays read it, whatever is kept then
                self._captured[key] = found
            else:
                csr = found[0].csr
                found[0].plan.follow(graph.plan, formats.BY_DST, csr)
        return found

    def _keep(self, made: tuple[Graph, Tensor], sign: int) -> None:
        graph, scale = made
        graph.edges.account = self if sign > 0 else None
        self.grew(sign * (graph.nbytes + scale.nbytes))

    def _draw(self, graph: Graph, strategy: int, width: int) -> tuple[Graph, Tensor]:
        csr = graph.csr
        with torch.no_grad(), torch.inference_mode(False):
            degree = csr.rowptr.diff()
            draws = degree.clamp(max=width)
            rowptr = torch.cat([draws.new_zeros(1), draws.cumsum(0, dtype=torch.int32)])
            scale = degree.double() / draws.clamp(min=1)
            slot = torch.ops.gnnfast.draw(csr.rowptr, rowptr, self.sizes(graph, width)[1], width, strategy)
            drawn = type(graph)(graph.num_src, graph.num_dst, slot.numel(), graph.device)
            perm = slot if csr.perm is None else csr.perm.index_select(0, slot)
            drawn.set_format(formats.BY_DST, formats.from_arrays(rowptr, csr.col.index_select(0, slot), perm))
            return drawn, scale

    @property
    def schedule_nbytes(self) -> int:
        graphs = [graph for graph, _ in list(self.drawn.values())]
        return sum(graph.format_schedule_nbytes + graph.schedule_nbytes for graph in graphs)
