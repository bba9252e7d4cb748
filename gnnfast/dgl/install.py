"""What is replaced in DGL, as data, and how. The file that holds gspmm is the same in every release from 1.1 to 2.4."""

from __future__ import annotations

import inspect
import operator
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy

from gnnfast import reporting
from gnnfast.dgl import bridge
from gnnfast.dgl.backend import make_edge_softmax, make_gsddmm, make_gspmm, make_gspmm_mean
from gnnfast.dgl.functions import make_invoke_edge_udf, make_invoke_udf_reduce, make_message_passing
from gnnfast.dgl.hetero import make_edge_softmax_hetero, make_gsddmm_hetero, make_gspmm_hetero
from gnnfast.dgl.layers import make_agnn, make_checked, make_dot_gat, make_gat, make_gatv2, make_gin, make_graph_conv, make_sage
from gnnfast.dgl.relational import make_hgt, make_rel_graph_conv
from gnnfast.dgl.structure import make_get_relation_graph, make_reverse, starves
from gnnfast.dgl.update import make_update_all
from gnnfast.patching import Patches, Unknown, fingerprint

_SPARSE, _SPMM = "dgl.backend.pytorch.sparse", "dgl.ops.spmm"
_INDEX, _GRAPH, _CORE = "dgl.heterograph_index", "dgl.heterograph", "dgl.core"


def _held(name: str, ops: str, internal: str = "") -> tuple[tuple[str, str], ...]:
    """Every attribute that holds a function of the backend: ``ops`` is the module of ``dgl.ops`` that calls it, by ``internal``."""
    return ("dgl.backend", name), ("dgl.backend.pytorch", name), (_SPARSE, name), (ops, internal or f"{name}_internal")


# (module that defines it, name, fingerprint of the known source, what replaces it, every attribute that holds it)
PATCHES = (
    (_SPARSE, "gspmm", ("5142d8130e54",), make_gspmm, _held("gspmm", _SPMM)),
    (_SPARSE, "gsddmm", ("6f2a80dd4215",), make_gsddmm, _held("gsddmm", "dgl.ops.sddmm")),
    (_SPARSE, "edge_softmax", ("18c75e0afa58",), make_edge_softmax, _held("edge_softmax", "dgl.ops.edge_softmax")),
    (_SPARSE, "gspmm_hetero", ("8b2051751288",), make_gspmm_hetero, _held("gspmm_hetero", _SPMM, "gspmm_internal_hetero")),
    (
        _SPARSE,
        "gsddmm_hetero",
        ("d22d5cbf3f93",),
        make_gsddmm_hetero,
        _held("gsddmm_hetero", "dgl.ops.sddmm", "gsddmm_internal_hetero"),
    ),
    (
        _SPARSE,
        "edge_softmax_hetero",
        ("a0441c94c46d",),
        make_edge_softmax_hetero,
        _held("edge_softmax_hetero", "dgl.ops.edge_softmax", "edge_softmax_hetero_internal"),
    ),
    (_SPMM, "gspmm", ("5ad73bce9915",), make_gspmm_mean, (("dgl.ops", "gspmm"), (_SPMM, "gspmm"))),
    (
        _INDEX,
        "HeteroGraphIndex.get_relation_graph",
        ("4b3c2c41505d",),
        make_get_relation_graph,
        ((_INDEX, "HeteroGraphIndex.get_relation_graph"),),
    ),
    (_INDEX, "HeteroGraphIndex.reverse", ("3028204f33ff",), make_reverse, ((_INDEX, "HeteroGraphIndex.reverse"),)),
    (_GRAPH, "DGLGraph.update_all", ("f744c4b68a7f",), make_update_all, ((_GRAPH, "DGLGraph.update_all"),)),
    (_CORE, "message_passing", ("dc629dc18b6d",), make_message_passing, ((_CORE, "message_passing"),)),
    (_CORE, "invoke_edge_udf", ("aa77156a00fe",), make_invoke_edge_udf, ((_CORE, "invoke_edge_udf"),)),
    (_CORE, "invoke_udf_reduce", ("a38d480d3acc",), make_invoke_udf_reduce, ((_CORE, "invoke_udf_reduce"),)),
)
MODULES = ("dgl",)


class Layer(NamedTuple):
    """A layer of ``dgl.nn.pytorch.conv``: its module, class, the fingerprints of its ``forward`` in DGL 1.1 to 2.1, what makes the
    dispatcher, the name of its graph where it asks in every call whether a node has no in-edges, and other methods of which the
    dispatcher knows what they do, by fingerprint."""

    module: str
    name: str
    known: tuple[str, ...]
    make: Callable[[FunctionType], Callable[..., Any]]
    asks: str = "graph"
    methods: tuple[tuple[str, str, str], ...] = ()


