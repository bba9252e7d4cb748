"""From an aggregation request through the selector to an op. Framework-free; the adapters and users call it alike."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfast import _native, autotune, features, sampling
from gnnfast.cache import note_variable
from gnnfast.config import STRATEGIES, Settings, settings
from gnnfast.graph import Graph, Tuned, check_device, check_integer, check_tensor, saved_tensors_are_watched
from gnnfast.reporting import ran
from gnnfast.selector import CONVERTED, Choice, Request, Sampling, Statistics, select

if _native.cpu.loaded:
    from gnnfast.ops.layer import LAYER
    from gnnfast.ops.spmm import SPMM, SPMM_MAX, call
    from gnnfast.ops.spmm_coo import REDUCE

FEATURE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
REDUCTIONS = ("sum", "mean", "max", "min")
TIES = {"first": 1, "even": 2, "scatter": 3}


def aggregate(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    *,
    place: str = "gnnfast.spmm",
    ties: str = "even",
    empty: float = 0.0,
    training: bool = True,
    owner: object = None,
    copies: bool = False,
) -> Tensor:
    """One aggregation on unchecked operands: ``x [num_src, F]``, ``weight [E]`` or ``[E, H]`` of the same dtype, or ``None``.
    Returns ``[num_dst, F]``. For the checked, documented form see :func:`spmm`.

    ``ties`` as in :func:`spmm`, or ``"scatter"``, which is ``"even"`` as ``torch.scatter_reduce(include_self=False)`` has it: where
    the result is 0, the value that it starts from takes a share. ``training`` is off where a model is known to be only evaluated,
    whether or not gradients are enabled. ``owner`` is the layer, by which constant features are known again (see
    :mod:`gnnfast.features`). With ``copies``, the caller's user may write into ``x`` before the backward pass, as a framework
    allows that keeps gathered messages for it."""
    grad_enabled = torch.is_grad_enabled()
    weight_grad = grad_enabled and weight is not None and weight.requires_grad
    needs_grad = weight_grad or (grad_enabled and x.requires_grad)
    if torch.compiler.is_compiling():  # compiled code holds one kernel, and is exact
        return _run(graph, x, weight, reduce, ties, empty, needs_grad, "gar", None)
    current = settings()
    sampling_asked = _samples(current)
    if weight_grad and weight is not None:
        note_variable(weight)
    if owner is not None and not x.requires_grad and not sampling_asked:
        compressed = features.try_aggregate(graph, x, weight, reduce, owner, place)
        if compressed is not None:
            return compressed
    if copies and (weight_grad or (needs_grad and reduce in ("max", "min"))):
        if weight_grad and weight is not None and not x.requires_grad and reduce in ("max", "min"):
            weight = weight.clone()
        x = x.clone(memory_format=torch.contiguous_format)  # [N, F], where the framework keeps [E, F]
    choice, tuned = choose(graph, x, reduce, needs_grad), None
    reason = choice.reason
    if sampling_asked:
        planned = sampling.plan(graph, reduce, needs_grad, grad_enabled and training)
        if not isinstance(planned, str):
            return sampling.run(graph, x, weight, reduce, needs_grad, planned, place)
        reason += f"; not sampled: {planned}"
    if x.is_cuda:
        graph.consider_locality(x.nbytes)
        if current.autotune:
            tuned = _tuned(graph, x, weight, reduce, ties, empty, needs_grad, choice)
        if tuned is not None:
            choice = Choice(tuned.kernel, choice.reason)
            reason = f"the fastest of those timed: schedule {tuned.schedule}, slab {tuned.slab or 'auto'}"
    graph.uses += 1
    ran(place, f"{choice.kernel} {reduce}", reason)
    return _run(graph, x, weight, reduce, ties, empty, needs_grad, choice.kernel, tuned)


def aggregate_linear(
    graph: Graph,
    x: Tensor,
    lin_weight: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    reduce: str,
    *,
    place: str,
    owner: object,
    copies: bool = False,
) -> Tensor | None:
    """The sum or mean of ``x @ lin_weight.t()``, plus ``bias [O]``, on unchecked operands of one dtype: ``[num_dst, O]``. ``None``
    where there is something to convert, decide or watch first; :func:`aggregate` then does the middle part.

    ``owner`` is the linear layer, by which constant features are known again; ``copies`` as in :func:`aggregate`."""
    current, grad_enabled = settings(), torch.is_grad_enabled()
    csc = grad_enabled and (x.requires_grad or lin_weight.requires_grad)
    if _samples(current) or current.kernel == "gas" or current.autotune or not graph.has(csc):
        return None
    if grad_enabled and (saved_tensors_are_watched() or (weight is not None and weight.requires_grad)):
        return None
    row_bytes = lin_weight.shape[0] * lin_weight.element_size()
    found, product = None if x.requires_grad else features.find(x, owner, "product"), None
    if found is not None:
        try:
            product = found[0].product(csc, row_bytes)
        except features.CapturingError:
            return None
        ran(place, "sparse product", found[1])
    elif copies and grad_enabled and lin_weight.requires_grad:
        x = x.clone(memory_format=torch.contiguous_format)
    if x.is_cuda:
        graph.consider_locality(graph.num_src * row_bytes)
    graph.uses += 1
    ran(place, f"linear and gar {reduce}", CONVERTED.reason)
    in_slots = (None, None) if weight is None else graph.slot_weights(weight, csc)
    args = graph.args(csc, row_bytes, permuted=in_slots is None)
    inputs = (*(in_slots or (weight, None)), reduce == "mean", product, x, lin_weight)
    if grad_enabled and not csc and bias is not None and bias.requires_grad:  # as in an addition, nothing is kept for its gradient
        return call(LAYER, False, args, *inputs, None) + bias  # type: ignore[no-any-return]
    return call(LAYER, csc, args, *inputs, bias)  # type: ignore[no-any-return]


def _samples(current: Settings) -> bool:
    return current.sample != "off" or current.kernel == "sampled"


def _run(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    ties: str,
    empty: float,
    needs_grad: bool,
    kernel: str,
    tuned: Tuned | None,
) -> Tensor:
    """One aggregation by a given kernel."""
    if kernel == "gas":
        coo = graph.coo
        assert coo is not None
        return torch.ops.gnnfast.spmm_coo(coo[1], coo[0], weight, x, graph.num_dst, REDUCE[reduce])
    csc = needs_grad and x.requires_grad
    row_bytes = x.shape[1] * x.element_size()
    if reduce in ("max", "min"):
        mode = TIES[ties] if needs_grad else 0
        args = graph.args(csc, row_bytes, tuned=tuned)
        return call(SPMM_MAX, needs_grad, args, weight, x, reduce == "min", mode, empty)[0]
    if weight is not None and not (needs_grad and weight.requires_grad) and not torch.compiler.is_compiling():
        in_slots = graph.slot_weights(weight, csc)
        if in_slots is not None:
            return call(SPMM, needs_grad, graph.args(csc, row_bytes, False, tuned), *in_slots, x, reduce == "mean", None)
    return call(SPMM, needs_grad, graph.args(needs_grad, row_bytes, tuned=tuned), weight, None, x, reduce == "mean", None)


def _tuned(
    graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, ties: str, empty: float, needs_grad: bool, choice: Choice
) -> Tuned | None:
    """The fastest way to run this aggregation; timed if it is the first of its kind."""
    current, deterministic = settings(), torch.are_deterministic_algorithms_enabled()
    # GAS competes only where the selector was free to choose and nothing needs CSR in a backward pass.
    free = current.kernel == "auto" and "coo" in graph._shared and not needs_grad and not deterministic
    kernels = ("gas", "gar") if free else (choice.kernel,)
    row_bytes = x.shape[1] * x.element_size()
    options = autotune.candidates(graph, row_bytes, kernels, current.schedule, deterministic)
    weights = None if weight is None else weight.shape[1:]
    key = (graph._flipped, x.shape[1], x.dtype, weights, reduce, kernels, current.schedule, deterministic)
    run = lambda option: _run(graph, x, weight, reduce, ties, empty, needs_grad, option.kernel, option)  # noqa: E731
    return autotune.best(graph, key, options, run)


def choose(graph: Graph, x: Tensor, reduce: str, needs_grad: bool) -> Choice:
    """The selector's choice for an aggregation of ``x [num_src, F]`` over ``graph`` now."""
    if torch.compiler.is_compiling():
        return Choice("gar", "compiled code holds one kernel")
    if needs_grad and saved_tensors_are_watched():
        return Choice("gar", "hooks watch what is saved for the backward pass")
    if graph.has(needs_grad) and settings().kernel == "auto":
        return CONVERTED  # at once: whatever else the selector could say, it would be GAR
    statistics = Statistics(
        graph.device.type,
        graph.num_src,
        graph.num_dst,
        graph.num_edges,
        graph.uses,
        graph.has(csc=needs_grad),
        "coo" in graph._shared,
    )
    deterministic = torch.are_deterministic_algorithms_enabled()
    return select(statistics, Request(reduce, needs_grad, deterministic, x.shape[1], x.element_size()), settings())


