"""The driver of every op: chooses a kernel, counts, reports and calls. Framework-free, on unchecked operands; the adapters and
:mod:`gnnfast.functional` call it alike."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gnnfast import _native, features
from gnnfast.cache import note_variable
from gnnfast.config import Settings, settings
from gnnfast.dispatch import autotune, sampling
from gnnfast.dispatch.bias import FEWEST_ROWS
from gnnfast.dispatch.bias import linear as linear_of_many
from gnnfast.dispatch.calls import arguments, count, over_coo, over_formats
from gnnfast.dispatch.select import Choice, Request, Statistics, select
from gnnfast.graph import Graph, ids
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.graph.plan import Tuned
from gnnfast.reporting import ran
from gnnfast.stream import is_capturing
from gnnfast.types import EXTREMA, Matrix
from gnnfast.unsupported import Unsupported

if _native.cpu.loaded:
    from gnnfast.ops.attention import ATTENTION, MOST_DROP_HEADS, held_width
    from gnnfast.ops.edge_relu import EDGE_RELU
    from gnnfast.ops.edge_softmax import EDGE_SOFTMAX
    from gnnfast.ops.head_dots import HEAD_DOTS
    from gnnfast.ops.layer import Coo, Formats, layer, shifted
    from gnnfast.ops.pair_attention import PAIR_ATTENTION
    from gnnfast.ops.sddmm import SDDMM, SDDMM_COO
    from gnnfast.ops.spmm import below_autograd, call
    from gnnfast.ops.spmm_plus import SPMM_PLUS, SPMM_PLUS_MAX


class _Reproducible(threading.local):
    """Whether sums on a GPU must be the same from run to run, as where frameworks multiply with a matrix in place of scattering,
    for which users give one. Read what is ``asked``, and ask by :func:`reproducibly`."""

    asked = False


reproducible = _Reproducible()


@contextlib.contextmanager
def reproducibly(on_gpu: bool) -> Iterator[None]:
    """Asks for that, ``on_gpu``, of what is called within."""
    before, reproducible.asked = reproducible.asked, on_gpu
    try:
        yield
    finally:
        reproducible.asked = before


def aggregate(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    *,
    place: str = "gnnfast.spmm",
    ties: str = "even",
    empty: float | None = 0.0,
    training: bool = True,
    owner: object = None,
    copies: bool = False,
) -> Tensor:
    """One aggregation: ``x [num_src, F]``, ``weight [E]`` or ``[E, H]`` of the same dtype, or ``None``. Returns ``[num_dst, F]``.
    For the documented form see :func:`gnnfast.spmm`.

    ``ties`` as there, or ``"scatter"``, which is ``"even"`` as ``torch.scatter_reduce(include_self=False)`` has it: where the
    result is 0, the value that it starts from takes a share. Of extrema rows without edges hold ``empty``; with ``None`` they and
    what is infinite hold 0, which a gradient with ``ties="first"`` and no weights that need one can have too. ``training`` is off
    where a model is known to be only evaluated, whether or not gradients are enabled. ``owner`` is the layer, by which constant
    features are known again (see :mod:`gnnfast.features`). With ``copies``, the caller's user may write into ``x`` before the
    backward pass, as a framework allows that keeps gathered messages for it."""
    grad_enabled = torch.is_grad_enabled()
    weight_grad = grad_enabled and weight is not None and weight.requires_grad
    needs_grad = weight_grad or (grad_enabled and x.requires_grad)
    if torch.compiler.is_compiling():  # compiled code holds one kernel, and is exact
        if not graph.has(needs_grad) and graph.edges.coo is not None and not (reduce in EXTREMA and (needs_grad or empty != 0)):
            return over_coo(graph, x, weight, reduce, needs_grad)
        return over_formats(graph, x, weight, reduce, ties, empty, needs_grad, weight_grad, None)
    current = settings()
    sampling_asked = _samples(current)
    if weight_grad and weight is not None:
        note_variable(weight)
    # To compress the gather of a graph that is not converted yet would convert it, and wait.
    ready = not graph.is_cuda or graph.has(needs_grad)
    if ready and owner is not None and not x.requires_grad and not sampling_asked and features.large(x):
        compressed = features.try_aggregate(graph, x, weight, reduce, owner, place)
        if compressed is not None:
            return compressed
    extremum, tuned = reduce in EXTREMA, None
    choice = choose(graph, x.shape[1], x.element_size(), reduce, needs_grad, current)
    if empty != 0 and choice.kernel == "gas":
        choice = Choice("gar", "rows without edges hold what only CSR tells")
    if copies and (weight_grad or (needs_grad and extremum)):
        if weight_grad and weight is not None and not x.requires_grad and extremum:
            weight = weight.clone()
        x = x.clone(memory_format=torch.contiguous_format)  # [N, F], where the framework keeps [E, F]
    kernel, reason = choice.kernel, choice.reason
    if sampling_asked:
        planned = sampling.plan(graph, reduce, needs_grad, grad_enabled and training)
        if not isinstance(planned, str):
            return sampling.run(graph, x, weight, reduce, needs_grad, planned, place)
        reason += f"; not sampled: {planned}"
    if x.is_cuda:
        ids.check()
        if current.autotune:

            def run(option: Tuned) -> Tensor:
                if option.kernel == "gas":
                    return over_coo(graph, x, weight, reduce, needs_grad)
                return over_formats(graph, x, weight, reduce, ties, empty, needs_grad, weight_grad, option)

            tuned = _tuned(graph, x, weight, reduce, needs_grad or empty != 0, kernel, run)
        if tuned is not None:
            kernel = tuned.kernel
            reason = f"the fastest of those timed: schedule {tuned.schedule}, slab {tuned.slab or 'auto'}"
    count(graph, place, f"{kernel} {reduce}", reason, x.nbytes)
    if kernel == "gas":
        graph.edges.regret += choice.regret
        return over_coo(graph, x, weight, reduce, needs_grad)
    return over_formats(graph, x, weight, reduce, ties, empty, needs_grad, weight_grad, tuned)


def shifted_sum(graph: Graph, x: Tensor, scale: Tensor, reduce: str, current: Settings, place: str) -> Tensor:
    """The sum or mean of :func:`aggregate` without weights and ``scale [1]`` times ``x`` itself, where nothing else is to be
    decided: the ``current`` settings are free and features are not large, or need a gradient."""
    grad_enabled = torch.is_grad_enabled()
    csc, row_bytes = grad_enabled and x.requires_grad, x.shape[1] * x.element_size()
    choice = choose(graph, x.shape[1], x.element_size(), reduce, csc, current)
    count(graph, place, f"{choice.kernel} {reduce}", choice.reason, x.nbytes)
    a = adjacency(graph, choice, None, reduce, csc, row_bytes)
    return shifted(csc or (grad_enabled and scale.requires_grad), a, x, scale)


class Linear(NamedTuple):
    """The operands of a layer that is linear up to its bias: ``A (x @ weight.t()) + bias + x_dst @ root.t()``, of one dtype.
    Without ``x_dst``, ``root`` multiplies ``x``; ``bias`` and ``root`` may be ``None``."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    x_dst: Tensor | None = None
    root: Tensor | None = None


