"""Questions that are asked while tracing, of the real objects (:func:`ask`), and what all that is traced asks.

Compiled code stays as it was decided then until the compiler traces again, as all code does that it has traced: it does so when an
option or a method of the instance is another, and not when somebody replaces one of a class.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from gnnfast import _native
from gnnfast.config import settings
from gnnfast.dispatch.select import cannot_win
from gnnfast.lazy.kinds import Exists
from gnnfast.reporting import fell_back, ran
from gnnfast.types import FEATURE_DTYPES, INDEX_DTYPES
from gnnfast.unsupported import Unsupported

PLAIN = (Tensor, torch.nn.Parameter)
# As many times as a sum's do what the compiler makes of an extremum and of attention move rows of edges.
EXTREMUM_TIMES, ATTENTION_TIMES, SOFTMAX_TIMES = 3, 2, 4
STATISTICS_TIMES = {"max": EXTREMUM_TIMES, "min": EXTREMUM_TIMES, "var": 2, "std": 2}
# And as many times where PyG adds self loops, which are not as many in each call, so that its code waits for the device.
LOOPED_TIMES = 8
# How often as many bytes the compiler scatters as fast by one thread on a CPU, which needs no atomic additions.
ATOMICS_TIMES = 4
USUAL_WIDTH = 64  # of layers that do not say theirs
TOO_SMALL = "PyG's own", "too small to gain in compiled code"


class Traced(NamedTuple):
    """A tensor that is traced: its stand-in without values, whether it is an input of the compiled code, which nothing in the code
    has written into (then it is the user's own when the code runs), and what it is in the compiler's graph."""

    fake: Any
    kind: type
    given: bool
    node: Any


class _State(threading.local):
    """``frame`` is the one of :func:`ask`, while its question is answered; ``said`` a layer of which it is said why PyG's forward
    runs, until it calls ``propagate``; ``messages`` what the ``message()`` that is traced is called with."""

    frame: Any = None
    answer: Any = None
    said: Any = None
    messages: Any = None


state = _State()


def ask(question: Callable[..., Any], *things: Any) -> Any:
    """``question(*things)`` while tracing, of real objects and :class:`Traced` tensors. The answer, made of tuples, strings and
    numbers, is a constant of the compiled code; that holds as long as the options among the ``things`` are the same. ``None`` means
    that PyG's own must run."""
    comptime(_answer)
    return _answered()


def _answer(ctx: Any) -> None:
    state.frame = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    question, things = (state.frame.symbolic_locals[name].realize() for name in ("question", "things"))
    try:
        # Exported programs must run without gnnfast. Asked here: torch 2.10 takes is_exporting() for true in all that it traces.
        exports = torch.compiler.is_exporting() or state.frame.output.export
        state.answer = None if exports else question.as_python_constant()(*map(real, things.items))
    except GuardOnDataDependentSymNode:  # sizes that are computed within the code: as PyG wrote it
        state.answer = None
    finally:
        state.frame = None


def real(variable: Any) -> Any:
    """What the compiler's stand-in for a value stands for."""
    variable = variable.realize()
    if isinstance(variable, torch._dynamo.variables.TensorVariable):
        node = variable.as_proxy().node
        fake = node.meta["example_value"]
        # Inputs of inner graphs, such as a checkpointed part's, may be made in between.
        given = node.op in ("placeholder", "get_attr") and node.graph is state.frame.output.root_tracer.graph and fake._version == 0
        return Traced(fake, variable.python_type(), given, node)
    if isinstance(variable, torch._dynamo.variables.SymNodeVariable):
        return variable.sym_num
    if variable.is_python_constant():
        return variable.as_python_constant()
    return getattr(variable, "value", variable)


def make(question: Callable[..., Any], messages: Any, *things: Any) -> Any:
    """Two tensors, each ``None`` if there is none, of nodes that ``question(messages, *things)`` has put into the compiler's
    graph."""
    out = None
    comptime(_put)
    return out, messages


def _put(ctx: Any) -> None:
    frame = state.frame = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    question, messages, things = (frame.symbolic_locals[name].realize() for name in ("question", "messages", "things"))
    try:
        nodes = question.as_python_constant()(real(messages), *map(real, things.items))
    except (Exists, GuardOnDataDependentSymNode):
        nodes = None, None
    except Exception as error:  # of a release of torch whose graphs are others than those that were known
        fell_back("pyg messages", f"compiled: {type(error).__name__}: {error}")
        nodes = None, None
    finally:
        state.frame = None
    for name, node in zip(("out", "messages"), nodes):
        if node is not None:
            del node.meta["example_value"]  # wrap_fx_proxy makes its own
            proxy = torch.fx.Proxy(node, frame.output.current_tracer)
            frame.symbolic_locals[name] = torch._dynamo.variables.builder.wrap_fx_proxy(frame, proxy)


def caller(frames: int) -> Any:
    """The traced frame so many calls above the one that asks; ``None`` where the compiler began below it."""
    found = state.frame.parent
    for _ in range(frames - 1):
        found = None if found is None else found.parent
    return found


@torch.compiler.assume_constant_result
def _answered() -> Any:
    answer, state.answer = state.answer, None
    return answer


def context() -> str:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform is active"
    return "forward-mode AD is active" if torch.autograd.forward_ad._current_level >= 0 else ""


def check_edges(edge_index: Any) -> None:
    """Raises Unsupported if an op does not take it, or would not know it again."""
    if not isinstance(edge_index, Traced) or edge_index.kind is not Tensor or edge_index.fake.layout is not torch.strided:
        raise Unsupported(f"the adjacency is a {getattr(edge_index, 'kind', type(edge_index)).__name__}")
    fake = edge_index.fake
    if fake.dim() != 2 or fake.shape[0] != 2 or fake.dtype not in INDEX_DTYPES:
        raise Unsupported(f"edge_index is {fake.dtype} of {fake.dim()} dimensions")
    if not edge_index.given:
        raise Unsupported("edge_index is computed within the compiled code")


def check_operand(name: str, t: Any, edge_index: Traced) -> None:
    if not isinstance(t, Traced) or t.kind not in PLAIN:
        raise Unsupported(f"{name} is a {getattr(t, 'kind', type(t)).__name__}")
    if t.fake.layout is not torch.strided or t.fake.dtype not in FEATURE_DTYPES:
        raise Unsupported(f"{name} is {t.fake.dtype} of layout {t.fake.layout}")
    if t.fake.device != edge_index.fake.device:
        raise Unsupported(f"{name} and edge_index are on different devices")
    missing = _native.missing(t.fake.device.type)
    if missing:
        raise Unsupported(missing)


def is_constant(weight: Any) -> bool:
    """Whether values may be derived from a weight and kept."""
    return weight is not None and weight.given and weight.kind is Tensor and not weight.fake.requires_grad


def is_small(edge_index: Traced, width: Any, dtype: torch.dtype, times: int = 1, scatters: bool = False) -> bool:
    """Whether the compiler does as well with PyG's operations, which move rows of such a width so many ``times`` as often as those
    of a sum, over a graph of the size that is met now; on a CPU more may be where it no more than ``scatters`` them. The size does
    not bind the compiled code: with a bound for each width a model of some layers would soon be traced more often than the
    compiler allows."""
    training, nbytes = torch.is_grad_enabled(), times * hint(edge_index.fake.shape[1]) * hint(width) * dtype.itemsize
    if edge_index.fake.is_cuda:
        return cannot_win(nbytes, training, settings(), "compiled")
    if torch.get_num_threads() == 1:
        nbytes //= ATOMICS_TIMES
    return cannot_win(nbytes, training, settings(), "compiled sums cpu" if scatters else "compiled cpu")


def hint(size: Any) -> int:
    """The size that is met now, which decides nothing but the order of operations: it must not bind the compiled code."""
    return size if isinstance(size, int) else int(size.node.hint) if size.node.has_hint() else 0


def deciding(module: Any) -> tuple[Any, ...]:
    """What of a module decides: code is traced again when one of these is another."""
    methods = module.message, module.aggregate, module.update, module.propagate, module.message_and_aggregate
    return module.flow, module.node_dim, module.explain, *of_aggregation(module.aggr_module), *methods


def of_aggregation(aggregation: Any) -> tuple[Any, ...]:
    """What of an aggregation, and of the parts that PyG's have, decides: layers of a class share code where modules within are of
    the same classes."""
    options = (getattr(aggregation, name, None) for name in ("mode", "semi_grad", "learn", "forward"))
    names = getattr(aggregation, "aggr_names", None) or ()
    parts = [getattr(aggregation, name, None) for name in ("aggr", "var_aggr", "fused_aggr")]
    parts += [part for part in getattr(aggregation, "aggrs", None) or ()]  # noqa: C416 - as torch 2.11 can trace it
    inner = [of_aggregation(part) for part in parts if isinstance(part, torch.nn.Module)]
    return aggregation, *options, *names, *(thing for things in inner for thing in things)


def of_linear(lin: Any) -> tuple[Any, ...]:
    """What of a linear layer decides, if there is one; others may have no bias by that name."""
    return () if lin is None else (getattr(lin, "bias", None) is None, lin.forward)


def left(module: Any, reason: str) -> None:
    fell_back(f"pyg {type(module).__name__}", f"compiled: {reason}")


def leave_small(module: Any) -> None:
    ran(f"pyg {type(module).__name__}", *TOO_SMALL)
    state.said = module


def needs_grad(*operands: Any) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
