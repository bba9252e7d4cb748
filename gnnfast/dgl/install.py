"""What is replaced in DGL, as data, and how. The file that holds gspmm is the same in every release from 1.1 to 2.4."""

from __future__ import annotations

import inspect
import operator
import sys
from types import ModuleType
from typing import Any

from gnnfast import reporting
from gnnfast.dgl import bridge
from gnnfast.dgl.backend import make_edge_softmax, make_gsddmm, make_gspmm, make_gspmm_mean
from gnnfast.dgl.structure import make_get_relation_graph, make_reverse
from gnnfast.patching import Patches, Unknown, fingerprint

_SPARSE, _SPMM, _INDEX = "dgl.backend.pytorch.sparse", "dgl.ops.spmm", "dgl.heterograph_index"


def _held(name: str, ops: str) -> tuple[tuple[str, str], ...]:
    """Every attribute that holds a function of the backend: ``ops`` is the module of ``dgl.ops`` that calls it."""
    return ("dgl.backend", name), ("dgl.backend.pytorch", name), (_SPARSE, name), (ops, f"{name}_internal")


# (module that defines it, name, fingerprint of the known source, what replaces it, every attribute that holds it)
PATCHES = (
    (_SPARSE, "gspmm", ("5142d8130e54",), make_gspmm, _held("gspmm", _SPMM)),
    (_SPARSE, "gsddmm", ("6f2a80dd4215",), make_gsddmm, _held("gsddmm", "dgl.ops.sddmm")),
    (_SPARSE, "edge_softmax", ("18c75e0afa58",), make_edge_softmax, _held("edge_softmax", "dgl.ops.edge_softmax")),
    (_SPMM, "gspmm", ("5ad73bce9915",), make_gspmm_mean, (("dgl.ops", "gspmm"), (_SPMM, "gspmm"))),
    (
        _INDEX,
        "HeteroGraphIndex.get_relation_graph",
        ("4b3c2c41505d",),
        make_get_relation_graph,
        ((_INDEX, "HeteroGraphIndex.get_relation_graph"),),
    ),
    (_INDEX, "HeteroGraphIndex.reverse", ("3028204f33ff",), make_reverse, ((_INDEX, "HeteroGraphIndex.reverse"),)),
)
MODULES = ("dgl",)


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
        except (Unknown, KeyError, AttributeError, OSError) as error:
            reporting.patched("dgl", label, f"left alone: {error} (DGL {getattr(module, '__version__', 'unknown')})")
            continue
        replacement = make(original)
        for owner, attribute in held:
            patches.set_attribute(owner, attribute, replacement)
        reporting.patched("dgl", label, "patched")
    if not bridge.absent():
        bridge.install(patches)
        reporting.patched("dgl", "graphs on a GPU", "patched")


def _holder(module: str, name: str) -> tuple[Any, str]:
    """What has an attribute ``name`` of a module, or ``Class.name``, and the attribute's own name."""
    *owners, attribute = name.split(".")
    return operator.attrgetter(*owners)(sys.modules[module]) if owners else sys.modules[module], attribute