def linear_layer(
    graph: Graph,
    operands: Linear,
    weight: Tensor | None,
    reduce: str,
    *,
    first: bool,
    place: str,
    owners: tuple[object, object] = (None, None),
    copies: bool = False,
) -> Tensor | None:
    """The layer ``[num_dst, O]`` as one node of autograd, with the product ``first``, or after the sum or mean over the edges with
    their ``weight [E]``. ``None`` where there is something else to decide or watch: :func:`aggregate` then does the middle part.

    ``owners`` are the layer and its root, by which constant features are known again; ``copies`` as in :func:`aggregate`."""
    current, grad_enabled = settings(), torch.is_grad_enabled()
    if _samples(current) or current.autotune:
        return None
    x, lin_weight, bias, x_dst, root = operands
    x_grad, csc, needs_grad = False, False, False
    if grad_enabled:
        if saved_tensors_are_watched() or (weight is not None and weight.requires_grad):
            return None
        x_grad = x.requires_grad
        csc = x_grad or (first and lin_weight.requires_grad)
        needs_grad = csc or any(t is not None and t.requires_grad for t in operands)
    if root is not None and owners[1] is not None:
        of_root = x if x_dst is None else x_dst
        compressed = features.try_multiply(of_root, root, owners[1], place) if features.large(of_root) else None
        if compressed is not None:
            rest = operands._replace(x_dst=None, root=None)
            out = linear_layer(graph, rest, weight, reduce, first=first, place=place, owners=owners, copies=copies)
            return None if out is None else out + compressed
    product = None
    if not x_grad and features.large(x) and (first or not graph.is_cuda or graph.has(csc)):
        row_bytes = lin_weight.shape[0] * x.element_size()
        found = features.find(x, owners[0], "product" if first else "aggregate")
        if found is not None:
            try:
                if not first:
                    hidden = features.aggregate(graph, found[0], weight, reduce, place, found[1])
                    out = torch.nn.functional.linear(hidden, lin_weight, bias)
                    return out if root is None else out + torch.nn.functional.linear(x if x_dst is None else x_dst, root)
                product = found[0].product(csc, row_bytes)
            except Unsupported:
                return None
            ran(place, "sparse product", found[1])
    if copies and first and product is None and grad_enabled and lin_weight.requires_grad:
        x = x.clone(memory_format=torch.contiguous_format)
    width, itemsize = lin_weight.shape[0] if first else x.shape[1], x.element_size()
    choice = choose(graph, width, itemsize, reduce, csc, current)
    if graph.is_cuda:
        ids.check()
    what = f"{choice.kernel} {reduce}"
    count(graph, place, f"linear and {what}" if first else f"{what} and linear", choice.reason, graph.num_src * width * itemsize)
    a = adjacency(graph, choice, weight, reduce, csc, width * itemsize)
    if bias is not None and bias.requires_grad and needs_grad and not _others_need_grad(operands):
        # As in an addition, nothing is kept for its gradient.
        return layer(False, a, first, product, x, lin_weight, None, x_dst, root) + bias
    if needs_grad and not (first or x_grad):
        return _above_constant(a, operands)
    return layer(needs_grad, a, first, product, x, lin_weight, bias, x_dst, root)


