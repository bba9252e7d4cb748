"""MFConv (Duvenaud et al., NeurIPS 2015), whose nodes of each degree have weights of their own.

PyG looks for the nodes of each degree in each call, eleven times as a rule, and waits for the GPU each time. Here they are put into
order once for a graph; and where there is so little to multiply that the number of operations counts, one product makes what each
node would be with the weights of all degrees, of which it takes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gnnfast import guards
from gnnfast.dispatch.relations import kept_with_edges
from gnnfast.patching import class_of, is_dispatched
from gnnfast.pyg.coefficients import OVERRIDES
from gnnfast.pyg.known import replaced_in_mf
from gnnfast.pyg.products import is_product, lin_parameters
from gnnfast.pyg.verdict import check_module
from gnnfast.reporting import ran
from gnnfast.types import REORDERED
from gnnfast.unsupported import Unsupported

# Up to which products with the weights of all degrees take less time than to start those of each.
_MOST_BYTES = 32 << 20  # of results, on a GPU
_MOST_PRODUCTS = 1 << 19  # on a CPU


class _Order(NamedTuple):
    """Nodes in order of degree: which ``nodes`` they are and the ``place`` of each, ``[N]``; of each degree ``counts``."""

    nodes: Tensor
    place: Tensor
    counts: tuple[int, ...]


def make_mf_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``MFConv.forward(x, edge_index, size)``."""
    known = class_of(original)

    def mf_conv(module: Any, x: Any, edge_index: Any, size: Any) -> Any:
        if type(edge_index) is not Tensor:
            return NotImplemented  # propagate() says so
        x, x_dst = x if type(x) is tuple and len(x) == 2 else (x, x)
        try:
            _check(known, module, x, x_dst, edge_index, size)
            nodes = _num_nodes(x, x_dst, size)
            stacked = _stacked(module, x, x_dst, nodes)
            of_nodes: Any = (_order_of if stacked is None else _rows_of)(module, edge_index, nodes)
        except Unsupported as error:
            ran(f"pyg {type(module).__name__}", "in parts", str(error))  # which say themselves how they ran
            return NotImplemented
        except (IndexError, RuntimeError):  # PyG raises its own
            return NotImplemented
        out = module.propagate(edge_index, x=(x, x_dst), size=size)
        if stacked is None:
            return _in_order(module, out, x_dst, of_nodes)
        return _by_product(module, stacked, out, x_dst, of_nodes)

    return mf_conv


def _check(known: Any, module: Any, x: Any, x_dst: Any, edge_index: Tensor, size: Any) -> None:
    """Raises Unsupported if the layer is not what PyG wrote, or its operands are not what it is written for."""
    own, cls = module.__dict__, type(module)
    reason = guards.context() or ("a function mode is active" if guards.function_modes() else "")
    if not reason and (cls is not known or not own.keys().isdisjoint(OVERRIDES) or not is_dispatched(cls.propagate)):
        reason = "a method is another than the layer's"
    if reason:
        raise Unsupported(reason)
    verdict, replaced = check_module(module), replaced_in_mf()
    if replaced or verdict.update is not None or verdict.message.feature != "x" or verdict.message.weight is not None:
        raise Unsupported(f"{replaced} is not the known one" if replaced else "the layer aggregates something else")
    modules, degrees = own["_modules"], own["max_degree"] + 1
    if any(len(modules[name]._modules) != degrees for name in _LINS) or own["node_dim"] not in (-2, 0):
        raise Unsupported("an option is not served")
    operands = {"x": x, "edge_index": edge_index} | ({} if x_dst is None else {"x of destinations": x_dst})
    for name, t in operands.items():
        reason = guards.operand(name, t)
        if reason or t.dim() != 2 or t.device != edge_index.device:
            raise Unsupported(reason or f"{name} has shape {list(t.shape)}, or is on another device")
    if edge_index.shape[0] != 2 or edge_index.dtype is not torch.int64:
        raise Unsupported(f"edge_index is {edge_index.dtype} of shape {list(edge_index.shape)}")
    plain = own["flow"] == "source_to_target" or (size is None and x is x_dst)
    if not plain or not guards.is_size(size) or torch.is_autocast_enabled(edge_index.device.type):
        raise Unsupported("a size or the flow is not served, or autocast is on")


_LINS = "lins_l", "lins_r"


def _num_nodes(x: Tensor, x_dst: Tensor | None, size: Any) -> int:
    """How many destinations there are, if PyG finds no other number. Raises Unsupported."""
    asked = None if size is None else size[1]
    nodes: int = (x.shape[0] if asked is None else asked) if x_dst is None else x_dst.shape[0]
    if asked not in (None, nodes) or (size is not None and size[0] not in (None, x.shape[0])):
        raise Unsupported("sizes do not fit together")
    return nodes


