"""The public functions: checked, documented, and each a request to :mod:`gnnfast.dispatch`."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfast import features
from gnnfast.dispatch import execute, sampling
from gnnfast.dispatch.select import Sampling
from gnnfast.graph import Graph
from gnnfast.graph.checks import check_device, check_integer, check_tensor
from gnnfast.types import FEATURE_DTYPES, LINEAR, REDUCTIONS, STRATEGIES


def spmm(graph: Graph, x: Tensor, weight: Tensor | None = None, reduce: str = "sum", *, ties: str = "even") -> Tensor:
    r"""Aggregates the features of each node's in-neighbours:
    :math:`y_i = \mathrm{reduce}_{e: j \to i} \, w_e \, x_j`.

    Runs as GAR or GAS (fuseGNN, Chen et al., ICCAD 2020; :mod:`gnnfast.dispatch.select` decides). Differentiable twice in ``x`` and
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

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2], [2, 2, 1]])  # 0 -> 2, 1 -> 2, 2 -> 1
        >>> graph = gnnfast.Graph.from_edge_index(edge_index, num_nodes=3)
        >>> x = torch.tensor([[1.0], [2.0], [4.0]])
        >>> gnnfast.spmm(graph, x).tolist()
        [[0.0], [4.0], [3.0]]
        >>> gnnfast.spmm(graph, x, weight=torch.tensor([1.0, 0.5, 2.0]), reduce="max").tolist()
        [[0.0], [8.0], [1.0]]
    """
    _check_operands(graph, x, weight, reduce, tuple(REDUCTIONS))
    if not isinstance(ties, str) or ties not in ("first", "even"):
        raise ValueError(f"ties must be 'first' or 'even', got {ties!r}")
    if x.dim() == 2:
        return execute.aggregate(graph, x, weight, reduce, ties=ties)
    out = execute.aggregate(graph, x.reshape(x.shape[0], x.shape[1:].numel()), weight, reduce, ties=ties)
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

    Example:
        >>> edge_index = torch.stack([torch.arange(100), torch.zeros(100, dtype=torch.long)])  # 100 edges to node 0
        >>> graph = gnnfast.Graph.from_edge_index(edge_index, num_nodes=100)
        >>> gnnfast.spmm_sampled(graph, torch.ones(100, 1), width=10, strategy="bucket")[0].item()  # 10 edges, times 100 / 10
        100.0
    """
    _check_operands(graph, x, weight, reduce, LINEAR)
    width = check_integer("width", width)
    if width < 1:
        raise ValueError(f"width must be an integer of at least 1, got {width}")
    _check_one_of("strategy", strategy, tuple(STRATEGIES))
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
    out = sampling.aggregate(graph, flat, weight, reduce, needs_grad, how, "gnnfast.spmm_sampled", seed)
    return out.view(graph.num_dst, *x.shape[1:])


