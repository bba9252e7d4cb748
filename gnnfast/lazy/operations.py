"""What ``message()`` makes of rows of edges that do not exist, which it gets in place of gathered features.

``message()`` runs as it is, on tensors of the shapes, dtypes and devices that it expects (:mod:`gnnfast.lazy.rows`). What works row
by row is done to the rows of nodes, of which there are fewer; a product with a number per edge or head is remembered for the
kernel that sums such products; a dot product of both ends has a kernel of its own. Anything else gets the gathered rows, which
then exist. Nothing is guessed, and nothing is remembered from one call for another but that a layer has nothing to gain.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from gnnfast import guards
from gnnfast.dispatch import edges, execute, gates
from gnnfast.graph.formats import BY_DST, BY_SRC
from gnnfast.lazy.kinds import Added, Existing, Gate, Gathered, Joined, Pair, Projected, Term, Weighted, saves
from gnnfast.lazy.rows import HANDLERS, Rows, handles, kind_of
from gnnfast.lazy.scores import Attended, Bends, Dots, Scaled, Scores, Shares, Sums, total_of
from gnnfast.types import FEATURE_DTYPES, REORDERED

# The compiler's stand-ins are among them: what handlers make in its code is put into it (gnnfast.pyg.compiled.rows).
_TENSORS, _PLAIN = (Tensor, FakeTensor), (*guards.PLAIN, FakeTensor)


def _by_row(function: Any) -> Callable[..., Any]:
    """For functions of each row by itself, whose gradient is finite wherever they are: nodes without edges must not matter."""

    def handler(t: Any, *args: Any, **kwargs: Any) -> Any:
        kind = kind_of(t)
        if not saves(kind) or any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
            return NotImplemented
        return kind.of(function(kind.kept(), *args, **kwargs))

    return handler


_OF_ELEMENTS = "elu gelu celu selu mish hardtanh relu6 hardsigmoid hardswish softsign logsigmoid tanhshrink"
for _function in (
    *(getattr(functional, name) for name in _OF_ELEMENTS.split()),
    *(getattr(owner, name) for owner in (Tensor, torch) for name in ("sin", "cos", "erf", "clamp", "clone")),
):
    HANDLERS[_function] = _by_row(_function)


def _within_row(function: Any, at: int = 1) -> Callable[..., Any]:
    """The same along a dimension, which they are told by an argument of that position, where it is not that of the edges."""
    by_row = _by_row(function)

    def handler(t: Any, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs["dim"] if "dim" in kwargs else args[at - 1] if len(args) >= at else None
        dims = dim if isinstance(dim, (tuple, list)) else (dim,)
        if not dims or not all(type(n) is int and n % t.dim() for n in dims):
            return NotImplemented
        return by_row(t, *args, **kwargs)

    return handler


for _function in (functional.softmax, torch.softmax, Tensor.softmax, functional.log_softmax, torch.mean, Tensor.mean):
    HANDLERS[_function] = _within_row(_function)
for _function in (functional.normalize, Tensor.norm, torch.norm):
    HANDLERS[_function] = _within_row(_function, 2)


@handles(functional.layer_norm)
def _layer_norm(t: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    kind = kind_of(t)
    if not saves(kind) or len(normalized_shape) >= t.dim() or not all(_is_parameter(p, kind) for p in (weight, bias)):
        return NotImplemented
    return kind.of(functional.layer_norm(kind.kept(), normalized_shape, weight, bias, eps))


@handles(functional.prelu)
def _prelu(t: Any, weight: Any) -> Any:
    kind = kind_of(t)
    return kind.of(functional.prelu(kind.kept(), weight)) if saves(kind) and _is_parameter(weight, kind) else NotImplemented


def _is_parameter(t: Any, kind: Gathered) -> bool:
    """Whether the gradient of a tensor, if it is one, may be summed over nodes in place of edges."""
    if t is None:
        return True
    if type(t) not in _PLAIN or t.dtype is not kind.x.dtype or t.dtype not in REORDERED:
        return False
    return not torch.is_autocast_enabled(t.device.type)


@handles(Tensor.square, torch.square)
def _square(t: Any) -> Any:
    return _by_row(torch.square)(t) if isinstance(kind_of(t), Gathered) else _mul(t, t)


@handles(Tensor.pow, torch.pow, Tensor.__pow__)
def _pow(t: Any, exponent: Any) -> Any:
    return _square(t) if _is_number(exponent) and exponent == 2 else NotImplemented


@handles(Tensor.to)
def _to(t: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
    kind = kind_of(t)
    if args or kwargs or type(dtype) is not torch.dtype or not dtype.is_floating_point:
        return NotImplemented
    if isinstance(kind, Gathered) and dtype is kind.x.dtype:
        return kind.seen(lambda rows: rows, t)  # themselves
    return _by_row(Tensor.to)(t, dtype)


for _name, _dtype in {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}.items():
    HANDLERS[getattr(Tensor, _name)] = functools.partial(_to, dtype=_dtype)


@handles(functional.leaky_relu)
def _leaky_relu(t: Any, negative_slope: Any = 0.01, inplace: Any = False) -> Any:
    kind = kind_of(t)
    sums = Sums.of(kind)
    if sums is None or inplace or not _is_number(negative_slope):
        return _by_row(functional.leaky_relu)(t, negative_slope, inplace)
    return Sums(sums.pair, float(negative_slope), sums.edge, sums.tail) if sums.slope == 1 else NotImplemented


@handles(torch.neg, Tensor.neg, Tensor.__neg__)
def _neg(t: Any) -> Any:
    kind = kind_of(t)
    return _multiplied(kind, -1) if isinstance(kind, (Gate, Pair, Weighted)) else _by_row(torch.neg)(t)


def _activation(function: Any, name: str) -> Any:
    """For those of which there are kernels: of sums of what both ends and the edge give."""
    by_row = _by_row(function)

    def handler(t: Any, *args: Any, **kwargs: Any) -> Any:
        kind = kind_of(t)
        if kind is None or isinstance(kind, Gathered):
            return by_row(t, *args, **kwargs)
        if args or kwargs.keys() - {"inplace"} or not (gates.takes(kind.like) or isinstance(kind, Gate)):
            return NotImplemented
        term = Term.of(kind)
        if term is None or term.act != "identity":
            return NotImplemented
        if not gates.takes(kind.like) and not (name == "relu" and term.is_sum_with_edges):
            return NotImplemented
        return Gate(term.activated(name))

    return handler


for _name, _functions in {
    "relu": (functional.relu, torch.relu, Tensor.relu),
    "sigmoid": (torch.sigmoid, Tensor.sigmoid, functional.sigmoid),
    "tanh": (torch.tanh, Tensor.tanh, functional.tanh),
    "softplus": (functional.softplus,),
    "silu": (functional.silu,),
    "abs": (torch.abs, Tensor.abs, Tensor.__abs__),
}.items():
    HANDLERS.update((_function, _activation(_function, _name)) for _function in _functions)


@handles(functional.linear)
def _linear(t: Any, weight: Any, bias: Any = None) -> Any:
    kind = kind_of(t)
    if kind is None or type(weight) not in _PLAIN or type(bias) not in (*_PLAIN, type(None)) or weight.dim() != 2:
        return NotImplemented
    if kind.like.dtype not in REORDERED or weight.dtype is not kind.like.dtype or torch.is_autocast_enabled(weight.device.type):
        return NotImplemented
    if isinstance(kind, Joined) and len(kind.shape) == 2 and weight.shape[1] == kind.shape[1]:
        return _linear_of_parts(kind, weight, bias)
    if isinstance(kind, Gathered):
        return kind.of(functional.linear(kind.kept(), weight, bias)) if saves(kind) else NotImplemented
    gate = Gate.of(kind) if gates.takes(kind.like) and weight.shape[1] == kind.shape[-1] else None
    return NotImplemented if gate is None or len(gate.shape) != 2 else Projected(gate, weight, bias)


def _linear_of_parts(joined: Joined, weight: Tensor, bias: Tensor | None) -> Any:
    """The sum of a product for each part, of which those at nodes are small."""
    joined.check()
    total: Tensor | None = None
    later: tuple[Tensor, Tensor] | None = None
    begin = 0
    by_side: dict[int, Tensor] = {}
    for part in joined.parts:
        columns = weight[:, begin : begin + part.shape[1]]
        begin += part.shape[1]
        if isinstance(part, Gathered):
            product = functional.linear(part.kept(), columns)
            by_side[part.side] = product if part.side not in by_side else by_side[part.side] + product
        elif later is None and not part.requires_grad and part.shape[1] <= gates.MOST_DEPTH and gates.takes(joined.like):
            later = part, columns
        else:
            if part.grad_fn is None and columns.requires_grad and torch.is_grad_enabled():
                part = part.clone()  # as PyG's torch.cat() does, so that the user may write into it before the backward pass
            product = functional.linear(part, columns)
            total = product if total is None else total + product
    if bias is not None:
        side = next(iter(by_side))
        by_side[side] = by_side[side] + bias
    joined.call.gained = True
    src, dst = (Gathered(joined.call, by_side[side], side, True) if side in by_side else None for side in (BY_SRC, BY_DST))
    return Gate(Term(src, shift=dst, edge=total, own=True, product=later))


@handles(torch.cat, torch.concat)
def _cat(tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    if kwargs or not isinstance(tensors, (tuple, list)) or not tensors or dim not in (-1, tensors[0].dim() - 1):
        return NotImplemented
    parts: list[Any] = []
    for t in tensors:
        kind = kind_of(t)
        part = (t.clone() if t.is_inference() else t) if kind is None and type(t) in _TENSORS else kind
        if isinstance(part, (Pair, Gate, Scores, Shares)):  # of which nothing can be said at nodes
            part = t.value()
        if not isinstance(part, (Gathered, Tensor)) or t.dim() < 2 or t.shape[:-1] != tensors[0].shape[:-1]:
            return NotImplemented
        if isinstance(part, Gathered) and not saves(part):
            return NotImplemented
        parts.append(part)
    gathered = [p for p in parts if isinstance(p, Gathered)]
    if not gathered or any(p.dtype is not gathered[0].x.dtype for p in tensors):
        return NotImplemented
    call = gathered[0].call
    return Joined(call, parts) if all(t.shape[0] == call.edges for t in tensors) else NotImplemented


@handles(Tensor.matmul, torch.matmul, Tensor.mm, torch.mm, Tensor.__matmul__)
def _matmul(t: Any, weight: Any) -> Any:
    kind = kind_of(t)
    if not saves(kind) or type(weight) not in _PLAIN or weight.dim() != 2 or kind.x.dtype not in REORDERED:
        return NotImplemented
    return NotImplemented if torch.is_autocast_enabled(weight.device.type) else kind.of(kind.kept().matmul(weight))


@handles(Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__)
def _mul(a: Any, b: Any) -> Any:
    kind, other = kind_of(a), b
    if kind is None or (isinstance(kind, (Scores, Shares)) and kind_of(b) is not None):
        kind, other = kind_of(b), a
    if kind is None:
        return NotImplemented
    of_other = kind_of(other)
    if isinstance(kind, Dots) and _is_number(other):
        return kind.times(other)
    if isinstance(kind, Joined) and _is_of_all(other, kind):
        return kind.times(other.expand(*other.shape[:-1], kind.shape[-1]))
    if isinstance(kind, Sums) and _is_of_all(other, kind):
        return Scaled(kind, other)
    if isinstance(of_other, Scores) or (isinstance(of_other, Shares) and not isinstance(kind, Gathered)):
        other, of_other = other.value(), None
    if isinstance(kind, Gathered) and isinstance(of_other, Gathered):
        found = _at_one_end(kind, of_other, "mul")
        if found is not NotImplemented:
            return found
        narrow = [math.prod(k.shape[1:]) < math.prod(big.shape[1:]) for k, big in ((kind, of_other), (of_other, kind))]
        if narrow[0]:
            kind, of_other = of_other, kind
        if any(narrow):
            return _weighted(kind, of_other.value())
        return _pair(kind, of_other, "mul")
    if _is_number(other) and isinstance(kind, (Gate, Pair, Weighted)):
        return _multiplied(kind, other)
    if _is_number(other) or _is_of_all(other, kind):
        return kind.of(kind.kept() * other) if saves(kind) else NotImplemented
    found = _weighted(kind, other)
    return _product(kind, other if of_other is None else of_other) if found is NotImplemented else found


def _multiplied(kind: Any, number: float) -> Any:
    """A gate, or weighted rows, times a number."""
    if isinstance(kind, Attended):  # whose weights need not exist
        rows = kind.rows.of(kind.rows.kept() * number) if saves(kind.rows) else None
        return NotImplemented if rows is None else Attended(rows, kind.shares, kind.tail)
    if isinstance(kind, Weighted):
        return Weighted(kind.rows, kind.weight * number, kind.heads, kind.tail, kind.heads_summed)
    gate = Gate.of(kind) if gates.takes(kind.like) else None
    if gate is None:
        return NotImplemented
    gate.check()
    return Gate(*gate.terms, weight=gate.weight, number=gate.number * number)


def _product(a: Any, b: Any) -> Any:
    """Of gates, or of one and rows of edges, or a number for each edge, ``b``."""
    gate = Gate.of(a)
    if gate is None or not gates.takes(gate.like):
        return NotImplemented
    if type(b) in _TENSORS and not _is_of_edges(b, a):
        is_weight = tuple(b.shape) == (gate.shape[0], *(1,) * (len(gate.shape) - 1)) and not b.is_inference()
        if not is_weight or b.dtype is not gate.like.dtype or b.device != gate.like.device:
            return NotImplemented
        gate.check()
        weight = b.view(-1) if gate.weight is None else gate.weight * b.view(-1)
        return Gate(*gate.terms, weight=weight, number=gate.number)
    if type(b) not in _TENSORS and (a.shape != b.shape or a.like.dtype is not b.like.dtype):
        return NotImplemented
    other = Gate(Term(edge=b)) if type(b) in _TENSORS else Gate.of(b)
    product = None if other is None else gate.times(other)
    return NotImplemented if product is None else product


def _at_one_end(a: Gathered, b: Gathered, how: str) -> Any:
    """What is made of rows of the same nodes, one of which may have fewer elements."""
    fits = len(a.shape) == len(b.shape) and all(n == m or 1 in (n, m) for n, m in zip(a.shape[1:], b.shape[1:]))
    if a.side != b.side or not fits or a.x.dtype is not b.x.dtype or not saves(a):
        return NotImplemented
    return a.of(getattr(a.kept(), how)(b.kept()))


def _pair(a: Any, b: Any, how: str) -> Any:
    """Rows at one end are computed there; at different ends, narrow ones may as well exist, but for scores of attention."""
    if a.side == b.side:
        return _at_one_end(a, b, how)
    if a.shape != b.shape or a.x.dtype is not b.x.dtype:
        return NotImplemented
    width = math.prod(a.shape[1:])
    if width < WIDE:
        return Sums(Pair(a, b, how)) if width and how == "add" and a.x.dtype in FEATURE_DTYPES else NotImplemented
    a.call.gained = True
    return Pair(a, b, how)


WIDE = 8


@handles(Tensor.add, torch.add, Tensor.__add__)
def _add(a: Any, b: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _added(a, b, "add")


@handles(Tensor.sub, torch.sub, Tensor.__sub__)
def _sub(a: Any, b: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _added(a, b, "sub")


@handles(Tensor.__rsub__)
def _rsub(b: Any, a: Any) -> Any:
    return _added(a, b, "sub")


def _added(a: Any, b: Any, how: str) -> Any:
    found = _as_one(a, b, how)
    return _apart(a, b) if found is NotImplemented and how == "add" else found  # in differences something may cancel out


def _as_one(a: Any, b: Any, how: str) -> Any:
    """What both make for one kernel."""
    kinds = kind_of(a), kind_of(b)
    if isinstance(kinds[0], Gathered) and isinstance(kinds[1], Gathered):
        return _pair(*kinds, how)
    if kinds[0] is not None and saves(kinds[0]) and (_is_number(b) or _is_of_all(b, kinds[0])):
        return kinds[0].of(getattr(kinds[0].kept(), how)(b))
    if how == "add":
        for kind, other in zip(kinds, (b, a)):
            if isinstance(kind, Sums) and kind.edge is None and kind.slope == 1 and _fits(other, kind):
                return Sums(kind.pair, edge=other.reshape(kind.pair.shape), tail=kind.tail)
            if isinstance(kind, (Gate, Pair)) and gates.takes(kind.like) and _is_of_all(other, kind):
                term = Term.of(kind)
                total = None if term is None else term.shifted(other)
                return NotImplemented if total is None else Gate(total)
            if _is_of_edges(other, kind):
                return _total(kind, Term(edge=other))
        if None not in kinds and kinds[0].shape == kinds[1].shape and kinds[0].like.dtype is kinds[1].like.dtype:
            return _total(*kinds)
    if kinds[1] is not None and saves(kinds[1]) and (_is_number(a) or _is_of_all(a, kinds[1])):
        return kinds[1].of(a + kinds[1].kept() if how == "add" else a - kinds[1].kept())
    return NotImplemented


MOST_PARTS = 4


def _apart(a: Any, b: Any) -> Any:
    """What no kernel takes as one."""
    kinds = kind_of(a), kind_of(b)
    first = kinds[1] if kinds[0] is None else kinds[0]
    if first is None or not first.call.adds or first.like.dtype not in REORDERED:
        return NotImplemented
    parts: list[Any] = []
    for t, kind in zip((a, b), kinds):
        if kind is not None and kind.shape == first.shape and kind.like.dtype is first.like.dtype:
            parts += kind.parts if isinstance(kind, Added) else (kind,)
        elif kind is None and _fits(t, first):
            parts.append(Existing(first.call, t))
        else:
            return NotImplemented
    if len(parts) > MOST_PARTS or not all(isinstance(p, (Gathered, Weighted, Pair, Gate, Projected, Existing)) for p in parts):
        return NotImplemented
    return Added(*parts)


@handles(Tensor.div, torch.div, Tensor.true_divide, Tensor.__truediv__)
def _div(a: Any, b: Any, **kwargs: Any) -> Any:
    kind = kind_of(a)
    if kwargs or kind is None or not _is_number(b):
        return NotImplemented
    if isinstance(kind, (Gate, Pair, Weighted)) and b:
        return _multiplied(kind, 1 / b)
    if isinstance(kind, Dots):
        return kind.times(1 / b) if b else NotImplemented
    return kind.of(kind.kept() / b) if saves(kind) else NotImplemented


def _total(kind: Any, other: Any) -> Any:
    """The sum of what both ends and the edge give."""
    if not gates.takes(kind.like) and not isinstance(kind, Gathered):
        return NotImplemented
    a, b = Term.of(kind), other if isinstance(other, Term) else Term.of(other)
    total = None if a is None or b is None else a.plus(b)
    if total is None or not (gates.takes(kind.like) or total.is_sum_with_edges):
        return NotImplemented
    return Gate(total)


def _is_of_edges(t: Any, kind: Any) -> bool:
    """Whether a tensor has a row for each edge, as rows of nodes at their ends have."""
    if not isinstance(kind, (Gathered, Pair, Gate)) or kind.like.dim() != 2 or kind.like.dtype not in FEATURE_DTYPES:
        return False
    return _fits(t, kind)


def _fits(t: Any, kind: Any) -> bool:
    """Whether a tensor has a number for each of a kind's."""
    if type(t) not in _TENSORS or t.layout is not torch.strided or t.is_inference():
        return False
    return tuple(t.shape) == kind.shape and t.dtype is kind.like.dtype and t.device == kind.like.device


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_of_all(t: Any, kind: Any) -> bool:
    """Whether a tensor is the same for each edge, and a product with it as large as the rows."""
    if type(t) not in _PLAIN or t.dtype is not kind.like.dtype or t.device != kind.like.device:
        return False
    shape, rows = tuple(t.shape), kind.shape
    if len(shape) > len(rows) or (len(shape) == len(rows) and shape[0] != 1):
        return False
    return all(n in (1, m) for n, m in zip(shape[::-1], rows[::-1]))


