"""Which functions are PyG's own.

A served call stands in for all functions of PyG that it skips, so each of them must be the known one, whoever replaced it and
where: in a subclass, in PyG's class, by name in a module, or by exchanging a code object. Verdicts are remembered by the functions
and their code objects (:class:`Watch`), which a call compares in two microseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import inspect
import itertools
import operator
import sys
import weakref
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch

from gnnfast import _native
from gnnfast.patching import code_of, is_dispatched

_MP, _BASE, _BASIC = "torch_geometric.nn.conv.message_passing", "torch_geometric.nn.aggr.base", "torch_geometric.nn.aggr.basic"
_UTILS = "torch_geometric.utils."
_GAT, _GATV2 = "torch_geometric.nn.conv.gat_conv", "torch_geometric.nn.conv.gatv2_conv"
_TRANSFORMER = "torch_geometric.nn.conv.transformer_conv"
_GIN, _HYPERGRAPH = "torch_geometric.nn.conv.gin_conv", "torch_geometric.nn.conv.hypergraph_conv"
_AGNN, _FA = "torch_geometric.nn.conv.agnn_conv", "torch_geometric.nn.conv.fa_conv"
_RGCN, _RGAT = "torch_geometric.nn.conv.rgcn_conv", "torch_geometric.nn.conv.rgat_conv"
_AGGR = "torch_geometric.nn.aggr."
_INSPECTOR = "torch_geometric.inspector"

# Fingerprints of the source in the releases it was studied in (2.6.0 to 2.8.1), by module and name.
FUNCTIONS: dict[tuple[str, str], tuple[str, ...]] = {
    (_MP, "MessagePassing._check_input"): ("84c224520db0",),
    (_MP, "MessagePassing._set_size"): ("33db24af6ee2",),
    (_MP, "MessagePassing._index_select"): ("5eb45f0fb864",),
    (_MP, "MessagePassing._index_select_safe"): ("d3b5d03e73ce", "5484a68b5dff"),
    (_MP, "MessagePassing._lift"): ("fc3cd5d14279",),
    (_MP, "MessagePassing._collect"): ("5fda49e85cd6",),
    (_MP, "MessagePassing.aggregate"): ("26911c9b343c",),
    (_MP, "MessagePassing.update"): ("6c5be3c83c4d",),
    (_INSPECTOR, "Inspector.collect_param_data"): ("ea638d8c0536",),
    (_INSPECTOR, "Inspector.get_params"): ("f8c8c2459e67",),
    (_INSPECTOR, "Inspector.get_param_dict"): ("2c620a8d715b",),
    (_INSPECTOR, "Inspector.get_signature"): ("9d3849bff5fb",),
    (_BASE, "Aggregation.__call__"): ("f1fdfa386632", "3e9d6b5c3747"),
    (_BASE, "Aggregation.reduce"): ("60b30b07bb48",),
    (_BASIC, "SumAggregation.forward"): ("ae5704af9d43",),
    (_BASIC, "MeanAggregation.forward"): ("ee7d05fb39ca",),
    (_BASIC, "MaxAggregation.forward"): ("d11a3668b201",),
    (_BASIC, "MinAggregation.forward"): ("34c43c7dad33",),
    (_UTILS + "_scatter", "scatter"): ("b1128e34b90a", "7626d94c6de9", "ede961baa469"),
    (_UTILS + "_scatter", "broadcast"): ("addf5e12696c",),
    (_UTILS + "sparse", "is_sparse"): ("613a5c6ed0c4",),
    (_UTILS + "sparse", "is_torch_sparse_tensor"): ("e47a6d6c2297", "03c7a9f8fa95"),
    (_UTILS + "loop", "add_remaining_self_loops"): ("53072a9e6bf4",),
    (_UTILS + "laplacian", "get_laplacian"): ("38b3943776c1",),
    (_UTILS + "loop", "compute_loop_attr"): ("e135af98494f",),
    (_UTILS + "num_nodes", "maybe_num_nodes"): ("5c5a14a71ece",),
    (_UTILS + "loop", "remove_self_loops"): ("12c556171121",),
    (_UTILS + "loop", "add_self_loops"): ("5f60298e16ef",),
    (_UTILS + "_softmax", "softmax"): ("5ecf982d48a1", "55544420bbc1"),
    (_GAT, "GATConv.edge_update"): ("6ae9b216a0b5",),
    (_GATV2, "GATv2Conv.edge_update"): ("abb0d54e5eec",),
    (_TRANSFORMER, "TransformerConv.message"): ("4d5a63506fac",),
    (_GIN, "GINEConv.message"): ("8a16fb11694a",),
    (_HYPERGRAPH, "HypergraphConv.message"): ("7c43e2c169e5",),
    (_AGNN, "AGNNConv.message"): ("111264f6a448",),
    (_FA, "FAConv.message"): ("10c26da6080e",),
    ("torch_geometric.nn.conv.pna_conv", "PNAConv.message"): ("fd1242bfa284",),
    (_AGGR + "scaler", "DegreeScalerAggregation.forward"): ("ba680a604c30",),
    (_AGGR + "multi", "MultiAggregation.forward"): ("0faaf629ecd2",),
    (_AGGR + "multi", "MultiAggregation.combine"): ("ae213ef12eef",),
    (_BASIC, "VarAggregation.forward"): ("887c6b6866c5",),
    (_BASIC, "StdAggregation.forward"): ("b5509e26fbde",),
    (_BASIC, "SoftmaxAggregation.forward"): ("4b5163e305ab",),
    (_UTILS + "_degree", "degree"): ("6134b925ac44",),
    (_RGCN, "masked_edge_index"): ("4880a758bc92",),
    (_RGCN, "RGCNConv.message"): ("315350e40a5e",),
    (_RGCN, "FastRGCNConv.message"): ("6ad5298362ee",),
    (_RGCN, "FastRGCNConv.aggregate"): ("9c9e30c74fd7",),
    (_RGAT, "RGATConv.message"): ("d82475235dbc",),
    (_RGAT, "RGATConv.update"): ("572690c58154",),
    (_UTILS + "_one_hot", "one_hot"): ("d9714ae37169",),
    ("torch_geometric.nn.conv.sage_conv", "SAGEConv.message_and_aggregate"): ("a2f51216150e",),
    ("torch_geometric.nn.conv.graph_conv", "GraphConv.message_and_aggregate"): ("b748192beae3",),
    (_GIN, "GINConv.message_and_aggregate"): ("a2f51216150e",),
}
TRANSFORMER = _TRANSFORMER, "TransformerConv.message"
GINE = _GIN, "GINEConv.message"

# What MessagePassing.propagate runs on a dense edge_index, besides message(), update() and the generated collect().
METHODS = ("_check_input", "_set_size", "_index_select", "_index_select_safe", "_lift", "aggregate")
_OF_AGGREGATION = ("__call__", "forward", "reduce")
_OF_MODULE = ("Module.__call__", "Module._call_impl")
_OF_TENSOR = ("index_select", "scatter_add_", "scatter_reduce_", "relu")
# Functions that are looked up by name: (module, name there, module and name of the known function).
_BY_PROPAGATE = (
    (_MP, "is_sparse", (_UTILS + "sparse", "is_sparse")),
    (_UTILS + "sparse", "is_torch_sparse_tensor", (_UTILS + "sparse", "is_torch_sparse_tensor")),
    (_BASE, "scatter", (_UTILS + "_scatter", "scatter")),
    (_UTILS + "_scatter", "broadcast", (_UTILS + "_scatter", "broadcast")),
)
_BY_NORM = (
    ("torch_geometric.nn.conv.gcn_conv", "add_remaining_self_loops", (_UTILS + "loop", "add_remaining_self_loops")),
    ("torch_geometric.nn.conv.gcn_conv", "maybe_num_nodes", (_UTILS + "num_nodes", "maybe_num_nodes")),
    ("torch_geometric.nn.conv.gcn_conv", "scatter", (_UTILS + "_scatter", "scatter")),
    (_UTILS + "loop", "maybe_num_nodes", (_UTILS + "num_nodes", "maybe_num_nodes")),
    (_UTILS + "loop", "compute_loop_attr", (_UTILS + "loop", "compute_loop_attr")),
    (_UTILS + "_scatter", "broadcast", (_UTILS + "_scatter", "broadcast")),
)


_BY_LAPLACIAN = (
    ("torch_geometric.nn.conv.cheb_conv", "get_laplacian", (_UTILS + "laplacian", "get_laplacian")),
    *((_UTILS + "laplacian", name, (_UTILS + "loop", name)) for name in ("add_self_loops", "remove_self_loops")),
    (_UTILS + "laplacian", "maybe_num_nodes", (_UTILS + "num_nodes", "maybe_num_nodes")),
    (_UTILS + "laplacian", "scatter", (_UTILS + "_scatter", "scatter")),
    (_UTILS + "loop", "maybe_num_nodes", (_UTILS + "num_nodes", "maybe_num_nodes")),
    (_UTILS + "loop", "compute_loop_attr", (_UTILS + "loop", "compute_loop_attr")),
    (_UTILS + "_scatter", "broadcast", (_UTILS + "_scatter", "broadcast")),
)

_BY_RELATIONS = (
    (_RGCN, "masked_edge_index", (_RGCN, "masked_edge_index")),
    (_RGCN, "one_hot", (_UTILS + "_one_hot", "one_hot")),
    (_RGCN, "scatter", (_UTILS + "_scatter", "scatter")),
    (_RGAT, "scatter", (_UTILS + "_scatter", "scatter")),
    (_UTILS + "_scatter", "broadcast", (_UTILS + "_scatter", "broadcast")),
)

_BY_HYPERGRAPH = (
    (_HYPERGRAPH, "scatter", (_UTILS + "_scatter", "scatter")),
    (_UTILS + "_scatter", "broadcast", (_UTILS + "_scatter", "broadcast")),
)

_BY_MF = (("torch_geometric.nn.conv.mf_conv", "degree", (_UTILS + "_degree", "degree")),)

# What attention layers look up by name, besides the functions of their own module that ``_IN`` lists.
_IN = {
    _GAT: ("softmax", "remove_self_loops", "add_self_loops"),
    _GATV2: ("softmax", "remove_self_loops", "add_self_loops"),
    _TRANSFORMER: ("softmax",),
    _AGNN: ("softmax", "remove_self_loops", "add_self_loops"),
    _RGAT: ("softmax",),
}
_BY_SOFTMAX = (
    (_UTILS + "_softmax", "scatter", (_UTILS + "_scatter", "scatter")),
    (_UTILS + "_softmax", "maybe_num_nodes", (_UTILS + "num_nodes", "maybe_num_nodes")),
)
_BY_LOOPS = (
    (_UTILS + "loop", "maybe_num_nodes", (_UTILS + "num_nodes", "maybe_num_nodes")),
    (_UTILS + "loop", "compute_loop_attr", (_UTILS + "loop", "compute_loop_attr")),
)
_WHERE = {"softmax": "_softmax", "remove_self_loops": "loop", "add_self_loops": "loop"}


class Watch:
    """A verdict that depends on functions: those of the names ``own`` of a class, and those at ``paths`` from ``places``. It holds
    as long as these and their code objects are the very same; each call of a layer asks. ``alone`` is an expression of ``own``, the
    dictionary of an instance, of one ``part`` of it and of places: whether the class says all about the two."""

    __slots__ = ("_find", "_find_own", "_judge", "_last", "_make", "_places")

    def __init__(
        self, own: tuple[str, ...], places: dict[str, Any], paths: tuple[str, ...], judge: Callable[[], Any], alone: str = "False"
    ) -> None:
        self._find_own, self._find = (_getter(names) for names in (own, paths))
        self._places, self._judge = SimpleNamespace(**places), judge
        self._make = _comparison(own, (*places,), paths, alone)
        self._last: tuple[Callable[..., bool], Any] = (lambda *_: False), None

    def verdict(self, cls: Any = None) -> Any:
        """The verdict; judged anew if something has changed. Raises AttributeError if something is missing or no function."""
        holds, verdict = self._last
        return verdict if holds(cls) else self._judged(cls)

    def of_instance(self, cls: Any, own: dict[str, Any], part: Any) -> Any:
        """The verdict on an instance, if nothing has changed and its class says all about it; else ``None``. In one function, as
        a small step calls many for the first time since the last one, which takes as long as what they do."""
        holds, verdict = self._last
        try:
            return verdict if holds(cls, own, part) else None
        except AttributeError:  # something is missing, or no function
            return None

    def _judged(self, cls: Any) -> Any:
        functions = self._find_own(cls) + self._find(self._places)  # first: what changes meanwhile is found by the next call
        codes, verdict = tuple(map(_code, functions)), self._judge()
        self._last = self._make(functions, codes, *vars(self._places).values()), verdict
        return verdict


_code = operator.attrgetter("__code__")


def _comparison(own: tuple[str, ...], places: tuple[str, ...], paths: tuple[str, ...], alone: str) -> Callable[..., Any]:
    """What makes, of functions, their codes and the places, the function that tells whether all are still there and, where one is
    given, whether an instance is ``alone``. Compiled for each verdict, as Python remembers in the code where it has found an
    attribute: of a small step, looking them up took 3.5 us more, and comparing in loops of C 5."""
    names = [*(f"cls.{name}" for name in own), *paths]
    functions = ", ".join(f"f{i}" for i in range(len(names)))
    held = " and ".join(f"{name} is f{i}" for i, name in enumerate(names))
    source = f"""\
