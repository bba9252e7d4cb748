"""Graph processing that is remembered with the user's graph: GCN normalisation.

Layers build a new ``edge_index`` with self loops and new weights in every forward pass. To use the same tensors again saves that
work and, as they are the same objects, lets the graph cache find their CSR. Whoever can keep what ``gcn_norm`` returns, or write
into it, gets copies: only a layer whose forward pass lets nobody see it shares what is remembered.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast.cache import cache, is_constant, keep_if_captured
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.patching import class_of, is_dispatched
from gnnfast.pyg import guards, known
from gnnfast.pyg.verdict import check_module
from gnnfast.reporting import ran
from gnnfast.unsupported import Unsupported

_PLACE = "pyg gcn_norm"


class _State(threading.local):
    """``edge_index`` is the one of a layer that may share the result of its next call of ``gcn_norm``."""

    edge_index: Any = None


_state = _State()


def sharing(edge_index: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function that normalises ``edge_index`` once and lets nobody see the result, which may then be shared."""
    _state.edge_index = edge_index
    try:
        return function(*arguments)
    finally:
        _state.edge_index = None


def make_gcn_norm(original: FunctionType) -> Any:
    """A dispatcher for ``gcn_norm`` that calls ``original`` once per graph."""

    def gcn_norm(
        edge_index: Any, edge_weight: Any, num_nodes: Any, improved: Any, add_self_loops: Any, flow: Any, dtype: Any
    ) -> Any:
        shares, _state.edge_index = _state.edge_index is edge_index, None
        arguments = (num_nodes, improved, add_self_loops, flow, dtype)
        if type(edge_index) is not Tensor or edge_index.layout is not torch.strided or guards.context():
            return NotImplemented
        if edge_index.is_inference() or guards.operand("edge_index", edge_index):
            return NotImplemented
        if edge_weight is not None and (guards.operand("edge_weight", edge_weight) or edge_weight.is_inference()):
            return NotImplemented
        if type(num_nodes) not in (int, type(None)) or known.replaced_in_norm():
            return NotImplemented
        capturing = guards.capturing(edge_index.device)
        if edge_weight is not None and not is_constant(edge_weight):
            if capturing:
                return NotImplemented
            # Weights must be computed anew; the structure is the same every time.
            normed, weight = original(edge_index, edge_weight, *arguments)
            if normed is edge_index:
                return normed, weight
            structure = cache.get((edge_index,), ("gcn_norm structure", num_nodes, add_self_loops), lambda: (_copy(normed),))[0]
            ran(_PLACE, "remembered structure", "the weights require a gradient")
            if shares:
                return structure, weight
            cache.add_copy(normed, structure)
            return normed, weight

        def build() -> tuple[Tensor | None, Tensor]:
            # Under inference_mode the tensors could not be used in training later.
            with torch.no_grad(), torch.inference_mode(False):
                normed, weight = original(edge_index, edge_weight, *arguments)
            # Holding the key itself would keep it alive for ever.
            return None if normed is edge_index else normed, weight

        keys = (edge_index,) if edge_weight is None else (edge_index, edge_weight)
        key = ("gcn_norm", *arguments, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
        if capturing:  # PyG's own would wait for the device; what is remembered is read in each replay
            found = cache.find(keys, key)
            if found is None:
                return NotImplemented
            keep_if_captured(found)
        else:
            found = cache.get(keys, key, build)
        normed, weight = found
        ran(_PLACE, "remembered", "computed once per graph")
        if shares:
            return edge_index if normed is None else normed, weight
        if normed is None:
            return edge_index, weight.clone()
        copy = normed.clone()
        cache.add_copy(copy, normed)
        return copy, weight.clone()

    return gcn_norm


def _copy(t: Tensor) -> Tensor:
    """One that can be used in training, even if it is made under inference_mode."""
    with torch.inference_mode(False):
        return t.clone()


def make_normalising(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for the ``forward(x, edge_index, ...)`` of a layer that begins by calling ``gcn_norm``: it shares the result
    where nothing but PyG's own code can see it."""
    cls, position = class_of(original), list(inspect.signature(original).parameters).index("edge_index")

    def forward(*arguments: Any) -> Any:
        if guards.context() or not keeps_to_itself(arguments[0], cls):
            return NotImplemented
        if not is_dispatched(original.__globals__.get("gcn_norm")):
            return NotImplemented  # somebody else's would see what is shared
        return sharing(arguments[position], original, *arguments)

    return forward


def keeps_to_itself(module: Any, cls: type) -> bool:
    """Whether only PyG's own code sees the normalised graph in a forward pass of a layer of class ``cls``."""
    own = module.__dict__
    if type(module) is not cls or own.get("cached") or saved_tensors_are_watched() or not own.keys().isdisjoint(_SEEING):
        return False
    if not own.get("normalize", True):
        return False  # the next call of gcn_norm would be somebody else's
    try:
        return check_module(module).update is None
    except Unsupported:
        return False


_SEEING = ("propagate", "forward", "message_and_aggregate")
