"""The selector is a pure function: its table."""

from __future__ import annotations

import pytest

from gnnfast.config import Settings
from gnnfast.selector import Request, Statistics, select

SEEN_ONCE = Statistics(device="cuda", average_degree=4.0, uses=0, converted=False, has_coo=True)
SUM = Request("sum", needs_grad=True, deterministic=False)


def _with(record, **changes):
    import dataclasses

    return dataclasses.replace(record, **changes)


@pytest.mark.parametrize(
    "graph,request_,settings,kernel,reason",
    [
        (SEEN_ONCE, SUM, Settings(), "gas", "first seen, average degree 4.0 < 8"),
        (_with(SEEN_ONCE, average_degree=90.0), SUM, Settings(), "gar", "average degree 90.0 >= 8"),
        (SEEN_ONCE, SUM, Settings(degree_threshold=2.0), "gar", "average degree 4.0 >= 2"),
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