def spmm_sparse_features(graph: Graph, x: Tensor, weight: Tensor | None = None, reduce: str = "sum") -> Tensor:
    r"""Aggregates sparse features of each node's in-neighbours into a dense result:
    :math:`y_i = \mathrm{reduce}_{e: j \to i} \, w_e \, x_j`.

    The cost grows with the stored entries of ``x`` instead of its size (Kim et al., IEEE Access 2022, Algorithm 2).
    Differentiable twice in ``weight`` and, where ``x.requires_grad``, in ``x.values()``. Nodes without in-edges get 0. Entries that
    are not stored count as nothing: a weight that is infinite or NaN does not turn them into NaN, as it would a stored zero.

    Args:
        graph: ``num_src`` sources, ``num_dst`` destinations, ``E`` edges.
        x: ``[num_src, F]`` in the layout ``torch.sparse_csr``; float32, float64, float16 or bfloat16. 16-bit types accumulate in
            float32. Entries stored several times are added.
        weight: ``[E]``; dtype and device of ``x``; in the edge order of the graph.
        reduce: ``"sum"`` or ``"mean"``.

    Returns:
        ``[num_dst, F]``, dense, the dtype of ``x``.

    Raises:
        TypeError: ``graph`` is no Graph, or ``x`` is not a ``torch.sparse_csr`` tensor of a supported dtype.
        ValueError: shapes, devices or dtypes do not fit together, or an unknown ``reduce``.
        IndexError: an index of the graph or of ``x`` is out of range (checked once, when each is first used).
        RuntimeError: gnnfast has no kernels for the device.

    Example:
        >>> graph = gnnfast.Graph.from_edge_index(torch.tensor([[0, 1], [1, 1]]), num_nodes=2)
        >>> x = torch.tensor([[0.0, 3.0, 0.0], [1.0, 0.0, 0.0]])
        >>> gnnfast.spmm_sparse_features(graph, x.to_sparse_csr()).tolist()
        [[0.0, 0.0, 0.0], [1.0, 3.0, 0.0]]
    """
    if not isinstance(graph, Graph):
        raise TypeError(f"graph must be a gnnfast.Graph, got {type(graph).__name__}; build one with Graph.from_edge_index(...)")
    reason = features.unsupported(x)
    if reason:
        raise TypeError(reason)
    check_tensor("x.values()", x.values())
    if x.dim() != 2 or x.shape[0] != graph.num_src:
        raise ValueError(f"x must have shape [{graph.num_src}, F], got {list(x.shape)}")
    if x.device != graph.device:
        raise ValueError(f"x is on {x.device} but the graph is on {graph.device}; move one of them")
    if not isinstance(reduce, str) or reduce not in ("sum", "mean"):
        raise ValueError(f"reduce must be sum or mean for sparse features, got {reduce!r}; gnnfast.spmm has max and min")
    if weight is not None:
        check_tensor("weight", weight)
        if weight.shape != (graph.num_edges,):
            raise ValueError(
                f"weight must have shape [{graph.num_edges}] (one value per edge), got {list(weight.shape)}; gnnfast.spmm takes "
                "weights per head"
            )
        if weight.dtype != x.dtype or weight.device != x.device:
            raise ValueError(f"weight must be {x.dtype} on {x.device}, as x is, got {weight.dtype} on {weight.device}")
    check_device("x", x)
    return features.aggregate_csr(graph, x, weight, reduce, "gnnfast.spmm_sparse_features")


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

    Example:
        >>> graph = gnnfast.Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
        >>> a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> gnnfast.sddmm(graph, a, b).tolist()  # <a_1, b_0> and <a_0, b_1>
        [3.0, 2.0]
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
    out = execute.dot(graph, a, b, heads, "gnnfast.sddmm")
    return out if dst.dim() == 3 else out.squeeze(1)


def edge_softmax(graph: Graph, score: Tensor, *, by: str = "dst") -> Tensor:
    r"""Softmax over the edges of each node, per head:
    :math:`p_e = \exp(s_e - m_i) / \sum_{e': j' \to i} \exp(s_{e'} - m_i)` for each edge :math:`e: j \to i`, with :math:`m_i` the
    largest score of the node (fuseGNN, Chen et al., ICCAD 2020). Differentiable twice.

    Args:
        graph: ``E`` edges.
        score: ``[E]`` or ``[E, H]`` in the edge order of the graph; dtypes as :func:`spmm`. 16-bit types accumulate in float32.
        by: ``"dst"``: over the in-edges of each destination; ``"src"``: over the out-edges of each source.

    Returns:
        As ``score``. NaN where a node has an edge of score NaN or infinity, or none that is not minus infinity, as with
        ``torch.softmax``.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as :func:`spmm`.

    Example:
        >>> graph = gnnfast.Graph.from_edge_index(torch.tensor([[0, 1, 2], [2, 2, 1]]), num_nodes=3)
        >>> gnnfast.edge_softmax(graph, torch.zeros(3)).tolist()
        [0.5, 0.5, 1.0]
    """
    if not isinstance(graph, Graph):
        raise TypeError(f"graph must be a gnnfast.Graph, got {type(graph).__name__}; build one with Graph.from_edge_index(...)")
    check_tensor("score", score)
    if score.dtype not in FEATURE_DTYPES:
        raise TypeError(f"score has dtype {score.dtype}; accepted are float32, float64, float16 and bfloat16")
    if score.dim() not in (1, 2) or score.shape[0] != graph.num_edges:
        raise ValueError(f"score must have shape [{graph.num_edges}] or [{graph.num_edges}, H], got {list(score.shape)}")
    if score.device != graph.device:
        raise ValueError(f"score is on {score.device} but the graph is on {graph.device}; move one of them")
    check_device("score", score)
    _check_one_of("by", by, ("dst", "src"))
    over = graph if by == "dst" else graph.reverse()
    out = execute.softmax(over, score if score.dim() == 2 else score[:, None], place="gnnfast.edge_softmax")
    return out if score.dim() == 2 else out.squeeze(1)