def _above_constant(a: Formats | Coo, operands: Linear) -> Tensor:
    """The layer with the aggregation first, through which no gradient goes: the nodes of autograd of torch's products take the host
    less than one in Python."""
    x, weight, bias, x_dst, root = operands
    with below_autograd():
        hidden, _ = a.times(x)
    linear = linear_of_many if hidden.shape[0] >= FEWEST_ROWS else torch.nn.functional.linear
    out = linear(hidden, weight, bias)
    return out if root is None else out.addmm_(x if x_dst is None else x_dst, root.t())


def listed_layer(
    ends: tuple[Tensor, Tensor], operands: Linear, reduce: str, regret: float, place: str
) -> tuple[Tensor, float] | None:
    """The same with the aggregation first, over ``ends`` (destinations and sources) on a GPU of as many nodes as ``operands`` have
    rows, from which no graph is made; and the regret after it, of which there was some before. ``None`` where a format pays, or
    something else is asked for."""
    x, grad_enabled = operands.x, torch.is_grad_enabled()
    needs_grad = grad_enabled and x.requires_grad
    choice = _listed(ends, x, reduce, regret, needs_grad, place, " and linear")
    if choice is None:
        return None
    nodes = x.shape[0]
    a = Coo(ends, None, nodes, nodes, reduce == "mean")
    if grad_enabled and not needs_grad:
        return _above_constant(a, operands), regret + choice.regret
    return layer(needs_grad, a, False, None, *operands), regret + choice.regret


