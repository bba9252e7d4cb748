"""Graph processing that is remembered with the user's graph: GCN normalisation.

Layers build a new ``edge_index`` with self loops and new weights in every forward pass. Handing out the same tensors again saves
that work and, as they are the same objects, lets the graph cache find their CSR.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast.graph import cache
from gnnfast.pyg import guards
from gnnfast.reporting import ran


def make_gcn_norm(original: FunctionType) -> Any:
    """A dispatcher for ``gcn_norm`` that calls ``original`` once per graph."""

    def gcn_norm(
        edge_index: Any, edge_weight: Any, num_nodes: Any, improved: Any, add_self_loops: Any, flow: Any, dtype: Any
    ) -> Any:
        arguments = (num_nodes, improved, add_self_loops, flow, dtype)
        if type(edge_index) is not Tensor or edge_index.layout is not torch.strided or guards.context():
            return NotImplemented
        if edge_index.is_inference() or guards.operand("edge_index", edge_index):
            return NotImplemented
        if edge_weight is not None and (guards.operand("edge_weight", edge_weight) or edge_weight.is_inference()):
            return NotImplemented
        if guards.capturing(edge_index.device):
            return NotImplemented
        place = "pyg gcn_norm"
        if edge_weight is not None and edge_weight.requires_grad and torch.is_grad_enabled():
            # Weights must be computed anew; the structure is the same every time.
            normed, weight = original(edge_index, edge_weight, *arguments)
            if normed is edge_index:
                return normed, weight
            ran(place, "remembered structure", "the weights require a gradient")
            return _remember((edge_index,), ("gcn_norm structure", num_nodes, add_self_loops), lambda: (normed,))[0], weight

        def build() -> tuple[Tensor | None, Tensor]:
            # Under inference_mode the tensors could not be used in training later.
            with torch.no_grad(), torch.inference_mode(False):
                normed, weight = original(edge_index, edge_weight, *arguments)
            # Holding the key itself would keep it alive for ever.
            return None if normed is edge_index else normed, weight

        keys = (edge_index,) if edge_weight is None else (edge_index, edge_weight)
        normed, weight = _remember(keys, ("gcn_norm", *arguments), build)
        ran(place, "remembered", "computed once per graph")
        return edge_index if normed is None else normed, weight

    return gcn_norm


def _remember(keys: tuple[Tensor, ...], key: Any, build: Any) -> Any:
    """The value for the keys, made anew if somebody has written into it meanwhile."""

    def versioned() -> Any:
        values = build()
        return values, _versions(values)

    values, versions = cache.get(keys, key, versioned)
    if versions != _versions(values):
        cache.drop(keys, key)
        values, _ = cache.get(keys, key, versioned)
    return values


def _versions(values: Any) -> list[int | None]:
    return [None if v is None else v._version for v in values]
