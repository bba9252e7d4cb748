"""Which kernel serves an aggregation: a pure function of the graph's statistics, the request, the settings and what kernels were
measured to cost."""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from gnnfast.config import Settings
from gnnfast.hardware import relative_bandwidth
from gnnfast.types import EXTREMA


class Statistics(NamedTuple):
    """What the choice depends on. ``converted`` says that the formats that GAR needs (CSR, and CSC for a gradient) exist;
    ``has_coo`` that the edges are there as COO; ``regret`` is by how many milliseconds the aggregations over COO so far were slower
    than they would have been over a format; ``capturing`` that a CUDA graph is being captured."""

    device: str
    num_src: int
    num_dst: int
    num_edges: int
    converted: bool
    has_coo: bool
    regret: float = 0.0
    capturing: bool = False

    @property
    def average_degree(self) -> float:
        return self.num_edges / max(self.num_dst, 1)


class Request(NamedTuple):
    """An aggregation: ``reduce`` is sum, mean, max or min; ``needs_grad`` says that some gradient will be asked for; features have
    ``width`` elements of ``itemsize`` bytes; ``reproducible``: what the framework computes there is the same from run to run."""

    reduce: str
    needs_grad: bool
    deterministic: bool
    width: int
    itemsize: int
    reproducible: bool = False


class Choice(NamedTuple):
    """``kernel`` is ``"gas"`` or ``"gar"``; ``reason`` is shown by ``gnnfast.report()``; ``regret`` is what this
    aggregation adds to that of the graph, and ``until`` the regret from which the choice must be made again."""

    kernel: str
    reason: str
    regret: float = 0.0
    until: float = math.inf


class Costs(NamedTuple):
    """What one aggregation was measured to cost, the host included, in milliseconds: over COO, with a conversion before, and over a
    format that is there. Each is a sum of coefficients times the terms that :func:`terms` lists (``benchmarks/calibrate.py``
    measures and fits them)."""

    gas: Sequence[float]
    convert_gar: Sequence[float]
    gar: Sequence[float]

    def of(self, kernel: str, values: Sequence[float]) -> float:
        return sum(c * v for c, v in zip(getattr(self, kernel), values))


def gas_or_convert(num_src: int, num_dst: int, num_edges: int, width: int, itemsize: int) -> tuple[float, float]:
    """By how many milliseconds an aggregation over COO is slower than over a format, and what making the format takes."""
    values = terms(num_src, num_dst, num_edges, width, itemsize)
    slower, converting = (sum(map(operator.mul, beyond, values)) for beyond in beyond_gar(itemsize))
    return max(slower, 0.0), max(converting, 0.0)


def terms(num_src: int, num_dst: int, num_edges: int, width: int, itemsize: int) -> tuple[float, ...]:
    """What costs depend on: calls, millions of edges and nodes, billions of bytes of messages and of features."""
    nodes = num_src + num_dst
    return 1.0, num_edges / 1e6, nodes / 1e6, num_edges * width * itemsize / 1e9, nodes * width * itemsize / 1e9


@lru_cache
def costs(itemsize: int) -> Costs:
    """The calibration that ships, for features of 2 or of 4 and more bytes."""
    table: dict[str, Any] = json.loads(Path(__file__).with_name("calibration.json").read_text())
    return Costs(**table["costs"]["2" if itemsize == 2 else "4"])


@lru_cache
def beyond_gar(itemsize: int) -> tuple[tuple[float, ...], ...]:
    """The coefficients of what GAS and a conversion cost more than a format that is there: each graph that is new asks."""
    gas, convert_gar, gar = costs(itemsize)
    return tuple(tuple(map(operator.sub, of, gar)) for of in (gas, convert_gar))


CONVERTED = Choice("gar", "CSR exists")


class Small(NamedTuple):
    """Bytes up to which a framework's own operations are as fast as any kernel, since the host decides, and whoever looks at a call
    first makes it slower."""

    training: int
    inference: int