def _weighted(kind: Any, weight: Any) -> Any:
    """Rows times a number for each edge, or for each edge and head."""
    before = kind if isinstance(kind, Weighted) and not kind.heads_summed else None
    of, shares = kind if before is None else before.rows, kind_of(weight)
    if not isinstance(of, Gathered) or of.side != BY_SRC or (type(weight) not in _TENSORS and not isinstance(shares, Shares)):
        return NotImplemented
    shape, rows = tuple(weight.shape), kind.shape
    if weight.dtype is not of.x.dtype or len(shape) != len(rows) or shape[0] != rows[0] or len(rows) < 2:
        return NotImplemented
    heads = math.prod(shape[1:]) if shape == rows else shape[1] if len(shape) > 2 else 1
    if shape != rows and (heads not in (1, rows[1]) or any(n != 1 for n in shape[2:]) or (len(shape) == 2 and shape[1] != 1)):
        return NotImplemented
    if of.x.dtype not in FEATURE_DTYPES or not math.prod(rows[1:]):
        return NotImplemented
    of.call.gained = True
    if isinstance(shares, Shares):
        return Attended(of, shares, rows[1:])
    if weight.device != of.x.device:
        return NotImplemented
    if weight.is_inference():  # in which writes are not noticed
        if shape == rows:
            return NotImplemented
        weight = weight.clone()
    weight = weight.reshape(-1, heads)
    if before is not None:
        if before.heads not in (1, heads) and heads != 1:
            return NotImplemented
        weight, heads = before.weight * weight, max(before.heads, heads)
    return Weighted(of, weight, heads, rows[1:])