def make({", ".join(("functions", "codes", *places))}):
    {functions}, = functions
    same, pairs = look(functions, codes)
    return lambda cls, own=None, part=None: (own is None or {alone}) and {held} and same(pairs)
"""
    scope: dict[str, Any] = {"look": _look}
    exec(source, scope)
    return scope["make"]  # type: ignore[no-any-return]


def _same_codes(pairs: Any) -> bool:
    """Whether functions, each with a code, still run that."""
    return all(function.__code__ is code for function, code in pairs)


def _look(functions: tuple[Any, ...], codes: tuple[Any, ...]) -> tuple[Callable[[Any], Any], Any]:
    """A function that tells whether ``functions``, which the caller holds, have these codes, and what to call it with."""
    pairs = tuple(zip(functions, codes))
    if _native.same_codes is None or any(type(function) is not FunctionType for function in functions):
        return _same_codes, pairs
    # After a backward pass 18 codes as attributes took 5 us, and 10 where an audit hook hears of each; so they take 2.
    in_c, code_of = _native.same_codes
    words = [code_of, len(pairs), *map(id, itertools.chain(*pairs))]
    held = (ctypes.c_void_p * len(words))(*words)
    held.pairs = pairs  # type: ignore[attr-defined]
    return in_c, held


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if not names:
        return lambda _: ()
    get = operator.attrgetter(*names)
    return get if len(names) > 1 else lambda of: (get(of),)


def _named(rows: tuple[tuple[str, str, tuple[str, str]], ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Places and paths of functions that are looked up by name."""
    places = {module.replace(".", "_"): sys.modules[module] for module, *_ in rows}
    return places, tuple(f"{module.replace('.', '_')}.{name}" for module, name, _ in rows)


