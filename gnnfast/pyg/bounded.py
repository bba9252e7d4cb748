"""Message passing whose memory does not grow with the edges: they go by chunks of destinations, and the messages of a chunk exist
only until they are reduced, and in the backward pass once more, where ``torch.utils.checkpoint`` computes them again.

It is for messages that would not fit, and only for those of which each depends on its own edge alone: a message that looks at the
others of its chunk, or leaves something behind, is none that may be computed in parts."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gnnfast.config import settings
from gnnfast.dispatch import edges
from gnnfast.graph import Graph
from gnnfast.lazy import effects
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


class State:
    """What messages are computed from, as it was: in the backward pass they are computed again, when it may be something else."""

    def __init__(self, module: Any, edge_index: Tensor, kwargs: dict[str, Any]) -> None:
        values = [v for value in kwargs.values() for v in (value if isinstance(value, (tuple, list)) else (value,))]
        tensors = [edge_index, *module.parameters(), *(v for v in values if isinstance(v, Tensor))]
        self._versions = [(t, t._version) for t in tensors if not t.is_inference()]

    def check(self) -> None:
        """Raises RuntimeError if it is not as it was."""
        for t, version in self._versions:
            if t._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
                    f"shape {list(t.shape)}, from which gnnfast computes messages a second time; GNNFAST_BOUNDED=off has them kept"
                )


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
    message = type(module).message
    reach = effects.Reach(message, module)
    if reach.unseen:
        return f"message() may call {reach.unseen}, which cannot be looked into"
    if any(map(effects.leaves_something, reach.codes)):
        return "message() leaves something behind"
    if any(map(effects.stores, reach.forwards)):
        return "a module leaves something behind"
    if any(map(effects.draws, (*reach.codes, *reach.forwards))):
        return "message() draws from a generator that is not torch's own"
    used = message.__code__.co_names
    if module.training and "training" in used and "dropout" not in used:
        return "message() asks whether it is trained"
    if not {"edge_index", "size", "adj_t", "ptr"}.isdisjoint(names):
        return "message() asks for all edges"
    for m in _aggregations(module.aggr_module):
        if type(m) not in _by_row():
            return f"{type(m).__name__} may look at all nodes"
    for m in reach.modules:
        if m is not module and (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks):
            return f"hooks are registered on a {type(m).__name__}"
        if m.training and isinstance(m, torch.nn.utils.parametrize.ParametrizationList):
            return "a parametrisation may change with each use"
    return ""


def _aggregations(aggregation: Any) -> list[Any]:
    """An aggregation and those that it consists of."""
    from torch_geometric.nn.aggr import Aggregation

    return [aggregation, *(m for m in aggregation.modules() if isinstance(m, Aggregation))]


@functools.cache
def _by_row() -> frozenset[type]:
    """Aggregations whose result for a node depends on the messages to it alone, and not on their order. Recurrent ones and those
    that pad depend on the largest degree of all nodes."""
    from torch_geometric.nn import aggr

    names = "Sum Mean Max Min Mul Var Std Softmax PowerMean VariancePreserving Multi DegreeScaler Fused"
    kinds = (getattr(aggr, f"{name}Aggregation", None) for name in names.split())
    from torch_geometric.nn.aggr.fused import FusedAggregation

    return frozenset({FusedAggregation, *(kind for kind in kinds if kind is not None)})


def _is_over_all_rows(m: Any) -> bool:
    """Whether the result of a module for a row depends on the other rows."""
    return isinstance(m, torch.nn.modules.batchnorm._NormBase) and (m.training or not m.track_running_stats)


def _refuse(m: Any, *_: Any) -> None:
    raise Unsupported(f"message() calls {type(m).__name__}, which takes its statistics over all edges")


def _evaluated(module: Any, made: dict[int, Any]) -> Any:
    """A module with the parameters and buffers of another, and without its dropout: other threads may run that one now."""
    if id(module) not in made:
        copied = made[id(module)] = object.__new__(type(module))
        own = copied.__dict__ = dict(module.__dict__)
        own |= {kind: dict(own[kind]) for kind in ("_parameters", "_buffers")} | {"training": False}
        own["_modules"] = {name: None if m is None else _evaluated(m, made) for name, m in own["_modules"].items()}
        if _is_over_all_rows(module):
            own["_forward_pre_hooks"] = collections.OrderedDict(own["_forward_pre_hooks"])
            copied.register_forward_pre_hook(_refuse)
    return made[id(module)]


@contextmanager
def _as_evaluated(module: Any, device: torch.device) -> Iterator[Any]:
    """Such a module, which leaves no trace in the random numbers of the program."""
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        yield _evaluated(module, {})


def _close(found: Tensor, expected: Tensor) -> bool:
    found, exact = found.double().nan_to_num(0, 0, 0), expected.double().nan_to_num(0, 0, 0)
    if not exact.numel():
        return True
    return bool((found - exact).abs().max() <= _TOLERANCE.get(expected.dtype, 1e-2) * exact.abs().max().clamp(min=1e-30))


def probe(module: Any, message: Any, ids: Tensor) -> int:
    """Bytes that a message and what it is computed from take, an edge, with what is kept for the backward pass.
    ``message(module, ids)`` computes those of some edges. Raises Unsupported if messages depend on one another."""
    try:
        return _probe(module, message, ids)
    except Unsupported:
        raise
    except Exception as error:  # the program's own is raised again where all messages are computed
        raise Unsupported(f"some edges' messages alone: {type(error).__name__}") from None


def _probe(module: Any, message: Any, ids: Tensor) -> int:
    half = max(ids.numel() // 2, 1)
    with _as_evaluated(module, ids.device) as evaluated, torch.no_grad():
        whole = message(evaluated, ids)
        if not isinstance(whole, Tensor) or whole.dim() == 0 or whole.shape[0] != ids.numel():
            raise Unsupported("messages are no tensor with a row for each edge")
        for part, expected in zip(ids.split(half), whole.split(half)):
            # Each edge three times: what depends on how many have an end in common, or on how many there are, is another then.
            found = message(evaluated, part.repeat(3)).view(3, *expected.shape)
            if not _close(found, expected):
                raise Unsupported("a message depends on others than that of its own edge")
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Any:  # nothing is kept: a result that its own node held would hold all of it
        if t.dim() and t.shape[0] == ids.numel():
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()

    with _as_evaluated(module, ids.device) as evaluated, torch.enable_grad(), saved_tensors_hooks(pack, lambda kept: kept):
        out = message(evaluated, ids)
    return 3 * out.nbytes // max(ids.numel(), 1) + sum(saved.values()) // max(ids.numel(), 1) + 32


def free_bytes(device: torch.device) -> int:
    """Memory that is free and that this process may take, or that torch would reuse."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # As memory_reserved() and memory_allocated() have it, which make a dictionary of all there is for each.
        known = torch.cuda.memory_stats_as_nested_dict(device)
        reserved, allocated = (known[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes"))
        allowed = int(total * torch.cuda.memory.get_per_process_memory_fraction(device)) - reserved
        return min(free, allowed) + reserved - allocated  # type: ignore[no-any-return]
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


def in_chunks(of: Edges, most: int, reduced: Callable[[Tensor, Tensor, edges.Ends], Tensor], state: State) -> Tensor:
    """``reduced(ids, edge_index, ends)``, ``[num_dst, ...]``, of each chunk's edges, put together."""
    training, parts = torch.is_grad_enabled(), []
    for chunk in of.chunks(most):

        def run(_: Tensor, chunk: Chunk = chunk) -> Tensor:
            state.check()
            part = of.part(chunk)
            first, second = part.unbind()
            ends = edges.Ends(*((second, first) if of.to_target else (first, second)), lambda: of.graph_of(chunk))
            out = reduced(of.ids(chunk.begin, chunk.end), part, ends)[chunk.first : chunk.last].clone()  # the others' rows go
            ends.ids = ()  # type: ignore[assignment]  # what autograd keeps of a chunk must not hold them
            return out

        # An argument on the device, by which the random numbers of that are found and given back too.
        parts.append(checkpoint(run, of.rowptr, use_reentrant=False) if training else run(of.rowptr))
    return torch.cat(parts)
