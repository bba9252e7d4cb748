"""Products with constant sparse features, and layers that are linear up to their bias: in the cheaper order, ``lin(aggregate(x))``,
as PyG writes some, or ``aggregate(lin(x))``, and the latter as one node of autograd."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast import features
from gnnfast.dispatch.execute import aggregate_linear
from gnnfast.dispatch.select import Layer, linear_first, saves_little
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.patching import class_of, is_dispatched
from gnnfast.pyg import guards
from gnnfast.pyg.known import is_linear
from gnnfast.pyg.norm import make_normalising, sharing
from gnnfast.pyg.propagate import graph_of
from gnnfast.pyg.verdict import check_module, module_hooks
from gnnfast.reporting import fell_back, ran
from gnnfast.types import FEATURE_DTYPES
from gnnfast.unsupported import Unsupported

_methods = operator.attrgetter("message", "aggregate", "update", "message_and_aggregate", "forward")
# Orders round differently, which only these dtypes have the digits for.
_REORDERED = (torch.float32, torch.float64)


def make_linear(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``Linear.forward(x)`` of PyG."""

    def linear(module: Any, x: Any) -> Any:
        if type(x) is not Tensor:
            return NotImplemented
        if x.layout is torch.strided:
            if not features.sighted(x, module, "product"):
                return NotImplemented  # at once: such are most calls
        elif reason := features.unsupported(x):
            fell_back("pyg Linear", reason)
            return NotImplemented
        weight, bias, place = module.weight, module.bias, "pyg Linear"
        if not _fits(x, weight, bias):
            return NotImplemented
        if bias is not None and x.element_size() == 2 and x.layout is torch.strided:
            return NotImplemented  # a bias added to rounded products rounds twice
        out = _product(x, weight, module, place)
        if out is None:
            return NotImplemented
        return out if bias is None else out + bias

    return linear


def make_gcn_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``GCNConv.forward(x, edge_index, edge_weight)``."""

    known = class_of(original)

    def gcn_conv(module: Any, x: Any, edge_index: Any, edge_weight: Any) -> Any:
        if guards.context() or guards.operand("x", x) or type(edge_index) is not Tensor or edge_index.layout is not torch.strided:
            return NotImplemented
        lin, bias = module.lin, module.bias
        if not _plain(lin) or lin.bias is not None or module.node_dim not in (-2, 0):
            return NotImplemented
        weight = lin.weight
        if not _fits(x, weight, bias):
            return NotImplemented
        reduce = _known_reduction(known, module)
        if not reduce:
            return NotImplemented
        if module.normalize:
            kept = module._cached_edge_index
            if kept is None:
                gcn_norm = original.__globals__["gcn_norm"]
                arguments = (edge_index, edge_weight, x.shape[0], module.improved, module.add_self_loops, module.flow, x.dtype)
                if module.cached:
                    kept = module._cached_edge_index = gcn_norm(*arguments)
                else:
                    kept = gcn_norm(*arguments) if saved_tensors_are_watched() else sharing(edge_index, gcn_norm, *arguments)
            edge_index, edge_weight = kept
        out = _in_one(module, reduce, lin, weight, bias, x, x, edge_index, edge_weight)
        return _add(module.propagate(edge_index, x=lin(x), edge_weight=edge_weight), bias) if out is None else out

    return gcn_conv


def make_sage_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``SAGEConv.forward(x, edge_index, size)``."""

    known = class_of(original)

    def sage_conv(module: Any, x: Any, edge_index: Any, size: Any) -> Any:
        if module.project:
            return NotImplemented
        x_src, x_dst = _pair(x)
        lin = module.lin_l
        reduce = _reorders(known, module, lin, x_src, x_dst, edge_index, size, 1)
        if not reduce:
            return NotImplemented
        copies = not module.root_weight or x_dst is not x_src
        out = _in_one(module, reduce, lin, lin.weight, lin.bias, x_src, x_dst, edge_index, None, size, copies)
        if out is None:
            pair = _project(module, lin, x_src, copies), _placeholder(x_dst)
            out = _add(module.propagate(edge_index, x=pair, size=size), lin.bias)
        if module.root_weight and x_dst is not None:
            out = out + module.lin_r(x_dst)
        return torch.nn.functional.normalize(out, p=2.0, dim=-1) if module.normalize else out

    return sage_conv