def spmm(graph: Graph, x: Tensor, weight: Tensor | None = None, reduce: str = "sum", *, ties: str = "even") -> Tensor:
    r"""Aggregates the features of each node's in-neighbours:
    :math:`y_i = \mathrm{reduce}_{e: j \to i} \, w_e \, x_j`.

    Runs as GAR or GAS (fuseGNN, Chen et al., ICCAD 2020), as :mod:`gnnfast.selector` decides. Differentiable twice in ``x`` and
    ``weight``. Nodes without in-edges get 0.

    Args:
        graph: ``num_src`` sources, ``num_dst`` destinations, ``E`` edges.
        x: ``[num_src, F]`` or ``[num_src, H, D]``; float32, float64, float16 or bfloat16. 16-bit types accumulate in float32.
        weight: ``[E]``, or ``[E, H]`` for three-dimensional ``x``; dtype and device of ``x``; in the edge order of the graph.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        ties: who gets the gradient of max and min: ``"even"`` (all edges that attain it share it) or ``"first"`` (the first such
            edge takes it, as in DGL).

    Returns:
        ``[num_dst, F]`` or ``[num_dst, H, D]``, the dtype of ``x``.

    Raises:
        TypeError: ``graph`` is no Graph, ``x`` or ``weight`` is no tensor, or ``x`` has an unsupported dtype.
        ValueError: shapes, layouts, devices or dtypes do not fit together, or an unknown ``reduce`` or ``ties``.
        IndexError: an id of the graph is out of range (checked once, when the graph is first used).
        RuntimeError: gnnfast has no kernels for the device.
    """
    _check_operands(graph, x, weight, reduce, REDUCTIONS)
    if not isinstance(ties, str) or ties not in ("first", "even"):
        raise ValueError(f"ties must be 'first' or 'even', got {ties!r}")
    if x.dim() == 2:
        return aggregate(graph, x, weight, reduce, ties=ties)
    out = aggregate(graph, x.reshape(x.shape[0], x.shape[1:].numel()), weight, reduce, ties=ties)
    return out.view(graph.num_dst, *x.shape[1:])