def listed_shifted_sum(
    ends: tuple[Tensor, Tensor], x: Tensor, scale: Tensor, reduce: str, regret: float, place: str
) -> tuple[Tensor, float] | None:
    """:func:`shifted_sum` over ``ends``, as :func:`listed_layer`."""
    grad_enabled = torch.is_grad_enabled()
    needs_grad = grad_enabled and x.requires_grad
    choice = _listed(ends, x, reduce, regret, needs_grad, place)
    if choice is None:
        return None
    nodes = x.shape[0]
    a = Coo(ends, None, nodes, nodes, reduce == "mean")
    return shifted(needs_grad or (grad_enabled and scale.requires_grad), a, x, scale), regret + choice.regret


def _listed(
    ends: tuple[Tensor, Tensor], x: Tensor, reduce: str, regret: float, needs_grad: bool, place: str, rest: str = ""
) -> Choice | None:
    """What sums over the list, if no format pays and nothing else is asked for; ``rest`` is what the report says besides."""
    current = settings()
    if not current.is_free:
        return None
    nodes, width = x.shape
    statistics = Statistics("cuda", nodes, nodes, ends[0].shape[0], False, True, regret)
    deterministic = torch.are_deterministic_algorithms_enabled()
    request = Request(reduce, needs_grad, deterministic, width, x.element_size(), reproducible.asked)
    choice = select(statistics, request, current)
    if choice.kernel != "gas":
        return None
    ids.watch(ends[0])
    ran(place, f"gas {reduce}{rest}", choice.reason)
    return choice


def adjacency(graph: Graph, choice: Choice, weight: Tensor | None, reduce: str, csc: bool, row_bytes: int) -> Formats | Coo:
    """The graph with its constant weights, as a sum or mean, in the form that the chosen kernel takes."""
    coo = graph.coo if choice.kernel == "gas" else None
    if coo is None:
        return Formats(*arguments(graph, weight, csc, row_bytes), reduce == "mean")
    graph.edges.regret += choice.regret
    return Coo((coo[1], coo[0]), weight, graph.num_dst, graph.num_src, reduce == "mean")


def _others_need_grad(operands: Linear) -> bool:
    x, lin_weight, _, x_dst, root = operands
    if x.requires_grad or lin_weight.requires_grad or (root is not None and root.requires_grad):
        return True
    return x_dst is not None and x_dst.requires_grad


def dot(graph: Graph, a: Tensor, b: Tensor, heads: int, place: str) -> Tensor:
    """``<a[dst], b[src]>`` of each edge and head: ``a [num_dst, F]``, ``b [num_src, F]`` -> ``[E, heads]``."""
    needs_grad = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    choice = choose(graph, b.shape[1], b.element_size(), "sum", needs_grad, settings())
    if torch.compiler.is_compiling():
        return call(SDDMM, needs_grad, graph.args(csc=needs_grad), a, b, heads, None, None, None)  # type: ignore[no-any-return]
    if a.is_cuda:
        ids.check()
    fresh = not (needs_grad or graph.is_cuda or graph.uses or graph.has(False))
    if fresh and graph.edges.coo is not None and settings().kernel == "auto":
        choice = Choice("gas", "used for the first time, and no sum is scattered")
    count(graph, place, f"{choice.kernel} dot", choice.reason, b.nbytes)
    coo = graph.coo if choice.kernel == "gas" else None
    if coo is not None:
        graph.edges.regret += choice.regret
        return call(SDDMM_COO, needs_grad, (), coo[1], coo[0], a, b, heads)  # type: ignore[no-any-return]
    return call(SDDMM, needs_grad, graph.args(csc=needs_grad), a, b, heads, None, None, None)  # type: ignore[no-any-return]


