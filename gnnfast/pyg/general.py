"""Message passing with any ``message()`` at all: the user's own functions run on gathered features as they do in PyG, and gnnfast
does what is before and after them, gathers and reductions, whose gradients are then no scattering either."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.config import Settings, settings
from gnnfast.dispatch import edges, several, softened
from gnnfast.graph import Graph
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.graph.formats import BY_DST, BY_SRC
from gnnfast.lazy import rows as lazy
from gnnfast.lazy.kinds import Exists, version_of
from gnnfast.lazy.rows import Call, Key, User, existing, operations
from gnnfast.pyg import bounded, listed
from gnnfast.pyg.adjacency import graph_of, running
from gnnfast.pyg.aggregations import is_softened, kinds_of, may_be_several, temperature_of
from gnnfast.pyg.messages import SPECIAL
from gnnfast.pyg.verdict import COLLECT, GENERIC, UNKNOWN, Steps, check_steps
from gnnfast.reporting import ran
from gnnfast.types import FEATURE_DTYPES, INDEX_DTYPES, LINEAR
from gnnfast.unsupported import Unsupported

# How often a scatter of PyG's reads messages, or takes as long; and its softmax aggregation.
SCATTER_PASSES, SOFTMAX_PASSES = 3, 14


class Few(NamedTuple):
    """Where nothing :func:`pays` in the calls of a module: up to so many ``ids`` of an ``edge_index``, and under some ``settings``
    up to so many bytes of the widest rows at all edges."""

    ids: int
    nbytes: float
    settings: Settings

    @classmethod
    def of(cls, module: Any, is_cuda: bool) -> Few:
        return cls(2 * ((lazy.FEW if is_cuda else lazy.FEW_ON_CPU) - 1), lazy.most_left(Key(module), is_cuda), settings())

    def holds(self, module: Any, edge_index: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether it is so in a call. What has been learnt must not decide in checkpointing."""
        ids = edge_index.numel()
        if ids <= self.ids or (torch.is_grad_enabled() and saved_tensors_are_watched()):
            return ids <= self.ids
        current = settings()  # a new object wherever they are overridden
        same = current is self.settings or current == self.settings
        return same and ids // 2 * _moved(module, edge_index.is_cuda, kwargs) <= self.nbytes


def pays(module: Any, edge_index: Any, kwargs: dict[str, Any]) -> bool:
    """Whether messages are so large that PyG's own path would take longer; asked in every call, before anything is looked at."""
    if type(edge_index) is not Tensor or edge_index.dim() != 2:
        return False
    is_cuda, num_edges = edge_index.is_cuda, edge_index.size(1)
    if lazy.are_few(num_edges, is_cuda):
        return False
    return lazy.pays(Key(module), num_edges, _moved(module, is_cuda, kwargs), is_cuda)


def _moved(module: Any, is_cuda: bool, kwargs: dict[str, Any]) -> int:
    """Bytes of the widest row of an edge; a softmax aggregation reads and writes such several times as often."""
    row_bytes = _widest_row(kwargs)
    return 3 * row_bytes if not is_cuda and is_softened(module) else row_bytes


