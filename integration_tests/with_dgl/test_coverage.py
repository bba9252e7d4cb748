"""docs/coverage_dgl.md is what the patch tables say, and what they say is so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gnnfast

dgl = pytest.importorskip("dgl")
from dgl.nn import pytorch as nn  # noqa: E402

from gnnfast.dgl import coverage  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "coverage_dgl.md"


def test_page():
    if not PAGE.is_file():
        pytest.skip("the tests run outside of the source tree, which has the page")
    page = PAGE.read_text()
    if f"DGL {dgl.__version__} " in page:
        assert coverage.markdown() == page, "run python -m gnnfast.dgl.coverage > docs/coverage_dgl.md"
        return
    # Another release may have other classes; of those that both have, the rows agree.
    written = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")}
    for name, served, how in coverage.rows():
        assert written.get(name, "") in ("", f"| {name} | {served} | {how} |")


def test_no_class_is_left_out():
    from dgl.nn.pytorch import conv

    listed = {row.name for row in coverage.rows()}
    assert {name for name in conv.__all__ if not name.startswith("CuGraph")} <= listed


F = 8
LAYERS = {
    "AGNNConv": lambda: nn.AGNNConv(),
    "APPNPConv": lambda: nn.APPNPConv(2, 0.1),
    "ChebConv": lambda: nn.ChebConv(F, 4, 2),
    "DotGatConv": lambda: nn.DotGatConv(F, 4, 2),
    "EdgeConv": lambda: nn.EdgeConv(F, 4),
    "GATConv": lambda: nn.GATConv(F, 4, 2),
    "GATv2Conv": lambda: nn.GATv2Conv(F, 4, 2),
    "GINConv": lambda: nn.GINConv(torch.nn.Linear(F, 4)),
    "GraphConv": lambda: nn.GraphConv(F, 4),
    "SAGEConv": lambda: nn.SAGEConv(F, 4, "mean"),
    "SGConv": lambda: nn.SGConv(F, 4),
    "TAGConv": lambda: nn.TAGConv(F, 4),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rows_are_what_the_report_says(name):
    g = dgl.add_self_loop(dgl.graph((torch.randint(0, 20, (60,)), torch.randint(0, 20, (60,)))))
    layer, x = LAYERS[name](), torch.randn(g.num_nodes(), F)
    args = (torch.tensor([2.0]),) if name == "ChebConv" else ()
    layer(g, x, *args)
    gnnfast.clear_report()
    layer(g, x, *args)
    report, served = gnnfast.report(), next(row.served for row in coverage.rows() if row.name == name)
    ran = {place for place, kernel, _ in report.kernels if kernel != "in parts"}
    if served == "as a whole":
        assert ran <= {f"dgl {name}", "dgl copy_u_sum"} and ran and not report.fallbacks
    elif served == "fused":
        assert ran and not report.fallbacks
    else:
        assert served in ("in part", "DGL's own") and report.fallbacks
