"""The examples run, and gnnfast serves them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import forked
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "data.py" and not path.name.startswith("dgl_"))

# Those of DGL are run in with_dgl; data.py is what these share.
pytestmark = pytest.mark.skipif(not SCRIPTS, reason="the tests run outside of the source tree, which has the examples")
pytest.importorskip("torch_geometric", reason="PyG is not installed")


@pytest.mark.parametrize("script", SCRIPTS)
def test_example(script, device, tmp_path):
    command = [str(EXAMPLES / script), "--device", device.type, "--epochs", "2"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GNNFAST")} | {"COLUMNS": "120"}
    done = forked.run(command, tmp_path, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"loss \d+\.\d+, test accuracy [01]\.\d+", done.stdout)
    assert "left to the framework" not in done.stdout, done.stdout
    assert re.search(r"^ *\d+ +\w+Conv ", done.stdout, re.M), done.stdout


def test_every_example_is_listed():
    page = (EXAMPLES / "README.md").read_text()
    assert [script for script in SCRIPTS if f"]({script})" not in page] == []
