"""Where there are no kernels, importing gnnfast works, says so once and changes nothing."""

from __future__ import annotations

import pytest

CODE = """
import sys, warnings
import torch._dynamo  # which asks for the system too
system = sys.platform
{pretend}
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    import gnnfast
sys.platform = system
print([str(w.message) for w in heard if "gnnfast" in str(w.message)])
{use}
print(sorted(gnnfast.report().kernels), gnnfast._native.cuda.reason)
try:
    gnnfast.Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
except RuntimeError as error:
    print("RuntimeError", error)
"""
LAYER = """
from torch_geometric.nn import GCNConv, GATConv
for layer in GCNConv(4, 4), GATConv(4, 4):
    assert layer(torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]])).shape == (3, 4)
gnnfast.disable(), gnnfast.enable()
"""
MISSING = "import pathlib; exists = pathlib.Path.exists; pathlib.Path.exists = lambda p: p.suffix != '.so' and exists(p)"


@pytest.mark.parametrize(
    "pretend, use, says",
    [
        ("sys.platform = 'darwin'", LAYER, "gnnfast has kernels for Linux, and none for macOS"),
        ("sys.platform = 'win32'", "", "gnnfast has kernels for Linux, and none for Windows"),
        (MISSING, LAYER, "libgnnfast_cpu.so is not in the installed package: reinstall gnnfast"),
        ("torch.__version__ = '2.9.1'", "", "torch 2.9.1 is older than 2.10"),
    ],
)
def test_import_without_kernels(pretend, use, says, run_python):
    pytest.importorskip("torch_geometric", reason="PyG is not installed")
    out = run_python(CODE.format(pretend=pretend, use=use))
    assert f"['gnnfast does nothing here: {says}" in out
    assert "[] it needs the CPU library, which is not loaded" in out
    assert "RuntimeError" in out and says in out.split("RuntimeError")[1]


def test_import_that_is_switched_off_says_nothing(run_python):
    out = run_python(CODE.format(pretend="sys.platform = 'darwin'", use=""), env={"GNNFAST": "0"})
    assert out.startswith("[]")
