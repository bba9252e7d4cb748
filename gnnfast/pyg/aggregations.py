"""What PyG's aggregations reduce, where they are nothing but what PyG wrote."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from gnnfast.dispatch import several
from gnnfast.dispatch.softened import Temperature
from gnnfast.guards import PLAIN
from gnnfast.pyg.known import replaced_in_scaler, replaced_in_softened
from gnnfast.pyg.verdict import is_plain
from gnnfast.types import MOST_KINDS
from gnnfast.unsupported import Unsupported


def kinds_of(aggregation: Any) -> tuple[str, ...]:
    """The reductions, of :data:`gnnfast.types.KINDS`, that an aggregation puts side by side. Raises Unsupported."""
    multiple, kinds = _classes()
    found = list(aggregation.aggrs) if type(aggregation) is multiple else [aggregation]
    if type(aggregation) is multiple and (aggregation.mode != "cat" or "combine" in aggregation.__dict__):
        raise Unsupported("aggregations are combined in another way")
    of_std = [a._modules["var_aggr"] for a in found if "var_aggr" in a._modules]
    for part in (*found, *of_std):
        if type(part) not in kinds:
            raise Unsupported(f"an aggregation is {type(part).__name__}")
        if getattr(part, "semi_grad", False):
            raise Unsupported("a variance or deviation has semi_grad=True")
    if any(kinds[type(part)] != "var" for part in of_std):
        raise Unsupported("a deviation is of something else than a variance")
    parts, fused = [aggregation, *found, *of_std], aggregation._modules.get("fused_aggr")
    if fused is not None:  # in PyG it computes several, those that were there when it was made
        parts.append(fused)
        of_now = [type(a).__name__ for a in found]
        if fused.aggr_names != of_now or aggregation.fused_out_index != [*range(len(found))] or fused.semi_grad:
            raise Unsupported("the aggregations are others than when they were put together")
    if not all(map(is_plain, parts)):
        raise Unsupported("hooks are registered on the aggregation")
    if len(found) > MOST_KINDS:
        raise Unsupported(f"more than {MOST_KINDS} aggregations")
    reason = replaced_in_scaler()
    if reason:
        raise Unsupported(f"{reason} is not the known one")
    return tuple(kinds[type(a)] for a in found)


def may_be_several(aggregation: Any) -> bool:
    """Whether it is worth to ask."""
    multiple, kinds = _classes()
    return type(aggregation) is multiple or kinds.get(type(aggregation)) in ("var", "std")


def temperature_of(aggregation: Any, messages: Any) -> Temperature | None:
    """That of PyG's softmax aggregation of ``messages [E, F]``, float32 or float64; ``None`` for anything else."""
    if not isinstance(messages, Tensor) or not several.takes(messages) or not softens(aggregation):
        return None
    return temperature(aggregation, messages)


def softens(aggregation: Any) -> bool:
    """Whether it is PyG's softmax aggregation and nothing else, with a gradient that kernels have."""
    if type(aggregation) is not _softmax_class() or (aggregation.semi_grad and not aggregation.learn):
        return False
    return is_plain(aggregation) and not replaced_in_softened()


def temperature(aggregation: Any, messages: Tensor) -> Temperature | None:
    """That of an aggregation that :func:`softens`; ``None`` if it does not fit the messages."""
    t = aggregation.t
    width, channels = messages.shape[1], aggregation.channels
    if type(t) in (int, float):
        return Temperature(float(t)) if channels == 1 and (type(t) is float or abs(t) < 1 << 63) else None
    if type(t) not in PLAIN or t.dtype is not messages.dtype or t.device != messages.device or t.dim() != 1:
        return None
    if t.shape[0] != channels or channels not in (1, width):
        return None
    t = t.expand(width)
    return Temperature(t=t if messages.requires_grad else t.clone())  # PyG keeps t for the gradient of messages alone


def is_softened(module: Any) -> bool:
    """Whether a layer's aggregation is PyG's softmax aggregation."""
    return type(module.__dict__["_modules"].get("aggr_module")) is _softmax_class()


@functools.cache
def _softmax_class() -> Any:
    from torch_geometric.nn import aggr

    return aggr.SoftmaxAggregation


@functools.cache
def _classes() -> tuple[Any, dict[type, str]]:
    from torch_geometric.nn import aggr

    return aggr.MultiAggregation, {
        getattr(aggr, f"{kind.capitalize()}Aggregation"): kind for kind in ("sum", "mean", "max", "min", "var", "std")
    }
