"""What is patched in PyG, as data, and how."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from gnnfast import reporting
from gnnfast.patching import Patches, Unknown, fingerprint
from gnnfast.pyg import known
from gnnfast.pyg.attention import make_gat_conv, make_gatv2_conv, make_transformer_conv
from gnnfast.pyg.coefficients import make_agnn_conv, make_fa_conv
from gnnfast.pyg.general import make_scatter
from gnnfast.pyg.gin import make_gin_conv, make_gine_conv
from gnnfast.pyg.hypergraph import make_hypergraph_conv
from gnnfast.pyg.layers import GCN, GRAPH, SAGE, SG, make_layer
from gnnfast.pyg.loops import flipped, make_add_self_loops, make_remove_self_loops, make_side_by_side
from gnnfast.pyg.matrices import make_ptr2index
from gnnfast.pyg.mf import make_mf_conv
from gnnfast.pyg.negative_sampling import make_negative_sampling, make_sample
from gnnfast.pyg.norm import make_gcn_norm, make_laplacian, make_normalising
from gnnfast.pyg.pna import make_pna_conv
from gnnfast.pyg.products import product, through
from gnnfast.pyg.propagate import make_generic, propagate
from gnnfast.pyg.relational_attention import make_rgat_conv
from gnnfast.pyg.relations import biases_of_types, make_hetero_linear, make_rgcn_conv
from gnnfast.pyg.softmax import make_softmax
from gnnfast.pyg.sparse import make_spmm
from gnnfast.pyg.wl import make_wl_conv

MESSAGE_PASSING = "torch_geometric.nn.conv.message_passing"


@dataclasses.dataclass(frozen=True)
class Patch:
    """One patched function ``name``, or method ``Class.name``, of PyG.

    ``known`` are fingerprints of its source in the releases it was studied in (2.6.0 to 2.8.1); with another one it is left
    alone. ``make`` gets the original function and returns the dispatcher. ``replace`` and ``part`` as in
    :meth:`Patches.add_dispatch`.
    """

    module: str
    name: str
    known: tuple[str, ...]
    make: Callable[[FunctionType], Callable[..., Any]] | None = None
    replace: tuple[str, str, Callable[..., Any]] | None = None
    part: bool = False


PATCHES = (
    # What classes run whose source PyG cannot read, so that it generates none for them.
    Patch(MESSAGE_PASSING, "MessagePassing.propagate", ("3e74443a6625",), make_generic, part=True),
    Patch("torch_geometric.nn.conv.gcn_conv", "gcn_norm", ("13eadb05c985",), make_gcn_norm),
    Patch("torch_geometric.nn.conv.gcn_conv", "GCNConv.forward", ("19639c7f1d56",), make_layer(GCN)),
    Patch("torch_geometric.nn.conv.gat_conv", "GATConv.forward", ("1d60274e9980", "0f8e29270a5a"), make_gat_conv),
    Patch("torch_geometric.nn.conv.gatv2_conv", "GATv2Conv.forward", ("7a7e1736871b", "2d023744c9ab"), make_gatv2_conv),
    Patch(
        "torch_geometric.nn.conv.transformer_conv",
        "TransformerConv.forward",
        ("859882cb176f", "cec5b0ba3f3d"),
        make_transformer_conv,
    ),
    Patch("torch_geometric.nn.conv.agnn_conv", "AGNNConv.forward", ("b51586782809",), make_agnn_conv),
    Patch("torch_geometric.nn.conv.fa_conv", "FAConv.forward", ("9270252c59a1", "e1c5a80469ec"), make_fa_conv),
    Patch("torch_geometric.nn.conv.gin_conv", "GINConv.forward", ("23e50bb1714e",), make_gin_conv),
    Patch(
        "torch_geometric.nn.conv.gin_conv",
        "GINEConv.forward",
        ("8ccc1723b4a8",),
        make_gine_conv,
        ("self.nn(out)", "self.nn, out", through),
    ),
    Patch("torch_geometric.nn.conv.graph_conv", "GraphConv.forward", ("a5a154f3a5b6",), make_layer(GRAPH)),
    Patch("torch_geometric.nn.conv.pna_conv", "PNAConv.forward", ("cb44563fb49f",), make_pna_conv),
    Patch("torch_geometric.nn.conv.rgat_conv", "RGATConv.forward", ("2ebd0da8a8d7", "c1b0cd38fa87"), make_rgat_conv),
    Patch("torch_geometric.nn.conv.rgcn_conv", "RGCNConv.forward", ("727bf68d5844",), make_rgcn_conv),
    Patch("torch_geometric.nn.conv.rgcn_conv", "FastRGCNConv.forward", ("ae57d59d6d35",), make_rgcn_conv),
    Patch("torch_geometric.nn.conv.sage_conv", "SAGEConv.forward", ("5fe530548373",), make_layer(SAGE)),
    Patch("torch_geometric.nn.conv.sg_conv", "SGConv.forward", ("ed836c9f444e", "c722900d1008"), make_layer(SG)),
    Patch("torch_geometric.nn.conv.appnp", "APPNP.forward", ("91324db315cb", "f47fe5ba07c3"), make_normalising),
    Patch("torch_geometric.nn.conv.arma_conv", "ARMAConv.forward", ("b07f6d8d230b",), make_normalising),
    Patch("torch_geometric.nn.conv.cheb_conv", "ChebConv.forward", ("a11cdd076991",), make_normalising),
    Patch("torch_geometric.nn.conv.cheb_conv", "ChebConv.__norm__", ("7e3614fafcc2",), make_laplacian),
    Patch(
        "torch_geometric.nn.conv.dir_gnn_conv",
        "DirGNNConv.forward",
        ("328c56ca6259",),
        None,
        ("edge_index.flip([0])", "edge_index, self.conv_out", flipped),
    ),
    Patch("torch_geometric.nn.conv.gcn2_conv", "GCN2Conv.forward", ("174c2d924d12",), make_normalising),
    Patch(
        "torch_geometric.nn.conv.hypergraph_conv",
        "HypergraphConv.forward",
        ("e926bff8da30",),
        make_hypergraph_conv,
        ("hyperedge_index.flip([0])", "hyperedge_index, self", flipped),
    ),
    Patch("torch_geometric.nn.conv.lg_conv", "LGConv.forward", ("36b4be0dcedc",), make_normalising),
    Patch("torch_geometric.nn.conv.mf_conv", "MFConv.forward", ("6cf5fea3e57f",), make_mf_conv),
    Patch("torch_geometric.nn.conv.mixhop_conv", "MixHopConv.forward", ("b7982512c99a",), make_normalising),
    Patch("torch_geometric.nn.conv.ssg_conv", "SSGConv.forward", ("d7dd15bb214b", "f95c3a995a9f"), make_normalising),
    Patch("torch_geometric.nn.conv.tag_conv", "TAGConv.forward", ("340db079cbd4",), make_normalising),
    Patch("torch_geometric.nn.conv.wl_conv_continuous", "WLConvContinuous.forward", ("6975d8e585a7",), make_wl_conv),
    Patch(
        "torch_geometric.nn.dense.linear",
        "Linear.forward",
        ("c9e4758257f3",),
        None,
        ("F.linear(x, self.weight, self.bias)", "x, self, Linear", product),
    ),
    Patch(
        "torch_geometric.nn.dense.linear",
        "HeteroLinear.forward",
        ("aba9ede97f03",),
        None,
        ("self.bias[type_vec]", "self.bias, type_vec, type_ptr", biases_of_types),
    ),
    Patch("torch_geometric.nn.dense.linear", "HeteroLinear.forward_naive", ("eac42818506e",), make_hetero_linear),
    Patch("torch_geometric.index", "ptr2index", ("9f7c5af4e632",), make_ptr2index),
    Patch(
        "torch_geometric.utils._negative_sampling",
        "negative_sampling",
        ("e238ce89814a", "be5474367aa6"),
        make_negative_sampling,
    ),
    Patch("torch_geometric.utils._negative_sampling", "sample", ("d219ea561321",), make_sample),
    Patch("torch_geometric.utils._scatter", "scatter", ("b1128e34b90a", "7626d94c6de9", "ede961baa469"), make_scatter),
    Patch("torch_geometric.utils._softmax", "softmax", ("5ecf982d48a1", "55544420bbc1"), make_softmax),
    Patch("torch_geometric.utils.loop", "remove_self_loops", ("12c556171121",), make_remove_self_loops),
    Patch("torch_geometric.utils.loop", "add_self_loops", ("5f60298e16ef",), make_add_self_loops),
    Patch("torch_geometric.utils.hetero", "construct_bipartite_edge_index", ("cd4caf550aa6",), make_side_by_side, part=True),
    Patch("torch_geometric.utils._spmm", "spmm", ("21242ae8226b", "6084961fda11"), make_spmm, part=True),
)
MODULES = tuple(dict.fromkeys([MESSAGE_PASSING, *(patch.module for patch in PATCHES)]))
# propagate is generated per class from a template; these are the parts of it that propagate.py stands in for.
TEMPLATES = {"propagate.jinja": ("b0c6eb39a67b",), "collect.jinja": ("7a42629d53c3",)}


def install(module: ModuleType, patches: Patches) -> None:
    """Patches one of PyG's modules, which has just been or was long ago imported."""
    from gnnfast.pyg.compiled import TRACED
    from gnnfast.pyg.compiled.propagate import propagate as traced_propagate  # which needs what PyG has imported anyway

    if module.__name__ == MESSAGE_PASSING:
        _guard("propagate", functools.partial(_install_propagate, module, patches, traced_propagate))
    for patch in PATCHES:
        if patch.module == module.__name__:
            _guard(patch.name, functools.partial(_install_function, module, patch, patches, TRACED.get(patch.name)))