_TYPED = (
    ("dgl.nn.pytorch.linear", "TypedLinear.forward", "90afb102123a"),
    ("dgl.nn.pytorch.linear", "TypedLinear.get_weight", "963a192c85df"),
)
LAYERS = (
    Layer("gatconv", "GATConv", ("df88e2edce68",), make_gat),
    Layer("gatv2conv", "GATv2Conv", ("2f8ee97570b8",), make_gatv2),
    Layer("dotgatconv", "DotGatConv", ("169215df2070",), make_dot_gat),
    Layer("agnnconv", "AGNNConv", ("1c65e736490c",), make_agnn),
    Layer("graphconv", "GraphConv", ("030572a867eb",), make_graph_conv),
    Layer("sageconv", "SAGEConv", ("a36f3835923f",), make_sage, asks=""),
    Layer("ginconv", "GINConv", ("a0f7f93eb211",), make_gin, asks=""),
    Layer(
        "relgraphconv",
        "RelGraphConv",
        ("79d7db357713",),
        make_rel_graph_conv,
        "",
        (("dgl.nn.pytorch.conv.relgraphconv", "RelGraphConv.message", "15911f50f863"), *_TYPED),
    ),
    Layer(
        "hgtconv",
        "HGTConv",
        ("85c648a6f7e7",),
        make_hgt,
        "",
        (("dgl.nn.pytorch.conv.hgtconv", "HGTConv.message", "0cc8c5229ba7"), *_TYPED),
    ),
    Layer("edgeconv", "EdgeConv", ("352564e1a239",), make_checked, asks="g"),
    Layer("edgegatconv", "EdgeGATConv", ("a41610c8f5a9",), make_checked),
    Layer("egatconv", "EGATConv", ("9ee6e8828bcb",), make_checked),
    Layer("gcn2conv", "GCN2Conv", ("f100e6febf77",), make_checked),
    Layer("gmmconv", "GMMConv", ("60410cca68f1",), make_checked),
    Layer("sgconv", "SGConv", ("54f6fa4c6422",), make_checked),
)

# Where DGL takes the int() of an array of one number, which numpy refuses from 2.4 on.
NUMBERS = ("dgl.utils.data", "dgl.nn.pytorch.explain.subgraphx")


def install(module: ModuleType, patches: Patches) -> None:
    """Patches DGL, which has just been or was long ago imported."""
    for where, name, known, make, places in PATCHES:
        label = f"{where}.{name}"
        try:
            defining = sys.modules[where]
            original = operator.attrgetter(name)(defining)
            found = fingerprint(inspect.getsource(defining), name)
            if found not in known:
                raise Unknown(f"its source has fingerprint {found}, which is not a known one")
            held = [_holder(m, n) for m, n in places]
            if any(vars(owner).get(n) is not original for owner, n in held):
                raise Unknown("another library has replaced it")
            replacement = make(original)
        except (Unknown, KeyError, AttributeError, OSError) as error:
            reporting.patched("dgl", label, f"left alone: {error} (DGL {getattr(module, '__version__', 'unknown')})")
            continue
        for owner, attribute in held:
            patches.set_attribute(owner, attribute, replacement)
        reporting.patched("dgl", label, "patched")
    for layer in LAYERS:
        label = f"{layer.name}.forward"
        try:
            _install_layer(sys.modules[f"dgl.nn.pytorch.conv.{layer.module}"], layer, patches)
        except (Unknown, KeyError, AttributeError, OSError, SyntaxError) as error:
            reporting.patched("dgl", label, f"left alone: {error} (DGL {getattr(module, '__version__', 'unknown')})")
        else:
            reporting.patched("dgl", label, "patched")
    if _refuses_arrays():
        for name in NUMBERS:
            if name in sys.modules:
                patches.set_attribute(sys.modules[name], "int", _int)
        reporting.patched("dgl", "int() of arrays of one number", "patched")
    if not bridge.absent():
        bridge.install(patches)
        reporting.patched("dgl", "graphs on a GPU", "patched")


def _refuses_arrays() -> bool:
    """Whether numpy takes no array of one number for a number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            int(numpy.zeros(1))
        except TypeError:
            return True
    return False


def _int(value: Any) -> int:
    return int(value.item() if isinstance(value, numpy.ndarray) else value)


def _install_layer(module: ModuleType, layer: Layer, patches: Patches) -> None:
    function = vars(vars(module)[layer.name])["forward"]
    source, name = Path(inspect.getfile(module)).read_text(), f"{layer.name}.forward"
    found = fingerprint(source, name)
    if found not in layer.known:
        raise Unknown(f"its source has fingerprint {found}, which is not a known one")
    for where, method, expected in layer.methods:
        found = fingerprint(Path(inspect.getfile(sys.modules[where])).read_text(), method)
        if found != expected:
            raise Unknown(f"the source of {method} has fingerprint {found}, which is not a known one")
    asked = (f"({layer.asks}.in_degrees() == 0).any()", layer.asks, starves) if layer.asks else None
    patches.add_dispatch(function, source, layer.make(patches.original(function)), replace=asked)


def _holder(module: str, name: str) -> tuple[Any, str]:
    """What has an attribute ``name`` of a module, or ``Class.name``, and the attribute's own name."""
    *owners, attribute = name.split(".")
    return operator.attrgetter(*owners)(sys.modules[module]) if owners else sys.modules[module], attribute
