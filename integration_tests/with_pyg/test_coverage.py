"""docs/coverage_pyg.md is what the patch tables say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from graphs import GRAPHS

import gnnfast

nn = pytest.importorskip("torch_geometric.nn", reason="PyG is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "coverage_pyg.md"


def test_page():
    import torch_geometric

    from gnnfast.pyg import coverage

    if not PAGE.is_file():
        pytest.skip("the tests run outside of the source tree, which has the page")
    page = PAGE.read_text()
    if f"PyG {torch_geometric.__version__} " in page:
        assert coverage.markdown() == page, "run python -m gnnfast.pyg.coverage > docs/coverage_pyg.md"
        return
    # Another release may have other classes; of those that both have, the rows agree.
    written = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")}
    rows = coverage.rows()
    assert len(rows) > 50
    for name, served, how in rows:
        assert written.get(name, "") in ("", f"| {name} | {served} | {how} |")


def test_no_class_is_left_out():
    from torch_geometric.nn import conv

    from gnnfast.pyg import coverage

    listed = {row.name for row in coverage.rows()}
    classes = {n for n in conv.__all__ if issubclass(getattr(conv, n), conv.MessagePassing)} - {"MessagePassing"}
    assert classes <= listed
    assert {row.name for row in coverage.rows() if row.served == "as a whole"} >= {"GCNConv", "GATConv", "SAGEConv", "GINConv"}


F = 16
AS_IT_RUNS = {
    "CGConv": lambda x, edges: nn.CGConv(F)(x, edges),
    "FeaStConv": lambda x, edges: nn.FeaStConv(F, F, heads=2)(x, edges),
    "FiLMConv": lambda x, edges: nn.FiLMConv(F, F)(x, edges),
    "GMMConv": lambda x, edges: nn.GMMConv(F, F, 3, 2)(x, edges, torch.rand(edges.shape[1], 3, device=x.device)),
    "HypergraphConv": lambda x, edges: nn.HypergraphConv(F, F)(x, edges),
    "LEConv": lambda x, edges: nn.LEConv(F, F)(x, edges),
    "PointTransformerConv": lambda x, edges: nn.PointTransformerConv(F, F)(x, x[:, :3], edges),
    "ResGatedGraphConv": lambda x, edges: nn.ResGatedGraphConv(F, F)(x, edges),
    "SuperGATConv": lambda x, edges: nn.SuperGATConv(F, F, heads=2)(x, edges),
}


@pytest.mark.parametrize("name", AS_IT_RUNS)
def test_what_is_said_of_layers_as_they_run(name, device, monkeypatch):
    from gnnfast.pyg import coverage, lazy

    monkeypatch.setattr(lazy, "WIDE", 8)  # as it is: positions are narrow
    assert AS_IT_RUNS.keys() == coverage.AS_IT_RUNS.keys()
    edge_index, n, _ = GRAPHS["random"]()
    torch.set_default_device(device)
    try:
        gnnfast.clear_report()
        AS_IT_RUNS[name](torch.randn(n, F), edge_index.to(device))
    finally:
        torch.set_default_device(None)
    kernels = {kernel for _, kernel, _ in gnnfast.report().kernels}
    if "sums of gates" in coverage.AS_IT_RUNS[name]:
        assert any(k.startswith("gates" if device.type == "cpu" else ("gathers", "gar", "gas")) for k in kernels)
    else:
        assert any(k.startswith(("gar", "gas")) for k in kernels) and not any(k.startswith("gathers") for k in kernels)