# Of messages, if nothing else is said; on a CPU "tiny" over any graph, "new" over one that is met for the first time. Measured
# beside an H200 (benchmarks/NOTES.md, "What is left alone"): a GPU of less bandwidth takes as long for fewer bytes.
SMALL = {
    "cuda": Small(110 << 20, 45 << 20),  # one aggregation
    "messages": Small(9 << 28, 13 << 27),  # all that PyG's operations read and write for messages of any code
    "new cuda": Small(1 << 20, 1 << 20),  # what is kept of a graph
    "compiled": Small(320 << 20, 128 << 20),  # kernels that the compiler fuses and may replay as a CUDA graph
    "compiled cpu": Small(-1, -1),  # slower than kernels at every size, but for sums, which the compiler scatters
    "compiled sums cpu": Small(1 << 19, 1 << 19),
    "cpu": Small(1 << 19, 1 << 19),  # sums of messages of any code, and attention with edge features
    "tiny cpu": Small(1 << 16, 1 << 16),  # left to PyG's operations, or to parts of a layer
    "tiny attention cpu": Small(1 << 15, 1 << 15),  # GATConv
    "new cpu": Small(1 << 16, 3 << 16),
    "tiny sums cpu": Small(1 << 18, 1 << 18),  # left to one operation over the edges as they are listed
    "new sums cpu": Small(1 << 20, 1 << 20),
    "tiny extrema cpu": Small(1 << 14, 1 << 18),  # which is so without a gradient
    "new extrema cpu": Small(1 << 16, 1 << 20),
    "tiny coefficients cpu": Small(1 << 17, 1 << 17),  # FAConv
    "tiny statistics cpu": Small(-1, 1 << 14),  # PNAConv with edge features
    "attention cpu": Small(1 << 12, 1 << 12),  # dot products, whose kernels win at every size, and nobody would notice
    "softmax cpu": Small(1 << 17, 1 << 17),  # the values
    "matrices cpu": Small(-1, 1 << 18),  # those of RGATConv
    # Adjacency matrices in torch's CSR, which its own product takes as they are: in training rows of 16 numbers of each entry,
    # however wide they are, since what a new one costs is its transpose.
    "adjacency cpu": Small(1 << 19, 1 << 25),
    "adjacency cuda": Small(64 << 20, 64 << 20),  # sums and means over such on a GPU: one operation over them as they are
}
ON_GPU = frozenset(where for where in SMALL if not where.endswith("cpu"))
# Bytes of messages and rows of nodes up to which, in training on a GPU, a mean within a layer that is not normalised is as fast as
# PyG writes it: kernels are fewer launches, but their gradients are Python (SAGEConv on 32 to 1,024 molecules, 128 samples: 0.92 to
# 1.03 of PyG; by torch's operations alone, 0.90 to 1.08). Above, up to what is left without a gradient, it is where the
# graph is new; a sum up to SMALL (GraphConv 0.83 to 0.91, left alone 0.94 to 0.98). SAGEConv over three new graphs, 62 MB of
# messages: 0.97 to 1.09 of PyG for 0.94 to 1.02 of what is left, and 0.98 to 2.6 ms of the device for 1.45 to 3.2.
FEW_BYTES = 1 << 24


# Milliseconds by which a conversion within a step keeps the host longer than the calibration says, which times it alone, host and
# device one after the other. On amazon-photo, 745 features, new in each step: inference of GIN 0.85 ms with it and 0.47 over COO,
# of SAGE 0.82 and 0.53, though the device takes longer over COO.
CONVERT_IN_A_STEP = 0.2

# On a CPU, milliseconds by which an element takes longer over COO than over CSR, an edge as much as 25 more elements, and that
# converting a graph takes: for each EDGES_ON_CPU as much as for the host alone. 12,000 edges, one thread: sums of 16 features 36 us
# longer, of 64 61, of 100 105; maxima 44, 100, 147; converting 66.
SCATTER_ON_CPU, CONVERT_ON_CPU, EDGES_ON_CPU = 0.07e-6, 0.022, 5000


def cannot_win(nbytes: int, training: bool, settings: Settings, where: str = "cuda") -> bool:
    """Whether so many bytes are too few to gain from a kernel of gnnfast, and nothing asks for one; ``where`` is a key of
    :data:`SMALL`, which says of what they are."""
    return nbytes <= most_left(training, settings, where)


def most_left(training: bool, settings: Settings, where: str) -> float:
    """The most bytes of which :func:`cannot_win` is true; -1 if it is of none."""
    if not settings.is_free:
        return -1.0
    most = SMALL[where][0 if training else 1]
    return most * relative_bandwidth() if where in ON_GPU else most


def most_small(where: str, settings: Settings) -> float:
    """The most bytes of which :func:`cannot_win` is true, with gradients and without."""
    return min(most_left(training, settings, where) for training in (False, True)) if settings.is_free else 0.0


def select(graph: Statistics, request: Request, settings: Settings) -> Choice:
    """Chooses between GAS (COO, atomics, no conversion) and GAR (CSR, reduction on chip)."""
    if not graph.has_coo:
        return Choice("gar", "the graph came compressed")
    if request.needs_grad and request.reduce in EXTREMA:
        return Choice("gar", "the gradient of max and min needs CSR")
    if request.deterministic and graph.device == "cuda":
        return Choice("gar", "deterministic algorithms are asked for")
    if settings.kernel in ("gas", "gar"):
        return Choice(settings.kernel, f"kernel={settings.kernel} is set")
    if graph.converted:
        return CONVERTED
    if graph.capturing:
        return Choice("gas", "a CUDA graph is being captured, and nothing can be converted")
    if request.reproducible and graph.device == "cuda":
        return Choice("gar", "the framework multiplies with a matrix, which is the same from run to run")
    if graph.device == "cpu":
        slower = graph.num_edges * (request.width + 25) * SCATTER_ON_CPU
        converting = CONVERT_ON_CPU * (1 + graph.num_edges / EDGES_ON_CPU)
        if graph.regret + slower < converting:
            return Choice("gas", "on a CPU converting takes longer than scattering so far", slower, converting - slower)
        return Choice("gar", "on a CPU converting costs less than scattering")
    if settings.degree_threshold is not None:
        few = graph.average_degree < settings.degree_threshold
        return Choice(
            "gas" if few else "gar", f"not converted, average degree {'<' if few else '>='} {settings.degree_threshold:g}"
        )
    slower, conversion = gas_or_convert(graph.num_src, graph.num_dst, graph.num_edges, request.width, request.itemsize)
    conversion += CONVERT_IN_A_STEP
    # A gradient needs two formats, and is a second aggregation: both sides of the comparison double. To convert once as much has
    # been lost as that takes is never more than twice as slow as the best in hindsight.
    if graph.regret + slower < conversion:
        return Choice("gas", "cheaper than converting so far, by the calibration", slower, conversion - slower)
    return Choice("gar", "converting pays, by the calibration")


