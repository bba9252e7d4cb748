"""docs/coverage_pyg.md is what the patch tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch_geometric", reason="PyG is not installed")

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
