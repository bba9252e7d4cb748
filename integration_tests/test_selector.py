"""The selector is a pure function: its table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gnnfast import hardware
from gnnfast.config import Settings
from gnnfast.dispatch.select import (
    SMALL,
    Density,
    Layer,
    Request,
    Statistics,
    cannot_win,
    densities,
    linear_first,
    select,
    sparse_pays,
)

SEEN_ONCE = Statistics("cuda", num_src=10_000, num_dst=10_000, num_edges=40_000, converted=False, has_coo=True)
SUM = Request("sum", needs_grad=True, deterministic=False, width=64, itemsize=4)


def _with(record, **changes):
    return record._replace(**changes)


@pytest.mark.parametrize(
    "graph,request_,settings,kernel,reason",
    [
        (SEEN_ONCE, SUM, Settings(), "gas", "cheaper than converting"),
        (_with(SEEN_ONCE, num_edges=40_000_000), SUM, Settings(), "gar", "converting pays"),
        # amazon-photo: the device takes longer over COO, the host less, and of a step the host decides
        (_with(SEEN_ONCE, num_src=7_650, num_dst=7_650, num_edges=238_162), _with(SUM, width=745), Settings(), "gas", "cheaper"),
        (SEEN_ONCE, SUM, Settings(degree_threshold=2.0), "gar", "average degree >= 2"),
        (SEEN_ONCE, SUM, Settings(degree_threshold=5.0), "gas", "average degree < 5"),
        (_with(SEEN_ONCE, regret=10.0), SUM, Settings(), "gar", "converting pays"),
        (_with(SEEN_ONCE, converted=True), SUM, Settings(), "gar", "CSR exists"),
        (_with(SEEN_ONCE, device="cpu"), SUM, Settings(), "gar", "costs less than scattering"),
        (_with(SEEN_ONCE, device="cpu", num_edges=100), SUM, Settings(), "gas", "takes longer than scattering so far"),
        (_with(SEEN_ONCE, device="cpu", num_edges=100, regret=1.0), SUM, Settings(), "gar", "costs less than scattering"),
        (_with(SEEN_ONCE, has_coo=False), SUM, Settings(kernel="gas"), "gar", "came compressed"),
        (SEEN_ONCE, _with(SUM, reduce="max"), Settings(kernel="gas"), "gar", "gradient of max"),
        (SEEN_ONCE, _with(SUM, reduce="max", needs_grad=False), Settings(), "gas", "cheaper than converting"),
        (SEEN_ONCE, _with(SUM, deterministic=True), Settings(kernel="gas"), "gar", "deterministic"),
        (_with(SEEN_ONCE, converted=True), SUM, Settings(kernel="gas"), "gas", "kernel=gas is set"),
        (SEEN_ONCE, SUM, Settings(kernel="gar"), "gar", "kernel=gar is set"),
        (SEEN_ONCE, _with(SUM, reproducible=True), Settings(), "gar", "the same from run to run"),
        (SEEN_ONCE, _with(SUM, reproducible=True), Settings(kernel="gas"), "gas", "kernel=gas is set"),
        (_with(SEEN_ONCE, capturing=True), _with(SUM, reproducible=True), Settings(), "gas", "is being captured"),
        (_with(SEEN_ONCE, device="cpu", num_edges=100), _with(SUM, reproducible=True), Settings(), "gas", "on a CPU"),
    ],
)
def test_table(graph, request_, settings, kernel, reason, monkeypatch):
    monkeypatch.setattr("gnnfast.dispatch.select.CONVERT_ON_CPU", 0.025)
    choice = select(graph, request_, settings)
    assert choice.kernel == kernel and reason in choice.reason


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("what", ["aggregate", "product"])
def test_density(what, itemsize, device):
    threshold = densities(device, what, itemsize).threshold(1000)
    assert 0 < threshold < 1
    for density, sparse in ((0.0, True), (0.99 * threshold, True), (threshold, False), (1.0, False)):
        choice = sparse_pays(device, what, density, 1000, itemsize, Settings())
        assert choice.sparse == sparse and f"density {density:.2%}, {'below' if sparse else 'not below'}" in choice.reason
    assert not sparse_pays(device, what, 0.0, 1000, itemsize, Settings(feature_density_threshold=0.0)).sparse
    assert sparse_pays(device, what, 0.9, 1000, itemsize, Settings(feature_density_threshold=1.0)).sparse


def test_narrow_rows_must_be_sparser():
    density = Density([(256, 0.01), (1024, 0.04), (4096, 0.1)])
    assert density.threshold(100) == density.threshold(256) == 0.01 and density.threshold(10_000) == 0.1
    assert abs(density.threshold(512) - 0.02) < 1e-9 and density.threshold(1024) == 0.04 < density.threshold(2000) < 0.1


WIDE_IN = Layer("cpu", 10_000, 10_000, 150_000, width_in=512, width_out=16, hops=1, x_grad=True, weight_grad=True)


@pytest.mark.parametrize(
    "layer,expected",
    [
        (WIDE_IN, True),
        (WIDE_IN._replace(hops=3), True),
        (WIDE_IN._replace(width_in=16, width_out=512), False),
        (WIDE_IN._replace(width_out=512), False),  # as cheap: the framework's order stays
        (WIDE_IN._replace(width_out=300, x_grad=False), False),  # would make a transposed aggregation that nobody needs
        (WIDE_IN._replace(width_out=300, x_grad=False, weight_grad=False), True),  # in inference there is none
        (WIDE_IN._replace(num_dst=500, num_edges=5_000), False),  # products of ten times as many rows
        (WIDE_IN._replace(num_dst=500, num_edges=5_000, x_grad=False, product_share=0.01), True),  # which are sparse
        (WIDE_IN._replace(device="cuda"), False),  # the host takes longer than the device saves
        (WIDE_IN._replace(device="cuda", num_edges=2_000_000), True),
    ],
)
def test_order(layer, expected):
    assert linear_first(layer) == expected


@pytest.fixture
def gpu(monkeypatch):
    """What makes a GPU of some properties."""

    def make(**properties):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(**properties))
        hardware.relative_bandwidth.cache_clear()

    yield make
    hardware.relative_bandwidth.cache_clear()


def test_what_is_too_small_follows_the_bandwidth(gpu, small):
    """An H200's 3201 MHz and 6016 bits, a T4's 5001 MHz and 256."""
    most = SMALL["cuda"].training
    for properties, share in ((dict(memory_clock_rate=3_201_000, memory_bus_width=6016), 1.0), (dict(name="of old"), 1.0)):
        gpu(**properties)
        assert hardware.relative_bandwidth() == pytest.approx(share, rel=0.01)
    gpu(memory_clock_rate=5_001_000, memory_bus_width=256)
    assert hardware.relative_bandwidth() == pytest.approx(0.32 / 4.8, rel=0.01)
    assert cannot_win(most // 20, True, Settings()) and not cannot_win(most // 10, True, Settings())
    assert cannot_win(SMALL["cpu"].training, True, Settings(), "cpu")
