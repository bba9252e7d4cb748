"""Products with constant sparse features, and layers that are linear up to their bias in the cheaper order: ``lin(aggregate(x))``,
as PyG writes them, or ``aggregate(lin(x))``."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast import features
from gnnfast.patching import is_dispatched
from gnnfast.pyg import guards
from gnnfast.pyg.propagate import Fallback, check_module, reduction
from gnnfast.reporting import fell_back, ran
from gnnfast.selector import Layer, linear_first, saves_little

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Orders round differently, which only these dtypes have the digits for.
_REORDERED = (torch.float32, torch.float64)


def make_linear(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``Linear.forward(x)`` of PyG."""

    def linear(module: Any, x: Any) -> Any:
        if type(x) is not Tensor:
            return NotImplemented
        if x.layout is torch.strided:
            if not features.eligible(x):
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


def make_sage_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``SAGEConv.forward(x, edge_index, size)``."""

    def sage_conv(module: Any, x: Any, edge_index: Any, size: Any) -> Any:
        if module.project:
            return NotImplemented
        x_src, x_dst = _pair(x)
        if not _reorders(original, module, module.lin_l, x_src, x_dst, edge_index, size, 1):
            return NotImplemented
        projected = _project(module, module.lin_l, x_src)
        out = module.propagate(edge_index, x=(projected, _placeholder(x_dst)), size=size)
        out = _add(out, module.lin_l.bias)
        if module.root_weight and x_dst is not None:
            out = out + module.lin_r(x_dst)
        return torch.nn.functional.normalize(out, p=2.0, dim=-1) if module.normalize else out

    return sage_conv


def make_graph_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``GraphConv.forward(x, edge_index, edge_weight, size)``."""

    def graph_conv(module: Any, x: Any, edge_index: Any, edge_weight: Any, size: Any) -> Any:
        x_src, x_dst = _pair(x)
        if _promotes(x_src, edge_weight) or not _reorders(original, module, module.lin_rel, x_src, x_dst, edge_index, size, 1):
            return NotImplemented
        projected = _project(module, module.lin_rel, x_src)
        out = module.propagate(edge_index, x=(projected, _placeholder(x_dst)), edge_weight=edge_weight, size=size)
        out = _add(out, module.lin_rel.bias)
        return out if x_dst is None else out + module.lin_root(x_dst)

    return graph_conv


def make_sg_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``SGConv.forward(x, edge_index, edge_weight)``."""

    def sg_conv(module: Any, x: Any, edge_index: Any, edge_weight: Any) -> Any:
        if module.cached or module._cached_x is not None or _promotes(x, edge_weight):
            return NotImplemented
        if not _reorders(original, module, module.lin, x, None, edge_index, None, module.K):
            return NotImplemented
        gcn_norm = original.__globals__["gcn_norm"]
        arguments = (edge_index, edge_weight, x.shape[0], False, module.add_self_loops, module.flow)
        edge_index, edge_weight = gcn_norm(*arguments, dtype=x.dtype)
        out = _project(module, module.lin, x)
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
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype or x.device != weight.device:
        return False
    return not torch.is_autocast_enabled(x.device.type)


def _product(x: Tensor, weight: Tensor, owner: Any, place: str) -> Tensor | None:
    """``x @ weight.t()`` by a sparse kernel, or ``None`` where a dense one is as good."""
    if not _is_csr(x):
        return features.try_multiply(x, weight, owner, place)
    try:
        return features.multiply_csr(x, weight, place)
    except features.CapturingError as error:
        reason = str(error)
    except (IndexError, ValueError) as error:  # PyG raises its own
        reason = f"invalid input: {error}"
    fell_back(place, reason)
    return None


def _project(module: Any, lin: Any, x: Tensor) -> Tensor:
    """``lin(x)`` without the bias."""
    place = f"pyg {type(module).__name__}"
    ran(place, "linear first", f"{lin.weight.shape[1]} -> {lin.weight.shape[0]} features")
    out = _product(x, lin.weight, module, place)
    return torch.nn.functional.linear(x, lin.weight) if out is None else out


def _reorders(original: FunctionType, module: Any, lin: Any, x_src: Any, x_dst: Any, edge_index: Any, size: Any, hops: int) -> bool:
    """Whether ``aggregate(lin(x))`` gives the same as the layer and is cheaper. What is not certain runs as PyG wrote it."""
    csr = _is_csr(x_src)
    if guards.context() or (not csr and not features.eligible(x_src) and _saves_little(lin, edge_index, hops)):
        return False  # at once
    if (not csr and guards.operand("x", x_src)) or not _plain(lin) or not _fits(x_src, lin.weight, lin.bias):
        return False
    if type(edge_index) is not Tensor or edge_index.layout is not torch.strided or edge_index.dim() != 2:
        return False
    if size is not None and len(size) != 2:
        return False
    if hops < 1 or module.node_dim not in (-2, 0) or (hops == 1 and module.flow != "source_to_target"):
        return False
    if not _known_module(original, module):
        return False
    if csr:
        return not features.unsupported(x_src)  # in PyG's order they would have to be gathered
    if x_src.dtype not in _REORDERED:
        return False
    grad, found = torch.is_grad_enabled(), features.measure(x_src, module, "order")
    shares = [features.share(x_src, found, what) for what in ("aggregate", "product")] if found else [1.0, 1.0]
    if isinstance(x_dst, Tensor):
        num_dst = x_dst.shape[0]
    else:
        num_dst = size[1] if size is not None and size[1] is not None else x_src.shape[0]
    layer = Layer(
        x_src.device.type,
        x_src.shape[0],
        num_dst,
        edge_index.shape[1],
        x_src.shape[1],
        lin.weight.shape[0],
        hops,
        grad and x_src.requires_grad,
        grad and lin.weight.requires_grad,
        *shares,
    )
    return linear_first(layer)


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


def _known_module(original: FunctionType, module: Any) -> bool:
    """Whether nothing between ``forward`` and the aggregation is another than the known layer's, and nobody watches it."""
    cls, known = type(module), _class_of(original)
    same = all(getattr(cls, n) is getattr(known, n) for n in ("message", "aggregate", "update", "message_and_aggregate", "forward"))
    if not same or "propagate" in vars(module) or not is_dispatched(cls.propagate):
        return False  # somebody else would see features of another width
    try:
        message = check_module(module)
        reduce = reduction(module)
    except Fallback:
        return False
    return message.feature == "x" and reduce in ("sum", "mean")


def _class_of(function: FunctionType) -> Any:
    return function.__globals__[function.__qualname__.split(".")[0]]


def _plain(lin: Any) -> bool:
    """Whether calling ``lin`` is a product and a bias and nothing else."""
    return (
        type(lin).__name__ == "Linear"
        and type(lin).__module__ in ("torch_geometric.nn.dense.linear", "torch.nn.modules.linear")
        and "forward" not in vars(lin)
        and not any(getattr(lin, hooks) for hooks in _HOOKS)
    )
