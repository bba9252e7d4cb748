"""Captured steps beside the same steps run one by one."""

from __future__ import annotations

import copy

import pytest
import torch

import gnnfast

nn = pytest.importorskip("torch_geometric.nn", reason="PyG is not installed")
from torch_geometric.utils import to_torch_csr_tensor  # noqa: E402

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
N, E, F = 300, 1500, 16


class Net(torch.nn.Module):
    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        make = {"GCN": nn.GCNConv, "SAGE": nn.SAGEConv, "GraphConv": nn.GraphConv}[kind]
        self.first, self.second, self.dropout = make(F, F), make(F, 4), dropout

    def forward(self, x, edge_index):
        x = torch.nn.functional.dropout(self.first(x, edge_index).relu(), self.dropout, self.training)
        return self.second(x, edge_index)


def _work(kind="GCN", dropout=0.0, optimizer=torch.optim.Adam, **options):
    torch.manual_seed(0)
    x, edge_index = torch.randn(N, F, device="cuda"), torch.randint(0, N, (2, E), device="cuda")
    y, model = torch.randint(0, 4, (N,), device="cuda"), Net(kind, dropout).cuda()
    return model, optimizer(model.parameters(), **{"lr": 0.01, **options}), x, edge_index, y


def _step(model, optimizer, x, edge_index, y):
    def step():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x, edge_index), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_needs_a_device():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(gnnfast.CaptureError, match="needs a CUDA device"):
        gnnfast.capture(lambda: None)()


@needs_cuda
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("kind", ["GCN", "SAGE", "GraphConv"])
def test_training_is_the_same(kind, optimizer):
    work = _work(kind, optimizer=optimizer)
    twin = _work(kind, optimizer=optimizer)
    step, plain = gnnfast.capture(_step(*work)), _step(*twin)
    for epoch in range(12):
        for one in (work, twin):
            one[1].param_groups[0]["lr"] = 0.01 / (1 + epoch // 3)
        found, expected = step(), plain()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)
    for a, b in zip(work[0].parameters(), twin[0].parameters()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)


@needs_cuda
def test_results_are_the_callers():
    step = gnnfast.capture(_step(*_work()))
    losses = [step() for _ in range(8)]
    assert len({float(loss) for loss in losses}) == 8 and not any(loss.requires_grad for loss in losses)


@needs_cuda
def test_dropout_is_random_and_follows_the_seed():
    model, _, x, edge_index, _ = _work(dropout=0.5)
    step = gnnfast.capture(lambda: model(x, edge_index).detach())
    for _ in range(4):
        step()
    torch.manual_seed(1)
    first, second = step(), step()
    torch.manual_seed(1)
    assert torch.equal(step(), first) and not torch.equal(first, second)


@needs_cuda
def test_changes_are_noticed():
    model, _, x, edge_index, _ = _work()
    model.eval()

    @torch.no_grad()
    def step():
        return model(x, edge_index)

    captured = gnnfast.capture(step)
    for _ in range(6):
        captured()
    changes = (
        lambda: x.mul_(2),
        lambda: edge_index.copy_(torch.randint_like(edge_index, N)),
        lambda: model.first.lin.weight.data.mul_(2),
    )
    for change in changes:
        change()
        for _ in range(5):
            torch.testing.assert_close(captured(), step())


@needs_cuda
def test_arguments_take_other_values():
    model, _, x, edge_index, _ = _work("SAGE")
    captured = gnnfast.capture(lambda x: model(x, edge_index))
    for _ in range(8):
        x = torch.randn_like(x)
        torch.testing.assert_close(captured(x), model(x, edge_index).detach())
    wide = torch.cat([x, x])  # another shape is captured anew
    other = torch.cat([edge_index, edge_index + N], 1)
    both = gnnfast.capture(lambda x, e: model(x, e))
    for _ in range(5):
        both(x, edge_index)
    for _ in range(5):
        torch.testing.assert_close(both(wide, other), model(wide, other).detach())


