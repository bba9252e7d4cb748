"""Fixtures: the device a test runs on, a fresh report, and the check that a test leaves gnnfast as it found it."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import thresholds
import torch

import gnnfast
from gnnfast import _native
from gnnfast.dispatch.select import SMALL

# Where there is no GPU, test_devices.py says so once.
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fewer", action="store_true", help="a part of the cases of tests that have many")
    parser.addoption("--fuzz-cases", type=int, default=1000, help="random programs that test_fuzz.py runs")
    parser.addoption("--fuzz-seed", type=int, default=0, help="the seed of the first of them")


MANY, ONE_OF = 16, 10


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``--fewer``: of tests with many cases, those that are the first with a value of a parameter, and one of ten others; of such as
    compile (:func:`compiling.fresh`), which takes seconds for each, one of ten for a device."""
    if not config.getoption("--fewer"):
        return
    cases = collections.defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out = set()
    for of_test in cases.values():
        compiles, seen, others = "fresh" in of_test[0].fixturenames, set(), 0
        for item in of_test if compiles or len(of_test) > MANY else ():
            values = {(name, id(value)) for name, value in item.callspec.params.items() if name == "device" or not compiles}
            if values <= seen:
                others += 1
                if others % ONE_OF:
                    left_out.add(item)
            seen |= values
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    reason = _native.missing(request.param)
    if not reason and request.param not in DEVICES:
        reason = "this machine has no CUDA device"
    if reason:
        pytest.skip(reason)
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def clean() -> None:
    torch.manual_seed(0)
    gnnfast.enable()
    gnnfast.clear_report()
    yield
    assert gnnfast.is_enabled()


@pytest.fixture
def data_folder() -> Path:
    """Real graphs, from the folder that GNNFAST_DATA names."""
    folder = os.environ.get("GNNFAST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("GNNFAST_DATA does not name a folder with the real graphs")
    return Path(folder)


@pytest.fixture
def run_python(tmp_path: Path):
    """Runs code in a process outside the source tree, with GNNFAST_* variables as given, and returns what it prints: ``apart`` in a
    new interpreter, which has imported nothing."""

    def run(code: str, check: bool = True, env: dict[str, str] | None = None, apart: bool = False) -> str:
        script = tmp_path / "script.py"
        script.write_text(code)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("GNNFAST") or k == "GNNFAST_ISA"} | (env or {})
        if apart:
            command = [sys.executable, "-W", "ignore", str(script)]
            done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=300)
        else:
            done = forked.run([str(script)], tmp_path, clean, quiet=True)
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture
def converts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every graph is worth converting, whatever was measured."""
    monkeypatch.setattr("gnnfast.dispatch.select.gas_or_convert", lambda *_: (1.0, 0.5))


@pytest.fixture(autouse=True)
def nothing_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds.nothing_is_too_small(monkeypatch)


@pytest.fixture
def small(nothing_is_too_small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls too small to gain are left alone, as they are where nothing is tested."""
    monkeypatch.setattr("gnnfast.dispatch.select.SMALL", SMALL)


@pytest.fixture(params=["rows there are", "all rows"])
def rows(request, monkeypatch):
    """Of nodes and types of edges; graphs of tests are small enough for all."""
    from gnnfast.dispatch import relations

    if request.param == "rows there are":
        monkeypatch.setattr(relations, "ALL_ROWS_BYTES", 0)
        monkeypatch.setattr(relations, "ALL_ROWS_PRODUCTS", 0)
    return request.param
