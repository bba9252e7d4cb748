"""Functions of users (UDFs), which DGL runs on features that it gathers at each edge, or on messages by degree. Those of edges run
as they are on rows that do not exist (:mod:`gnnfast.lazy`), or on rows that gnnfast gathers, whose gradients are no scattering."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.dgl import mailbox
from gnnfast.dgl.messages import empty_of, ends_of, reduce_edges
from gnnfast.dgl.structure import known, sized, structure
from gnnfast.dispatch import edges, execute
from gnnfast.graph import Graph
from gnnfast.graph.formats import BY_DST, BY_SRC
from gnnfast.lazy.rows import Call, Key, Rows, User, are_few, existing, operations, pays
from gnnfast.reporting import fell_back, ran
from gnnfast.types import REDUCTIONS, REORDERED

DEGREES, ROWS = "degree by degree", "over rows of edges"  # how DGL runs functions
_ANY = Key(None)  # on a CPU nothing that was found out about a function decides whether it pays
# What a function may have from around it, other than functions and modules: what its second run finds as its first did.
_INERT = (Tensor, str, int, float, bool, torch.dtype, torch.device, type(None))


def place_of(func: Any) -> str:
    """Where a function is in the report: its layer, or its own name."""
    func = _innermost(func)
    owner = getattr(func, "__self__", None)
    return f"dgl {type(owner).__name__ if isinstance(owner, torch.nn.Module) else _name_of(func)}"


def _innermost(func: Any) -> Any:
    while isinstance(func, functools.partial):
        func = func.func
    return func


def _name_of(func: Any) -> str:
    return getattr(_innermost(func), "__qualname__", type(func).__name__)


def count(func: Any, how: str, g: Any) -> None:
    """Reports that DGL's own code runs a function."""
    if not _is_filter(func):
        why = "too small to gain" if _too_small(g, how == DEGREES) else f"a Python function, which runs {how}"
        fell_back(place_of(func), f"{_name_of(func)} is {why}")


def _is_filter(func: Any) -> bool:
    """Whether a function is DGL's, of ``filter_edges()``, which passes no messages; it runs the user's."""
    return _name_of(func).startswith("DGLGraph.")


def make_invoke_udf_reduce(original: Any) -> Any:
    """Replaces ``invoke_udf_reduce(graph, func, msgdata)`` of ``dgl.core``, which runs a function degree by degree, on messages
    that exist: of a function that may not run twice."""

    @functools.wraps(original)
    def invoke_udf_reduce(graph: Any, func: Any, msgdata: Any, *, orig_nid: Any = None) -> Any:
        batch = _batch(graph, [func], by_degree=True)
        call = None if batch is None else batch.call()
        if batch is not None and call is not None:
            found = batch.attempt(call, lambda: mailbox.run(func, graph, msgdata, call))
            if found is not None:
                return found[0]
        count(func, DEGREES, graph)
        return original(graph, func, msgdata, orig_nid=orig_nid)

    return invoke_udf_reduce


def make_invoke_edge_udf(original: Any) -> Any:
    """Replaces ``invoke_edge_udf(graph, eid, etype, func)`` of ``dgl.core``, which makes what a function gives for each edge."""

    @functools.wraps(original)
    def invoke_edge_udf(graph: Any, eid: Any, etype: Any, func: Any, *, orig_eid: Any = None) -> Any:
        batch = _batch(graph, [func]) if sys.modules["dgl.core"].is_all(eid) else None
        call = None if batch is None else batch.call()
        if batch is not None and call is not None:
            found = batch.attempt(call, lambda: {n: existing(v) for n, v in func(batch.edges(call, orig_eid)).items()})
            if found is not None:
                seen = operations(call.user.key, call, _name_of(func))
                ran(call.place, "function of edges", "")
                if seen:
                    ran(call.place, "rows of edges", seen)
                return found[0]
        count(func, ROWS, graph)
        return original(graph, eid, etype, func, orig_eid=orig_eid) if batch is None else func(batch.edges(None, orig_eid))

    return invoke_edge_udf