def spmm_sampled(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None = None,
    reduce: str = "sum",
    *,
    width: int,
    strategy: str = "random",
    rescale: bool = True,
    seed: int | None = None,
) -> Tensor:
    r"""Approximates :func:`spmm` from at most ``width`` edges of each node (ES-SpMM, Lin et al., 2021, Algorithm 1); nodes with no
    more edges are aggregated exactly. A mean divides by the number of edges taken. Breaks a graph of ``torch.compile``; compiled
    code that runs :func:`spmm` is exact whatever the settings ask for.

    Args:
        graph, x, weight: as :func:`spmm`.
        reduce: ``"sum"`` or ``"mean"``.
        width: the most edges of a node, at least 1.
        strategy: edge :math:`i` of the :math:`n` edges of a node, for :math:`i <` ``width``, is its ``i``-th with ``"bucket"``, its
            :math:`577\,i \bmod n`-th with ``"fastrand"`` (577 is prime: where it divides :math:`n`, edges repeat after
            :math:`n / 577` and count as often), and one of the ``i``-th of ``width`` equal parts with ``"random"``, drawn from a
            hash of ``seed``, so that each edge is taken with probability ``width`` :math:`/ n`.
        rescale: whether sums are multiplied by :math:`n /` ``width``; with ``"random"`` the result then has no bias.
        seed: of ``"random"``; from torch's generator if not given, a new draw each call.

    Returns:
        As :func:`spmm`. Differentiable in ``x`` and ``weight``, twice, with ``"random"`` alone: the backward pass runs over the
        same draw, which nothing stores.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as :func:`spmm`; ValueError also for a ``width`` below 1, an unknown
            ``strategy``, a ``seed`` of more than 64 bits, and where a gradient is asked of another strategy than ``"random"``.
    """
    _check_operands(graph, x, weight, reduce, ("sum", "mean"))
    width = check_integer("width", width)
    if width < 1:
        raise ValueError(f"width must be an integer of at least 1, got {width}")
    _check_one_of("strategy", strategy, STRATEGIES)
    seed = None if seed is None else check_integer("seed", seed)
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be an integer of 64 bits, got {seed}")
    if not isinstance(rescale, bool):
        raise TypeError(f"rescale must be True or False, got {type(rescale).__name__}")
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
    if needs_grad and strategy != "random":
        raise ValueError(f"strategy {strategy!r} has no gradient; use 'random', or call it under torch.no_grad()")
    flat = x if x.dim() == 2 else x.reshape(x.shape[0], x.shape[1:].numel())
    how = Sampling(strategy, min(width, 2**31 - 1), rescale)  # no row has more edges
    place = "gnnfast.spmm_sampled"
    if graph.draws(how.width)[0] > how.width:
        out = sampling.run(graph, flat, weight, reduce, needs_grad, how, place, seed)
    else:
        if x.is_cuda:
            graph.consider_locality(flat.nbytes)
        graph.uses += 1
        ran(place, f"gar {reduce}", f"no node has more than {how.width} edges")
        out = _run(graph, flat, weight, reduce, "even", 0.0, needs_grad, "gar", None)
    return out.view(graph.num_dst, *x.shape[1:])