def _widest_row(kwargs: dict[str, Any]) -> int:
    """Bytes of a row of the widest operand."""
    widest = 0
    for value in kwargs.values():
        t = value[0] if type(value) is tuple and value else value
        if type(t) in guards.PLAIN and t.dtype in FEATURE_DTYPES and t.dim():
            widest = max(widest, t.numel() // (t.size(0) or 1) * t.element_size())
    return widest


def _tensors(kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for value in kwargs.values():
        for t in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(t, Tensor) and t.dtype in FEATURE_DTYPES and t.dim():
                yield t


def _differ_in_rows(pair: Any, dim: int, size: Any) -> bool:
    tensors = [t for t in pair if isinstance(t, Tensor) and -t.dim() <= dim < t.dim()] if isinstance(pair, (tuple, list)) else ()
    return len({*(t.shape[dim] for t in tensors), *(n for n in size or () if n is not None)}) > 1


def propagate(module: Any, edge_index: Tensor, size: Any, kwargs: dict[str, Any], why: str, collect: str = COLLECT) -> Any:
    """What ``propagate`` returns; the report says ``why`` no kernel does all of it. Raises Unsupported."""
    if edge_index.layout is not torch.strided or edge_index.shape[0] != 2 or edge_index.dtype not in INDEX_DTYPES:
        raise Unsupported(f"edge_index is {edge_index.dtype} of shape {list(edge_index.shape)}")
    if not guards.is_size(size):
        raise Unsupported("size is not a pair of numbers")
    reason = guards.operand("edge_index", edge_index)
    if reason or not edge_index.is_contiguous():
        raise Unsupported(reason or "edge_index is not contiguous")
    if module.flow != "source_to_target" and any(_differ_in_rows(value, module.node_dim, size) for value in kwargs.values()):
        raise Unsupported("flow is target_to_source, and PyG has messages of the first of a pair of unlike sizes")
    steps = check_steps(module, collect)
    if bounded.may_not_fit(edge_index.shape[1], _row_bytes(kwargs), edge_index.device):
        try:
            out = _in_chunks(module, steps, edge_index, size, kwargs, collect)
            if out is not None:
                return out
        except Unsupported as error:
            why = f"{why}; not in chunks: {error}"
    found: list[Graph] = []
    ends = edges.Ends(*_ends(module, edge_index), lambda: found[0])
    rows = Call.of((User(type(module).message, module, Key(module)),), ends, steps.place)
    sizes, collected = _collect(module, edge_index, size, kwargs, ends, collect, rows)
    found.append(_graph(module, edge_index, sizes))

    version = version_of(edge_index)

    def aggregated(exist: bool) -> Any:
        before, running.messages = running.messages, (ends, version)
        given = _arguments(steps.message, collected, exist)
        copies: list[tuple[Tensor, int | None]] = []
        if not exist and rows is not None and rows.writes:  # who runs again would write twice
            for name, value in given.items():
                if type(value) is Tensor:
                    given[name] = value.clone()
                    copies.append((given[name], version_of(given[name])))
        try:
            messages = module.message(**given)
        finally:
            running.messages = before
        if not exist and rows is not None:
            rows.check_kept()
            if any(version_of(t) != v for t, v in copies):
                raise Exists
        if version_of(edge_index) != version:  # message() has written into it: the graph is another than that of ``ends``
            return module.aggregate(existing(messages), **_arguments(steps.aggregate, collected))
        return existing(_aggregate(module, steps, messages, ends, collected, why, None if exist else rows))

    found_out = None if rows is None else rows.run(lambda: aggregated(False))
    out = _update(module, steps, aggregated(True) if found_out is None else found_out[0], collected)
    if rows is not None:
        del collected
        rows.settle()  # what message() has given to somebody
        if found_out is not None:
            rows.learn_passes(_widest_row(kwargs))
            if rows.operations and not rows.said:
                ran(steps.place, "rows of edges", operations(Key(module), rows))
    return out


def _ends(module: Any, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    """Destinations and sources."""
    first, second = edge_index[0], edge_index[1]
    return (second, first) if module.flow == "source_to_target" else (first, second)


def _collect(
    module: Any,
    edge_index: Tensor,
    size: Any,
    kwargs: dict[str, Any],
    ends: edges.Ends,
    collect: str,
    rows: Call | None = None,
) -> tuple[list[Any], Any]:
    """The sizes, and the arguments of message(), aggregate() and update(), as PyG's ``collect`` finds them, gathered by gnnfast;
    with ``rows`` as such that do not exist."""
    try:
        sizes = module._check_input(edge_index, size)
        collector = _Collector(module, edge_index, ends, rows)
        if collect == GENERIC:
            found = type(module)._collect(collector, module._user_args, edge_index, sizes, kwargs)
            return sizes, SimpleNamespace(**found)
        return sizes, type(module).collect(collector, edge_index, *kwargs.values(), sizes)
    except (IndexError, ValueError, RuntimeError, AssertionError) as error:  # PyG raises its own
        raise Unsupported(f"invalid input: {error}") from None


def _graph(module: Any, edge_index: Tensor, sizes: list[Any]) -> Graph:
    to_target = module.flow == "source_to_target"
    num_src, num_dst = sizes if to_target else sizes[::-1]
    num_src, num_dst = num_dst if num_src is None else num_src, num_src if num_dst is None else num_dst
    if num_dst is None:
        raise Unsupported("the number of nodes is not known")
    graph = graph_of(edge_index, num_src, num_dst, to_target)
    try:
        graph.args(csc=torch.is_grad_enabled())  # now: a bad id, or a graph that cannot be converted, is PyG's to report
    except (IndexError, ValueError) as error:
        raise Unsupported(f"invalid input: {error}") from None
    return graph


def _messages(module: Any, steps: Steps, collected: Any) -> Any:
    return module.message(**_arguments(steps.message, collected))


def _update(module: Any, steps: Steps, out: Any, collected: Any) -> Any:
    return module.update(out, **_arguments(steps.update, collected))


def _arguments(names: tuple[str, ...], collected: Any, exist: bool = True) -> dict[str, Any]:
    """Arguments by name, rows among them as such that ``exist``."""
    found = {name: getattr(collected, name) for name in names}
    return {name: existing(value) for name, value in found.items()} if exist else found


def _in_chunks(module: Any, steps: Steps, edge_index: Tensor, size: Any, kwargs: dict[str, Any], collect: str) -> Any:
    """The same in chunks of edges, or ``None`` if all messages fit into the memory."""
    names = steps.message + steps.aggregate
    if not edge_index.shape[1]:
        raise Unsupported("there are no edges")
    if not steps.known_aggregate or any(name.endswith(("_i", "_j")) or name in SPECIAL for name in steps.update):
        raise Unsupported("aggregate() or update() may look at all edges")
    reason = bounded.why_not(module, steps.message)
    if reason:
        raise Unsupported(reason)
    none = edge_index[:, :0]
    sizes, of_nodes = _collect(module, none, size, kwargs, edges.Ends(*_ends(module, none), lambda: graph), collect)
    graph = _graph(module, edge_index, sizes)
    rows = bounded.per_edge(names, kwargs, graph)

    def collected(ids: Tensor, part: Tensor, ends: edges.Ends) -> Any:
        given = {name: value.index_select(0, ids) if name in rows else value for name, value in kwargs.items()}
        return _collect(module, part, tuple(sizes), given, ends, collect)[1]

    def message(module: Any, ids: Tensor) -> Any:
        part = edge_index.index_select(1, ids)
        plain = Graph.of_ids(*_ends(module, part)[::-1], graph.num_src, graph.num_dst, ids.numel())
        return _messages(module, steps, collected(ids, part, edges.Ends(*_ends(module, part), lambda: plain)))

    of = bounded.Edges(graph, edge_index, module.flow == "source_to_target")
    state = bounded.State(module, edge_index, kwargs)
    bytes_per_edge = bounded.probe(module, message, of.ids(0, min(bounded.PROBE, graph.num_edges))) + 2 * _row_bytes(kwargs)
    state.check()
    most = bounded.chunk_size(graph.num_edges, bytes_per_edge, edge_index.device)
    if most is None:
        return None

    def reduced(ids: Tensor, part: Tensor, ends: edges.Ends) -> Tensor:
        args = collected(ids, part, ends)
        out = _aggregate(module, steps, _messages(module, steps, args), ends, args, "")
        if not isinstance(out, Tensor) or not out.dim() or out.shape[0] != graph.num_dst:
            raise Unsupported("the aggregation gives no tensor with a row for each node")
        return out

    gib = 2.0 ** round(math.log2(graph.num_edges * bytes_per_edge / 2**30))
    ran(steps.place, "chunks of edges", f"messages would take about {gib:g} GiB; GNNFAST_BOUNDED={settings().bounded}")
    return _update(module, steps, bounded.in_chunks(of, most, reduced, state), of_nodes)


def _row_bytes(kwargs: dict[str, Any]) -> int:
    """Bytes of a row of all operands."""
    return sum(t.shape[1:].numel() * t.element_size() for t in _tensors(kwargs))


def _is_first(dim: int, t: Tensor) -> bool:
    """Whether a dimension is the first of a tensor, which may have none such."""
    return bool(dim in (0, -t.dim()) and t.dim())


class _Collector:
    """Stands in for the module where ``collect()`` gathers."""

    def __init__(self, module: Any, edge_index: Tensor, ends: edges.Ends, rows: Call | None) -> None:
        self.flow, self.node_dim, self._set_size = module.flow, module.node_dim, module._set_size
        self._ends, self._first, self._rows = ends, edge_index.data_ptr(), rows

    def _index_select(self, x: Tensor, index: Tensor) -> Tensor:
        if not index.numel() or not _is_first(self.node_dim, x) or guards.operand("x", x) or x.dtype not in FEATURE_DTYPES:
            return x.index_select(self.node_dim, index)
        in_first = index.data_ptr() == self._first
        side = BY_SRC if in_first == (self.flow == "source_to_target") else BY_DST
        if self._rows is not None and x.dim() > 1:
            return self._rows.rows(x, side)
        return edges.gather(x, self._ends, side)

    def _lift(self, x: Tensor, edge_index: Tensor, dim: int) -> Tensor:
        return self._index_select(x, edge_index[dim])


def _aggregate(
    module: Any, steps: Steps, messages: Any, ends: edges.Ends, collected: Any, why: str, rows: Call | None = None
) -> Any:
    """What ``aggregate()`` makes of messages, which may be ``rows`` that do not exist."""
    if rows is not None and rows.moved is not None:
        rows.count(SOFTMAX_PASSES if is_softened(module) else SCATTER_PASSES * len(_several(module, steps) or (1,)), messages)
    if rows is not None and steps.reduce:
        fused = rows.aggregate(messages, module.node_dim, steps.reduce)
        if fused is not None:
            return fused
        messages = existing(messages)
    kinds = _several(module, steps)
    if kinds and rows is not None:
        fused = rows.aggregate_several(messages, module.node_dim, kinds)
        if fused is not None:
            return _unsaved(fused)
        if rows.any_reduction(messages):
            kinds = ()  # one by one
        else:
            messages = existing(messages)
    temperature = None if steps.reduce or kinds else temperature_of(_aggregation(module, steps), messages)
    if temperature is not None and rows is not None:
        fused = rows.aggregate_softened(messages, module.node_dim, temperature)
        if fused is not None:
            return _unsaved(fused)
        messages = existing(messages)
    if (
        (steps.reduce or kinds or temperature is not None)
        and not guards.operand("messages", messages)
        and messages.dtype in FEATURE_DTYPES
        and _is_first(module.node_dim, messages)
        and messages.shape[0] == ends.ids[BY_DST].shape[0]
        and messages.device == ends.ids[BY_DST].device
    ):
        if steps.reduce:
            _say_in_part(module, steps, rows, steps.reduce, why)
            return edges.reduce(messages, ends, steps.reduce)
        if temperature is not None:
            _say_in_part(module, steps, rows, "softmax aggregation", why)
            return _unsaved(softened.reduce_messages(messages, temperature, ends))
        if several.takes(messages):
            _say_in_part(module, steps, rows, "several reductions", why)
            return _unsaved(several.reduce_messages(messages, None, ends, kinds))
    _say_in_part(module, steps, rows, "reductions", why)
    before, index = vars(_reducing).copy(), getattr(collected, "index", None)  # of an aggregate() that propagates itself
    _reducing.ends, _reducing.index, _reducing.rows = ends, index, rows
    _reducing.version = None if index is None else version_of(index)  # aggregate() may write into it
    try:
        return module.aggregate(messages, **_arguments(steps.aggregate, collected, rows is None))
    finally:
        vars(_reducing).clear()
        vars(_reducing).update(before)


def _say_in_part(module: Any, steps: Steps, rows: Call | None, what: str, why: str) -> None:
    """Reports that messages exist, and by what operations if that is all that can be said."""
    if why:
        ran(steps.place, f"gathers and {what}", operations(Key(module), rows) or why if why == UNKNOWN else why)
    if rows is not None:
        rows.said = True


def _unsaved(out: Tensor) -> Tensor:
    """A result that users may write into, as they may into PyG's, of a kernel whose backward pass reads what it gave."""
    return out.clone() if out.requires_grad else out


def _aggregation(module: Any, steps: Steps) -> Any:
    """What aggregates, if it is known what of, and sums may not be sampled."""
    current = settings()
    if current.sample != "off" or current.kernel == "sampled" or steps.reduce or not steps.known_aggregate:
        return None
    return module.__dict__["_modules"].get("aggr_module")


def _several(module: Any, steps: Steps) -> tuple[str, ...]:
    """The reductions that PyG's aggregations put side by side; empty if they do something else, are sums and means alone, which
    keep no messages for their gradients, or may be sampled."""
    aggregation = _aggregation(module, steps)
    if not may_be_several(aggregation):
        return ()
    try:
        kinds = kinds_of(aggregation)
    except Unsupported:
        return ()
    return () if set(kinds) <= set(LINEAR) else kinds


class _Reducing(threading.local):
    """``index`` holds the destinations of the edges at ``ends`` whose messages an ``aggregate()`` reduces now; these may be
    ``rows`` that do not exist."""

    ends: edges.Ends | None = None
    index: Tensor | None = None
    version: int | None = None
    rows: Call | None = None


_reducing = _Reducing()


def make_scatter(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``scatter(src, index, dim, dim_size, reduce)``: over the graph where an aggregation calls it, else over the
    rows as they are listed."""

    def scatter(src: Any, index: Any, dim: Any, dim_size: Any, reduce: Any) -> Any:
        ends = _reducing.ends
        if ends is None or index is not _reducing.index or (index is not None and version_of(index) != _reducing.version):
            return listed.scatter_rows(src, index, dim, dim_size, _SCATTERED.get(reduce) if type(reduce) is str else None)
        if type(index) is not Tensor or reduce not in _SCATTERED or guards.context():
            return NotImplemented
        if _reducing.rows is not None and dim_size == ends.towards(BY_DST).num_dst:
            fused = _reducing.rows.aggregate(src, dim, _SCATTERED[reduce])
            if fused is not None:
                return fused
        src = existing(src)
        if guards.operand("src", src) or src.dtype not in FEATURE_DTYPES or not _is_first(dim, src):
            return NotImplemented
        if src.shape[0] != index.shape[0] or dim_size != ends.towards(BY_DST).num_dst or src.device != index.device:
            return NotImplemented
        return edges.reduce(src, ends, _SCATTERED[reduce])

    return scatter


_SCATTERED = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "amax": "max", "min": "min", "amin": "min"}