def _replaced(rows: tuple[tuple[str, str, tuple[str, str]], ...]) -> str:
    """The first of them that is not the known one; empty if there is none."""
    for where, name, function in rows:
        if not is_known(vars(sys.modules[where]).get(name), *function):
            return f"{where}.{name}"
    return ""


def watch_propagate(kind: type, methods: tuple[str, ...], judge: Callable[[], Any], alone: str, names: dict[str, Any]) -> Watch:
    """A verdict that depends on all that a class of message passing, with an aggregation of a kind, runs; of itself ``methods``.
    ``alone`` as in :class:`Watch`, with its ``names``."""
    places, paths = _named(_BY_PROPAGATE)
    paths += tuple(f"kind.{name}" for name in _OF_AGGREGATION)
    places |= {"kind": kind, "Module": torch.nn.Module, "of_tensor": _of_tensor, "replaceable": _OF_TENSOR}
    alone = f"of_tensor.isdisjoint(replaceable) and {alone}"
    return Watch(methods, places | names, (*paths, *_OF_MODULE), judge, alone)


_of_tensor = torch.Tensor.__dict__.keys()  # follows the dictionary


def replaced_in_tensor() -> bool:
    """Whether methods of tensors that PyG calls have been replaced: torch's are those of a base class, which nobody can change."""
    return not _of_tensor.isdisjoint(_OF_TENSOR)


