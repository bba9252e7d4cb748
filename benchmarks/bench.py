"""Times the cells of one graph, gnnfast and its peers on the same inputs."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import gnnfast
from gnnfast import Graph

from . import tables, timing
from .cells import DTYPES, Case, Cell
from .graphs import Sample
from .limits import Limits, Machine
from .peers import PEERS, UnavailableError, without_gnnfast

TOLERANCE = {"fp64": 1e-4, "fp32": 1e-4, "fp16": 1e-2, "bf16": 1e-2}
WORST_ROUNDING = 0.5  # cuSPARSE adds up in 16 bits, and is off by up to 0.2
WARMUP = 6  # gnnfast improves the schedule of a graph that is used again and again


class MismatchError(Exception):
    """Two results that should agree do not."""


class Bench:
    """One graph and what has been timed on it, so that cells which groups share are timed once."""

    def __init__(self, sample: Sample, machine: Machine, repeats: int | None) -> None:
        self.sample, self.device, self.repeats = sample, sample.col.device, repeats
        self.limits = Limits(sample, machine)
        self.graph = Graph.from_csr(sample.rowptr, sample.col)
        self.weight = torch.rand(sample.edges, device=self.device, generator=self._random(0))
        self.notes: defaultdict[Cell, list[str]] = defaultdict(list)
        self._ours: dict[Cell, dict[str, Any]] = {}
        self._peers: dict[tuple[str, Cell], float] = {}

    def row(self, case: Case) -> tables.Row:
        """Everything measured for one case. ``note`` says which peers could not be timed, and why; ``failed`` which were wrong."""
        cell = case.cell
        row = case.columns | {"nodes": self.sample.nodes, "edges": self.sample.edges} | self.ours(cell)
        for label, other in cell.references():
            row[f"{label} ms"] = self.ours(other)["gnnfast ms"]
            over, under = (label, "gnnfast") if label == "1 thread" else ("gnnfast", label)
            row[f"{over} / {under}"] = row[f"{over} ms"] / row[f"{under} ms"]
        found, notes, wrong = {}, self.notes[cell], []
        for name in case.peers:
            try:
                found[name] = row[f"{name} ms"] = self.peer(name, cell)
            except MismatchError as error:
                wrong.append(f"{name}: {error}")
            except Exception as error:  # a peer that fails must not end the run
                notes.append(f"{name}: {brief(error)}")
        if len(found) > 1:
            found["best peer"] = min(found.values())
        row |= {f"{name} / gnnfast": ms / row["gnnfast ms"] for name, ms in found.items()}
        limit = self.limits.ms(cell.what, cell.width, DTYPES[cell.dtype].itemsize, cell.weighted)
        if limit:
            row |= {"limit ms": limit, tables.LIMIT: limit / row["gnnfast ms"]}
        return row | {k: "; ".join(v) for k, v in (("note", notes), ("failed", wrong)) if v}

    def device_columns(self, cell: Cell) -> tables.Row:
        """The device time of a call and its number of kernels."""
        try:
            return dict(zip(("device us", "kernels"), timing.device_work(self.prepare(cell, *self.inputs(cell)))))
        except RuntimeError as error:
            return {"note": f"torch.profiler: {brief(error)}"}

    # ---- gnnfast -----------------------------------------------------------------------------------------------------------
    def ours(self, cell: Cell) -> dict[str, Any]:
        """gnnfast's median and first time in milliseconds and the kernel it chose."""
        if cell not in self._ours:
            with threads(cell.threads), schedule(cell.what):
                self._ours[cell] = self._time_ours(cell)
        return self._ours[cell]

    def _time_ours(self, cell: Cell) -> dict[str, Any]:
        inputs, made = self.inputs(cell), []
        gnnfast.clear_report()
        first = timing.wall_ms(lambda: (made.append(self.prepare(cell, *inputs)), made[0]()), self.device)
        kernels = _kernels()
        (call,) = made
        if "backward" in cell.what:
            self.check_gradients(cell, call())
        ms, spread = timing.sample(call, self.device, self.repeats, WARMUP, wall=cell.what == "conversion")
        gnnfast.clear_report()
        call()
        return {"kernel": _kernels() or kernels or None, "gnnfast ms": ms, "gnnfast spread": spread, "first call ms": first}

    def inputs(self, cell: Cell) -> tuple[Tensor, Tensor | None]:
        """``x [N, F]`` and ``weight [E]`` in slot order, or ``None``; for a conversion the COO of the sample."""
        if cell.what == "conversion":
            return self.sample.coo
        x = torch.randn(self.sample.nodes, cell.width, device=self.device, generator=self._random(1)).to(DTYPES[cell.dtype])
        return x, self.weight.to(x.dtype, copy=True) if cell.weighted else None

    def prepare(self, cell: Cell, x: Tensor, weight: Tensor | None) -> Callable[[], Any]:
        """The call that is timed; with a gradient it returns those of x and, for forward+backward, weight."""
        if cell.what == "conversion":
            return lambda: Graph.from_edge_index(x, self.sample.nodes).csr
        graph = Graph.from_csr(self.sample.rowptr, self.sample.col) if cell.what.startswith("schedule") else self.graph
        forward = lambda: gnnfast.spmm(graph, x, weight, cell.reduce)  # noqa: E731
        if "backward" not in cell.what:
            return forward
        wanted = [x.requires_grad_()]
        if cell.what == "forward+backward" and weight is not None:
            wanted.append(weight.requires_grad_())
        forward()  # a weight that is the same tensor again is kept in the order of the slots
        out = forward()
        along = out.detach()
        if cell.what == "backward":
            return lambda: torch.autograd.grad(out, wanted, along, retain_graph=True)
        return lambda: torch.autograd.grad(forward(), wanted, along)

    def check_gradients(self, cell: Cell, gradients: tuple[Tensor, ...]) -> None:
        """An aggregation is of degree 1 in x and in weight, so the gradients g along out satisfy <g, x> = <out, out>."""
        operands = self.inputs(cell)
        out = gnnfast.spmm(self.graph, *operands, cell.reduce)
        expected = _dot(out, out)
        for value, gradient in zip(operands, gradients):
            assert value is not None
            check(abs(_dot(value, gradient) - expected) / expected, cell.dtype)

    # ---- peers -------------------------------------------------------------------------------------------------------------
    def peer(self, name: str, cell: Cell) -> float:
        """A peer's median time in milliseconds, after a comparison of its output with gnnfast's."""
        if cell.what != "forward":
            raise UnavailableError("is timed for forward passes alone")
        x, weight = self.inputs(cell)
        expected = gnnfast.spmm(self.graph, x, weight, cell.reduce)
        with without_gnnfast():
            call = PEERS[name](self.sample, x, weight, cell.reduce)
            try:
                check(difference(call(), expected), cell.dtype)
            except MismatchError:
                self.blame(name, cell, call(), expected)
            del expected
            key = ("cuSPARSE", replace(cell, dtype="fp32")) if name == "cuSPARSE fp32" else (name, cell)
            if key not in self._peers:
                self._peers[key] = timing.median_ms(call, self.device, self.repeats)
        return self._peers[key]

    def blame(self, name: str, cell: Cell, theirs: Tensor, ours: Tensor) -> None:
        """Two results differ: if gnnfast's is right by torch's scatter in float64 and the peer rounds badly, a note says so. Raises
        MismatchError otherwise."""
        x, weight = self.inputs(cell)
        few = slice(8)  # features, for a message of each edge takes memory
        exact = PEERS["PyG"](self.sample, x[:, few].double(), None if weight is None else weight.double(), cell.reduce)()
        our_error, their_error = (difference(t[:, few], exact) for t in (ours, theirs))
        check(our_error, cell.dtype)
        if not their_error <= WORST_ROUNDING:
            raise MismatchError(f"results differ by {their_error:.2g} of their norm, which is no rounding; gnnfast's are right")
        self.notes[cell].append(f"{name} is off by {their_error:.2g} of float64's result, gnnfast by {our_error:.2g}")

    def _random(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Runs torch on that many CPU threads; ``None`` changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def schedule(what: str) -> Iterator[None]:
    """The setting that a pass ``schedule NAME`` asks for; other passes change nothing."""
    with contextlib.ExitStack() as stack:
        if what.startswith("schedule "):
            try:
                stack.enter_context(gnnfast.override(schedule=what.removeprefix("schedule ")))
            except (TypeError, ValueError) as error:
                raise UnavailableError(str(error)) from error
        yield


def difference(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected. What a 16-bit type cannot hold counts as its largest number."""
    most = min(torch.finfo(found.dtype).max, torch.finfo(expected.dtype).max)
    found, expected = (t.double().clamp(-most, most) for t in (found, expected))
    return float((found - expected).norm() / expected.norm())


def check(difference: float, dtype: str) -> None:
    """Raises MismatchError if a relative difference is too large, or no number."""
    if not difference <= TOLERANCE[dtype]:
        raise MismatchError(f"results differ by {difference:.2g} of their norm; accepted is {TOLERANCE[dtype]:g}")


def brief(error: Exception) -> str:
    """An error in one line."""
    text = next(iter(str(error).strip().splitlines()), "no message")
    return text if isinstance(error, UnavailableError | MismatchError) else f"{type(error).__name__}: {text}"


def _kernels() -> str:
    """What gnnfast ran since its report was cleared."""
    return ", ".join(sorted({kernel for _, kernel, _ in gnnfast.report().kernels}))


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).sum())
