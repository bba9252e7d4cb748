"""The scripts under examples/ train, on whichever devices there are."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import forked
import pytest

pytest.importorskip("dgl")

EXAMPLES = Path(__file__).parents[2] / "examples"
# The least accuracy of each model it trains; a guess is right for 1 in 7, in the last for 1 in 4.
SCRIPTS = {
    "dgl_gcn_gat.py": {"GCN": 0.7, "GAT": 0.7},
    "dgl_sage_sampling.py": {"GraphSAGE": 0.6},
    "dgl_rgcn.py": {"RGCN": 0.8},
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_example(script, device):
    if not EXAMPLES.is_dir():
        pytest.skip("the tests run outside of the source tree, which has the examples")
    root = str(Path(sys.modules["gnnfast"].__file__).parents[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = forked.run([str(EXAMPLES / script), device.type], os.getcwd(), env, quiet=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = {name: float(accuracy) for name, accuracy in re.findall(r"^(\w+) on .*accuracy ([\d.]+)", done.stdout, re.MULTILINE)}
    assert found.keys() == SCRIPTS[script].keys()
    assert all(found[name] > least for name, least in SCRIPTS[script].items()), found
