"""The selector is a pure function: its table."""

from __future__ import annotations

import pytest

from gnnfast.config import Settings
from gnnfast.selector import Request, Statistics, select

SEEN_ONCE = Statistics("cuda", num_src=10_000, num_dst=10_000, num_edges=40_000, uses=0, converted=False, has_coo=True)
SUM = Request("sum", needs_grad=True, deterministic=False, width=64, itemsize=4)


def _with(record, **changes):
    return record._replace(**changes)


@pytest.mark.parametrize(
    "graph,request_,settings,kernel,reason",
    [
        (SEEN_ONCE, SUM, Settings(), "gas", "first seen, and cheaper"),
        (_with(SEEN_ONCE, num_edges=40_000_000), SUM, Settings(), "gar", "first seen, and converting pays"),
        (SEEN_ONCE, SUM, Settings(degree_threshold=2.0), "gar", "average degree >= 2"),
        (SEEN_ONCE, SUM, Settings(degree_threshold=5.0), "gas", "average degree < 5"),
        (_with(SEEN_ONCE, uses=1), SUM, Settings(), "gar", "seen before"),
        (_with(SEEN_ONCE, converted=True), SUM, Settings(), "gar", "CSR exists"),
        (_with(SEEN_ONCE, device="cpu"), SUM, Settings(), "gar", "on a CPU"),
        (_with(SEEN_ONCE, has_coo=False), SUM, Settings(kernel="gas"), "gar", "came compressed"),
        (SEEN_ONCE, _with(SUM, reduce="max"), Settings(kernel="gas"), "gar", "gradient of max"),
        (SEEN_ONCE, _with(SUM, reduce="max", needs_grad=False), Settings(), "gas", "first seen"),
        (SEEN_ONCE, _with(SUM, deterministic=True), Settings(kernel="gas"), "gar", "deterministic"),
        (_with(SEEN_ONCE, converted=True), SUM, Settings(kernel="gas"), "gas", "kernel=gas is set"),
        (SEEN_ONCE, SUM, Settings(kernel="gar"), "gar", "kernel=gar is set"),
    ],
)
def test_table(graph, request_, settings, kernel, reason):
    choice = select(graph, request_, settings)
    assert choice.kernel == kernel and reason in choice.reason