def make_message_passing(original: Any) -> Any:
    """Replaces ``message_passing(g, mfunc, rfunc, afunc)`` of ``dgl.core``: messages that a user's function makes, or
    reduces, may never exist."""
    core, ops, function = (sys.modules[f"dgl.{name}"] for name in ("core", "ops", "function"))
    simple = sys.modules["dgl.function.reducer"].SimpleReduceFunction

    def messages_of(mfunc: Any, g: Any, at_edges: Any) -> Any:
        if not core.is_builtin(mfunc):
            return mfunc(at_edges)
        given = at_edges.src, at_edges.dst, at_edges.data
        if type(mfunc) is function.CopyMessageFunction:
            return {mfunc.out_field: given[mfunc.target][mfunc.in_field]}
        lhs, rhs = given[mfunc.lhs][mfunc.lhs_field], given[mfunc.rhs][mfunc.rhs_field]
        if mfunc.binary_op not in ("add", "sub", "mul") or lhs.dim() != rhs.dim():  # which DGL aligns otherwise than torch
            return core.invoke_gsddmm(g, mfunc)
        return {mfunc.out_field: getattr(torch, mfunc.binary_op)(lhs, rhs)}

    def reduced(batch: _Batch, call: _Call, mfunc: Any, rfunc: Any) -> Any:
        messages = messages_of(mfunc, batch.g, batch.edges(call, batch.g.edata.get(core.EID)))
        call.check_kept()
        if not core.is_builtin(rfunc):
            return mailbox.run(rfunc, batch.g, messages, call)
        found = messages[rfunc.msg_field]
        out = call.aggregate(found, 0, rfunc.name)
        if out is None:
            ran(call.place, f"gathers and {rfunc.name}", operations(call.user.key, call, _name_of(mfunc)))
            out = getattr(ops, f"copy_e_{rfunc.name}")(batch.g, existing(found))
        return {rfunc.out_field: out}

    @functools.wraps(original)
    def message_passing(g: Any, mfunc: Any, rfunc: Any, afunc: Any) -> Any:
        functions = [f for f in (rfunc, mfunc) if not core.is_builtin(f)]
        by_degree = rfunc in functions
        served = by_degree or (functions and type(rfunc) is simple and rfunc.name in REDUCTIONS)
        batch = _batch(g, functions, by_degree) if served else None
        call = None if batch is None else batch.call()
        if batch is None or call is None:
            return original(g, mfunc, rfunc, afunc)
        found = batch.attempt(call, lambda: reduced(batch, call, mfunc, rfunc))
        if found is None:
            return original(g, mfunc, rfunc, afunc)
        (made,) = found
        if afunc is None:
            return made
        for name, value in g.dstdata.items():
            if name not in made:
                made[name] = value
        return core.invoke_node_udf(g, core.ALL, g.dsttypes[0], afunc, ndata=made, orig_nid=g.dstdata.get(core.NID))

    return message_passing


class _Call(Call):
    """One run of a function over the edges of a graph, with DGL's gradients of maxima and its rows without edges."""

    def weighted(self, x: Tensor, weight: Tensor | None, reduce: str, training: bool, copies: bool) -> Tensor:
        graph = self.ends.towards(BY_DST)
        how: Any = dict(ties="first", empty=empty_of(graph, reduce, False), training=training, copies=copies)
        return execute.aggregate(graph, x, weight, reduce, place=self.place, **how)

    def reduced(self, rows: Tensor, reduce: str) -> Tensor:
        return reduce_edges(self.ends.towards(BY_DST), rows, reduce, self.place)


class _Batch:
    """All edges of a graph of one edge type, of which a user's function makes something."""

    def __init__(self, g: Any, users: tuple[User, ...], place: str, graph: Graph) -> None:
        self.g, self.users, self.place, self.graph, self.ends = g, users, place, graph, ends_of(graph)

    def call(self) -> _Call | None:
        """What rows that do not exist are for; ``None`` if they have to, as where a second run would write into features."""
        call = _Call.of(self.users, self.ends, self.place)
        if call is not None and call.writes and any("data" in user.function.__code__.co_names for user in self.users):
            return None
        return call

    def attempt(self, call: _Call, function: Callable[[], Any]) -> tuple[Any] | None:
        """``call.run(function)``. What it writes into features of edges is there only if it comes to an end."""
        frame = self.g._edge_frames[0]
        before = dict(frame._columns)
        found = call.run(function)
        call.settle()
        if found is None:
            frame._columns = before
        return found

    def edges(self, call: _Call | None, orig_eid: Any) -> Any:
        """DGL's ``EdgeBatch``, with rows of a call, or such as exist."""
        g, graph = self.g, self.graph
        source, target = g._graph.metagraph.find_edge(0)
        eid = torch.arange(graph.num_edges, dtype=g.idtype, device=g.device) if orig_eid is None else orig_eid
        src, dst = (self._frame(g._node_frames[of], side, call) for of, side in ((source, BY_SRC), (target, BY_DST)))
        of_edges = g._edge_frames[0] if call is None else _frame_written_into()(g._edge_frames[0])
        return sys.modules["dgl.udf"].EdgeBatch(g, eid, g.canonical_etypes[0], src, of_edges, dst)

    def _frame(self, nodes: Any, side: int, call: _Call | None) -> Any:
        def gathered(column: Any) -> Any:
            x = column.data
            if guards.operand("x", x) or x.dim() < 2 or x.dtype not in REORDERED or x.device != self.graph.device:
                return column.subcolumn(self.g.edges()[side == BY_DST]).data
            return edges.gather(x, self.ends, side) if call is None else call.rows(x, side)

        frame = sys.modules["dgl.frame"].Frame(num_rows=self.graph.num_edges)
        column_at_ends = _column_at_ends()
        frame._columns = {name: column_at_ends(column, gathered, self.graph.num_edges) for name, column in nodes._columns.items()}
        return frame


