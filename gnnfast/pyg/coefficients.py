"""Layers that sum rows with one coefficient an edge: AGNNConv and FAConv as a whole."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.config import settings
from gnnfast.dispatch import edges, execute
from gnnfast.dispatch.select import cannot_win
from gnnfast.graph.formats import BY_DST, BY_SRC
from gnnfast.patching import class_of, is_dispatched
from gnnfast.pyg.adjacency import graph_of
from gnnfast.pyg.attention import OVERRIDES, after_dropout, check_tensors, dropout_of, graph_of_layer
from gnnfast.pyg.known import replaced_in_attention, replaced_in_layer
from gnnfast.pyg.layers import normalise
from gnnfast.pyg.matrices import edges_for, is_matrix, weighed
from gnnfast.pyg.small import is_new_and_tiny
from gnnfast.pyg.verdict import check_steps
from gnnfast.reporting import ran
from gnnfast.unsupported import Unsupported


def check_simple(known: Any, module: Any) -> None:
    """Raises Unsupported if a layer that sums ``x [N, F]`` with coefficients is not what PyG wrote."""
    own, cls = module.__dict__, type(module)
    if cls is not known or not own.keys().isdisjoint(OVERRIDES) or not is_dispatched(cls.propagate):
        raise Unsupported("a method is another than the layer's")
    if check_steps(module).reduce != "sum":
        raise Unsupported("the layer aggregates something else")
    reason = replaced_in_layer(cls)
    if reason or own["node_dim"] not in (-2, 0) or own["flow"] != "source_to_target":
        raise Unsupported(f"{reason} is not the known one" if reason else "an option is not served")


def _check_simple(known: Any, module: Any, x: Any, edge_index: Any) -> None:
    """The same, and if kernels do not take its operands."""
    reason = guards.context()
    if reason:
        raise Unsupported(reason)
    check_simple(known, module)
    check_tensors((x, x), x, edge_index)
    if torch.is_autocast_enabled(x.device.type):
        raise Unsupported("autocast is on")


def make_agnn_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for the ``forward(x, edge_index)`` of AGNNConv (Thekumparampil et al., 2018): attention by cosines."""
    known = class_of(original)

    def agnn_conv(module: Any, x: Any, edge_index: Any) -> Any:
        place = f"pyg {type(module).__name__}"
        if is_matrix(edge_index):
            edge_index = edges_for(module, edge_index, (x, x))
            if edge_index is None:
                return NotImplemented
        try:
            _check_simple(known, module, x, edge_index)
            reason, beta = replaced_in_attention(known), module.beta
            reason = reason or guards.operand("beta", beta)
            if reason or beta.shape != (1,) or beta.dtype is not x.dtype or beta.device != x.device:
                raise Unsupported(reason or "beta does not fit")
            graph, _ = graph_of_layer(module, (x, x), edge_index, False)
            graph.args(csc=torch.is_grad_enabled())
        except Unsupported as error:
            ran(place, "in parts", str(error))  # which say themselves how they ran
            return NotImplemented
        except (IndexError, ValueError):  # PyG raises its own
            return NotImplemented
        unit = torch.nn.functional.normalize(x, p=2.0, dim=-1)
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.clone()  # PyG keeps none, so that users may write into theirs
        out, alpha = execute.dot_attention(graph, beta * unit, unit, x, 1, 1.0, place=place, training=module.training)
        return out.clone() if alpha is None and out.requires_grad else out  # theirs may be written into

    return agnn_conv


def _is_small(x: Any, edge_index: Any) -> bool:
    """Whether FAConv, whose gradients are several kernels, meets a graph that is too small for them."""
    if not (type(x) is type(edge_index) is Tensor and x.dim() == edge_index.dim() == 2):
        return False
    training, where = torch.is_grad_enabled(), "cuda" if x.is_cuda else "tiny coefficients cpu"
    if not (training or x.is_cuda) or guards.context():
        return False
    return cannot_win(edge_index.shape[1] * x.shape[1] * x.element_size(), training, settings(), where)


def make_fa_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for the ``forward(x, x_0, edge_index, edge_weight, return_attention_weights)`` of FAConv (Bo et al., AAAI
    2021)."""
    known = class_of(original)

    def fa_conv(module: Any, x: Any, x_0: Any, edge_index: Any, edge_weight: Any, weights: Any) -> Any:
        place = f"pyg {type(module).__name__}"
        of_matrix = is_matrix(edge_index)
        if of_matrix:
            refused = edge_weight is not None or (type(edge_index) is not Tensor and edge_index.has_value())  # PyG says so
            refused = refused or module.cached or not is_dispatched(original.__globals__["gcn_norm"])
            found = None if refused else weighed(original, module, edge_index, x)
            if found is None:
                return NotImplemented
            edge_index, edge_weight = found
        elif _is_small(x, edge_index) or is_new_and_tiny(x, edge_index, module, "tiny coefficients cpu"):
            return NotImplemented  # propagate says so
        try:
            _check_simple(known, module, x, edge_index)
            dropout = module.dropout
            if weights is not None or type(dropout) not in (int, float) or not 0 <= dropout <= 1:
                raise Unsupported("an option is not served")
            if module.normalize != (of_matrix or edge_weight is None):
                raise Unsupported("PyG says what is wrong with edge_weight")
            # Dropout is drawn for edges as PyG lists them.
            reduce = "" if dropout_of(module) else "sum"
            edge_index, edge_weight, graph = normalise(module, x, edge_index, edge_weight, reduce, original)
            reason = guards.operand("edge_weight", edge_weight)
            if reason or edge_weight.shape != edge_index.shape[1:] or edge_weight.dtype is not x.dtype:
                raise Unsupported(reason or "edge_weight does not fit")
            graph = graph_of(edge_index, x.shape[0], x.shape[0], True) if graph is None else graph
            if torch.is_grad_enabled() or not x.is_cuda:
                graph.args(csc=torch.is_grad_enabled())
        except Unsupported as error:
            ran(place, "in parts", str(error))  # which say themselves how they ran
            return NotImplemented
        except (IndexError, ValueError):  # PyG raises its own
            return NotImplemented
        ends = edges.Ends(edge_index[1], edge_index[0], lambda: graph)
        alpha = edges.gather(module.att_l(x), ends, BY_SRC) + edges.gather(module.att_r(x), ends, BY_DST)
        alpha = after_dropout(module, alpha.tanh().squeeze(-1))
        out = execute.aggregate(graph, x, alpha * edge_weight, "sum", place=place, training=module.training, copies=True)
        return out if module.eps == 0.0 else out + module.eps * x_0

    return fa_conv