# ---- sampling ------------------------------------------------------------------------------------------------------------------
class Sampling(NamedTuple):
    """How an aggregation is sampled: at most ``width`` edges a row, chosen by ``strategy``; ``rescale`` as the setting
    ``sample_rescale``."""

    strategy: str
    width: int
    rescale: bool


FEWEST_DRAWS = 16


def default_width(average_degree: float) -> int:
    """An eighth of the average degree, as a power of two, at least 16."""
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


# ---- sparse features ---------------------------------------------------------------------------------------------------------
MULTIPLIES = 16.0  # multiply-adds of a dense product in the time in which an aggregation gathers one element
MUCH = 0.9  # another order than the framework's must save this much, ...
# ... and so many elements gathered: the backward pass then aggregates too, which takes the host 0.2 ms on CUDA, while the device
# gathers a GB.
FEWEST_SAVED = {"cpu": 1 << 17, "cuda": 1 << 28}


class Density(NamedTuple):
    """Below which density sparse features pay, as measured: ``(width, density)`` where both ways take equally long, by width."""

    crossovers: Sequence[tuple[int, float]]

    def threshold(self, width: int) -> float:
        """Between two measured widths, a power of the width; beyond them, that of the nearest."""
        points = self.crossovers
        if width <= points[0][0]:
            return points[0][1]
        for (low, at_low), (high, at_high) in itertools.pairwise(points):
            if width <= high:
                share = math.log(width / low) / math.log(high / low)
                return float(at_low ** (1 - share) * at_high**share)
        return points[-1][1]


class SparseChoice(NamedTuple):
    """Whether features are used compressed, and the reason shown by ``gnnfast.report()``."""

    sparse: bool
    reason: str


@lru_cache
def densities(device: str, what: str, itemsize: int) -> Density:
    """The calibration that ships: ``what`` is ``"aggregate"`` or ``"product"``, itemsize that of the features."""
    table: dict[str, Any] = json.loads(Path(__file__).with_name("calibration.json").read_text())
    return Density(table["density"][device][what]["2" if itemsize == 2 else "4"])


def sparse_pays(device: str, what: str, density: float, width: int, itemsize: int, settings: Settings) -> SparseChoice:
    """Whether compressed features of ``width`` columns beat dense ones in an aggregation or a product."""
    threshold = settings.feature_density_threshold
    if threshold is None:
        threshold = densities(device, what, itemsize).threshold(width)
    sparse = density < threshold
    return SparseChoice(sparse, f"density {density:.2%}, {'below' if sparse else 'not below'} {threshold:.2g}")


class Layer(NamedTuple):
    """A layer that is linear up to its bias: ``hops`` aggregations of features ``[num_src, width_in]``, and a product to
    ``width_out``. ``x_grad`` and ``weight_grad`` say which gradients will be asked for. ``aggregate_share`` and ``product_share``
    are the costs of the features as they are (compressed, where that pays) over those of dense ones."""

    device: str
    num_src: int
    num_dst: int
    num_edges: int
    width_in: int
    width_out: int
    hops: int
    x_grad: bool
    weight_grad: bool
    aggregate_share: float = 1.0
    product_share: float = 1.0


def linear_first(layer: Layer) -> bool:
    """Whether ``aggregate(lin(x))`` is so much cheaper than ``lin(aggregate(x))``, in elements gathered, that the order changes. A
    gradient of the features asks for the transposed aggregation, one of the weights for a second product."""
    gathers = layer.hops * (layer.num_edges + layer.num_dst)
    products = (1 + layer.x_grad + layer.weight_grad) * layer.width_in * layer.width_out / MULTIPLIES
    aggregated_first = gathers * layer.width_in * (layer.aggregate_share + layer.x_grad) + layer.num_dst * products
    multiplied_first = gathers * layer.width_out * (1.0 + (layer.x_grad or layer.weight_grad))
    multiplied_first += layer.num_src * products * layer.product_share
    return multiplied_first < MUCH * aggregated_first - FEWEST_SAVED[layer.device]


def saves_little(device: str, num_edges: int, width_in: int, width_out: int, hops: int) -> bool:
    """Whether the edges alone, forward and backward, cost so little that :func:`linear_first` need not be asked; or the device has
    no kernels."""
    return 2 * hops * num_edges * (width_in - width_out) < FEWEST_SAVED.get(device, math.inf)
