"""Message passing whose memory does not grow with the edges: they go by chunks of destinations, and the messages of a chunk exist
only until they are reduced, and in the backward pass once more, where ``torch.utils.checkpoint`` computes them again.

It is for messages that would not fit, and only for those of which each depends on its own edge alone: a message that looks at the
others of its chunk, or leaves something behind, is none that may be computed in parts."""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gnnfast.config import settings
from gnnfast.dispatch import edges
from gnnfast.graph import Graph
from gnnfast.unsupported import Unsupported

SHARE = 0.5  # of the free memory that messages may take before they are computed in chunks, ...
CHUNK, CHUNK_SHARE = 4 << 30, 0.25  # ... of at most so many bytes, and this share of what is free
FEWEST = 1 << 14  # edges of a chunk: with fewer the host decides
PROBE = 512  # edges whose messages are looked at
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


class Chunk(NamedTuple):
    """Destinations ``[first, last)`` and the slots ``[begin, end)`` of their edges."""

    first: int
    last: int
    begin: int
    end: int


class Edges:
    """The edges of a graph by destination, of which one chunk at a time is there."""

    def __init__(self, graph: Graph, edge_index: Tensor, to_target: bool) -> None:
        csr = graph.csr
        self.rowptr, self.perm, self.edge_index, self.graph, self.to_target = csr.rowptr, csr.perm, edge_index, graph, to_target
        self._latest: tuple[Chunk, Graph] | None = None

    def ids(self, begin: int, end: int) -> Tensor:
        """The edge ids of slots."""
        if self.perm is None:
            return torch.arange(begin, end, device=self.rowptr.device)
        return self.perm[begin:end].long()

    def part(self, chunk: Chunk) -> Tensor:
        """The edges of a chunk as an ``edge_index``."""
        return self.edge_index.index_select(1, self.ids(chunk.begin, chunk.end))

    def graph_of(self, chunk: Chunk) -> Graph:
        """The graph of a chunk. That of the one that was asked for last is kept."""
        if self._latest is None or self._latest[0] != chunk:
            first, second = self.part(chunk).unbind()
            src, dst = (first, second) if self.to_target else (second, first)
            self._latest = chunk, Graph.of_ids(src, dst, self.graph.num_src, self.graph.num_dst, chunk.end - chunk.begin)
        return self._latest[1]

    def chunks(self, most: int) -> Iterator[Chunk]:
        """Chunks of about ``most`` edges; the edges of one destination stay together."""
        rows = self.rowptr.numel() - 1
        starts = torch.arange(0, self.graph.num_edges, most, device=self.rowptr.device, dtype=self.rowptr.dtype)
        cuts = torch.unique(torch.searchsorted(self.rowptr[:-1], starts, right=True) - 1)
        cuts[:1] = 0
        ends = torch.cat([cuts, cuts.new_tensor([rows])])
        bounds = torch.stack([ends, self.rowptr[ends].long()]).t().tolist()
        for (first, begin), (last, end) in itertools.pairwise(bounds):
            yield Chunk(first, last, begin, end)


@functools.lru_cache(maxsize=256)
def _leaves_something(code: CodeType) -> bool:
    """Whether a function writes to what outlives it."""
    return any(i.opname in ("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE_ATTR") for i in dis.get_instructions(code))


def per_edge(names: tuple[str, ...], kwargs: dict[str, Any], graph: Graph) -> tuple[str, ...]:
    """Which arguments of ``propagate`` have a row for each edge. ``names`` are those that message() and its like ask for. Raises
    Unsupported where that cannot be told."""
    ends = {name[:-2] for name in names if name.endswith(("_i", "_j"))}
    found = []
    for name, value in kwargs.items():
        if name in names and isinstance(value, Tensor) and value.dim() and value.shape[0] == graph.num_edges:
            if name in ends or graph.num_edges in (graph.num_src, graph.num_dst, 1):
                raise Unsupported(f"{name} may have a row for each node or for each edge")
            found.append(name)
    return tuple(found)


def why_not(module: Any, names: tuple[str, ...]) -> str:
    """Why messages cannot be computed in parts, if that can be seen from the module; else empty."""
    if _leaves_something(type(module).message.__code__):
        return "message() leaves something behind"
    if not {"edge_index", "size", "adj_t", "ptr"}.isdisjoint(names):
        return "message() asks for all edges"
    for m in _over_all_rows(module.aggr_module):
        return f"{type(m).__name__} takes its statistics over all nodes"
    return ""


