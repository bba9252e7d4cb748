"""Linear layers as products: which are nothing else, what becomes of them where features are constant and sparse, where biases are
many, and where several multiply the same features.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnnfast import features, guards
from gnnfast.dispatch.bias import FEWEST_ROWS, are_many, biased, linears
from gnnfast.dispatch.bias import linear as linear_of
from gnnfast.guards import tracing_state
from gnnfast.pyg.known import is_linear
from gnnfast.pyg.verdict import global_hooks, is_plain, module_hooks
from gnnfast.reporting import fell_back
from gnnfast.unsupported import Unsupported

_STRIDED = torch.strided


def product(x: Any, module: Any, linear: type) -> Any:
    """``F.linear(x, module.weight, module.bias)`` of PyG's class of ``linear`` layers. Most inputs are hidden activations, or few
    numbers: for these it only looks up parameters where they are, a microsecond less than as attributes of a module, and asks
    nothing else."""
    plain = type(x) is Tensor and x.layout is _STRIDED
    few = plain and (x.requires_grad or tracing_state() is not None or x.numel() < features.MIN_ELEMENTS or not features.large(x))
    own = module.__dict__
    if few and type(module) is linear and "weight" not in own and "bias" not in own:
        parameters = own["_parameters"]
        try:
            weight, bias = parameters["weight"], parameters["bias"]
            many = x.is_cuda and torch.is_grad_enabled() and tracing_state() is None and x.numel() >= FEWEST_ROWS
            return linear_of(x, weight, bias) if many else functional.linear(x, weight, bias)
        except KeyError:  # somebody has parametrised them
            pass
    weight, bias = module.weight, module.bias
    out = None if few else _multiplied(x, weight, bias, module)
    return linear_of(x, weight, bias) if out is None else out


def products(x: Any, lins: Sequence[Any]) -> Sequence[Tensor]:
    """What linear layers make of the same features: without calling them as modules, which takes as long as the product does on
    small graphs, if that is a product alone."""
    if torch.compiler.is_compiling():
        return [lin(x) for lin in lins]
    hidden = type(x) is Tensor and (x.requires_grad or not features.large(x))  # else they may be used compressed
    known = type(lins[0])
    if hidden and is_linear(known) and all(is_product(lin, known) for lin in lins):
        parameters = [lin_parameters(lin) for lin in lins]
        if all(type(weight) in guards.PLAIN and (bias is None or type(bias) in guards.PLAIN) for weight, bias in parameters):
            return linears(x, *itertools.chain(*parameters))
    return [lin(x) for lin in lins]


def through(nn: Any, x: Any) -> Any:
    """``nn(x)``, its linear layers with many rows on a GPU as :func:`gnnfast.dispatch.bias.linear` has them."""
    many = type(x) is Tensor and x.is_cuda and x.dim() == 2 and x.shape[0] >= FEWEST_ROWS and torch.is_grad_enabled()
    if not many or not isinstance(nn, torch.nn.Module) or not are_many(x, _widest_bias(nn)):
        return nn(x)
    if any(global_hooks) or nn._compiled_call_impl is not None:
        return nn(x)
    if type(nn) is torch.nn.Sequential and is_plain(nn):
        for part in nn._modules.values():
            x = through(part, x)
        return x
    return product(x, nn, type(nn)) if is_product(nn) else nn(x)


def _widest_bias(nn: torch.nn.Module) -> int:
    """The length of the longest bias of a module, or of those that run in turn."""
    if type(nn) is torch.nn.Sequential:
        return max(map(_widest_bias, nn._modules.values()), default=0)  # type: ignore[arg-type]
    bias: Any = lin_parameters(nn)[1] if is_linear(type(nn)) else None
    return bias.numel() if type(bias) in guards.PLAIN else 0


def _multiplied(x: Any, weight: Any, bias: Any, module: Any) -> Tensor | None:
    """The product with features that are compressed; ``None``: torch's own."""
    if type(x) is not Tensor:
        return None
    if x.layout is _STRIDED:
        if not features.sighted(x, module, "product") or guards.context():
            return None
    elif reason := guards.context() or features.unsupported(x):
        fell_back("pyg Linear", reason)
        return None
    if not fits(x, weight, bias):
        return None
    if bias is not None and x.element_size() == 2 and x.layout is _STRIDED:
        return None  # a bias added to rounded products rounds twice
    out = sparse_product(x, weight, module, "pyg Linear")
    return out if out is None or bias is None else biased(out, bias)


def lin_parameters(lin: Any) -> Any:
    """The weight and the bias of a linear layer that is a product; what is not there is no tensor, a bias that it was made without
    ``None``."""
    parameters = lin._parameters
    return parameters.get("weight", ""), parameters.get("bias", "")


def is_product(lin: Any, known: type | None = None) -> bool:
    """Whether calling ``lin`` is a product and a bias and nothing else; that of a class ``known`` is, as was just asked."""
    own = lin.__dict__
    return (type(lin) is known or is_linear(type(lin))) and own.keys().isdisjoint(_OF_LINEAR) and not any(module_hooks(own))


# What of an instance would be called, or used, in place of what its class and its parameters say.
_OF_LINEAR = ("forward", "_call_impl", "weight", "bias")


def fits(x: Any, weight: Any, bias: Any) -> bool:
    """Whether a product of gnnfast can stand in for ``x @ weight.t() + bias``."""
    if guards.operand("weight", weight) or (bias is not None and guards.operand("bias", bias)):
        return False
    dtype, device = weight.dtype, weight.device
    if x.dim() != 2 or weight.dim() != 2 or x.size(1) != weight.size(1) or x.dtype != dtype or x.device != device:
        return False
    return not torch.is_autocast_enabled(device.type) and (bias is None or bias.dtype == dtype)


def sparse_product(x: Tensor, weight: Tensor, owner: Any, place: str) -> Tensor | None:
    """``x @ weight.t()`` by a sparse kernel, or ``None`` where a dense one is as good."""
    if not is_csr(x):
        return features.try_multiply(x, weight, owner, place)
    try:
        return features.multiply_csr(x, weight, place)
    except Unsupported as error:
        reason = str(error)
    except (IndexError, ValueError) as error:  # PyG raises its own
        reason = f"invalid input: {error}"
    fell_back(place, reason)
    return None


def is_csr(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.sparse_csr


def placeholder(x_dst: Any) -> Any:
    """What ``propagate`` takes the number of destinations from: a sparse tensor has no rows that it could select."""
    return x_dst.values().new_empty(()).expand(x_dst.shape) if is_csr(x_dst) else x_dst