def replaced_in_propagate(kind: type) -> str:
    """What of these, besides the methods of the class, is not the known one; empty if nothing."""
    for name in _OF_AGGREGATION:
        where, cls = (_BASIC, kind.__name__) if name == "forward" else (_BASE, "Aggregation")
        if not is_known(inspect.getattr_static(kind, name), where, f"{cls}.{name}"):
            return f"{kind.__name__}.{name}"
    return replaced_in_module(torch.nn.Module) or _replaced(_BY_PROPAGATE)


def is_inspector(inspector: Any) -> bool:
    """Whether what PyG's generic path asks for arguments is PyG's own."""
    names = [name.partition(".")[2] for where, name in FUNCTIONS if where == _INSPECTOR]
    if not vars(inspector).keys().isdisjoint(names):
        return False
    return all(is_known(inspect.getattr_static(type(inspector), name), _INSPECTOR, f"Inspector.{name}") for name in names)


def replaced_in_module(cls: type) -> str:
    """What calls the ``forward`` of a class of modules and is not torch's own; empty if nothing."""
    for name in ("__call__", "_call_impl"):
        if not _is_as_written(inspect.getattr_static(cls, name), "torch.nn.modules.module"):
            return f"{cls.__name__}.{name}"
    return ""


def replaced_in_norm() -> str:
    """A function that ``gcn_norm`` calls by name and that is not PyG's own; empty if there is none."""
    return _ask(_BY_NORM)


