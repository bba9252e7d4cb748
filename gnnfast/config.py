"""Every setting, its environment variable and what that accepts."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from threading import get_ident
from typing import Any

from gnnfast.types import STRATEGIES

BACKENDS = ("pyg", "dgl")
KERNELS = ("auto", "gas", "gar", "sampled")
SCHEDULES = ("auto", "off", "degree", "locality")
# Those that act on a call.
CALL_SETTINGS = (
    "kernel",
    "degree_threshold",
    "feature_density_threshold",
    "schedule",
    "autotune",
    "sample",
    "sample_width",
    "sample_rescale",
    "dropout",
    "bounded",
    "strict",
)
DROPOUTS = ("kernel", "framework")
LOG_LEVELS = ("off", "info", "debug")


def _one_of(*accepted: str) -> tuple[str, Callable[[str], str]]:
    def parse(text: str) -> str:
        if text not in accepted:
            raise ValueError(text)
        return text

    return f"{', '.join(accepted[:-1])} or {accepted[-1]}", parse


def _flag(text: str) -> bool:
    return {"0": False, "1": True}[text]


def _backends(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or any(name not in BACKENDS for name in names):
        raise ValueError(text)
    return names


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise ValueError(text)
    return number


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _setting(default: Any, variable: str, accepts: str, parse: Callable[[str], Any], about: str, unset: str = "") -> Any:
    """``about`` is what the documentation says of it (docs/settings.md), ``unset`` what ``None`` stands for."""
    return field(
        default=default, metadata={"variable": variable, "accepts": accepts, "parse": parse, "about": about, "unset": unset}
    )


@dataclass(frozen=True)
class Settings:
    """What the user asked for. ``None`` means: decided from the device.

    ``degree_threshold`` is the average degree from which a graph that is seen for the first time is converted to CSR.
    ``feature_density_threshold`` is the share of non-zero elements below which constant input features are compressed; 0: never.
    ``schedule`` is the order in which CUDA kernels work through the rows: ``off`` by id, ``degree`` longest first, ``locality`` by
    communities, which are searched at the first use, ``auto`` by communities once a graph was used often enough and has them.
    ``autotune`` times the kernels on the first calls of each graph and shape and keeps the fastest.

    ``sample`` has sums and means approximated from at most ``sample_width`` edges of each node (:func:`gnnfast.spmm_sampled`):
    with ``bucket`` and ``fastrand`` in inference, with ``random`` also in training. ``sample_rescale`` has sums multiplied by what
    makes up for the edges left out. ``kernel="sampled"`` samples graphs too that are otherwise left alone for their low average
    degree.

    ``dropout`` of attention coefficients is drawn inside the kernels with ``kernel``, from torch's generator but other masks for a
    seed than the framework's, or with ``framework`` as the framework draws it, at the price of memory and time per edge.

    ``bounded`` has the messages of PyG's layers that no kernel computes made and reduced in chunks of edges, and made again in the
    backward pass: with ``auto`` where they would take more than half of the free memory, with ``on`` always, with ``off`` never.

    ``dgl_bridge`` has graphs of a DGL without CUDA live on a GPU (:mod:`gnnfast.dgl.bridge`).
    """

    enabled: bool = _setting(
        True,
        "GNNFAST",
        "0 or 1",
        _flag,
        "whether `import gnnfast` switches gnnfast on",
    )
    backends: tuple[str, ...] = _setting(
        BACKENDS,
        "GNNFAST_BACKENDS",
        "a comma list of pyg and dgl",
        _backends,
        "the frameworks that are patched",
    )
    kernel: str = _setting(
        "auto",
        "GNNFAST_KERNEL",
        *_one_of(*KERNELS),
        "who aggregates: `gas` scatters over COO, `gar` reduces over CSR, `sampled` also samples graphs too sparse to gain by it",
    )
    degree_threshold: float | None = _setting(
        None,
        "GNNFAST_DEGREE_THRESHOLD",
        "a number above 0",
        _positive,
        "average degree from which a graph that is new on a GPU is converted to CSR",
        "by measured costs",
    )
    feature_density_threshold: float | None = _setting(
        None,
        "GNNFAST_FEATURE_DENSITY_THRESHOLD",
        "a number from 0 to 1",
        _share,
        "share of non-zero elements below which constant input features are compressed; 0: never",
        "by measured costs",
    )
    schedule: str = _setting(
        "auto",
        "GNNFAST_SCHEDULE",
        *_one_of(*SCHEDULES),
        "the order in which CUDA kernels take the rows: `off` by id, `degree` longest first, `locality` by communities from the "
        "first use on, `auto` by communities once a large graph was used often enough and has them",
    )
    autotune: bool = _setting(
        False,
        "GNNFAST_AUTOTUNE",
        "0 or 1",
        _flag,
        "time the kernels on the first calls of each graph and shape, and keep the fastest",
    )
    sample: str = _setting(
        "off",
        "GNNFAST_SAMPLE",
        *_one_of("off", *STRATEGIES),
        "approximate sums and means from some edges of each node: `bucket` and `fastrand` in inference, `random` in training too",
    )
    sample_width: int | None = _setting(
        None,
        "GNNFAST_SAMPLE_WIDTH",
        "an integer of at least 1",
        _count,
        "the most edges of a node that sampling takes",
        "an eighth of the average degree, at least 16",
    )
    sample_rescale: bool = _setting(
        True,
        "GNNFAST_SAMPLE_RESCALE",
        "0 or 1",
        _flag,
        "whether sampled sums are multiplied by edges / edges taken",
    )
    dropout: str = _setting(
        "kernel",
        "GNNFAST_DROPOUT",
        *_one_of(*DROPOUTS),
        "who draws the dropout of attention coefficients: the `kernel`, or the `framework` as without gnnfast, which needs memory "
        "`[E, H]`",
    )
    bounded: str = _setting(
        "auto",
        "GNNFAST_BOUNDED",
        *_one_of("auto", "on", "off"),
        "messages in chunks of edges: where they would take more than half of the free memory (`auto`), always or never",
    )
    dgl_bridge: bool = _setting(
        True,
        "GNNFAST_DGL_BRIDGE",
        "0 or 1",
        _flag,
        "whether graphs of a DGL without CUDA can be on a GPU",
    )
    cache_mb: int | None = _setting(
        None,
        "GNNFAST_CACHE_MB",
        "an integer of at least 0",
        _natural,
        "the most MiB of what is remembered on a device; the graph used last is always kept",
        "a quarter of the device's memory",
    )
    strict: bool = _setting(
        False,
        "GNNFAST_STRICT",
        "0 or 1",
        _flag,
        "whether a fallback to the framework is an error",
    )
    log: str = _setting(
        "off",
        "GNNFAST_LOG",
        *_one_of(*LOG_LEVELS),
        "what is logged to stderr: patches and first fallbacks (`info`), every call (`debug`)",
    )

    @functools.cached_property
    def is_free(self) -> bool:
        """Whether nothing asks for a kernel."""
        return self.kernel == "auto" and self.sample == "off" and not self.autotune


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings that the environment asks for.

    Raises:
        ValueError: a variable has a value it does not accept; the message names the variable and what it accepts.
    """
    values = {}
    for setting in fields(Settings):
        text = environment.get(setting.metadata["variable"])
        if text is None or text == "":
            continue
        try:
            values[setting.name] = setting.metadata["parse"](text)
        except (ValueError, KeyError):
            raise ValueError(
                f"the environment variable {setting.metadata['variable']} is {text!r}; it accepts {setting.metadata['accepts']}"
            ) from None
    return Settings(**values)


