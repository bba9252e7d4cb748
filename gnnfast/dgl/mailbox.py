"""Functions of users that reduce messages: DGL runs them once for each degree, on messages ``[N, D, ...]`` of ``N`` nodes that have
``D`` in-edges. Here they run once, on messages of all nodes that have any, which are rows of edges (and may not exist, see
:mod:`gnnfast.lazy`): what is done to each element or row is done to these, and a reduction along dimension 1 is one of a kernel.

That is right only for what looks at each node by itself. So messages and features of nodes are tensors that know which operations
do, and ``D`` is a number for each node; anything else, a question how many nodes there are too, ends the attempt (``Exists``), and
DGL runs the function as ever."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gnnfast import _native, guards
from gnnfast.dgl.messages import as_rows, reduce_edges
from gnnfast.dispatch import execute
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.graph.formats import BY_DST
from gnnfast.lazy import operations
from gnnfast.lazy.kinds import Exists, raised
from gnnfast.lazy.rows import Call, existing, writes
from gnnfast.types import REORDERED

if _native.cpu.loaded:
    from gnnfast.ops.convert import derived


class Mailbox:
    """The messages of one call, and the nodes that get any: ``ids``, or ``None`` if all do."""

    def __init__(self, call: Call) -> None:
        self.call, self.graph = call, call.ends.towards(BY_DST)
        rowptr = self.graph.csr.rowptr

        def make() -> Tensor:  # waits for a GPU, once for a graph
            return rowptr.diff().nonzero().view(-1)

        kept = derived(rowptr, "with edges", make)
        ids = make() if kept is None else kept
        self.ids = None if ids.numel() == self.graph.num_dst else ids

    def of_nodes(self, t: Tensor) -> OfNodes:
        """What rows of all destinations are to a function."""
        return _of_nodes(t if self.ids is None else t.index_select(0, self.ids))

    def feature(self, t: Any) -> OfNodes:
        """The same of features, into which a user may write before the backward pass: what DGL gives a function is a copy."""
        if guards.operand("features", t) or t.device != self.graph.device:
            raise Exists
        return self.of_nodes(t.clone() if self.ids is None and torch.is_grad_enabled() else t)

    def messages(self, rows: Tensor) -> Messages:
        """What rows of edges are to a function."""
        if rows.dim() < 1 or rows.shape[0] != self.call.edges or rows.dtype not in REORDERED or rows.device != self.graph.device:
            raise Exists
        shape = (rows.shape[0], 1, *rows.shape[1:])  # nobody sees the first two
        made: Messages = _wrapper(Messages, shape, rows)
        made.rows, made.mailbox = rows, self
        return made

    def at_edges(self, t: OfNodes) -> Tensor:
        """Rows ``[N, 1, ...]`` of nodes at each of their in-edges."""
        rows = t.rows.squeeze(1)
        if rows.dtype not in REORDERED:
            raise Exists
        if self.ids is not None:
            rows = rows.new_zeros(self.graph.num_dst, *rows.shape[1:]).index_copy(0, self.ids, rows)
        return self.call.rows(rows, BY_DST) if rows.dim() > 1 else self.call.gather(rows, BY_DST)

    def degrees(self) -> Degrees:
        rowptr = self.graph.csr.rowptr

        def make() -> _Counts:  # waits for a GPU, once for a graph
            return _Counts(*rowptr.diff().unique(return_inverse=True))

        kept = derived(rowptr, "degrees", make)
        counts = make() if kept is None else kept
        return Degrees([n for n in counts.numbers if n], self, counts, is_size=True)

    def beside(self, number: Degrees, dtype: torch.dtype, dims: int, at_edges: bool) -> Tensor:
        """A number of each node beside rows of so many dimensions, of their dtype, as a number of Python's is."""
        if not dtype.is_floating_point or any(type(n) is not int and not isinstance(n, float) for n in number.numbers):
            raise Exists
        of_nodes, starving = number.counts.of_nodes, len(number.counts.numbers) - len(number.numbers)
        table = torch.tensor([*[0.0] * starving, *map(float, number.numbers)], dtype=torch.float64)
        values = table.to(of_nodes.device, dtype).index_select(0, of_nodes)
        if at_edges:
            values = self.call.gather(values, BY_DST)
        elif self.ids is not None:
            values = values.index_select(0, self.ids)
        return values.view(-1, *(1,) * (dims - 1))

    def reduced(self, rows: Tensor, how: str) -> OfNodes:
        out = self.call.aggregate(rows, 0, how)
        if out is None:
            rows = existing(rows)
            out = reduce_edges(self.graph, as_rows(rows), how, self.call.place).view(self.graph.num_dst, *rows.shape[1:])
        return self.of_nodes(out)

    def softmax(self, rows: Tensor) -> Messages:
        """Over the messages of each node."""
        found = operations.softmax(rows, self.call.ends.ids[BY_DST], None, 0)
        if found is NotImplemented:
            rows = existing(rows)
            found = execute.softmax(self.graph, as_rows(rows), place=self.call.place).view(rows.shape)
        return self.messages(found)