def _degrees(module: Any, edge_index: Tensor, nodes: int) -> Tensor:
    """Of the nodes, which have the weights of ``max_degree`` from there on."""
    index = edge_index[int(module.flow == "source_to_target")]
    counts = index.new_zeros(nodes).scatter_add_(0, index, index.new_ones(1).expand(index.shape[0]))
    return counts.clamp_(max=module.max_degree)


# ---- little to multiply --------------------------------------------------------------------------------------------------------
class _Stacked(NamedTuple):
    """Weights of all degrees, one under the other, of what is aggregated and of destinations, if there are any."""

    weight: Tensor
    bias: Tensor | None
    root: Tensor | None


def _stacked(module: Any, x: Tensor, x_dst: Tensor | None, nodes: int) -> _Stacked | None:
    """The weights, where all linear layers are products of one shape and there is little to multiply."""
    width = module.out_channels
    columns = nodes * (module.max_degree + 1) * width
    products = columns * (x.shape[1] + (0 if x_dst is None else x_dst.shape[1]))
    few = columns * x.element_size() <= _MOST_BYTES if x.is_cuda else products <= _MOST_PRODUCTS
    if not few or not width or x.dtype not in REORDERED:
        return None
    of_lins = _stack(module._modules["lins_l"], x, x, width)
    of_roots = (None, None) if x_dst is None else _stack(module._modules["lins_r"], x, x_dst, width)
    if of_lins is None or of_roots is None or of_roots[1] is not None:
        return None
    return _Stacked(*of_lins, of_roots[0])


def _stack(lins: Any, like: Tensor, x: Tensor, width: int) -> tuple[Tensor, Tensor | None] | None:
    """The weights and biases of linear layers, if they are products of a shape that fits ``x``."""
    kind, weights, biases = None, list[Any](), list[Any]()
    for lin in lins._modules.values():
        if not is_product(lin, kind):
            return None
        kind, (weight, bias) = type(lin), lin_parameters(lin)
        weights.append(weight)
        if bias is not None:
            biases.append(bias)
    if len(biases) not in (0, len(weights)):
        return None
    for t, shape in *((weight, (width, x.shape[1])) for weight in weights), *((bias, (width,)) for bias in biases), (x, x.shape):
        if type(t) not in guards.PLAIN or t.shape != shape or t.dtype is not like.dtype or t.device != like.device:
            return None
    return torch.cat(weights), torch.cat(biases) if biases else None


def _rows_of(module: Any, edge_index: Tensor, nodes: int) -> Tensor:
    """Which row is each node's own, where each has one of every degree: ``[N]``. Raises Unsupported."""

    def make() -> Tensor:
        first = torch.arange(0, nodes * (module.max_degree + 1), module.max_degree + 1, device=edge_index.device)
        return first.add_(_degrees(module, edge_index, nodes))

    return kept_with_edges((edge_index,), ("rows of degrees", *_key(module, nodes)), make)  # type: ignore[no-any-return]


def _by_product(module: Any, stacked: _Stacked, out: Tensor, x_dst: Any, rows: Tensor) -> Tensor:
    of_all = functional.linear(out, stacked.weight, stacked.bias)
    if stacked.root is not None:
        if torch.is_grad_enabled() and stacked.root.requires_grad:
            x_dst = x_dst.clone()  # which the user may write into before the backward pass
        of_all = torch.addmm(of_all, x_dst, stacked.root.t())
    return of_all.view(-1, module.out_channels).index_select(0, rows)


# ---- more ----------------------------------------------------------------------------------------------------------------------
def _order_of(module: Any, edge_index: Tensor, nodes: int) -> _Order:
    """Kept with the edges. Raises Unsupported."""

    def make() -> _Order:
        degrees = _degrees(module, edge_index, nodes)
        order = degrees.argsort(stable=True)
        place = torch.empty_like(order).index_copy_(0, order, torch.arange(nodes, device=order.device))
        return _Order(order, place, tuple(torch.bincount(degrees, minlength=module.max_degree + 1).tolist()))

    return kept_with_edges((edge_index,), ("order of degrees", *_key(module, nodes)), make)  # type: ignore[no-any-return]


def _key(module: Any, nodes: int) -> tuple[object, ...]:
    return nodes, module.max_degree, module.flow


def _in_order(module: Any, out: Tensor, x_dst: Any, order: _Order) -> Tensor:
    lins, roots = (module._modules[name] for name in _LINS)
    results = [lin(rows) for lin, rows in zip(lins, _sorted(out, order).split(order.counts))]
    if x_dst is not None:
        of_roots = zip(results, roots, _sorted(x_dst, order).split(order.counts))
        results = [result + lin(rows) for result, lin, rows in of_roots]
    made = out.new_empty((out.shape[0], module.out_channels))
    return made.index_copy_(0, order.nodes, torch.cat(results))


def _sorted(x: Tensor, order: _Order) -> Tensor:
    """``x[order.nodes]``: written to where rows go, so that its gradient is read from there, and not added up."""
    return x.new_empty(x.shape).index_copy_(0, order.place, x)