@needs_cuda
@pytest.mark.parametrize("of_matrix", [False, True])
@pytest.mark.parametrize("make", [lambda: nn.GCNConv(F, 4), lambda: nn.SGConv(F, 4, K=2), lambda: nn.LGConv()])
def test_weights_that_are_new_in_each_step(make, of_matrix, monkeypatch):
    """Those that the step makes, or the values of a matrix: normalised over the graph that is kept."""
    monkeypatch.setattr("gnnfast.pyg.matrices.FEW_ENTRIES", -1)
    torch.manual_seed(0)
    x, layer = torch.randn(N, F, device="cuda"), make().cuda()
    edge_index = torch.randint(0, N, (2, E), device="cuda").unique(dim=1)
    adj = to_torch_csr_tensor(edge_index, torch.rand(edge_index.shape[1], device="cuda"), size=(N, N))

    def step(x, score):
        return layer(x, adj) if of_matrix else layer(x, edge_index, score.sigmoid().detach())

    captured = gnnfast.capture(step)
    for _ in range(8):
        score, x = torch.randn(edge_index.shape[1], device="cuda"), torch.randn_like(x)
        torch.testing.assert_close(captured(x, score), step(x, score).detach())


@needs_cuda
def test_gradients_may_be_set_to_none_outside():
    work = _work()
    step = gnnfast.capture(_step(*work))
    for _ in range(5):
        step()
    work[1].zero_grad()
    step()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in work[0].parameters())


@needs_cuda
def test_an_optimiser_outside_of_the_step():
    results = []
    for captured in (False, True):
        model, optimizer, x, edge_index, y = _work("SAGE", optimizer=torch.optim.SGD)

        def step():
            loss = torch.nn.functional.cross_entropy(model(x, edge_index), y)  # noqa: B023
            for p in model.parameters():  # noqa: B023
                p.grad = None
            loss.backward()
            return loss

        run, losses = gnnfast.capture(step) if captured else step, []
        for _ in range(8):
            losses.append(float(run()))
            optimizer.step()
            optimizer.zero_grad()
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=1e-4)


@needs_cuda
def test_parameters_that_are_replaced():
    model, _, x, edge_index, _ = _work("SAGE")

    @torch.no_grad()
    def step():
        return model(x, edge_index)

    captured = gnnfast.capture(step)
    for _ in range(5):
        captured()
    model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}, assign=True)
    for _ in range(5):
        torch.testing.assert_close(captured(), step())


@needs_cuda
def test_arguments_that_nobody_could_serve():
    model, _, x, edge_index, _ = _work("SAGE")
    captured = gnnfast.capture(lambda x, other=None: model(x, edge_index))
    with pytest.raises(gnnfast.CaptureError, match="requires a gradient"):
        captured(x.clone().requires_grad_())
    with pytest.raises(gnnfast.CaptureError, match="tensors or plain values, got object"):
        captured(x, object())


@needs_cuda
@pytest.mark.parametrize("bad", ["item", "mask"])
def test_refusal_names_the_line(bad):
    model, _, x, edge_index, y = _work()

    def step():
        out = model(x, edge_index)
        return out[y > 1] if bad == "mask" else out.sum().item()

    captured = gnnfast.capture(step)
    for _ in range(3):
        captured()
    for _ in range(2):
        with pytest.raises(gnnfast.CaptureError, match=r"step cannot be captured.*test_captured.py.*y > 1"):
            captured()
    step()  # nothing is left behind
    again = gnnfast.capture(lambda: model(x, edge_index).detach())
    for _ in range(5):
        torch.testing.assert_close(again(), model(x, edge_index).detach())