def sddmm(graph: Graph, dst: Tensor, src: Tensor) -> Tensor:
    r"""A dot product per edge: :math:`s_e = \langle a_i, b_j \rangle` for each edge :math:`e: j \to i`, and per head for
    three-dimensional features. Differentiable twice.

    Args:
        graph: the graph.
        dst: :math:`a`, ``[num_dst, F]`` or ``[num_dst, H, D]``; dtypes as :func:`spmm`.
        src: :math:`b`, ``[num_src, F]`` or ``[num_src, H, D]``, the same dtype.

    Returns:
        ``[E]`` or ``[E, H]`` in the edge order of the graph.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as :func:`spmm`.
    """
    _check_graph_and_features(graph, dst, "dst", graph.num_dst if isinstance(graph, Graph) else 0)
    _check_graph_and_features(graph, src, "src", graph.num_src)
    if dst.shape[1:] != src.shape[1:] or dst.dtype != src.dtype:
        raise ValueError(
            f"dst and src must agree in dtype and feature shape, got {dst.dtype} {list(dst.shape)} and {src.dtype} "
            f"{list(src.shape)}"
        )
    heads = dst.shape[1] if dst.dim() == 3 else 1
    a, b = (t.reshape(t.shape[0], t.shape[1:].numel()) for t in (dst, src))
    needs_grad = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    choice = choose(graph, b, "sum", needs_grad)
    ran("gnnfast.sddmm", f"{choice.kernel} dot", choice.reason)
    coo = graph.coo if choice.kernel == "gas" else None
    if coo is not None:
        out = torch.ops.gnnfast.sddmm_coo(coo[1], coo[0], a, b, heads)
    else:
        out = torch.ops.gnnfast.sddmm(*graph.args(csc=needs_grad), a, b, heads)
    return out if dst.dim() == 3 else out.squeeze(1)


def _check_operands(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, accepted_reductions: tuple[str, ...]) -> None:
    _check_graph_and_features(graph, x, "x", graph.num_src if isinstance(graph, Graph) else 0)
    _check_one_of("reduce", reduce, accepted_reductions)
    if weight is not None:
        check_tensor("weight", weight)
        heads = x.shape[1] if x.dim() == 3 else None
        dim = weight.dim()
        if not (dim == 1 or (dim == 2 and weight.size(1) == heads)) or weight.size(0) != graph.num_edges:
            accepted = f"[{graph.num_edges}]" + (f" or [{graph.num_edges}, {heads}]" if heads is not None else "")
            raise ValueError(f"weight must have shape {accepted} (one value per edge), got {list(weight.shape)}")
        if weight.dtype != x.dtype or weight.device != x.device:
            raise ValueError(f"weight must be {x.dtype} on {x.device}, as x is, got {weight.dtype} on {weight.device}")


def _check_graph_and_features(graph: Graph, x: Tensor, name: str, rows: int) -> None:
    if not isinstance(graph, Graph):
        raise TypeError(f"graph must be a gnnfast.Graph, got {type(graph).__name__}; build one with Graph.from_edge_index(...)")
    check_tensor(name, x)
    if x.dtype not in FEATURE_DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; accepted are float32, float64, float16 and bfloat16")
    if x.dim() not in (2, 3) or x.shape[0] != rows:
        raise ValueError(f"{name} must have shape [{rows}, F] or [{rows}, H, D], got {list(x.shape)}")
    if x.device != graph.device:
        raise ValueError(f"{name} is on {x.device} but the graph is on {graph.device}; move one of them")
    check_device(name, x)


def _check_one_of(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {value!r}")
