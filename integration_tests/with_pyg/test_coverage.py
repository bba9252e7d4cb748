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
    assert not {row.name for row in coverage.rows() if row.how.endswith("message()") or row.how.endswith("calls of PyG")}
    assert {row.name for row in coverage.rows() if row.served == "as a whole"} >= {"GCNConv", "GATConv", "SAGEConv", "GINConv"}


F = 16


class OfOneType(torch.nn.Module):
    """A layer for graphs of many types on one of one."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, edge_index):
        return self.layer({"node": x}, {("node", "to", "node"): edge_index})


AS_IT_RUNS = {
    "CGConv": lambda: nn.CGConv(F),
    "FeaStConv": lambda: nn.FeaStConv(F, F, heads=2),
    "FiLMConv": lambda: nn.FiLMConv(F, F),
    "GENConv": lambda: nn.GENConv(F, F),
    "GMMConv": lambda: nn.GMMConv(F, F, 3, 2),
    "HANConv": lambda: OfOneType(nn.HANConv(F, F, (["node"], [("node", "to", "node")]), heads=2)),
    "HGTConv": lambda: OfOneType(nn.HGTConv(F, F, (["node"], [("node", "to", "node")]), heads=2)),
    "LEConv": lambda: nn.LEConv(F, F),
    "PointTransformerConv": lambda: nn.PointTransformerConv(F, F),
    "ResGatedGraphConv": lambda: nn.ResGatedGraphConv(F, F),
    "SuperGATConv": lambda: nn.SuperGATConv(F, F, heads=2),
}
FURTHER = {  # than features and edges
    "GMMConv": lambda x, edges: (edges, torch.rand(edges.shape[1], 3, device=x.device)),
    "PointTransformerConv": lambda x, edges: (x[:, :3], edges),
}


HOW = {"SpMM": ("gar", "gas"), "sums of gates": ("gates",), "softmax": ("softmax aggregation",)}
HOW["attention"] = ("attention", "edge softmax")


@pytest.mark.parametrize("name", AS_IT_RUNS)
def test_what_is_said_of_layers_as_they_run(name, device, monkeypatch):
    from gnnfast.lazy import operations
    from gnnfast.pyg import coverage

    monkeypatch.setattr(operations, "WIDE", 8)  # as it is: positions are narrow
    assert AS_IT_RUNS.keys() == coverage.AS_IT_RUNS.keys()
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    gnnfast.clear_report()
    AS_IT_RUNS[name]().to(device)(x, *FURTHER.get(name, lambda x, edges: (edges,))(x, edge_index))
    kernels = {kernel for _, kernel, _ in gnnfast.report().kernels}
    how = next(names for said, names in HOW.items() if said in coverage.AS_IT_RUNS[name])
    assert any(k.startswith(how) for k in kernels) and not any(k.startswith("gathers") for k in kernels)