# ---- graphs that are new in each step ----------------------------------------------------------------------------------------
@needs_cuda
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("kernel", ["auto", "gar"])
@pytest.mark.parametrize("kind", ["SAGE", "GIN", "GINE", "GraphConv"])
def test_new_graphs_do_not_wait_for_the_device(kind, kernel, reduce):
    mlp = torch.nn.Linear(F, F)
    make = {"GIN": nn.GINConv, "GINE": nn.GINEConv}.get(kind)
    model = (make(mlp, aggr=reduce) if make else getattr(nn, f"{kind}Conv".replace("ConvConv", "Conv"))(F, F, aggr=reduce)).cuda()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(N, F, device="cuda")
    graphs = [torch.randint(0, N, (2, E), device="cuda") for _ in range(4)]
    attr = torch.randn(E, F, device="cuda")
    gnnfast.disable()
    expected = [model(x, g, attr) if kind == "GINE" else model(x, g) for g in graphs]
    gnnfast.enable()
    weight = copy.deepcopy(model.state_dict())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with gnnfast.override(kernel=kernel):
            found = [model(x, g, attr) if kind == "GINE" else model(x, g) for g in graphs]
            for g in graphs:
                optimizer.zero_grad()
                (model(x, g, attr) if kind == "GINE" else model(x, g)).square().mean().backward()
                optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    model.load_state_dict(weight)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@needs_cuda
def test_a_schedule_of_unknown_size_gives_the_same_bits():
    """Of a new graph the host knows how long the schedule can be; once the device has told, how long it is."""
    dst = torch.cat([torch.zeros(30_000, dtype=torch.long), torch.randint(0, 2000, (60_000,)), torch.arange(1500).repeat(40)])
    edge_index = torch.stack([torch.randint(0, 2000, dst.shape), dst]).cuda()
    x = torch.randn(2000, 64, device="cuda", requires_grad=True)
    for reduce in ("sum", "mean", "max"):
        results = []
        for exact in (False, True):
            graph = gnnfast.Graph.from_edge_index(edge_index, 2000)
            graph.args(csc=True, exact=exact)
            assert graph.csr.exact == exact
            with gnnfast.override(kernel="gar"):
                out = gnnfast.spmm(graph, x, reduce=reduce)
            results.append((out, *torch.autograd.grad(out.sin().sum(), x)))
        assert all(torch.equal(a, b) for a, b in zip(*results))
    for _ in range(5):
        gnnfast.spmm(graph, x)
        torch.cuda.synchronize()
    assert graph.csr.exact and graph.csc.exact


@needs_cuda
def test_what_cannot_win_is_left_alone(small):
    conv, x = nn.GINConv(torch.nn.Linear(F, F)).cuda(), torch.randn(N, F, device="cuda", requires_grad=True)
    edge_index = torch.randint(0, N, (2, E), device="cuda")
    conv(x, edge_index)  # what the class computes is found out
    gnnfast.clear_report()
    out = conv(x, edge_index)
    kernels = {k[1:] for k in gnnfast.report().kernels if k[0] != "pyg Linear"}
    assert {kernel for kernel, _ in kernels} == {"PyG's own"} and all("too small to gain" in reason for _, reason in kernels)
    assert not gnnfast.report().fallbacks
    gnnfast.disable()
    torch.testing.assert_close(out, conv(x, edge_index))
    gnnfast.enable()
    gnnfast.clear_report()
    with gnnfast.override(kernel="gar"):
        conv(x, edge_index)
    assert any("gar" in k[1] for k in gnnfast.report().kernels)


@needs_cuda
@pytest.mark.parametrize("kind", ["SAGEConv", "GraphConv"])
def test_small_layers_in_a_captured_step_are_kernels(kind, small):
    """Of an eager step the host decides, of a replay the device."""
    conv, x = getattr(nn, kind)(F, F).cuda(), torch.randn(N, F, device="cuda", requires_grad=True)
    edge_index = torch.randint(0, N, (2, E), device="cuda")

    def step():
        return torch.autograd.grad(conv(x, edge_index).square().sum(), (x, *conv.parameters()))

    gnnfast.clear_report()
    for _ in range(3):
        step()
    assert "PyG's own" in {kernel for _, kernel, _ in gnnfast.report().kernels}
    captured = gnnfast.capture(step)
    found = [[g.clone() for g in captured()] for _ in range(3)]
    assert any("linear" in kernel for _, kernel, _ in gnnfast.report().kernels)
    gnnfast.disable()
    expected = step()
    gnnfast.enable()
    for grads in found:
        torch.testing.assert_close(grads, list(expected), rtol=1e-4, atol=1e-4)
