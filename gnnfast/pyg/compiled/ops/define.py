"""How these ops are defined: the arguments that tell a graph, overloads, kernels and gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast.graph import Graph
from gnnfast.pyg.adjacency import graph_of, incidence_of
from gnnfast.pyg.loops import looped_graph

_library = torch.library.Library("gnnfast", "FRAGMENT")
_ops = torch.ops.gnnfast
_TAGS = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, name))


class Edges(NamedTuple):
    """The last arguments of all: an ``edge_index [2, E]`` and the sizes of its graph, what the graph is made of, and the place of
    the report. ``form`` is one of

    - ``given``: the edges as they are;
    - ``looped``: with self loops, as :func:`gnnfast.pyg.loops.looped_graph`, or as ``gcn_norm`` adds them;
    - ``listed``: the former, in PyG's order where there are values for each edge;
    - ``incidence``: from the edges, which have features of their own, to where they end.
    """

    edge_index: Tensor
    num_src: int
    num_dst: int
    to_target: bool
    form: str
    place: str

    @property
    def looped(self) -> tuple[Any, Tensor]:
        """The graph with self loops, and its edges if they are listed."""
        listed = self.form == "listed" or not self.edge_index.is_cuda
        return looped_graph(self.edge_index, self.num_src, self.num_dst, listed)

    @property
    def graph(self) -> Graph:
        if self.form in ("looped", "listed"):
            return self.looped[0]
        graph = graph_of(self.edge_index, self.num_src, self.num_dst, self.to_target)
        return incidence_of(self.edge_index, graph, self.to_target) if self.form == "incidence" else graph

    @property
    def sources(self) -> int:
        return self.edge_index.shape[1] if self.form == "incidence" else self.num_src

    @property
    def rows(self) -> int:
        """Of values for each edge: as many as there can be, as only values tell how many loops are added. The last ones are 0."""
        return self.edge_index.shape[1] + (min(self.num_src, self.num_dst) if self.form in ("looped", "listed") else 0)

    def padded(self, t: Tensor) -> Tensor:
        missing = self.rows - t.shape[0]
        return torch.nn.functional.pad(t, (0, 0) * (t.dim() - 1) + (0, missing)) if missing else t


def of_edges(graph: Graph, t: Tensor) -> Tensor:
    """Of values for each edge those that there are."""
    return t.contiguous()[: graph.num_edges]


# Compilers keep code that calls ops on disk, for who runs the same program again: maybe with another release of gnnfast.
_SOURCES = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
_VERSION = f"v{hashlib.sha256(_SOURCES).hexdigest()[:8]}"
_EDGES = "Tensor edge_index, SymInt num_src, SymInt num_dst, bool to_target, str form, str place"


def define(name: str, arguments: str, results: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """An op, and another overload, its kernel, which has no gradient. The first is made of the second, so that it is the latter
    that compiled code calls: torch's way to an op with a gradient in Python takes as long again as the call."""
    whole, alone = _VERSION, f"{_VERSION}_kernel"
    for overload in (whole, alone):
        _library.define(f"{name}.{overload}({arguments}{', ' if arguments else ''}{_EDGES}) -> {results}", tags=_TAGS)

    def run(*given: Any) -> Any:
        if not torch.is_grad_enabled():
            return kernel(*given)
        with torch.no_grad():
            return kernel(*given)

    for key in ("CPU", "CUDA"):
        _library.impl(f"{name}.{alone}", run, key)
    _library.impl(f"{name}.{alone}", torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"gnnfast::{name}.{alone}", fake, lib=_library)
    op = getattr(getattr(_ops, name), whole)
    differentiated[op] = getattr(getattr(_ops, name), alone)
    _library.impl(f"{name}.{whole}", lambda *given: differentiated[op](*given), "CompositeImplicitAutograd")
    return op


# What each op is made of: its kernel, or what differentiates it.
differentiated: dict[Any, Callable[..., Any]] = {}


def differentiate(op: Any, keep: Callable[..., tuple[Any, ...]], backward: Callable[..., tuple[Any, ...]]) -> None:
    """Registers the gradient of an op: ``keep(ctx, output, *inputs)`` returns the tensors that ``backward(ctx, *tensors, *grads)``
    gets, which returns the gradients of the first inputs. ``ctx.needs`` says of which there must be some."""
    kernel = differentiated[op]
    lists = [n for n, argument in enumerate(op._schema.arguments) if str(argument.type) == "List[Tensor]"]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, sizes: list[int], *flat: Any) -> Any:
            """``sizes`` of the lists of tensors among the arguments, whose tensors are arguments of their own here."""
            ctx.needs, inputs = _nested(ctx.needs_input_grad[1:], lists, sizes), _nested(flat, lists, sizes)
            output = kernel(*inputs)
            ctx.save_for_backward(*keep(ctx, output, *inputs))
            ctx.rest = tuple(None if isinstance(t, Tensor) or n in lists else t for n, t in enumerate(inputs))
            ctx.count = len(flat)
            return tuple(output) if isinstance(output, list) else output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            found = _flat(backward(ctx, *ctx.saved_tensors, *grads), lists)
            return None, *found, *(None,) * (ctx.count - len(found))

    def run(*given: Any) -> Any:
        if not torch.is_grad_enabled() or not torch._C._any_requires_grad(*given):
            return kernel(*given)
        return Function.apply([len(given[n]) for n in lists], *_flat(given, lists))  # type: ignore[no-untyped-call]

    differentiated[op] = run


def _flat(values: Any, lists: list[int]) -> list[Any]:
    """Values, with the items of those that are ``lists`` in their place."""
    return [item for n, value in enumerate(values) for item in (value if n in lists else (value,))]


def _nested(flat: Any, lists: list[int], sizes: list[int]) -> list[Any]:
    """Values of which ``lists`` have so many items."""
    found = [*flat]
    for n, size in zip(lists, sizes):
        found[n : n + size] = [found[n : n + size]]
    return found


def differentiate_once(op: Any) -> None:
    """Registers that an op, which is a gradient, has none itself."""

    def refuse(*_: Any) -> Any:
        raise RuntimeError(f"{op} has no second derivative: call the model uncompiled")

    differentiate(op, lambda *_: (), refuse)


def empty(like: Tensor, *shape: int, dtype: Any = None) -> Tensor:
    return like.new_empty(shape, dtype=like.dtype if dtype is None else dtype)


def must_train(train: bool, op: Any) -> None:
    if not train:
        raise RuntimeError(f"{op} was called with train=False, which keeps nothing for a gradient")