def make_graph_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``GraphConv.forward(x, edge_index, edge_weight, size)``."""

    known = class_of(original)

    def graph_conv(module: Any, x: Any, edge_index: Any, edge_weight: Any, size: Any) -> Any:
        x_src, x_dst = _pair(x)
        lin = module.lin_rel
        reduce = "" if _promotes(x_src, edge_weight) else _reorders(known, module, lin, x_src, x_dst, edge_index, size, 1)
        if not reduce:
            return NotImplemented
        copies = x_dst is not x_src
        out = _in_one(module, reduce, lin, lin.weight, lin.bias, x_src, x_dst, edge_index, edge_weight, size, copies)
        if out is None:
            pair = _project(module, lin, x_src, copies), _placeholder(x_dst)
            out = _add(module.propagate(edge_index, x=pair, edge_weight=edge_weight, size=size), lin.bias)
        return out if x_dst is None else out + module.lin_root(x_dst)

    return graph_conv


def make_sg_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``SGConv.forward(x, edge_index, edge_weight)``."""

    known, in_order = class_of(original), make_normalising(original)

    def sg_conv(module: Any, x: Any, edge_index: Any, edge_weight: Any) -> Any:
        if module.cached or module._cached_x is not None or _promotes(x, edge_weight):
            return NotImplemented
        if not _reorders(known, module, module.lin, x, None, edge_index, None, module.K):
            return in_order(module, x, edge_index, edge_weight)
        gcn_norm = original.__globals__["gcn_norm"]
        arguments = (edge_index, edge_weight, x.shape[0], False, module.add_self_loops, module.flow)
        edge_index, edge_weight = sharing(edge_index, gcn_norm, *arguments, x.dtype)
        out = _project(module, module.lin, x, copies=True)
        for _ in range(module.K):
            out = module.propagate(edge_index, x=out, edge_weight=edge_weight)
        return _add(out, module.lin.bias)

    return sg_conv


def make_gin_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``GINConv.forward(x, edge_index, size)``: torch cannot scale ``torch.sparse_csr`` by ``1 + eps``."""

    def gin_conv(module: Any, x: Any, edge_index: Any, size: Any) -> Any:
        x_src, x_dst = _pair(x)
        if not _is_csr(x_dst) or features.unsupported(x_dst) or guards.context():
            return NotImplemented
        out = module.propagate(edge_index, x=(x_src, _placeholder(x_dst)), size=size)
        return module.nn(out + (1 + module.eps) * x_dst.to_dense())

    return gin_conv


def _pair(x: Any) -> tuple[Any, Any]:
    if isinstance(x, Tensor):
        return x, x
    return x if isinstance(x, tuple) and len(x) == 2 else (None, None)


def _placeholder(x_dst: Any) -> Any:
    """What ``propagate`` takes the number of destinations from: a sparse tensor has no rows that it could select."""
    return x_dst.values().new_empty(()).expand(x_dst.shape) if _is_csr(x_dst) else x_dst


def _promotes(x: Any, weight: Any) -> bool:
    """Whether weighting changes the dtype of the features, so that PyG's product comes after and fails."""
    tensors = isinstance(x, Tensor) and isinstance(weight, Tensor)
    return tensors and torch.promote_types(x.dtype, weight.dtype) != x.dtype