def _guard(name: str, action: Callable[[], None]) -> None:
    try:
        action()
    except (Unknown, OSError, SyntaxError, AttributeError) as error:
        version = getattr(sys.modules.get("torch_geometric"), "__version__", "unknown")
        reporting.patched("pyg", name, f"left alone: {error} (PyG {version}; known are 2.6.0 to 2.8.1)")
    else:
        reporting.patched("pyg", name, "patched")


def _install_function(module: ModuleType, patch: Patch, patches: Patches, make_traced: Any) -> None:
    function = inspect.unwrap(operator.attrgetter(patch.name)(module))
    source = Path(inspect.getfile(module)).read_text()
    found = fingerprint(source, patch.name, function.__code__.co_firstlineno)
    if found not in patch.known:
        raise Unknown(f"{patch.name} has fingerprint {found}, which is not a known one")
    original = patches.original(function)
    traced = None if make_traced is None else make_traced(original)
    dispatch = None if patch.make is None else patch.make(original)
    patches.add_dispatch(function, source, dispatch, traced=traced, replace=patch.replace, part=patch.part)


def _install_propagate(module: ModuleType, patches: Patches, traced: Callable[..., Any]) -> None:
    folder = Path(inspect.getfile(module)).parent
    for template, fingerprints in TEMPLATES.items():
        found = hashlib.sha256((folder / template).read_bytes()).hexdigest()[:12]
        if found not in fingerprints:
            raise Unknown(f"{template} has fingerprint {found}, which is not a known one")
    from_template = module.module_from_template

    # Classes get their propagate when first instantiated. Those that have one are patched now, later ones as they get it.
    def module_from_template(*args: Any, **kwargs: Any) -> Any:
        made = from_template(*args, **kwargs)
        _patch_template(made, patches, traced)
        return made

    for cls in _subclasses(module.MessagePassing):
        function = cls.__dict__.get("_jinja_propagate")
        made = sys.modules.get(getattr(function, "__module__", ""))
        if function is not None and made is not module and getattr(made, "propagate", None) is function:
            _patch_template(made, patches, traced)
    patches.set_attribute(module, "module_from_template", module_from_template)


def _patch_template(made: Any, patches: Patches, traced: Callable[..., Any]) -> None:
    function = getattr(made, "propagate", None)
    known.add_generated(getattr(made, "collect", None))
    if isinstance(function, FunctionType):
        dispatch = functools.partial(propagate, patches.original(function))
        patches.add_dispatch(function, Path(made.__file__).read_text(), dispatch, as_dict=True, traced=traced, part=True)


def _subclasses(cls: type) -> set[type]:
    found: set[type] = {cls}
    return found.union(*map(_subclasses, cls.__subclasses__()))
