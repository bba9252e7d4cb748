"""A case: from a seed to what differs with gnnfast and without."""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from typing import Any

import pytest
import thresholds
import torch
from torch import Tensor

import gnnfast
from fuzz.world import World
from gnnfast import features

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
# What works with gnnfast and not without: it has saved something else, or does not make a new EdgeIndex.
ALLOWED = (
    "modified by an inplace operation",
    "Cannot set version_counter for inference tensor",
    "Inference tensors cannot be saved for backward",
)
FRAMEWORKS = ("pyg", "dgl")


def world_of(framework: str) -> type[World]:
    if framework == "pyg":
        from fuzz.pyg import Pyg

        return Pyg
    from fuzz.dgl import Dgl

    return Dgl


def plan_of(world: type[World], seed: int) -> list[tuple[str, int]]:
    r = random.Random(seed + 1)
    names = r.choices(list(world.steps), list(world.steps.values()), k=r.randint(3, 9))
    return [(name, r.getrandbits(31)) for name in names]


def differs(found: Any, expected: Any, least: float = 0.0) -> str:
    """What of two entries of a log is not the same; empty if all is. ``least`` is a tolerance for every dtype."""
    if isinstance(expected[1], Exception) or isinstance(found[1], Exception):
        if isinstance(expected[1], RuntimeError) and any(reason in str(expected[1]) for reason in ALLOWED):
            return ""
        if type(found[1]) is not type(expected[1]):
            return f"{found[0]}: {_brief(found[1])} instead of {_brief(expected[1])}"
        return ""
    if found[0] != expected[0] or len(found[1]) != len(expected[1]):
        return f"{found[0]} instead of {expected[0]}"
    # Of gradients that cancel out, digits are left as many as the largest of them had; in float32 those of squares show.
    kinds = [(e[e.isfinite()].norm().item(), e.dtype) for e in expected[1] if isinstance(e, Tensor) and e.is_floating_point()]
    sizes = [max(size, size * size) if dtype is torch.float32 else size for size, dtype in kinds]
    floor = max(1e-3, *(0.01 * size for size in sizes)) if sizes else 0
    for i, (f, e) in enumerate(zip(found[1], expected[1])):
        if not isinstance(e, Tensor) or not isinstance(f, Tensor):
            if f != e:
                return f"{found[0]}, value {i}: {f} instead of {e}"
        elif f.dtype != e.dtype or f.shape != e.shape:
            return f"{found[0]}, value {i}: {f.dtype} {list(f.shape)} instead of {e.dtype} {list(e.shape)}"
        elif f.is_floating_point():
            finite = e.isfinite()
            if not torch.equal(f.isfinite(), finite) or not torch.equal(f[~finite].isnan(), e[~finite].isnan()):
                return f"{found[0]}, value {i}: not finite elsewhere"
            error = (f - e)[finite].norm() / e[finite].norm().clamp(min=floor)
            if error > max(TOLERANCE[e.dtype], least):
                return f"{found[0]}, value {i}: off by {error:.2g}"
        elif not torch.equal(f, e):
            return f"{found[0]}, value {i}: other ids"
    return ""


def _brief(value: Any) -> str:
    return f"{type(value).__name__}({str(value)[:120]})" if isinstance(value, Exception) else "a result"


@contextlib.contextmanager
def small_features() -> Any:
    """Features of these sizes are compressed too."""
    before = features.MIN_WIDTH, features.MIN_ELEMENTS
    features.MIN_WIDTH, features.MIN_ELEMENTS = 2, 2
    try:
        yield
    finally:
        features.MIN_WIDTH, features.MIN_ELEMENTS = before


def run_case(framework: str, seed: int, device: str = "cpu") -> str:
    """Runs a case. Returns what differs with what led to it, or nothing."""
    world, logs = world_of(framework), {}
    plan = plan_of(world, seed)
    try:
        for on in (True, False):
            (gnnfast.enable if on else gnnfast.disable)()
            with warnings.catch_warnings(), small_features():
                warnings.simplefilter("ignore")
                # DGL's wheel has no kernels for a GPU.
                made = world(seed, "cpu" if framework == "dgl" and not on else device, on)
                logs[on] = made.run(plan)
    finally:
        gnnfast.enable()
    found, expected = logs[True], logs[False]
    least = 1e-5 if any(name == "cast" for name, _ in plan) else 0.0  # what has been in float32 has kept its rounding
    for f, e in zip(found, expected):
        difference = differs(f, e, least)
        if difference:
            return f"{framework} {seed} ({made.name}; {', '.join(n for n, _ in plan)}): {difference}"
        if isinstance(e[1], Exception):
            break  # what comes after an error depends on where it was raised
    return ""


CASES = 250  # that a process takes at once


def prepare() -> None:
    """Called once in a process."""
    torch.set_num_threads(1)  # the graphs are tiny
    thresholds.nothing_is_too_small(pytest.MonkeyPatch())


def run_cases(frameworks: list[str], seeds: range, device: str, until: float) -> tuple[int, int]:
    """How many cases ran, and how many failed."""
    failures = 0
    for done, seed in enumerate(seeds):
        if time.time() > until:
            return done, failures
        difference = run_case(frameworks[seed % len(frameworks)], seed, device)
        if difference:
            failures += 1
            print(difference, flush=True)
    return len(seeds), failures