def _add(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias


def _is_csr(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.sparse_csr


def _fits(x: Any, weight: Any, bias: Any) -> bool:
    """Whether a product of gnnfast can stand in for ``x @ weight.t() + bias``."""
    if guards.context() or guards.operand("weight", weight) or (bias is not None and guards.operand("bias", bias)):
        return False
    dtype, device = weight.dtype, weight.device
    if x.dim() != 2 or weight.dim() != 2 or x.size(1) != weight.size(1) or x.dtype != dtype or x.device != device:
        return False
    return not torch.is_autocast_enabled(device.type) and (bias is None or bias.dtype == dtype)


def _product(x: Tensor, weight: Tensor, owner: Any, place: str) -> Tensor | None:
    """``x @ weight.t()`` by a sparse kernel, or ``None`` where a dense one is as good."""
    if not _is_csr(x):
        return features.try_multiply(x, weight, owner, place)
    try:
        return features.multiply_csr(x, weight, place)
    except Unsupported as error:
        reason = str(error)
    except (IndexError, ValueError) as error:  # PyG raises its own
        reason = f"invalid input: {error}"
    fell_back(place, reason)
    return None


def _project(module: Any, lin: Any, x: Tensor, copies: bool) -> Tensor:
    """``lin(x)`` without the bias; with ``copies``, the user may write into ``x`` before the backward pass."""
    out = _product(x, lin.weight, lin, f"pyg {type(module).__name__}")
    if out is not None:
        return out
    if copies and torch.is_grad_enabled() and lin.weight.requires_grad:
        x = x.clone()
    return torch.nn.functional.linear(x, lin.weight)


def _in_one(
    module: Any,
    reduce: str,
    lin: Any,
    weight: Tensor,
    bias: Tensor | None,
    x_src: Tensor,
    x_dst: Any,
    edge_index: Tensor,
    edge_weight: Any,
    size: Any = None,
    copies: bool = False,
) -> Tensor | None:
    """``aggregate(lin(x))`` and the bias as one node of autograd, if the graph was seen. ``copies`` as in :func:`_project`."""
    if size is not None or x_src.layout is not torch.strided or x_src.dtype not in FEATURE_DTYPES:
        return None
    if x_dst is not None and x_dst is not x_src and (guards.operand("x", x_dst) or x_dst.dim() != 2):
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None
    try:
        graph = graph_of(edge_index, x_src.shape[0], _num_dst(x_src, x_dst, size), module.flow == "source_to_target")
    except Unsupported:
        return None
    device = x_src.device
    if graph.device != device:
        return None
    if edge_weight is not None:
        if guards.operand("edge_weight", edge_weight) or edge_weight.shape != (graph.num_edges,):
            return None
        if edge_weight.dtype != x_src.dtype or edge_weight.device != device:
            return None
    place = f"pyg {type(module).__name__}"
    try:
        return aggregate_linear(graph, x_src, weight, bias, edge_weight, reduce, place=place, owner=lin, copies=copies)
    except (IndexError, ValueError):  # PyG raises its own
        return None


def _num_dst(x_src: Tensor, x_dst: Any, size: Any) -> int:
    if isinstance(x_dst, Tensor):
        return x_dst.shape[0]
    return size[1] if size is not None and size[1] is not None else x_src.shape[0]


def _reorders(known: Any, module: Any, lin: Any, x_src: Any, x_dst: Any, edge_index: Any, size: Any, hops: int) -> str:
    """Sum or mean, if ``aggregate(lin(x))`` gives the same as the layer and is cheaper; else empty. What is not certain runs as PyG
    wrote it."""
    csr = _is_csr(x_src)
    if guards.context() or (not csr and not _may_be_sparse(x_src, module) and _saves_little(lin, edge_index, hops)):
        return ""  # at once
    if (not csr and guards.operand("x", x_src)) or not _plain(lin) or not _fits(x_src, lin.weight, lin.bias):
        return ""
    if type(edge_index) is not Tensor or edge_index.layout is not torch.strided or edge_index.dim() != 2:
        return ""
    if size is not None and len(size) != 2:
        return ""
    if hops < 1 or module.node_dim not in (-2, 0) or (hops == 1 and module.flow != "source_to_target"):
        return ""
    reduce = _known_reduction(known, module)
    if not reduce:
        return ""
    place, change = f"pyg {type(module).__name__}", f"{lin.weight.shape[1]} -> {lin.weight.shape[0]} features"
    if csr:
        if features.unsupported(x_src):
            return ""
        ran(place, "linear first", change)  # in PyG's order they would have to be gathered
        return reduce
    if x_src.dtype not in _REORDERED:
        return ""
    grad, found = torch.is_grad_enabled(), features.measure(x_src, module, "order")
    shares = [features.share(x_src, found, what) for what in ("aggregate", "product")] if found else [1.0, 1.0]
    layer = Layer(
        x_src.device.type,
        x_src.shape[0],
        _num_dst(x_src, x_dst, size),
        edge_index.shape[1],
        x_src.shape[1],
        lin.weight.shape[0],
        hops,
        grad and x_src.requires_grad,
        grad and lin.weight.requires_grad,
        *shares,
    )
    if not linear_first(layer):
        return ""
    ran(place, "linear first", change)
    return reduce


def _may_be_sparse(x: Any, module: Any) -> bool:
    """Whether a layer was given these features before, so that they may be worth measuring."""
    return type(x) is Tensor and features.sighted(x, module, "order")


def _saves_little(lin: Any, edge_index: Any, hops: int) -> bool:
    """Whether looking further costs more than the other order can save."""
    weight = getattr(lin, "weight", None)
    if not isinstance(weight, Tensor) or not isinstance(edge_index, Tensor):
        return False
    if torch.nn.parameter.is_lazy(weight):
        return True  # PyG's own forward gives it a shape
    if weight.dim() != 2 or edge_index.dim() != 2:
        return False
    return saves_little(edge_index.device.type, edge_index.shape[1], weight.shape[1], weight.shape[0], hops)


def _known_reduction(known: Any, module: Any) -> str:
    """Sum or mean, if nothing between ``forward`` and the aggregation is another than the ``known`` layer's, and nobody watches it;
    else empty."""
    cls = type(module)
    same = cls is known or _methods(cls) == _methods(known)
    if not same or "propagate" in module.__dict__ or not is_dispatched(cls.propagate):
        return ""  # somebody else would see features of another width
    try:
        verdict = check_module(module)
    except Unsupported:
        return ""
    known_use = verdict.update is None and verdict.message.feature == "x" and verdict.reduce in ("sum", "mean")
    return verdict.reduce if known_use else ""


def _plain(lin: Any) -> bool:
    """Whether calling ``lin`` is a product and a bias and nothing else."""
    own = lin.__dict__
    return is_linear(type(lin)) and "forward" not in own and "_call_impl" not in own and not any(module_hooks(own))