@handles(Tensor.sum, torch.sum)
def _sum(t: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    kind = kind_of(t)
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if kind is None or not isinstance(dim, int) or kwargs or not dim % t.dim():
        return NotImplemented
    dim %= t.dim()
    if isinstance(kind, Gathered):
        return kind.of(kind.kept().sum(dim, keepdim)) if saves(kind) else NotImplemented
    if isinstance(kind, (Pair, Scaled, Joined)) and not _sums_alike(kind):
        return NotImplemented
    if isinstance(kind, Pair) and kind.how == "mul" and dim == t.dim() - 1 and kind.a.x.dtype in FEATURE_DTYPES:
        return _dot(kind, keepdim)
    if isinstance(kind, Scaled) and dim == t.dim() - 1 and math.prod(kind.shape[1:]):
        return Bends(kind, (*kind.shape[1:-1], 1) if keepdim else kind.shape[1:-1])
    if isinstance(kind, Joined) and dim == t.dim() - 1 and not keepdim and kind.like.dtype in FEATURE_DTYPES:
        return total_of(kind) or NotImplemented
    if not isinstance(kind, Weighted) or kind.heads_summed or keepdim:
        return NotImplemented
    if kind.heads == 1 and saves(kind.rows):
        x = kind.rows.kept().reshape(-1, *kind.tail).sum(dim)
        return Weighted(kind.rows.of(x), kind.weight, 1, x.shape[1:])
    if dim == 1 and len(kind.tail) == 2 and kind.tail[0] == kind.heads:
        return Weighted(kind.rows, kind.weight, kind.heads, kind.tail[1:], True)
    return NotImplemented


def _sums_alike(kind: Any) -> bool:
    """Whether sums are of the dtype of what is summed: under autocast they are of another."""
    return not torch.is_autocast_enabled(kind.like.device.type)


def _dot(kind: Pair, keepdim: bool) -> Any:
    tail = kind.shape[1:-1]
    if not math.prod(kind.shape[1:]):
        return NotImplemented
    a, b = (k.saved().contiguous() for k in sorted((kind.a, kind.b), key=lambda k: k.side != BY_DST))
    kind.call.gained = True
    return Dots(kind.call, a, b, math.prod(tail), (*tail, 1) if keepdim else tail)


@handles(torch.einsum)
def _einsum(equation: Any, *operands: Any) -> Any:
    """Dot products as ``"ehd,ehd->eh"``, and rows times a number for each edge or head as ``"eh,ehd->ehd"``."""
    if type(equation) is not str or len(operands) != 2:
        return NotImplemented
    given, _, out = equation.replace(" ", "").partition("->")
    first, _, second = given.partition(",")
    if max(len(set(first)), len(set(second))) != max(len(first), len(second)) or not (first + second + out).isalpha():
        return NotImplemented
    a, b = operands
    if first == second and out == first[:-1]:
        pair = _mul(a, b)
        is_dot = isinstance(pair, Pair) and pair.a.x.dtype in FEATURE_DTYPES and _sums_alike(pair)
        return _dot(pair, False) if is_dot else NotImplemented
    if second == first[:-1]:
        a, b, first, second = b, a, second, first
    if out != second or first != second[:-1] or not isinstance(a, _TENSORS):
        return NotImplemented
    return NotImplemented if kind_of(b) is None else _mul(b, a.unsqueeze(-1))


@handles(functional.dropout)
def _dropout(t: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Any:
    kind = kind_of(t)
    if not isinstance(kind, Shares) or inplace or not _is_number(p) or not 0 <= p <= 1:
        return NotImplemented
    if not training or not p:
        return kind.seen_as(kind.tail, t)
    drops = not kind.dropout and kind.source is None and kind.call.drops(p, kind.of.heads)
    return Shares(kind.of, kind.tail, float(p)) if drops else NotImplemented


def softmax(src: Any, index: Any, num_nodes: Any, dim: Any) -> Any:
    """PyG's ``softmax`` over the edges at each destination, of scores or of rows at sources, of which each element is a head."""
    kind = kind_of(src)
    if (
        kind is None
        or dim not in (0, -src.dim())
        or not kind.call.ends.are_destinations(index)
        or kind.like.dtype not in FEATURE_DTYPES
    ):
        return NotImplemented
    graph = kind.call.ends.towards(BY_DST)
    if num_nodes not in (None, graph.num_dst) or torch.is_autocast_enabled(kind.like.device.type):
        return NotImplemented
    kind = Sums.of(kind) or kind
    if isinstance(kind, Scores):
        return Rows.made(kind.call, Shares(kind, kind.tail))
    row = kind.like.shape[1:]
    if not isinstance(kind, Gathered) or kind.side != BY_SRC or not row.numel():
        return NotImplemented
    kind.call.gained = True
    found = execute.softmax(graph, None, None, kind.kept().reshape(-1, row.numel()), place=kind.call.place)
    return edges.shaped(found.clone() if found.requires_grad else found, row)  # users may write into theirs