def softmax(
    graph: Graph, score: Tensor | None, dst: Tensor | None = None, src: Tensor | None = None, slope: float = 1.0, *, place: str
) -> Tensor:
    """The softmax over the in-edges of each node, per head, of the leaky ReLU of ``score [E, H]`` plus ``dst [num_dst, H]`` plus
    ``src [num_src, H]``, each of which may be ``None``: ``[E, H]`` in the edge order of the graph. For the documented form see
    :func:`gnnfast.edge_softmax`."""
    for t, rows in ((score, graph.num_edges), (dst, graph.num_dst), (src, graph.num_src)):
        if t is not None and t.shape[0] != rows:
            raise ValueError(f"scores of shape {list(t.shape)} do not fit {graph}")
    grad_enabled = torch.is_grad_enabled()
    needs_grad = grad_enabled and any(t is not None and t.requires_grad for t in (score, dst, src))
    args = graph.args(csc=grad_enabled and src is not None and src.requires_grad)
    if not torch.compiler.is_compiling():
        if graph.is_cuda:
            ids.check()
        count(graph, place, "edge softmax", "over CSR", 0)
    return call(EDGE_SOFTMAX, needs_grad, args, score, dst, src, slope)  # type: ignore[no-any-return]


def attention(
    graph: Graph,
    x: Tensor,
    dst: Tensor,
    src: Tensor,
    slope: float,
    dropout: float = 0.0,
    *,
    place: str,
    training: bool = True,
    weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``x [num_src, F]`` of the in-neighbours, weighted by the softmax of the leaky ReLU of ``dst [num_dst, H]`` plus
    ``src [num_src, H]`` after ``dropout``: ``[num_dst, F]``, and with ``weights`` these coefficients ``[E, H]``."""
    heads = dst.shape[1]
    width = held_width(x, heads)
    # On a CPU coefficients are few beside the features, and to have them costs less than to compute them twice.
    if weights or not graph.is_cuda or not fuses(dropout, heads) or width is None:
        alpha = softmax(graph, None, dst, src, slope, place=place)
        if dropout:
            alpha = torch.nn.functional.dropout(alpha, p=dropout, training=True)
        return aggregate(graph, x, alpha, "sum", place=place, training=training), alpha
    (x,), narrowed = of_width(width, heads, x)
    return narrowed(fused_attention(graph, x, dst, src, slope, dropout, place=place)), None


def fused_attention(graph: Graph, x: Tensor, dst: Tensor, src: Tensor, slope: float, dropout: float = 0.0, *, place: str) -> Tensor:
    """The same without coefficients, which do not exist."""
    args, needs_grad, seed = _prepare(graph, place, dropout, x, dst, src)
    return call(ATTENTION, needs_grad, args, dst, src, x, slope, float(dropout), seed, needs_grad)  # type: ignore[no-any-return]


def edge_relu(graph: Graph, x: Tensor, of_edges: Tensor, *, place: str) -> Tensor:
    """The sum over the in-edges of each node of ``relu(x[source] + of_edges)``, ``[num_dst, F]``, of ``x [num_src, F]`` and
    ``of_edges [E, F]`` of one dtype. Either may be written into afterwards: of neither anything is kept."""
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or of_edges.requires_grad)
    args = graph.args(needs_grad, x.shape[1] * x.element_size())
    if graph.is_cuda:
        ids.check()
    count(graph, place, "sum of relu(x_j + edge)", "over CSR, no message is kept", x.nbytes)
    return call(EDGE_RELU, needs_grad, args, x, of_edges, needs_grad)  # type: ignore[no-any-return]


def plus(graph: Graph, x: Tensor, of_edges: Tensor, reduce: str, minus: bool, *, place: str, empty: float | None = 0.0) -> Tensor:
    """On a CPU, the sum, mean, max or min over the in-edges of each node of ``x[source] + of_edges``, or ``- of_edges``:
    ``[num_dst, F]``, of ``x [num_src, F]`` and ``of_edges [E, H]`` of one dtype. Rows without edges hold ``empty`` in place of an
    extremum; of edges that tie the first takes the gradient."""
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or of_edges.requires_grad)
    args = graph.args(torch.is_grad_enabled() and x.requires_grad, x.shape[1] * x.element_size())
    count(graph, place, f"{reduce} of x_j {'-' if minus else '+'} edge", "over CSR, no message is made", x.nbytes)
    if reduce in EXTREMA:
        return call(SPMM_PLUS_MAX, needs_grad, args, of_edges, x, minus, reduce == "min", needs_grad, empty)  # type: ignore[no-any-return]
    return call(SPMM_PLUS, needs_grad, args, of_edges, x, minus, reduce == "mean")  # type: ignore[no-any-return]


def head_dots(x: Tensor, vectors: Tensor) -> Tensor:
    """The dot products of each of the H heads of a row of ``x [N, H D]`` with ``vectors [K, H, D]`` of its dtype, K = 1 or 2:
    ``[K, N, H]``. ``x`` is read once, and nothing as large as it is made."""
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or vectors.requires_grad)
    return call(HEAD_DOTS, needs_grad, (), x, vectors.flatten(1), vectors.shape[1])  # type: ignore[no-any-return]


def dot_attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    scale: float,
    dropout: float = 0.0,
    *,
    place: str,
    training: bool = True,
    weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``value [num_src, F]`` of the in-neighbours, weighted by the softmax of ``scale`` times ``<query[dst], key[src]>`` per head
    (``[num_dst, F]``, ``[num_src, F]``) after ``dropout``: ``[num_dst, F]``, and with ``weights`` the coefficients ``[E, H]``
    before it."""
    width = held_width(key, heads)
    if weights or not fuses(dropout, heads) or width is None:
        alpha = coefficients(graph, query, key, heads, scale, place)
        kept = torch.nn.functional.dropout(alpha, p=dropout, training=True) if dropout else alpha
        return aggregate(graph, value, kept, "sum", place=place, training=training), alpha
    (query, key, value), narrowed = of_width(width, heads, query, key, value)
    args, needs_grad, seed = _prepare(graph, place, dropout, query, key, value)
    out = call(PAIR_ATTENTION, needs_grad, args, query, key, value, None, None, heads, scale, float(dropout), seed, needs_grad)
    return narrowed(out), None


def coefficients(graph: Graph, query: Tensor, key: Tensor, heads: int, scale: float, place: str) -> Tensor:
    """The softmax of ``scale`` times ``<query[dst], key[src]>`` per head over the in-edges of each node: ``[E, H]``."""
    return softmax(graph, dot(graph, query, key, heads, place) * scale, place=place)


def gatv2_attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    att: Tensor,
    heads: int,
    slope: float,
    dropout: float = 0.0,
    *,
    edge: Tensor | None = None,
    place: str,
) -> Tensor | None:
    """``key [num_src, F]`` of the in-neighbours, weighted by the softmax of ``<att, leaky_relu(query[dst] + key[src] + edge)>`` per
    head (``att [F]``, ``query [num_dst, F]``, ``edge [E, F]`` of 32 or 64 bits if given) after ``dropout``: ``[num_dst, F]``.
    ``None`` where there are no kernels for that."""
    width = held_width(key, heads)
    if not fuses(dropout, heads) or width is None or (edge is not None and key.element_size() < 4):
        return None
    given = (query, key, att) if edge is None else (query, key, att, edge)
    (query, key, att, *of_edges), narrowed = of_width(width, heads, *given)
    args, needs_grad, seed = _prepare(graph, place, dropout, query, key, att, *of_edges)
    edge = of_edges[0] if of_edges else None
    out = call(PAIR_ATTENTION, needs_grad, args, query, key, None, att, edge, heads, slope, float(dropout), seed, needs_grad)
    return narrowed(out)


