"""How each class of message passing of the installed PyG is served: ``python -m gnnfast.pyg.coverage > docs/coverage_pyg.md``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from gnnfast.pyg import known
from gnnfast.pyg.gin import make_gine_conv
from gnnfast.pyg.install import PATCHES
from gnnfast.pyg.messages import RELU_FORMS
from gnnfast.pyg.norm import make_normalising
from gnnfast.pyg.verdict import message_of

_MORE_MODULES = ("attentive_fp", "linkx", "lpformer", "schnet", "visnet")  # of torch_geometric.nn.models, with classes of their own

# By what layers are served as a whole, by the module that serves them.
_WHOLE = {
    **dict.fromkeys(("gnnfast.pyg.attention", "gnnfast.pyg.coefficients"), "attention"),
    "gnnfast.pyg.hypergraph": "means at hyperedges, and of these at nodes; with attention, SpMM with coefficients",
    "gnnfast.pyg.gin": "a sum with each node's own row, by few operations",
    "gnnfast.pyg.layers": "linear parts, aggregation, bias and root",
    "gnnfast.pyg.mf": "SpMM of x_j, and products of nodes in order of degree",
    "gnnfast.pyg.pna": "products at nodes, all statistics in one walk over the edges; with edge features, of messages that exist",
    "gnnfast.pyg.relational_attention": "products once for each node and type of edges, attention over all",
    "gnnfast.pyg.wl": "a mean with each node's own row, by few operations; on a CPU and with weights, SpMM of edge_weight * x_j",
    "gnnfast.pyg.relations": "one aggregation over the edges of all relations, and the matrix of each",
}

# What their own message() turns out to be as it runs (gnnfast.lazy.operations).
_WEIGHTED = "SpMM with the coefficients that its own message() computes"
_GATES = "sums of gates"
_ATTENTION = "attention with the scores that its own message() computes"
_SOFTENED = "sums weighted by the softmax of what its own message() makes of nodes"
AS_IT_RUNS = {
    **dict.fromkeys(("FeaStConv", "GMMConv", "SuperGATConv"), _WEIGHTED),
    "GENConv": _SOFTENED,
    **dict.fromkeys(("HANConv", "HGTConv"), _ATTENTION),
    **dict.fromkeys(("CGConv", "FiLMConv", "LEConv", "PointTransformerConv", "ResGatedGraphConv"), _GATES),
}

# What keeps the message() of others from being taken apart.
_PAIRS = "a network of what both ends of an edge have"
_SOFTMAX = "a softmax within it"
WHY = {
    **dict.fromkeys(("DynamicEdgeConv", "EdgeConv", "PPFConv", "PointGNNConv", "PointNetConv"), _PAIRS),
    "NNConv": "a matrix for each edge",
    **dict.fromkeys(("HEATConv", "LPAttLayer"), _SOFTMAX),
    "DNAConv": "attention over the layers before, for each edge",
    "GATEConv": "linear layers within it",
    "EGConv": "several reductions of the same rows",
    "GeneralConv": "linear layers within it, and with attention a softmax",
    "MeshCNNConv": "a linear layer for each of the four edges beside one",
    "SplineConv": "a kernel of another library",
    "ViS_MP": "several results for each edge",
    "ViS_MP_Vertex": "several results for each edge",
}

# Those that leave most calls to propagate().
_BEFORE_PROPAGATE = make_normalising, make_gine_conv, None


class Row(NamedTuple):
    """``served`` is how much of a class gnnfast does, ``how`` by what, or why not."""

    name: str
    served: str
    how: str


def rows() -> list[Row]:
    """One for each subclass of MessagePassing in ``torch_geometric.nn``, by name."""
    import importlib

    from torch_geometric.nn import MessagePassing

    for module in _MORE_MODULES:
        importlib.import_module(f"torch_geometric.nn.models.{module}")
    classes = {cls for cls in _subclasses(MessagePassing) if cls.__module__.startswith("torch_geometric.nn.") and _is_there(cls)}
    return sorted(map(_row, classes))


def _is_there(cls: type) -> bool:
    """Whether a class is no copy, as tools that rewrite models make."""
    return getattr(sys.modules[cls.__module__], cls.__name__, None) is cls


def _subclasses(cls: Any) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _row(cls: Any) -> Row:
    replaced = [name for name in known.METHODS if name != "aggregate" and not known.is_known_method(cls, name)]
    if replaced:
        return Row(cls.__name__, "PyG's own", f"{replaced[0]}() is overridden")
    patch = next((p for p in PATCHES if p.name == f"{cls.__name__}.forward" and p.module == cls.__module__), None)
    if patch is not None and patch.make not in _BEFORE_PROPAGATE:
        return Row(cls.__name__, "as a whole", _WHOLE[patch.make.__module__])
    found = message_of(inspect.getattr_static(cls, "message"))
    if not known.is_known_method(cls, "aggregate"):
        return _in_part(cls, "gathers, and what its own aggregate() calls of PyG")
    if cls.__name__ in AS_IT_RUNS:
        return Row(cls.__name__, "fused", AS_IT_RUNS[cls.__name__])
    if found is None:
        return _in_part(cls, "gathers and reductions around its own message()")
    if found.form in RELU_FORMS:
        return Row(cls.__name__, "fused", f"sum of relu({found.feature}_j + {found.weight})")
    if found.form == "plain" and found.weight is not None:  # which may have a value for each feature
        return Row(cls.__name__, "in part", f"SpMM where {found.weight} has a value per edge or head, else gathers and reductions")
    of_edge = f"{found.feature}_j" if found.weight is None else f"{found.weight} * {found.feature}_j"
    normalised = ", normalised once per graph" if patch is not None and patch.make is make_normalising else ""
    return Row(cls.__name__, "fused", f"SpMM of {of_edge}{normalised}")


def _in_part(cls: Any, how: str) -> Row:
    return Row(cls.__name__, "in part", f"{how}: {WHY[cls.__name__]}" if cls.__name__ in WHY else how)


def markdown() -> str:
    """The table."""
    import torch_geometric

    lines = [
        "# What gnnfast does in PyG's classes of message passing",
        "",
        f"Made for PyG {torch_geometric.__version__} by `python -m gnnfast.pyg.coverage`. A row says how calls are served that no",
        "option or input keeps from it; `gnnfast.report()` says it for a model, with the reason wherever less is done. Calls too",
        "small to gain run as PyG wrote them.",
        "",
        "- *as a whole*: the layer's forward pass is gnnfast's, from its linear parts to its bias.",
        "- *fused*: messages never exist; one kernel gathers, multiplies and reduces. *On a CPU*: there.",
        "- *in part*: the class's own `message()` runs, in chunks of edges where messages would not fit; gathers and reductions,",
        "  and their gradients, are gnnfast's. Rows that are only multiplied, summed up or aggregated [never exist](messages.md).",
        "",
        "| class | served | by |",
        "|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {name} | {served} | {how} |" for name, served, how in rows()), ""])


if __name__ == "__main__":
    print(markdown(), end="")