def replaced_in_laplacian() -> str:
    """The same of what ChebConv calls to make its weights."""
    return _ask(_BY_LAPLACIAN)


def replaced_in_relations() -> str:
    """The same of what RGCNConv, FastRGCNConv and RGATConv call."""
    return _ask(_BY_RELATIONS)


def replaced_in_hypergraph() -> str:
    """The same of what HypergraphConv calls."""
    return _ask(_BY_HYPERGRAPH)


def replaced_in_mf() -> str:
    """The same of what MFConv calls."""
    return _ask(_BY_MF)


# ---- layers as a whole ---------------------------------------------------------------------------------------------------------
@functools.cache
def _of_layer(cls: type) -> Watch:
    def judge() -> str:
        message = inspect.getattr_static(cls, "message")
        if not is_known(message, cls.__module__, f"{cls.__name__}.message"):
            return "message()"
        of_class = lambda name: is_known(inspect.getattr_static(cls, name), cls.__module__, f"{cls.__name__}.{name}")  # noqa: E731
        return next((f"{n}()" for n in ("aggregate", "update") if not (is_known_method(cls, n) or of_class(n))), "")

    return Watch(("message", "aggregate", "update"), {}, (), judge)


def replaced_in_layer(cls: type) -> str:
    """What of the functions of a class that one of PyG's own steps runs is not the known one, besides those of all message passing;
    empty if nothing."""
    try:
        return _of_layer(cls).verdict(cls)  # type: ignore[no-any-return]
    except AttributeError:
        return "a function"