Narrow = Callable[[Tensor], Tensor]


def of_width(width: int, heads: int, *rows: Tensor) -> tuple[tuple[Tensor, ...], Narrow]:
    """Rows ``[..., F]`` with ``width`` features a head, of which those that they do not have are 0 and count for nothing, and what
    makes of a result as wide one of ``[..., F]``."""
    features = rows[0].shape[-1] // max(heads, 1)
    if features == width:
        return rows, lambda out: out

    def widened(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t.unflatten(-1, (heads, features)), (0, width - features)).flatten(-2)

    return tuple(map(widened, rows)), lambda out: out.unflatten(-1, (heads, width))[..., :features].flatten(-2)


def fuses(dropout: float, heads: int) -> bool:
    """Whether nothing asks for coefficients that exist: they are drawn as the framework draws them, sampled or timed."""
    current = settings()
    if dropout and (dropout >= 1 or current.dropout == "framework" or heads > MOST_DROP_HEADS):
        return False
    return not current.autotune and current.kernel in ("auto", "gar") and not _samples(current)


def _prepare(graph: Graph, place: str, dropout: float, *operands: Tensor) -> tuple[Matrix, bool, Tensor | None]:
    """The graph's arguments, whether a gradient is needed, and the seed of the dropout: one that torch's generator gives."""
    x, needs_grad, width = operands[0], False, 0
    for t in operands:
        needs_grad = needs_grad or t.requires_grad
        width = max(width, t.shape[1]) if t.dim() == 2 else width
    needs_grad = needs_grad and torch.is_grad_enabled()
    args = graph.args(needs_grad, width * x.element_size())
    seed = torch.empty(1, dtype=torch.int64, device=x.device).random_() if dropout else None
    if not torch.compiler.is_compiling():
        if graph.is_cuda:
            ids.check()
        count(graph, place, "attention", "over CSR, nothing per edge is kept", x.nbytes)
    return args, needs_grad, seed