def _over_all_rows(module: Any) -> list[Any]:
    """Parts of a module whose result for a row depends on the other rows."""
    norms = [m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase)] if module is not None else []
    return [m for m in norms if m.training or not m.track_running_stats]


def _refuse(m: Any, *_: Any) -> None:
    raise Unsupported(f"message() calls {type(m).__name__}, which takes its statistics over all edges")


@contextmanager
def _as_evaluated(module: Any, device: torch.device) -> Iterator[None]:
    """Without dropout, and without a trace in the random numbers of the program."""
    training = [m for m in module.modules() if m.training]
    watched = [m.register_forward_pre_hook(_refuse) for m in _over_all_rows(module)]
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        try:
            for m in training:
                m.training = False
            yield
        finally:
            for m in training:
                m.training = True
            for handle in watched:
                handle.remove()


def probe(module: Any, message: Any, ids: Tensor) -> int:
    """Bytes that a message and what it is computed from take, an edge, with what is kept for the backward pass. ``message(ids)``
    computes those of some edges. Raises Unsupported if messages depend on one another."""
    half = max(ids.numel() // 2, 1)
    with _as_evaluated(module, ids.device), torch.no_grad():
        whole = message(ids)
        if not isinstance(whole, Tensor) or whole.dim() == 0 or whole.shape[0] != ids.numel():
            raise Unsupported("messages are no tensor with a row for each edge")
        parts = torch.cat([message(ids[:half]), message(ids[half:])]) if ids.numel() > 1 else whole
        error = (whole.double() - parts.double()).abs().nan_to_num(0, 0, 0).max() if whole.numel() else 0.0
        if error > _TOLERANCE.get(whole.dtype, 1e-2) * max(float(whole.double().nan_to_num(0, 0, 0).abs().max()), 1e-30):
            raise Unsupported("a message depends on others than that of its own edge")
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.dim() and t.shape[0] == ids.numel():
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with _as_evaluated(module, ids.device), torch.enable_grad(), saved_tensors_hooks(pack, lambda t: t):
        out = message(ids)
    return 3 * out.nbytes // max(ids.numel(), 1) + sum(saved.values()) // max(ids.numel(), 1) + 32


def free_bytes(device: torch.device) -> int:
    """Memory that is free, or that torch would reuse."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        import os

        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def may_not_fit(num_edges: int, row_bytes: int, device: torch.device) -> bool:
    """Whether messages, of which a row of the operands has so many bytes, are worth a closer look."""
    asked, operands = settings().bounded, num_edges * row_bytes
    return asked == "on" or (asked == "auto" and operands > FEWEST * FEWEST and 16 * operands > free_bytes(device))


def chunk_size(num_edges: int, bytes_per_edge: int, device: torch.device) -> int | None:
    """Edges of a chunk, or ``None`` where all messages fit."""
    free = free_bytes(device)
    if settings().bounded != "on" and num_edges * bytes_per_edge <= SHARE * free:
        return None
    return max(int(min(CHUNK, CHUNK_SHARE * free) / bytes_per_edge), FEWEST)


def in_chunks(of: Edges, most: int, reduced: Callable[[Tensor, Tensor, edges.Ends], Tensor]) -> Tensor:
    """``reduced(ids, edge_index, ends)``, ``[num_dst, ...]``, of each chunk's edges, put together."""
    training, parts = torch.is_grad_enabled(), []
    for chunk in of.chunks(most):

        def run(chunk: Chunk = chunk) -> Tensor:
            part = of.part(chunk)
            first, second = part.unbind()
            ends = edges.Ends(*((second, first) if of.to_target else (first, second)), lambda: of.graph_of(chunk))
            out = reduced(of.ids(chunk.begin, chunk.end), part, ends)[chunk.first : chunk.last].clone()  # the others' rows go
            ends.ids = ()  # type: ignore[assignment]  # what autograd keeps of a chunk must not hold them
            return out

        parts.append(checkpoint(run, use_reentrant=False) if training else run())
    return torch.cat(parts)