def _variable(name: str) -> str:
    return next(s.metadata["variable"] for s in fields(Settings) if s.name == name)


# Variables that are no settings: of tests, benchmarks, the demo and bug hunts, and what worker processes inherit.
_OTHERS = ("GNNFAST_DATA", "GNNFAST_ISA", "GNNFAST_DGL_SHIM", "GNNFAST_DEMO_JSON", "GNNFAST_CUDA")


def unknown_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that are named like settings but are none, with what may have been meant."""
    known = [setting.metadata["variable"] for setting in fields(Settings)]
    found = {}
    for name in environment:
        if name.startswith("GNNFAST") and name not in known and name not in _OTHERS:
            near = difflib.get_close_matches(name, known, 1)
            found[name] = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return found


def without_effect(asked: Settings, cuda: bool = True, installed: Collection[str] = BACKENDS) -> list[str]:
    """What of the settings changes nothing beside the others, or on a machine with or without CUDA kernels and with the frameworks
    ``installed``, in words. Each begins with the variable."""
    found = []
    default = Settings()
    if not asked.enabled:
        given = [s for s in fields(Settings) if s.name != "enabled" and getattr(asked, s.name) != getattr(default, s.name)]
        return [f"{s.metadata['variable']} has no effect beside GNNFAST=0, until gnnfast.enable()" for s in given]
    if not cuda:
        for name in ("schedule", "autotune", "degree_threshold"):
            if getattr(asked, name) != getattr(default, name):
                found.append(f"{_variable(name)} has no effect here: it is about CUDA kernels, and there are none in use")
    if asked.backends != BACKENDS and not set(asked.backends) & set(installed):
        found.append(f"GNNFAST_BACKENDS={','.join(asked.backends)} leaves nothing to patch: that is not installed")
    if not asked.sample_rescale and asked.sample == "off" and asked.kernel != "sampled":
        found.append("GNNFAST_SAMPLE_RESCALE has no effect: nothing is sampled (GNNFAST_SAMPLE chooses how)")
    if not asked.dgl_bridge and ("dgl" not in installed or not cuda):
        found.append("GNNFAST_DGL_BRIDGE has no effect: it is about DGL's graphs on a GPU")
    if asked.sample == "off" and asked.kernel != "sampled" and asked.sample_width is not None:
        found.append("GNNFAST_SAMPLE_WIDTH has no effect: nothing is sampled (GNNFAST_SAMPLE chooses how)")
    if asked.kernel == "sampled" and os.environ.get("GNNFAST_SAMPLE") == "off":
        found.append("GNNFAST_SAMPLE=off has no effect beside GNNFAST_KERNEL=sampled, which samples by fastrand")
    if cuda and asked.kernel not in ("auto", "gas") and asked.degree_threshold is not None:
        found.append(f"GNNFAST_DEGREE_THRESHOLD has no effect beside GNNFAST_KERNEL={asked.kernel}")
    return found


_base = from_environment()
_current: ContextVar[Settings | None] = ContextVar("gnnfast_settings", default=None)
_live: dict[int, list[Settings]] = {}  # of the threads that are within override(), the innermost last


def settings() -> Settings:
    """The settings in force in this thread or task; in a backward pass those of its caller."""
    return _current.get() or (_of_caller() if _live else None) or _base


# How many threads are within :func:`override`; if none is, :func:`settings` are those of the environment.
is_overridden: Callable[[], int] = _live.__len__


def _of_caller() -> Settings | None:
    """Autograd runs the backward passes of a GPU, and what a checkpoint repeats there, in threads of its own, where no context
    variable is set. Newer releases of torch keep the context of who called backward(). Others do not say who it was: if all threads
    that override anything agree, it is taken for one of them."""
    import torch

    if torch._C._current_graph_task_id() == -1 or get_ident() in _live:
        return None
    if torch._C._is_key_in_tls("context"):
        found = torch._C._get_obj_in_tls("context").get(_current)
        if found is not None:
            return found  # type: ignore[no-any-return]
    innermost = {stack[-1] for stack in _live.copy().values() if stack}
    return innermost.pop() if len(innermost) == 1 else None


@contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Use other settings inside a ``with`` block, in this thread and in the backward passes that it starts.

    Accepts the fields of :class:`Settings` that act on a call: ``kernel``, ``degree_threshold``, ``feature_density_threshold``,
    ``schedule``, ``autotune``, ``sample``, ``sample_width``, ``sample_rescale``, ``dropout``, ``bounded``, ``strict``. To switch
    gnnfast on and off use :func:`gnnfast.enable` and :func:`gnnfast.disable`.

    Raises:
        TypeError: a name is no such setting.
        ValueError: a value is not accepted.

    Example:
        >>> with gnnfast.override(kernel="gar", strict=True) as settings:
        ...     settings.kernel
        'gar'
    """
    accepted = {s.name: s for s in fields(Settings) if s.name in CALL_SETTINGS}
    for name, value in changes.items():
        if name not in accepted:
            raise TypeError(f"override() got {name!r}; it accepts {', '.join(accepted)}")
        try:
            changes[name] = accepted[name].metadata["parse"](str(int(value)) if isinstance(value, bool) else str(value))
        except (ValueError, KeyError):
            raise ValueError(f"override({name}={value!r}): {name} accepts {accepted[name].metadata['accepts']}") from None
    made, thread = replace(settings(), **changes), get_ident()
    token, stack = _current.set(made), _live.setdefault(thread, [])
    stack.append(made)
    try:
        yield made
    finally:
        stack[:] = [other for other in stack if other is not made]  # tasks of a thread may leave in any order
        if not stack:
            _live.pop(thread, None)
        _current.reset(token)