def _samples(current: Settings) -> bool:
    return current.sample != "off" or current.kernel == "sampled"


def _tuned(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    needs_csr: bool,
    chosen: str,
    run: Callable[[Tuned], Tensor],
) -> Tuned | None:
    """The fastest way to ``run`` this aggregation; timed if it is the first of its kind."""
    current, deterministic = settings(), torch.are_deterministic_algorithms_enabled()
    # GAS competes only where the selector was free to choose and nothing needs CSR in a backward pass.
    free = current.kernel == "auto" and graph.edges.coo is not None and not (needs_csr or deterministic or reproducible.asked)
    kernels = ("gas", "gar") if free else (chosen,)
    row_bytes = x.shape[1] * x.element_size()
    options = autotune.candidates(graph, row_bytes, kernels, current.schedule, deterministic)
    weights = None if weight is None else weight.shape[1:]
    key = (graph.flipped, x.shape[1], x.dtype, weights, reduce, kernels, current.schedule, deterministic)
    return autotune.best(graph, key, options, run)


def choose(graph: Graph, width: int, itemsize: int, reduce: str, needs_grad: bool, current: Settings) -> Choice:
    """The selector's choice for an aggregation over ``graph`` now. Remembered with the graph for as long as
    its reasons hold: layers ask in every call."""
    if torch.compiler.is_compiling():
        return Choice("gar", "compiled code holds one kernel")
    if needs_grad and saved_tensors_are_watched():
        return Choice("gar", "hooks watch what is saved for the backward pass")
    converted = graph.has(needs_grad)
    edges, deterministic, alike = graph.edges, torch.are_deterministic_algorithms_enabled(), reproducible.asked
    key = graph.flipped, reduce, needs_grad, deterministic, width, itemsize, converted, alike
    asked, kept = edges.choices.get(key, (None, None))
    if kept is None or asked is not current or edges.regret >= kept.until:
        sizes = graph.num_src, graph.num_dst, graph.num_edges
        capturing = graph.is_cuda and is_capturing()
        statistics = Statistics(graph.device.type, *sizes, converted, edges.coo is not None, edges.regret, capturing)
        kept = select(statistics, Request(reduce, needs_grad, deterministic, width, itemsize, alike), current)
        if not capturing:
            edges.choices[key] = current, kept
    return kept
