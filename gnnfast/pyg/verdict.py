"""What a module computes: its message, its reduction, and that nothing else of it runs. Decided once for a class, and again when
one of the functions that the verdict depends on is another, or has another code object."""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from types import FunctionType
from typing import Any, NamedTuple

import torch

from gnnfast.pyg import known
from gnnfast.pyg.messages import DOT_ATTENTION, GINE, RELU_FORMS, SPECIAL, Message, means_relu, recognise
from gnnfast.unsupported import Unsupported

# Not propagate: PyG puts a bound one into the instance when an explainer was used, and it is the generated one that called here.
CALLED = ("forward", "reduce", "_call_impl")
METHODS = (*known.METHODS, "collect", "message", "update")
mp_hooks = operator.itemgetter(
    *(
        f"_{stage}_forward_{kind}"
        for stage in ("propagate", "message", "aggregate", "message_and_aggregate")
        for kind in ("pre_hooks", "hooks")
    )
)
module_hooks = operator.itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What torch.nn.modules.module._has_any_global_hook() asks: the dictionaries stay the same.
global_hooks = tuple(
    getattr(torch.nn.modules.module, f"_global_{name}")
    for name in (
        "backward_pre_hooks",
        "backward_hooks",
        "forward_pre_hooks",
        "forward_hooks",
        "forward_hooks_always_called",
        "forward_hooks_with_kwargs",
    )
)
_MOST = 4096  # verdicts that are remembered
# By the id of a class, which is let go, with a reference that drops the verdict then; and by that of its aggregation.
_verdicts: dict[tuple[int, type], tuple[known.Watch, weakref.ref[type]]] = {}


class Verdict(NamedTuple):
    """What a module computes: ``reduce`` over ``message``. ``update`` holds the names that an overridden ``update()`` asks for
    besides its input; ``None``: it is PyG's. ``place`` is what the report calls it."""

    message: Message
    reduce: str
    update: tuple[str, ...] | None
    place: str


class Steps(NamedTuple):
    """What of ``collect()`` the three functions of a class ask for, by name. ``reduce``: the aggregation is PyG's own (empty: it is
    not); ``known_aggregate``: ``aggregate()`` is. ``place`` as in :class:`Verdict`."""

    message: tuple[str, ...]
    aggregate: tuple[str, ...]
    update: tuple[str, ...]
    reduce: str
    known_aggregate: bool
    place: str


def _check_instance(module: Any) -> None:
    """Raises Unsupported if more runs in an instance than in its class."""
    own = module.__dict__
    if any(mp_hooks(own)):
        raise Unsupported("hooks are registered on message passing")
    if own["_explain"]:
        raise Unsupported("an explainer is active")
    if own.get("_decomposed_layers", 1) != 1:
        raise Unsupported("decomposed_layers is set")
    if not own.keys().isdisjoint(METHODS):
        raise Unsupported("the instance overrides a method of message passing")
    if any(global_hooks):
        raise Unsupported("global module hooks are registered")
    if known.replaced_in_tensor():
        raise Unsupported("a method of torch.Tensor is not the known one")


def is_plain(aggregation: Any) -> bool:
    """Whether nothing but its class says what an aggregation does."""
    own = aggregation.__dict__
    return not any(module_hooks(own)) and own.keys().isdisjoint(CALLED)


def check_module(module: Any) -> Verdict:
    """What a module computes on which nothing but known functions run. Raises Unsupported."""
    cls = type(module)
    _check_instance(module)
    aggregation = module.__dict__["_modules"].get("aggr_module")
    kind = type(aggregation)
    if kind not in _reductions():
        raise Unsupported(f"the aggregation is {kind.__name__}")
    if not is_plain(aggregation):
        raise Unsupported("hooks are registered on the aggregation")
    key = id(cls), kind
    entry = _verdicts.get(key) or _watch(cls, kind, key)
    try:
        verdict = entry[0].verdict(cls)
    except AttributeError:
        if not hasattr(cls, "collect"):
            raise Unsupported("PyG cannot read the source of the class, which was defined by exec or on standard input") from None
        raise Unsupported("a method of message passing is no plain function") from None
    if isinstance(verdict, str):
        raise Unsupported(verdict)
    served[id(cls)] = verdict
    return verdict  # type: ignore[no-any-return]


def watch_of(module: Any) -> known.Watch:
    """By what the verdict on a checked module is asked again."""
    return _verdicts[id(type(module)), type(module.aggr_module)][0]


def check_steps(module: Any) -> Steps:
    """The steps of a module whose ``message()`` may be anything. Raises Unsupported."""
    cls = type(module)
    _check_instance(module)
    aggregation = module.__dict__["_modules"].get("aggr_module")
    kind = type(aggregation)
    key = id(cls), kind
    entry = _steps.get(key)
    if entry is None:
        holder = weakref.ref(cls, lambda _: _steps.pop(key, None))
        of_pyg = kind if kind in _reductions() else next(iter(_reductions()))
        entry = _steps[key] = known.watch_propagate(of_pyg, METHODS, lambda: _judge_steps(holder(), kind)), holder
    try:
        steps = entry[0].verdict(cls)
    except AttributeError:
        raise Unsupported("a method of message passing is no plain function") from None
    if isinstance(steps, str):
        raise Unsupported(steps)
    return steps if is_plain(aggregation) else steps._replace(reduce="")  # type: ignore[no-any-return]


