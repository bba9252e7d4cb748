"""Which kernel serves an aggregation: a pure function of the graph's statistics, the request and the settings."""

from __future__ import annotations

from dataclasses import dataclass

from gnnfast.config import Settings


@dataclass(frozen=True)
class Statistics:
    """What the choice depends on. ``uses`` counts earlier aggregations over the graph; ``converted`` says that the formats that
    GAR needs (CSR, and CSC for a gradient) exist; ``has_coo`` that the edges are there as COO."""

    device: str
    average_degree: float
    uses: int
    converted: bool
    has_coo: bool


@dataclass(frozen=True)
class Request:
    """An aggregation: ``reduce`` is sum, mean, max or min; ``needs_grad`` says that some gradient will be asked for."""

    reduce: str
    needs_grad: bool
    deterministic: bool


@dataclass(frozen=True)
class Choice:
    """``kernel`` is ``"gas"`` or ``"gar"``; ``reason`` is shown by ``gnnfast.report()``."""

    kernel: str
    reason: str


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
        return Choice("gar", "CSR exists")
    if graph.device == "cpu":
        return Choice("gar", "on a CPU converting costs less than one scatter")
    if graph.uses > 0:
        return Choice("gar", "the graph was seen before")
    if graph.average_degree >= settings.degree_threshold:
        return Choice("gar", f"average degree {graph.average_degree:.1f} >= {settings.degree_threshold:g}")
    return Choice("gas", f"first seen, average degree {graph.average_degree:.1f} < {settings.degree_threshold:g}")