@functools.cache
def _of_product(cls: Any) -> Watch:
    module = sys.modules[cls.__module__]

    def judge() -> tuple[bool, bool]:
        function, where = cls.message_and_aggregate, cls.__module__
        multiplies = _is_as_written(function, where) and is_dispatched(module.spmm)
        return multiplies, multiplies and is_known(function, where, f"{cls.__name__}.message_and_aggregate")

    return Watch(("message_and_aggregate",), {"module": module}, ("module.spmm",), judge)


def multiplies(cls: type, alone: bool = False) -> bool:
    """Whether what one of PyG's layers does with a matrix is PyG's product, which nobody has replaced; ``alone``: of its features,
    by its ``aggr``, and nothing else."""
    try:
        return _of_product(cls).verdict(cls)[alone]  # type: ignore[no-any-return]
    except AttributeError:
        return False


# Functions of aggregations: class, name, module.
_SCALERS = (
    *((f"{name}Aggregation", "forward", _BASIC) for name in ("Sum", "Mean", "Max", "Min", "Var", "Std")),
    ("DegreeScalerAggregation", "forward", _AGGR + "scaler"),
    ("MultiAggregation", "forward", _AGGR + "multi"),
    ("MultiAggregation", "combine", _AGGR + "multi"),
)
_BY_SCALER = (
    (_AGGR + "scaler", "degree", (_UTILS + "_degree", "degree")),
    (_UTILS + "_degree", "maybe_num_nodes", (_UTILS + "num_nodes", "maybe_num_nodes")),
    (_BASE, "scatter", (_UTILS + "_scatter", "scatter")),
    (_UTILS + "_scatter", "broadcast", (_UTILS + "_scatter", "broadcast")),
)


_SOFTENED = (("SoftmaxAggregation", "forward", _BASIC),)
_BY_SOFTENED = (
    (_BASIC, "softmax", (_UTILS + "_softmax", "softmax")),
    (_BASE, "scatter", (_UTILS + "_scatter", "scatter")),
    (_UTILS + "_scatter", "broadcast", (_UTILS + "_scatter", "broadcast")),
    *_BY_SOFTMAX,
)


@functools.cache
def _of_aggregations(methods: tuple[tuple[str, str, str], ...], rows: tuple[tuple[str, str, tuple[str, str]], ...]) -> Watch:
    classes = {cls: getattr(sys.modules[where], cls) for cls, _, where in methods}
    inherited = tuple((cls, name) for cls in classes for name in ("__call__", "reduce"))
    places, paths = _named(rows)
    paths += tuple(f"{cls}.{name}" for cls, name, *_ in (*methods, *inherited))
    container = torch.nn.Sequential

    def judge() -> str:
        for cls, name, where in methods:
            if not is_known(inspect.getattr_static(classes[cls], name), where, f"{cls}.{name}"):
                return f"{cls}.{name}"
        for cls, name in inherited:
            if not is_known(inspect.getattr_static(classes[cls], name), _BASE, f"Aggregation.{name}"):
                return f"{cls}.{name}"
        if not _is_as_written(container.forward, "torch.nn.modules.container"):
            return "Sequential.forward"
        return replaced_in_module(torch.nn.Module) or _replaced(rows)

    places |= classes | {"Module": torch.nn.Module, "Sequential": container}
    return Watch((), places, (*paths, *_OF_MODULE, "Sequential.forward"), judge)


def replaced_in_scaler() -> str:
    """What PyG's aggregations that are scaled by degree run, and is not PyG's own; empty if nothing."""
    return _ask_aggregations(_SCALERS, _BY_SCALER)


def replaced_in_softened() -> str:
    """The same of PyG's softmax aggregation."""
    return _ask_aggregations(_SOFTENED, _BY_SOFTENED)


