"""Which kernel serves an aggregation: a pure function of the graph's statistics, the request, the settings and what kernels were
measured to cost."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from gnnfast.config import Settings


class Statistics(NamedTuple):
    """What the choice depends on. ``uses`` counts earlier aggregations over the graph; ``converted`` says that the formats that
    GAR needs (CSR, and CSC for a gradient) exist; ``has_coo`` that the edges are there as COO."""

    device: str
    num_src: int
    num_dst: int
    num_edges: int
    uses: int
    converted: bool
    has_coo: bool

    @property
    def average_degree(self) -> float:
        return self.num_edges / max(self.num_dst, 1)


class Request(NamedTuple):
    """An aggregation: ``reduce`` is sum, mean, max or min; ``needs_grad`` says that some gradient will be asked for; features have
    ``width`` elements of ``itemsize`` bytes."""

    reduce: str
    needs_grad: bool
    deterministic: bool
    width: int
    itemsize: int


class Choice(NamedTuple):
    """``kernel`` is ``"gas"`` or ``"gar"``; ``reason`` is shown by ``gnnfast.report()``."""

    kernel: str
    reason: str


class Costs(NamedTuple):
    """What one aggregation over a graph seen for the first time was measured to cost on a device, in milliseconds: each a sum of
    coefficients times the terms that :func:`terms` lists (``benchmarks/calibrate.py`` measures and fits them)."""

    gas: Sequence[float]
    convert_gar: Sequence[float]

    def of(self, kernel: str, values: Sequence[float]) -> float:
        return sum(c * v for c, v in zip(self.gas if kernel == "gas" else self.convert_gar, values))


def terms(num_src: int, num_dst: int, num_edges: int, width: int, itemsize: int) -> tuple[float, ...]:
    """What costs depend on: calls, millions of edges and nodes, billions of bytes of messages and of features."""
    nodes = num_src + num_dst
    return 1.0, num_edges / 1e6, nodes / 1e6, num_edges * width * itemsize / 1e9, nodes * width * itemsize / 1e9


@lru_cache
def costs(itemsize: int) -> Costs:
    """The calibration that ships, for features of 2 or of 4 and more bytes."""
    table: dict[str, Any] = json.loads(Path(__file__).with_name("calibration.json").read_text())
    return Costs(**table["costs"]["2" if itemsize == 2 else "4"])


CONVERTED = Choice("gar", "CSR exists")


def select(graph: Statistics, request: Request, settings: Settings) -> Choice:
    """Chooses between GAS (COO, atomics, no conversion) and GAR (CSR, reduction on chip)."""
    if not graph.has_coo:
        return Choice("gar", "the graph came compressed")
    if request.needs_grad and request.reduce in ("max", "min"):
        return Choice("gar", "the gradient of max and min needs CSR")
    if request.deterministic and graph.device == "cuda":
        return Choice("gar", "deterministic algorithms are asked for")
    if settings.kernel in ("gas", "gar"):
        return Choice(settings.kernel, f"kernel={settings.kernel} is set")
    if graph.converted:
        return CONVERTED
    if graph.device == "cpu":
        return Choice("gar", "on a CPU converting costs less than one scatter")
    if graph.uses > 0:
        return Choice("gar", "the graph was seen before")
    if settings.degree_threshold is not None:
        few = graph.average_degree < settings.degree_threshold
        return Choice("gas" if few else "gar", f"first seen, average degree {'<' if few else '>='} {settings.degree_threshold:g}")
    measured = costs(request.itemsize)
    values = terms(graph.num_src, graph.num_dst, graph.num_edges, request.width, request.itemsize)
    if measured.of("gas", values) < measured.of("convert_gar", values):
        return Choice("gas", "first seen, and cheaper than converting by the calibration")
    return Choice("gar", "first seen, and converting pays at once by the calibration")


class Sampling(NamedTuple):
    """How an aggregation is sampled: at most ``width`` edges a row, chosen by ``strategy``; ``rescale`` as the setting
    ``sample_rescale``."""

    strategy: str
    width: int
    rescale: bool


FEWEST_DRAWS = 16


def default_width(average_degree: float) -> int:
    """An eighth of the average degree, as a power of two, at least 16: rates from an eighth (equal degrees) to about a half (power
    laws), at which the paper (ES-SpMM, Lin et al., 2021) still finds under 1% of accuracy lost."""
    return max(FEWEST_DRAWS, 1 << max(0, round(math.log2(max(average_degree, 1) / 8))))


def select_sampling(average_degree: float, reduce: str, needs_grad: bool, training: bool, settings: Settings) -> Sampling | str:
    """How an aggregation is sampled where the settings ask for it, or why it is not.

    ``training`` says that gradients are enabled and nothing shows that the model is only evaluated."""
    strategy = "fastrand" if settings.sample == "off" else settings.sample
    if reduce not in ("sum", "mean"):
        return f"{reduce} has no sampled form"
    if strategy != "random" and needs_grad:
        return f"{strategy} has no gradient; use random, or torch.no_grad() for inference"
    if strategy != "random" and training:
        return f"{strategy} is for inference, and gradients are enabled; use random, or torch.no_grad()"
    width = settings.sample_width or default_width(average_degree)
    if settings.kernel != "sampled" and 2 * average_degree <= width:
        return f"the average degree {average_degree:.3g} is at most half of the {width} edges a row to sample"
    return Sampling(strategy, width, settings.sample_rescale)
