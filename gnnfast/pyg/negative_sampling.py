"""Pairs of nodes without an edge, which link prediction and SuperGATConv draw in each step (``negative_sampling``).

PyG takes each number from Python's own generator, half a microsecond or more, and looks for edges among them on the host. Here the
very same numbers come from that generator at once (numpy has its algorithm, MT19937: Matsumoto and Nishimura, "Mersenne Twister",
1998), its state is what it would be, and edges are looked for where they are.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from types import FunctionType
from typing import Any, get_args

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.reporting import ran

FEW = 1024  # numbers that Python draws as fast one by one


def make_sample(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``sample(population, k, device)``: ``k`` distinct numbers below ``population``."""

    def sample(population: Any, k: Any, device: Any) -> Any:
        if type(population) is not int or type(k) is not int or k < FEW or population <= k or guards.context():
            return NotImplemented
        generator = _generator(population, k)
        if generator is None:
            return NotImplemented
        ran("pyg negative_sampling", "numbers drawn at once", "those that Python's generator gives")
        return torch.as_tensor(draw(population, k, generator), device=device)

    return sample


def make_negative_sampling(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``negative_sampling(edge_index, num_nodes, num_neg_samples, method, force_undirected)``."""
    names = original.__globals__
    ratios = float in get_args(names["negative_sampling"].__annotations__["num_neg_samples"])  # since PyG 2.7

    def negative_sampling(edge_index: Any, num_nodes: Any, num_neg_samples: Any, method: Any, force_undirected: Any) -> Any:
        if method != "sparse" or guards.context() or guards.operand("edge_index", edge_index):
            return NotImplemented
        if edge_index.dtype is not torch.int64 or edge_index.dim() != 2 or edge_index.shape[0] != 2:
            return NotImplemented
        wanted = edge_index.shape[1] if num_neg_samples is None else num_neg_samples
        wanted = int(wanted * edge_index.shape[1]) if ratios and isinstance(wanted, float) else wanted
        if type(wanted) is not int or wanted < FEW or not (num_nodes is None or isinstance(num_nodes, (int, tuple))):
            return NotImplemented
        num_nodes = names["maybe_num_nodes"](edge_index, num_nodes) if num_nodes is None else num_nodes
        bipartite = not isinstance(num_nodes, int)
        size, undirected = num_nodes if bipartite else (num_nodes, num_nodes), force_undirected and not bipartite
        edges, population = names["edge_index_to_vector"](edge_index, size, bipartite, undirected)
        if edges.numel() >= population:
            return edge_index.new_empty((2, 0))
        wanted = wanted // 2 if undirected else wanted
        tried = int(1.1 * wanted / (1.0 - edges.numel() / population))
        found, edges = None, _sorted(edges)
        for _ in range(3):  # as often as PyG, which may then return fewer
            drawn = names["sample"](population, tried, device="cpu").to(edge_index.device)
            taken = _are_in(drawn, edges)
            if found is not None:
                taken |= _are_in(drawn, _sorted(found))
            drawn = drawn[~taken]
            found = drawn if found is None else torch.cat([found, drawn])
            if found.numel() >= wanted:
                found = found[:wanted]
                break
        ran("pyg negative_sampling", "edges searched in order", f"on {edge_index.device.type}")
        return names["vector_to_edge_index"](found, size, bipartite, undirected)

    return negative_sampling


def _sorted(t: Tensor) -> Tensor:
    import numpy as np

    return t.sort().values if t.is_cuda else torch.from_numpy(np.sort(t.numpy()))  # a third of the time of torch's


def _are_in(t: Tensor, among: Tensor) -> Tensor:
    """Which numbers are among others that are sorted. A search in order meets what is in the cache, so the few that are found in
    order are what is searched then."""
    if not among.numel():
        return torch.zeros_like(t, dtype=torch.bool)
    ordered = _sorted(t)
    found = ordered[_at(ordered, among) == ordered]
    return _at(t, found) == t if found.numel() else torch.zeros_like(t, dtype=torch.bool)


def _at(t: Tensor, among: Tensor) -> Tensor:
    return among[torch.searchsorted(among, t).clamp_(max=among.numel() - 1)]


# ---- Python's generator ----------------------------------------------------------------------------------------------------------
def _generator(n: int, k: int) -> random.Random | None:
    """The one that ``random.sample(range(n), k)`` draws from, if it is Python's own and draws as :func:`draw` does."""
    of_pool = 21 + 4 ** math.ceil(math.log(k * 3, 4)) if k > 5 else 21  # Python keeps a list of what is left up to there
    if n <= of_pool or n.bit_length() > 62:
        return None
    generator = getattr(random.sample, "__self__", None)
    if type(generator) is not random.Random or not vars(generator).keys() <= {"gauss_next"}:
        return None
    cls = random.Random
    of_class = cls.sample, cls.sample.__code__, cls._randbelow, cls._randbelow.__code__  # type: ignore[attr-defined]
    return generator if getattr(random.sample, "__func__", None) is cls.sample and _is_known(*of_class) else None


@functools.lru_cache(maxsize=4)
def _is_known(*of_class: Any) -> bool:
    """Whether this Python draws as :func:`draw` does, by trying both."""
    for n, k in ((5_000, 500), ((1 << 32) - 1, 50), ((1 << 33) + 5, 50)):  # many repeated, one word a number, two
        ours, expected = random.Random(n), random.Random(n)
        if draw(n, k, ours).tolist() != expected.sample(range(n), k) or ours.getstate() != expected.getstate():
            return False
    return True


def draw(n: int, k: int, generator: random.Random) -> Any:
    """``generator.sample(range(n), k)`` as int64 in numpy."""
    while True:
        before = generator.getstate()
        numbers, after = _drawn(n, k, before)
        if generator.getstate() == before:  # no other thread has drawn meanwhile
            generator.setstate(after)
            return numbers


def _drawn(n: int, k: int, before: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The numbers that are drawn in a state, and the state after it. Numbers of as many bits as ``n`` has are drawn, and those left
    out that are not below ``n`` or were drawn before."""
    import numpy as np

    version, state, gauss = before
    words = np.random.MT19937()
    start: Any = {"bit_generator": "MT19937", "state": {"key": np.array(state[:-1], dtype=np.uint32), "pos": state[-1]}}
    bits = n.bit_length()
    each = 1 if bits <= 32 else 2  # words of 32 bits, the lowest first; of the last one its upper bits
    expected = -math.log1p(-k / n) * 2.0**bits
    while True:
        count = int(expected + 8 * math.sqrt(expected)) + 64
        words.state = start
        raw = words.random_raw(each * count)
        numbers = raw >> np.uint64(32 - bits) if each == 1 else (raw[1::2] >> np.uint64(64 - bits)) << np.uint64(32) | raw[::2]
        at = np.flatnonzero(numbers < np.uint64(n))
        numbers = numbers[at].view(np.int64)
        ordered = np.sort(numbers)
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if repeated.size:
            where = np.flatnonzero(np.isin(numbers, repeated))
            _, first = np.unique(numbers[where], return_index=True)
            keep = np.ones(numbers.size, dtype=bool)
            keep[np.delete(where, first)] = False
            at, numbers = at[keep], numbers[keep]
        if numbers.size >= k:
            break
        expected *= 2
    words.state = start
    words.random_raw(each * (int(at[k - 1]) + 1), output=False)
    left = words.state["state"]
    return numbers[:k], (version, (*left["key"].tolist(), left["pos"]), gauss)
