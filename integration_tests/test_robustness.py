"""Short versions of the runs in robustness/."""

from __future__ import annotations

import itertools
import sys

import pytest

import gnnfast
from gnnfast import patching, switch

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from robustness.runs import RUNS

SECONDS = {"changing_graphs": 6.0, "threads": 2.0}


@pytest.mark.parametrize("name", RUNS)
def test_run(name, device):
    if name == "out_of_memory" and device.type == "cpu":
        pytest.skip("the system ends a process that takes too much memory of the host")
    RUNS[name](SECONDS.get(name, 0.0), device.type)


def _until(line, function):
    """Calls a function, with an interrupt before the given line of the modules that switch. Returns whether it got so far."""
    files, lines = {patching.__file__, switch.__file__}, itertools.count()

    def trace(frame, event, _):
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and next(lines) == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("which", ["enable", "disable"])
def test_interrupt_at_any_line_of_switching(which, request):
    from torch_geometric.nn import GATConv, GCNConv
    from torch_geometric.nn.conv import message_passing
    from torch_geometric.utils import scatter

    def state():
        return [GCNConv.forward.__code__, GATConv.forward.__code__, scatter.__code__, message_passing.module_from_template]

    gnnfast.enable()
    on = state()
    gnnfast.disable()
    off = state()
    assert not any(a is b for a, b in zip(on, off))
    for line in itertools.count(0, 31 if request.config.getoption("--fewer") else 3):
        (gnnfast.enable if which == "disable" else gnnfast.disable)()
        interrupted = _until(line, getattr(gnnfast, which))
        gnnfast.disable()
        assert all(a is b for a, b in zip(state(), off)), f"a patch was left by an interrupt at line {line}"
        gnnfast.enable()
        assert [a is b for a, b in zip(state()[:3], on)] == [True] * 3, f"a patch was lost by an interrupt at line {line}"
        if not interrupted:
            break
    assert line > 30