@functools.cache
def _frame_written_into() -> Any:
    class FrameWrittenInto(sys.modules["dgl.frame"].Frame):  # type: ignore[misc, name-defined]
        """Another name for a frame, through which rows are written that exist from then on."""

        def __init__(self, frame: Any) -> None:
            self.__dict__ = frame.__dict__

        def update_column(self, name: str, data: Any) -> None:
            if isinstance(data, Rows):
                data.settle()
            super().update_column(name, existing(data))

    return FrameWrittenInto


@functools.cache
def _column_at_ends() -> Any:
    class ColumnAtEnds(sys.modules["dgl.frame"].Column):  # type: ignore[misc, name-defined]
        """A column of nodes at one end of each edge, gathered when it is asked for."""

        def __init__(self, column: Any, gathered: Callable[[Any], Any], rows: int) -> None:
            super().__init__(column.storage, column.scheme)
            self._rows = rows
            self._gather: Any = functools.partial(gathered, column)

        def __len__(self) -> int:
            return self._rows

        @property
        def data(self) -> Any:
            if self._gather is not None:
                self.storage, self._gather = self._gather(), None
            return self.storage

    def through_data(name: str) -> Any:
        """A method of a column, of the rows of edges, which exist for it."""

        def method(self: Any, *args: Any, **named: Any) -> Any:
            return getattr(plain(existing(self.data), self.scheme), name)(*args, **named)

        return method

    plain = sys.modules["dgl.frame"].Column
    for name in ("to", "astype", "clone", "deepclone", "subcolumn", "__getstate__", "__copy__"):
        setattr(ColumnAtEnds, name, through_data(name))
    return ColumnAtEnds


def _batch(g: Any, functions: list[Any], by_degree: bool = False) -> _Batch | None:
    """The edges of a graph, if functions that run on them, or on messages ``by_degree``, may gain."""
    gidx, of_edges = g._graph, g._edge_frames
    num_edges, is_cuda = of_edges[0].num_rows, hasattr(type(gidx), "ends")
    if len(of_edges) > 1 or _too_small(g, by_degree):
        return None
    if torch.compiler.is_compiling() or guards.context() or torch.is_autocast_enabled("cuda" if is_cuda else "cpu"):
        return None
    reducer = functions[0] if by_degree else None  # what it keeps nobody could read
    users = tuple(user for user in (_user(f, f is not reducer) for f in functions) if user is not None)
    if len(users) < len(functions) or (is_cuda and not by_degree and not pays(users[0].key, num_edges, _widest_row(g), True)):
        return None
    if not known(gidx).single(gidx) or sized(gidx).too_large:
        return None
    graph = structure(gidx)
    return _Batch(g, users, place_of(functions[0]), graph) if graph.device.type in ("cpu", "cuda") else None


def _too_small(g: Any, by_degree: bool) -> bool:
    """Whether a graph has so few edges that no function on them gains."""
    num_edges, is_cuda = g._edge_frames[0].num_rows, hasattr(type(g._graph), "ends")
    if not num_edges or are_few(num_edges, is_cuda):
        return True
    return not (by_degree or is_cuda or pays(_ANY, num_edges, _widest_row(g), False))


def _widest_row(g: Any) -> int:
    """Bytes of the widest row that the function may be given."""
    widest = 0
    for frame in (*g._node_frames, *g._edge_frames):
        for column in frame._columns.values():
            scheme = getattr(column, "scheme", None)  # a feature that is loaded later has none
            if scheme is not None and scheme.dtype in REORDERED:
                widest = max(widest, math.prod(scheme.shape) * scheme.dtype.itemsize)
    return widest


def _user(func: Any, may_keep: bool) -> User | None:
    """What is known of a function by which it may run on rows that do not exist: a method of a module, one within such a method, or
    one that stands alone."""
    function, module = getattr(func, "__func__", func), getattr(func, "__self__", None)
    if type(function) is not FunctionType or _is_filter(function):
        return None
    for name, value in _around(function):
        if name == "self" and module is None:
            module = value
        elif not isinstance(value, (FunctionType, torch.nn.Module, *_INERT)):
            return None
    if module is not None and not isinstance(module, torch.nn.Module):
        return None
    code = function.__code__  # what stands alone may be made anew for each call
    return User(function, module, Key(code) if module is None else Key(module, code), may_keep, "data" if may_keep else "")


def _around(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Names and values of what a function has from around it."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not yet there
            yield name, None