_steps: dict[tuple[int, type], tuple[known.Watch, weakref.ref[type]]] = {}


# What is refused for its message() alone: by the id of the class, its message and the code of that. To refuse is always right, so
# that nothing else is looked at again.
_refusals: dict[int, tuple[Any, Any, str]] = {}
# The last verdict on classes that were served, by their id: what the next call may be asked by before anything is looked at.
served: dict[int, Verdict] = {}


def refused(cls: type) -> str:
    """Why no module of a class can be served, if that is known; else empty."""
    entry = _refusals.get(id(cls))
    if entry is not None:
        message: Any = getattr(cls, "message", None)
        if message is entry[0] and message.__code__ is entry[1]:
            return entry[2]
    return ""


def _watch(cls: type, kind: type, key: tuple[int, type]) -> tuple[known.Watch, weakref.ref[type]]:
    if len(_verdicts) >= _MOST:
        _verdicts.clear()

    def gone(_: Any) -> None:
        _verdicts.pop(key, None)
        _refusals.pop(key[0], None)
        served.pop(key[0], None)

    holder = weakref.ref(cls, gone)
    watch = known.watch_propagate(kind, METHODS, lambda: _judge(holder(), kind))
    _verdicts[key] = watch, holder
    return _verdicts[key]


def _judge(cls: Any, kind: type) -> Verdict | str:
    replaced = known.replaced_in_propagate(kind)
    if replaced:
        return f"{replaced} is not the known one"
    for name in known.METHODS:
        if not known.is_known_method(cls, name):
            return f"{name}() is overridden"
    if not known.is_generated(inspect.getattr_static(cls, "collect")):
        return "collect() is overridden"
    message, update = inspect.getattr_static(cls, "message"), inspect.getattr_static(cls, "update")
    found = message_of(message)
    if found is None:
        reason = "message() is not x_j or weight * x_j"
        if isinstance(message, FunctionType) and getattr(cls, "message", None) is message:
            _refusals[id(cls)] = message, message.__code__, reason  # type: ignore[union-attr]
        return reason
    reduce, place = _reductions()[kind], f"pyg {cls.__name__}"
    if found.form in RELU_FORMS and not (reduce == "sum" and means_relu(found.form, message)):  # type: ignore[arg-type]
        return "message() is relu(x_j + edge features), of which only sums are fused"
    if known.is_known_method(cls, "update"):
        return Verdict(found, reduce, None, place)
    names = update_arguments(update) if type(update) is FunctionType else None
    return "update() asks for more than arguments of propagate()" if names is None else Verdict(found, reduce, names, place)


def message_of(function: Any) -> Message | None:
    """What a ``message()`` computes, if a kernel does that."""
    if known.is_known(function, *known.TRANSFORMER):
        return DOT_ATTENTION
    if known.is_known(function, *known.GINE):
        return GINE
    return recognise(function.__code__) if type(function) is FunctionType else None


def _judge_steps(cls: Any, kind: type) -> Steps | str:
    for name in known.METHODS:
        if name != "aggregate" and not known.is_known_method(cls, name):
            return f"{name}() is overridden"
    collect = inspect.getattr_static(cls, "collect")
    if not known.is_generated(collect):
        return "collect() is overridden"
    arguments: list[tuple[str, ...]] = []
    for name, given in (("message", 1), ("aggregate", 2), ("update", 2)):  # besides self, what the step before has made
        function = inspect.getattr_static(cls, name)
        if type(function) is not FunctionType or function.__code__.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
            return f"{name}() has no fixed arguments"
        names = list(inspect.signature(function).parameters)[given:]
        arguments.append(tuple(n for n in names if name != "aggregate" or n != "aggr"))
    if {n for names in arguments for n in names} != set(collect.__globals__["CollectArgs"]._fields):
        return "message() and its like take other arguments than those that PyG generated collect() for"
    own = known.is_known_method(cls, "aggregate")
    reduce = _reductions().get(kind, "") if own else ""
    if reduce and known.replaced_in_propagate(kind):
        reduce = ""
    message, aggregate, update = arguments
    return Steps(message, aggregate, update, reduce, own, f"pyg {cls.__name__}")


def update_arguments(update: FunctionType) -> tuple[str, ...] | None:
    """Names that an overridden update() asks for besides its input; ``None`` if they are not all plain arguments."""
    code = update.__code__
    names = code.co_varnames[2 : code.co_argcount]
    simple = not any(n.endswith(("_i", "_j")) or n in SPECIAL for n in names)
    flags = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return names if simple and not code.co_kwonlyargcount and not code.co_flags & flags else None


@functools.cache
def _reductions() -> dict[type, str]:
    from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, MinAggregation, SumAggregation

    return {SumAggregation: "sum", MeanAggregation: "mean", MaxAggregation: "max", MinAggregation: "min"}
