"""HypergraphConv without attention as a whole: means of nodes at hyperedges, and of these at nodes."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.cache import is_constant
from gnnfast.dispatch.bias import biased
from gnnfast.dispatch.calls import scatter
from gnnfast.dispatch.execute import aggregate
from gnnfast.dispatch.relations import kept_with_edges
from gnnfast.graph import ids
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.patching import class_of
from gnnfast.pyg import listed
from gnnfast.pyg.adjacency import graph_of
from gnnfast.pyg.as_written import sums
from gnnfast.pyg.attention import check_tensors
from gnnfast.pyg.coefficients import check_simple
from gnnfast.pyg.known import replaced_in_hypergraph
from gnnfast.pyg.products import is_product
from gnnfast.pyg.small import are_few, is_new, is_new_and_few
from gnnfast.reporting import ran
from gnnfast.types import REORDERED
from gnnfast.unsupported import Unsupported


def make_hypergraph_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for the ``forward(x, hyperedge_index, hyperedge_weight, hyperedge_attr, num_edges)`` of HypergraphConv (Bai et
    al., 2021)."""
    known = class_of(original)

    def hypergraph_conv(module: Any, x: Any, edge_index: Any, weight: Any, _: Any, num_edges: Any) -> Any:
        if module.__dict__.get("use_attention", True):
            return NotImplemented  # propagate() says how it runs
        few = _are_few(module, x, edge_index, weight)
        place = f"pyg {type(module).__name__}"
        try:
            _check(known, module, x, edge_index, weight)
            num_nodes, num_edges = x.shape[0], _number_of_hyperedges(edge_index, few) if num_edges is None else num_edges
            of_edges = _coefficients(edge_index, 1, None, num_edges, x.dtype, few)
            of_nodes = _coefficients(edge_index, 0, weight, num_nodes, x.dtype, few)
            if not few:
                graph = graph_of(edge_index, num_nodes, num_edges, True)
                graph.args(csc=torch.is_grad_enabled())
        except Unsupported as error:
            ran(place, "in parts", str(error))  # which say themselves how they ran
            return NotImplemented
        except (IndexError, RuntimeError, TypeError, ValueError):  # PyG raises its own
            return NotImplemented
        x = module.lin(x)
        if few:
            if x.is_cuda:
                ids.watch(edge_index)
            nodes, edges = edge_index.unbind()
            needs_grad = torch.is_grad_enabled() and x.requires_grad
            if needs_grad and x.is_cuda:  # two gradients in Python take longer than torch's operations
                ran(place, "PyG's own", "too small to gain from a graph that is new: its operations alone")
                out = _add(edges, nodes, of_edges, x, num_edges)
                out = _add(nodes, edges, of_nodes, out, num_nodes)
            else:
                ran(place, "gas sum", listed.WHY)
                out = scatter(edges, nodes, of_edges, x, num_edges, "sum", needs_grad)
                out = scatter(nodes, edges, of_nodes, out, num_nodes, "sum", needs_grad)
        else:
            out = aggregate(graph, x, of_edges, "sum", place=place, training=module.training)
            out = aggregate(graph.reverse(), out, of_nodes, "sum", place=place, training=module.training)
        return out if module.bias is None else biased(out, module.bias)

    return hypergraph_conv


def _add(row: Tensor, column: Tensor, weight: Tensor, x: Tensor, num_rows: int) -> Tensor:
    messages = x.index_select(0, column) * weight.unsqueeze(1)
    return sums(messages, row, num_rows)


def _check(known: Any, module: Any, x: Any, edge_index: Any, weight: Any) -> None:
    """Raises Unsupported if the layer is not what PyG wrote, or kernels do not take its operands."""
    reason = guards.context()
    if reason:
        raise Unsupported(reason)
    check_simple(known, module)
    own, lin = module.__dict__, module.lin
    if own["node_dim"] != 0 or own["heads"] != 1 or own["concat"] is not True:
        raise Unsupported("an option is not served")
    multiplies = lin is not None and is_product(lin) and not guards.operand("weight", lin.weight)
    if replaced_in_hypergraph() or not multiplies or lin.weight.shape[0] != own["out_channels"]:
        raise Unsupported("its linear layer is more than a product, or a function is not the known one")
    check_tensors((x, x), x, edge_index)
    if torch.is_autocast_enabled(x.device.type) or edge_index.dtype is not torch.int64 or not edge_index.shape[1]:
        raise Unsupported("autocast is on, or ids are not int64, or there are none")
    if weight is not None and (guards.operand("hyperedge_weight", weight) or weight.dtype is not x.dtype or weight.dim() != 1):
        raise Unsupported("weights of hyperedges do not fit")


def _are_few(module: Any, x: Any, edge_index: Any, weight: Any) -> bool:
    """Whether there are too few members of hyperedges to keep anything of them."""
    if not (type(x) is type(edge_index) is Tensor and edge_index.dim() == 2):
        return False
    if x.dtype not in REORDERED or (isinstance(weight, Tensor) and weight.requires_grad):
        return False
    if torch.is_grad_enabled() and saved_tensors_are_watched():
        return False
    row_bytes = module.out_channels * x.element_size()
    if edge_index.is_cuda:
        return not torch.are_deterministic_algorithms_enabled() and is_new_and_few(edge_index, row_bytes, module, "new cuda")
    if are_few(edge_index, row_bytes, "tiny sums cpu"):
        return True
    return are_few(edge_index, row_bytes, "new sums cpu") and is_new(edge_index, module)


def _number_of_hyperedges(edge_index: Tensor, few: bool) -> int:
    if few or edge_index.is_cpu:
        return int(edge_index[1].max()) + 1
    return kept_with_edges((edge_index,), ("number of hyperedges",), lambda: int(edge_index[1].max()) + 1)  # type: ignore[no-any-return]


def _coefficients(edge_index: Tensor, end: int, weight: Any, num_groups: int, dtype: torch.dtype, few: bool) -> Tensor:
    """What multiplies a member of a group, those of one ``end`` of an ``edge_index``, in their mean: ``[E]``. Nodes weigh their
    hyperedges, if they have a ``weight``."""

    def make() -> Tensor:
        index = edge_index[end]
        weights = None if weight is None else weight.index_select(0, edge_index[1 - end])
        needs_grad = weights is not None and weights.requires_grad
        if index.is_cpu and dtype in REORDERED and not needs_grad:
            return torch.ops.gnnfast.inverse_sums.default(index, weights, num_groups, dtype)  # type: ignore[no-any-return]
        if weights is None and dtype in REORDERED:  # a group without members is looked up by none
            counts = torch.ops.gnnfast.degrees.default(index, num_groups, dtype)
            return counts.reciprocal_().index_select(0, index)  # type: ignore[no-any-return]
        weights = torch.ones(index.shape, dtype=dtype, device=index.device) if weights is None else weights
        inverse = weights.new_zeros(num_groups).scatter_add_(0, index, weights).reciprocal()
        return inverse.masked_fill(inverse == float("inf"), 0).index_select(0, index)

    if few or (weight is not None and not is_constant(weight)):
        return make()
    keys = (edge_index,) if weight is None else (edge_index, weight)
    key = "coefficients of hyperedges", end, num_groups, dtype, torch.are_deterministic_algorithms_enabled()
    return kept_with_edges(keys, key, make)  # type: ignore[no-any-return]