def _ask_aggregations(methods: tuple[tuple[str, str, str], ...], rows: tuple[tuple[str, str, tuple[str, str]], ...]) -> str:
    try:
        return _of_aggregations(methods, rows).verdict()  # type: ignore[no-any-return]
    except AttributeError:
        return "a function"


# ---- attention -----------------------------------------------------------------------------------------------------------------
@functools.cache
def _attention(where: str) -> Watch:
    names = tuple((where, name, (_UTILS + _WHERE[name], name)) for name in _IN[where])
    rows = names + _BY_SOFTMAX + _BY_LOOPS

    def judge() -> str:
        return _replaced(_BY_SOFTMAX + _BY_LOOPS) or next(
            (n for w, n, f in names if not is_served(vars(sys.modules[w]).get(n), *f)), ""
        )

    return Watch((), *_named(rows), judge)


@functools.cache
def _edge_update(cls: type) -> Watch:
    def judge() -> str:
        for name in ("edge_updater", "edge_collect"):  # which PyG generates
            function = inspect.getattr_static(cls, name)
            module = getattr(function, "__module__", "")
            if not module.startswith("torch_geometric.nn.conv.") or not _is_as_written(function, module):
                return f"{name}()"
        update = inspect.getattr_static(cls, "edge_update")
        return "" if is_known(update, cls.__module__, f"{cls.__name__}.edge_update") else "edge_update()"

    return Watch(("edge_update", "edge_updater", "edge_collect"), {}, (), judge)


def replaced_in_attention(cls: type) -> str:
    """What an attention layer calls and is not PyG's own; empty if nothing. ``cls`` is PyG's class."""
    try:
        where = cls.__module__
        if where not in _IN:
            return "the layer's module"
        replaced = _attention(where).verdict() or (_edge_update(cls).verdict(cls) if where in (_GAT, _GATV2) else "")
    except AttributeError:
        replaced = "a function"
    return f"{replaced} is not the known one" if replaced else ""


@functools.cache
def _by_name(rows: tuple[tuple[str, str, tuple[str, str]], ...]) -> Watch:
    return Watch((), *_named(rows), lambda: _replaced(rows))


def replaced_in_softmax() -> str:
    """What PyG's ``softmax`` calls by name and is not PyG's own; empty if nothing."""
    return _ask(_BY_SOFTMAX)


def replaced_in_loops() -> str:
    """The same of what adds and removes self loops."""
    return _ask(_BY_LOOPS)


def _ask(rows: tuple[tuple[str, str, tuple[str, str]], ...]) -> str:
    try:
        return _by_name(rows).verdict()  # type: ignore[no-any-return]
    except AttributeError:
        return "a function"


# ---- linear layers ------------------------------------------------------------------------------------------------------------
_linears: dict[type, Watch] = {}


def is_linear(cls: type) -> bool:
    """Whether a class is PyG's or torch's linear layer, and nobody has replaced what its call runs."""
    watch = _linears.get(cls)
    if watch is None:
        if cls.__module__ not in _LINEARS or getattr(sys.modules[cls.__module__], "Linear", None) is not cls:
            return False
        watch = Watch(("forward", "__call__", "_call_impl"), {}, (), lambda: _judge_linear(cls))
        _linears[cls] = watch
    try:
        return watch.verdict(cls)
    except AttributeError:
        return False


_LINEARS = ("torch_geometric.nn.dense.linear", "torch.nn.modules.linear")


def _judge_linear(cls: type) -> bool:
    forward = inspect.getattr_static(cls, "forward")
    return (is_dispatched(forward) or _is_as_written(forward, cls.__module__)) and not replaced_in_module(cls)


# ---- functions that PyG generates ----------------------------------------------------------------------------------------------
_generated: weakref.WeakKeyDictionary[FunctionType, CodeType] = weakref.WeakKeyDictionary()


