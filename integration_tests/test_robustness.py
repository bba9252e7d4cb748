"""Short versions of the runs in robustness/."""

from __future__ import annotations

import pytest

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from robustness.runs import RUNS

SECONDS = {"changing_graphs": 6.0, "threads": 2.0}


@pytest.mark.parametrize("name", RUNS)
def test_run(name, device):
    if name == "out_of_memory" and device.type == "cpu":
        pytest.skip("the system ends a process that takes too much memory of the host")
    RUNS[name](SECONDS.get(name, 0.0), device.type)