class _Counts:
    """The degrees that there are, ascending, and which of them each destination has."""

    def __init__(self, numbers: Tensor, of_nodes: Tensor) -> None:
        self.numbers, self.of_nodes, self.nbytes = numbers.tolist(), of_nodes, of_nodes.nbytes


class _Named(Mapping[str, Any]):
    """Tensors by name, made when they are asked for."""

    def __init__(self, given: Mapping[str, Any], make: Callable[[Any], Any]) -> None:
        self._given, self._make = given, make
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._make(self._given[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


def _raise(self: Any, *args: Any) -> Any:
    raise Exists


class _Unknown:
    """A size or ids of which a function may hold some, but not know any: those of a degree where DGL runs it."""

    __class__ = property(lambda self: int)  # type: ignore[assignment]  # to isinstance()
    __eq__ = __ne__ = __bool__ = __int__ = __float__ = __len__ = __repr__ = __str__ = __format__ = _raise
    __hash__ = __iter__ = __getitem__ = __contains__ = _raise

    def __index__(self) -> int:
        error = Exists()
        raised.count -= 1  # torch asks, catches it and goes on
        raise error

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _done(func, args, kwargs or {})


class Degrees(_Unknown):
    """How many messages a node has, or a number made of that, as Python or numpy makes it: ``numbers`` for each degree there is but
    0. ``is_size``: the former."""

    def __init__(self, numbers: list[Any], mailbox: Mailbox, counts: _Counts, is_size: bool = False) -> None:
        self.numbers, self.mailbox, self.counts, self.is_size = numbers, mailbox, counts, is_size

    __class__ = property(lambda self: int if self.is_size else float)  # type: ignore[assignment]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs or ufunc.nout != 1:
            raise Exists
        return self._made(ufunc, *inputs)

    @staticmethod
    def _made(func: Callable[..., Any], *args: Any) -> Any:
        """Errors of Python's are those that DGL's loop over degrees would have met."""
        own = next(a for a in args if type(a) is Degrees)
        if any(type(a) is not Degrees and not isinstance(a, Real) for a in args):
            return NotImplemented  # a tensor knows what to do, if anybody
        each = zip(*(a.numbers if type(a) is Degrees else [a] * len(own.numbers) for a in args))
        return Degrees([func(*numbers) for numbers in each], own.mailbox, own.counts)


def _operator(func: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    if swapped:
        return lambda self, other: self._made(func, other, self)
    return lambda self, *other: self._made(func, self, *other)


for _func in (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow):
    setattr(Degrees, f"__{_func.__name__}__", _operator(_func))
    setattr(Degrees, f"__r{_func.__name__}__", _operator(_func, swapped=True))
for _name in ("neg", "pos", "abs"):
    setattr(Degrees, f"__{_name}__", _operator(getattr(operator, _name)))


def run(func: Callable[[Any], Any], g: Any, messages: Mapping[str, Tensor], call: Call) -> Any:
    """The frame of what a function makes of messages, as ``invoke_udf_reduce`` of ``dgl.core`` returns it. Raises Exists."""
    mailbox, of_type = Mailbox(call), g.dsttypes[0]
    features = g._node_frames[g.get_ntype_id_from_dst(of_type)]
    named = _Named(features, mailbox.feature), _Named(messages, mailbox.messages)
    found = func(sys.modules["dgl.udf"].NodeBatch(g, _Unknown(), of_type, *named))
    if any(type(t) is not OfNodes for t in found.values()):
        raise Exists
    made = sys.modules["dgl.frame"].Frame(num_rows=mailbox.graph.num_dst)
    made._initializers, made._default_initializer = features._initializers, features._default_initializer
    ids = g.dstnodes() if mailbox.ids is None else mailbox.ids.to(g.idtype)
    made.update_row(ids, {name: t.rows for name, t in found.items()})
    call.gained = True
    return made


# ---- what functions see --------------------------------------------------------------------------------------------------------
class OfNodes(Tensor):
    """``rows`` of the nodes that have in-edges, which nobody else may touch: what is not seen as an operation, and known, fails."""

    rows: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _done(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise Exists


class Messages(OfNodes):
    """Messages ``[N, D, ...]``: ``rows [E, ...]`` of edges."""

    mailbox: Mailbox


def _wrapper(cls: Any, shape: Any, rows: Tensor) -> Any:
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=rows.dtype, device=rows.device)  # type: ignore[attr-defined]


def _of_nodes(rows: Tensor) -> OfNodes:
    made: OfNodes = _wrapper(OfNodes, rows.shape, rows)
    made.rows = rows
    return made


class Extremum(NamedTuple):
    """What ``max(dim)`` returns, but for the indices, which nobody knows."""

    values: Any
    indices: None = None


def _done(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on such tensors. Raises Exists if it is not known to look at each node by itself."""
    if func in _OF_ALL:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    handler = _HANDLERS.get(func)
    if handler is None or writes(func, args, kwargs) or (torch.is_grad_enabled() and saved_tensors_are_watched()):
        raise Exists
    with torch._C.DisableTorchFunctionSubclass():
        first = next((t for t in _tensors(args, kwargs) if type(t) is Messages), None)
    if first is not None and torch.is_grad_enabled() != first.mailbox.call.grad_enabled:
        raise Exists
    return handler(func, first, args, kwargs)


def _tensors(args: Any, kwargs: Any) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        yield from value if type(value) in (tuple, list) else (value,)


def _dims(t: Any) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return t.dim()  # type: ignore[no-any-return]


def _shape(t: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return t.shape


def _plain(value: Any, first: Messages | None, dims: int, dtype: torch.dtype) -> Any:
    """An operand as the operation on rows takes it: rows of edges if there are messages, else of nodes. ``dims`` and ``dtype`` are
    those of the operands that have a row for each node; nobody else's first dimension may meet that of nodes, or of messages."""
    if type(value) is Degrees:
        at_edges = first is not None
        return value.mailbox.beside(value, dtype, dims - at_edges, at_edges)
    if not isinstance(value, Tensor):
        if isinstance(value, (tuple, list)):
            raise Exists
        return value
    shape = _shape(value)
    if isinstance(value, OfNodes):
        if len(shape) != dims:
            raise Exists
        if first is None or type(value) is Messages:
            return value.rows
        if dims < 2 or shape[1] != 1:
            raise Exists
        return first.mailbox.at_edges(value)
    if type(value) not in guards.PLAIN:
        raise Exists
    spare = len(shape) - dims + (1 if first is None else 2)  # dimensions that meet those of nodes and messages
    if any(n != 1 for n in shape[: max(spare, 0)]):
        raise Exists
    return value if first is None or spare < 2 else value.squeeze(0)


def _made(out: Any, first: Messages | None, rows: int) -> Any:
    """A result for a function, with a row for each node, or message."""
    if not isinstance(out, Tensor) or not out.dim() or out.shape[0] != rows:
        raise Exists
    return _of_nodes(out) if first is None else first.mailbox.messages(out)


def _rows_of(args: Any, kwargs: Any, first: Messages | None) -> tuple[int, int, torch.dtype]:
    """How many rows a result must have, and the dimensions and the dtype of operands that have them."""
    own = [t for t in _tensors(args, kwargs) if type(t) is not Degrees and isinstance(t, OfNodes)]
    dims, dtypes = max(map(_dims, own)), {t.dtype for t in own}
    return (first.mailbox.call.edges if first is not None else _shape(own[0])[0]), dims, max(dtypes, key=lambda d: d.itemsize)


def _by_element(func: Any, first: Messages | None, args: Any, kwargs: Any) -> Any:
    rows, dims, dtype = _rows_of(args, kwargs, first)
    plain = [_plain(a, first, dims, dtype) for a in args]
    return _made(func(*plain, **{k: _plain(v, first, dims, dtype) for k, v in kwargs.items()}), first, rows)


def _axis(dim: Any, dims: int) -> int:
    """A dimension, counted from the first. Raises Exists if it is that of nodes."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if type(dim) is not int or not -dims <= dim < dims or dim % dims == 0:
        raise Exists
    return dim % dims


def _along(func: Any, first: Messages | None, args: Any, kwargs: Any) -> Any:
    """Reductions and softmax, along a dimension of each node."""
    t, *rest = args
    if not isinstance(t, OfNodes) or len(rest) > 2 or kwargs.keys() - {"dim", "keepdim", "dtype", "_stacklevel"}:
        raise Exists
    named = dict(zip(("dim", "keepdim"), rest)) | kwargs
    name, keepdim = func.__name__, named.get("keepdim", False)
    softens = name == "softmax"
    if named.get("dtype") is not None or "dim" not in named or (softens and "keepdim" in named):
        raise Exists
    dim = _axis(named["dim"], _dims(t))
    if first is None:
        found = func(t.rows, dim) if softens else func(t.rows, dim, keepdim)
        return Extremum(_of_nodes(found.values)) if name in ("max", "min") else _of_nodes(found)
    if dim == 1 and softens:
        return first.mailbox.softmax(first.rows)
    if dim == 1:
        out: Any = first.mailbox.reduced(first.rows, name)
        out = out.unsqueeze(1) if keepdim else out
        return Extremum(out) if name in ("max", "min") else out
    if name in ("max", "min"):
        raise Exists
    out = func(first.rows, dim - 1) if softens else func(first.rows, dim - 1, keepdim)
    return first.mailbox.messages(out)


def _seen(func: Any, first: Messages | None, args: Any, kwargs: Any) -> Any:
    """Dimensions of 1 more or fewer."""
    if kwargs or len(args) != 2:
        raise Exists
    t, dim = args
    dims = _dims(t) + (func.__name__ == "unsqueeze")
    axis = _axis(dim, dims)
    if first is None:
        return _of_nodes(func(t.rows, axis))
    if axis == 1:
        raise Exists
    return first.mailbox.messages(func(first.rows, axis - 1))


def _sized(func: Any, first: Messages | None, args: Any, kwargs: Any) -> Any:
    """``size()`` and ``shape``: of dimensions that are known, and ``D``, which may be counted with."""
    t, *dim = args
    sizes = (_Unknown(), *_shape(t)[1:]) if first is None else (_Unknown(), first.mailbox.degrees(), *_shape(t)[2:])
    return sizes[(dim[0] if dim else kwargs["dim"])] if dim or kwargs else sizes


def _viewed(func: Any, first: Messages | None, args: Any, kwargs: Any) -> Any:
    """``view(-1, ...)`` of rows of nodes, or with sizes as they were given."""
    t, *shape = args
    shape = [*shape[0]] if len(shape) == 1 and type(shape[0]) in (tuple, list, torch.Size) else shape
    sizes, rest = (shape[:1], shape[1:]) if first is None else (shape[:2], shape[2:])
    if kwargs or not sizes or any(type(n) is not int for n in rest):
        raise Exists
    if type(sizes[0]) is not _Unknown and (type(sizes[0]) is not int or sizes[0] != -1 or -1 in rest):
        raise Exists
    if first is None:
        return _made(t.rows.reshape(_shape(t)[0], *rest), None, _shape(t)[0])
    if len(sizes) < 2 or type(sizes[1]) is not Degrees or not sizes[1].is_size:
        raise Exists
    return _made(first.rows.reshape(first.mailbox.call.edges, *rest), first, first.mailbox.call.edges)


def _indexed(func: Any, first: Messages | None, args: Any, kwargs: Any) -> Any:
    """Parts of each row."""
    t, index = args
    index, whole = index if type(index) is tuple else (index,), slice(None)
    known = all(type(i) in (int, slice, type(None), type(...)) for i in index)
    if kwargs or type(t) not in (OfNodes, Messages) or not known or sum(i is ... for i in index) > 1:
        raise Exists
    if ... in index:
        at = index.index(...)
        index = (*index[:at], *(whole,) * (_dims(t) - sum(i is not None for i in index) + 1), *index[at + 1 :])
    of_nodes = 1 if first is None else 2
    if any(type(i) is not slice or i != whole for i in index[:of_nodes]):
        raise Exists
    plain = t.rows if first is None else first.rows
    index = (whole, *index[of_nodes:])
    return _made(plain[index], first, plain.shape[0])


def _joined(func: Any, first: Messages | None, args: Any, kwargs: Any) -> Any:
    """``cat`` and ``stack`` of rows."""
    if not args or kwargs.keys() - {"dim"} or len(args) > 2 or not all(isinstance(t, OfNodes) for t in args[0]):
        raise Exists
    dims = _dims(args[0][0])
    axis = _axis(args[1] if len(args) > 1 else kwargs.get("dim", 0), dims + (func.__name__ == "stack"))
    rows, _, dtype = _rows_of(args, kwargs, first)
    parts = [_plain(t, first, dims, dtype) for t in args[0]]
    if first is None:
        return _made(func(parts, axis), None, rows)
    if axis == 1:
        raise Exists
    return _made(func(parts, axis - 1), first, rows)


def _multiplied(func: Any, first: Messages | None, args: Any, kwargs: Any) -> Any:
    """``linear`` and products with a matrix."""
    t, weight, *bias = args
    others = [weight, *bias, *kwargs.values()]
    if kwargs.keys() - {"bias"} or not isinstance(t, OfNodes) or _dims(t) < (2 if first is None else 3):
        raise Exists
    if any(o is not None and type(o) not in guards.PLAIN for o in others) or weight.dim() != 2:
        raise Exists
    plain = t.rows if first is None else first.rows
    return _made(func(plain, weight, *bias, **kwargs), first, plain.shape[0])


def _normed(func: Any, first: Messages | None, args: Any, kwargs: Any) -> Any:
    """``layer_norm``, within each row."""
    t, shape, *rest = args
    if not isinstance(t, OfNodes) or len(shape) > _dims(t) - (1 if first is None else 2):
        raise Exists
    if any(isinstance(p, OfNodes) for p in (*rest, *kwargs.values())):
        raise Exists
    plain = t.rows if first is None else first.rows
    return _made(func(plain, shape, *rest, **kwargs), first, plain.shape[0])


def _expanded(func: Any, first: Messages | None, args: Any, kwargs: Any) -> Any:
    """``expand_as`` messages."""
    if kwargs or first is None or len(args) != 2 or args[1] is not first or type(args[0]) is not OfNodes:
        raise Exists
    t = args[0]
    if _dims(t) != _dims(first) or _shape(t)[1:] != _shape(first)[1:]:
        raise Exists
    return first.mailbox.messages(first.mailbox.at_edges(t))


def _dropped(func: Any, first: Messages | None, args: Any, kwargs: Any) -> Any:
    """``dropout`` of each element, by another mask than where each degree draws its own."""
    named = dict(zip(("input", "p", "training"), args)) | kwargs
    t, p = named["input"], named.get("p", 0.5)
    if not named.get("training", True) or not p:
        return t
    plain = t.rows if first is None else existing(first.rows)
    return _made(func(plain, p), first, plain.shape[0])


def _of(owners: tuple[Any, ...], names: str) -> set[Any]:
    return {getattr(owner, name) for owner in owners for name in names.split() if hasattr(owner, name)}


_EVERYWHERE = (torch, Tensor, functional)
_ELEMENTS = "add sub mul div subtract multiply true_divide rsub neg abs exp log pow square sqrt rsqrt reciprocal clamp clone sign"
_ELEMENTS += " sin cos log1p expm1 maximum minimum"
_ELEMENTS += " relu sigmoid tanh leaky_relu elu gelu celu selu silu softplus mish hardtanh logsigmoid relu6 softsign"
_OPERATORS = "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __neg__ __pow__ __abs__"
_HANDLERS: dict[Any, Callable[..., Any]] = {}
for _functions, _handler in (
    (_of(_EVERYWHERE, _ELEMENTS) | _of((Tensor,), _OPERATORS), _by_element),
    (_of((torch, Tensor), "sum mean max min") | _of(_EVERYWHERE, "softmax"), _along),
    (_of((torch, Tensor), "unsqueeze squeeze"), _seen),
    ({Tensor.size, vars(torch._C.TensorBase)["shape"].__get__}, _sized),
    (_of((Tensor,), "view reshape"), _viewed),
    ({Tensor.__getitem__}, _indexed),
    (_of((torch,), "cat concat stack"), _joined),
    (_of(_EVERYWHERE, "linear matmul mm") | {Tensor.__matmul__}, _multiplied),
    ({functional.layer_norm}, _normed),
    ({Tensor.expand_as}, _expanded),
    ({functional.dropout}, _dropped),
):
    _HANDLERS.update(dict.fromkeys(_functions, _handler))
_OF_ALL = {getattr(Tensor, name).__get__ for name in ("dtype", "device", "ndim", "is_cuda", "layout")}
_OF_ALL |= {Tensor.dim, Tensor.is_floating_point, torch.is_floating_point}