def add_generated(function: Any) -> None:
    """Takes a function for known that PyG has just generated from a known template: its file may not be there for long."""
    if not is_generated(function) and _is_as_written(function, getattr(function, "__module__", "")):
        _generated[function] = function.__code__


def is_generated(function: Any) -> bool:
    """Whether a function is one that PyG generated, unchanged."""
    return type(function) is FunctionType and _generated.get(function) is function.__code__


# ---- options ---------------------------------------------------------------------------------------------------------------------
def option(function: FunctionType, module: Any, name: str, default: Any = None) -> Any:
    """An option of a layer, if PyG's ``function`` reads one of that name: others are the user's own and mean nothing."""
    return module.__dict__.get(name, default) if name in function.__code__.co_names else default


# ---- one function ------------------------------------------------------------------------------------------------------------
def is_known_method(cls: type, name: str) -> bool:
    """Whether a class has a method of message passing from PyG."""
    return is_known(inspect.getattr_static(cls, name, None), _MP, f"MessagePassing.{name}")


def is_known(function: Any, module: str, name: str) -> bool:
    """Whether a function is the one of that name in :data:`FUNCTIONS`, as PyG's source has it."""
    wrapper = getattr(function, "__wrapped__", None)
    if wrapper is not None:  # by a decorator of PyG
        if not _is_as_written(function, "torch_geometric.experimental"):
            return False
        function = wrapper
    if not _is_as_written(function, module):
        return False
    return fingerprint_of(code_of(function)) in FUNCTIONS.get((module, name), ())


def is_served(function: Any, module: str, name: str) -> bool:
    """Whether a function is the known one, or that with a dispatch added, which leads to the same."""
    at = vars(sys.modules[module]).get(name)
    return function is at and (is_dispatched(function) or is_known(function, module, name))


def _is_as_written(function: Any, module: str) -> bool:
    """Whether a function belongs to a module and has the code that its file compiles to."""
    if type(function) is not FunctionType or function.__globals__ is not getattr(sys.modules.get(module), "__dict__", None):
        return False
    file = _code_of_file(function.__globals__["__file__"])
    return file is not None and _defines(file, code_of(function))


@functools.lru_cache(maxsize=64)
def _code_of_file(path: str) -> CodeType | None:
    """The code object that Python runs to import a file: compiling torch's modules takes 40 ms."""
    with contextlib.suppress(OSError, SyntaxError):  # nothing is known then
        return SourceFileLoader("known", path).get_code("known")
    return None


def _defines(outer: CodeType, code: CodeType) -> bool:
    """Whether a function's code is what a module, class or function defines; what begins below it is not looked at."""
    inner = [c for c in outer.co_consts if isinstance(c, CodeType) and c.co_firstlineno <= code.co_firstlineno]
    return any(c == code or _defines(c, code) for c in reversed(inner))


@functools.lru_cache(maxsize=1024)
def fingerprint_of(code: CodeType) -> str:
    """A short hash of the source lines of a function, without indentation and blank lines."""
    lines = _lines_of(code.co_filename)[code.co_firstlineno - 1 :]
    body = (line.strip() for line in lines[: _length(lines)])
    return hashlib.sha256("\n".join(line for line in body if line).encode()).hexdigest()[:12]


@functools.lru_cache(maxsize=64)
def _lines_of(path: str) -> list[str]:
    return Path(path).read_text().splitlines(keepends=True)


def _length(lines: list[str]) -> int:
    """How many lines the function at the first one has: to the next that is indented no deeper, but for the end of its arguments.
    By tokens, as inspect finds it, takes forty times as long."""
    indent = len(lines[0]) - len(lines[0].lstrip())
    in_head, end = True, 0
    for nth, line in enumerate(lines, 1):
        text = line.strip()
        if in_head or len(line) - len(line.lstrip()) > indent:
            end = nth
        elif text and not text.startswith("#"):  # after comments a function may go on
            break
        in_head = in_head and not (text.endswith(":") and not text.startswith(("#", "@")))
    return end