def attention(
    graph: Graph,
    dst: Tensor,
    src: Tensor,
    value: Tensor | None = None,
    *,
    score: str = "dot",
    att: Tensor | None = None,
    edge: Tensor | None = None,
    slope: float = 0.2,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    r"""Attention over the in-neighbours of each node, per head:
    :math:`y_i = \sum_{e: j \to i} p_e \, v_j` with :math:`p_e` the softmax of scores :math:`s_e` over the in-edges of :math:`i`.
    Nothing exists per edge (online softmax: Milakov and Gimelshein, 2018; coefficients are computed again backward, as in
    FlashAttention, Dao et al., 2022), but coefficients ``[E, H]`` of ``"additive"`` on a CPU. Differentiable
    twice. Nodes without in-edges get 0.

    Args:
        graph: ``num_src`` sources, ``num_dst`` destinations.
        dst, src: what scores are computed from at destinations and sources; dtypes as :func:`spmm`, softmax and sums of 16-bit
            types in float32. By ``score``:
        score: ``"dot"``: :math:`s_e =` ``scale`` :math:`\langle dst_i, src_j \rangle`, of ``[num_dst, H, D]`` and
            ``[num_src, H, D]`` (Vaswani et al., 2017). ``"additive"``: ``leaky_relu``:math:`(dst_i + src_j)`, of ``[num_dst, H]``
            and ``[num_src, H]`` (GAT, Velickovic et al., ICLR 2018). ``"gatv2"``: :math:`\langle` ``att``
            :math:`, leaky\_relu(dst_i + src_j + edge_e) \rangle`, of ``[num_dst, H, D]`` and ``[num_src, H, D]`` (Brody et al.,
            ICLR 2022).
        value: :math:`v`, ``[num_src, H, D]``; not given with ``"gatv2"``, whose values are ``src``.
        att: ``[H, D]``, of ``"gatv2"``.
        edge: ``[E, H, D]`` in the order of the graph's edges, of ``"gatv2"``; 0 if not given. In 16-bit types coefficients then
            exist.
        slope: of the leaky ReLU for negative numbers.
        scale: of ``"dot"``; :math:`1 / \sqrt{D}` if not given.
        dropout: the share of coefficients left out, others are scaled up; drawn from torch's generator, but by other draws than
            ``torch.nn.functional.dropout`` makes of a seed where coefficients do not exist, unless ``GNNFAST_DROPOUT=framework``.

    Returns:
        ``[num_dst, H, D]``. NaN as :func:`edge_softmax`. Kept for the backward pass: do not write into it before.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as :func:`spmm`; ValueError also for an unknown ``score``, an operand that
            it does not take or that is missing, and a ``dropout`` outside [0, 1].

    Example:
        >>> graph = gnnfast.Graph.from_edge_index(torch.tensor([[0, 1, 2], [2, 2, 1]]), num_nodes=3)
        >>> query, key, value = (torch.randn(3, 4, 8) for _ in range(3))  # 4 heads of 8
        >>> gnnfast.attention(graph, query, key, value).shape
        torch.Size([3, 4, 8])
    """
    _check_one_of("score", score, ("dot", "additive", "gatv2"))
    if (value is None) != (score == "gatv2"):
        raise ValueError(f"value must {'not be given' if value is not None else 'be given'} with score {score!r}")
    if (att is None) != (score != "gatv2"):
        raise ValueError(f"att must {'not be given' if att is not None else 'be given'} with score {score!r}")
    if edge is not None and score != "gatv2":
        raise ValueError(f"edge must not be given with score {score!r}")
    for name, number in (("slope", slope), ("scale", scale), ("dropout", dropout)):
        if not isinstance(number, (int, float)) and not (name == "scale" and number is None):
            raise TypeError(f"{name} must be a number, got {type(number).__name__}")
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout must be in [0, 1], got {dropout}")
    values, named = src if value is None else value, "src" if value is None else "value"
    _check_graph_and_features(graph, values, named, graph.num_src if isinstance(graph, Graph) else 0)
    if values.dim() != 3:
        raise ValueError(f"{named} must have shape [{graph.num_src}, H, D], got {list(values.shape)}")
    heads, width = values.shape[1:]
    of_score = (heads,) if score == "additive" else (heads, width)
    for name, t, shape in (
        ("dst", dst, (graph.num_dst, *of_score)),
        ("src", src, (graph.num_src, *of_score)),
        ("att", att, of_score),
        ("edge", edge, (graph.num_edges, heads, width)),
    ):
        if t is None and name in ("att", "edge"):
            continue
        check_tensor(name, t)
        assert t is not None
        if t.shape != shape or t.dtype != values.dtype or t.device != values.device:
            wanted = f"{values.dtype} of shape {list(shape)} on {values.device}"
            raise ValueError(f"{name} must be {wanted}, got {t.dtype} {list(t.shape)} on {t.device}")
    flat, place, drop = values.reshape(graph.num_src, heads * width), "gnnfast.attention", float(dropout)
    if score == "additive":
        out = execute.attention(graph, flat, dst, src, slope, drop, place=place)[0]
    elif score == "dot":
        query, key = (t.reshape(t.shape[0], heads * width) for t in (dst, src))
        factor = width**-0.5 if scale is None and width else scale or 0.0
        out = execute.dot_attention(graph, query, key, flat, heads, factor, drop, place=place)[0]
    else:
        assert att is not None
        query = dst.reshape(graph.num_dst, heads * width)
        rows = None if edge is None else edge.reshape(graph.num_edges, heads * width)
        found = execute.gatv2_attention(graph, query, flat, att.reshape(-1), heads, slope, drop, edge=rows, place=place)
        out = _gatv2_in_parts(graph, dst, src, att, edge, slope, drop) if found is None else found
    return out.view(graph.num_dst, heads, width)


def _gatv2_in_parts(
    graph: Graph, dst: Tensor, src: Tensor, att: Tensor, edge: Tensor | None, slope: float, dropout: float
) -> Tensor:
    """With a row of features per edge, where there is no kernel for heads so wide, or coefficients are asked for."""
    from gnnfast.ops.spmm import edges

    row, column, of_slot = edges(graph.args(csc=False))
    both = dst[row] + src[column]
    both = both if edge is None else both + edge[of_slot]
    by_slot = (torch.nn.functional.leaky_relu(both, slope) * att).sum(-1)
    score = by_slot.new_zeros(graph.num_edges, by_slot.shape[1]).index_copy(0, of_slot, by_slot)
    alpha = execute.softmax(graph, score, place="gnnfast.attention")
    alpha = torch.nn.functional.dropout(alpha, p=dropout, training=True) if dropout else alpha
    return execute.aggregate(graph, src.flatten(1), alpha, "sum", place="gnnfast.attention")


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
