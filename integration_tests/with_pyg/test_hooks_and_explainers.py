"""Hooks on layers, and PyG's explainers, with gnnfast and without."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from comparison import same
from torch.nn import Linear

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import explain, nn
from workflows import MODELS, gradients, graph

HOOKS = ["propagate", "message", "aggregate", "edge_update", "message_and_aggregate"]
EACH_HOOK = [
    *(f"{name}_forward{end}" for name in HOOKS[:4] for end in ("_pre_hook", "_hook")),
    *("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"),  # of any module
]


def watch(model, change):
    """Hooks of all kinds on all layers, what they see, and, if asked to, what they change."""
    seen = []

    def before(name, module, inputs):
        seen.append((name, "before", type(module).__name__, sorted(inputs[-1])))

    def after(name, module, inputs, out):
        seen.append((name, "after", type(module).__name__, sorted(inputs[-1]), tuple(out.shape)))
        return 0.5 * out if change else None

    for module in model.modules():
        if isinstance(module, nn.MessagePassing):
            for name in HOOKS:
                getattr(module, f"register_{name}_forward_pre_hook")(functools.partial(before, name))
                getattr(module, f"register_{name}_forward_hook")(functools.partial(after, name))
        if isinstance(module, nn.MessagePassing | Linear | nn.Linear):
            module.register_forward_hook(
                lambda module, inputs, out: seen.append(("forward", type(module).__name__, tuple(out.shape)))
            )
            module.register_full_backward_hook(lambda module, *given: seen.append(("backward", type(module).__name__)))
    return seen


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_hooks(name, change, device):
    data = graph(device)
    model, seen = MODELS[name]().to(device, torch.float64), []

    def run():
        watched = copy.deepcopy(model)
        calls = watch(watched, change)
        x = data.x.clone().requires_grad_()
        found = [t for _ in range(3) for t in gradients(watched(x, data.edge_index), watched, x)]
        seen.append(calls)
        return found

    same(run)
    assert seen[0] == seen[1] and len(seen[0]) > 3 * 2 * 6


@pytest.mark.parametrize("hook", EACH_HOOK)
def test_one_hook(hook, device):
    """Layers with a hook of one kind alone may be served otherwise than those with all."""
    data, model, counts = graph(device), MODELS["GAT"]().to(device, torch.float64), []

    def run():
        watched, counted = copy.deepcopy(model), []
        handles = [getattr(conv, f"register_{hook}")(lambda *given: counted.append(len(given))) for conv in watched.convs]
        x = data.x.clone().requires_grad_()
        found = gradients(watched(x, data.edge_index), watched, x)
        for handle in handles:
            handle.remove()
        counts.append((*counted, len(counted)))
        return [*found, *gradients(watched(x, data.edge_index), watched, x)]

    assert same(run).kernels
    assert counts[0] == counts[1] and counts[0][-1] == 2


EXPLAINERS = {
    "GNNExplainer": (lambda: explain.GNNExplainer(epochs=8), "model", "attributes"),
    "PGExplainer": (lambda: explain.PGExplainer(epochs=2), "phenomenon", None),
    "AttentionExplainer": (lambda: explain.AttentionExplainer(), "model", None),
    "CaptumExplainer": (lambda: explain.CaptumExplainer("IntegratedGradients"), "model", "attributes"),
}
EXPLAINED = [(name, model) for name in ("GNNExplainer", "PGExplainer") for model in ("GCN", "GraphSAGE", "GAT")]


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")  # as PGExplainer does
@pytest.mark.parametrize(("algorithm", "name"), [*EXPLAINED, ("AttentionExplainer", "GAT"), ("CaptumExplainer", "GCN")])
def test_explainers(algorithm, name, device):
    make, kind, node_mask = EXPLAINERS[algorithm]
    if algorithm == "CaptumExplainer":
        pytest.importorskip("captum", reason="captum is not installed")
    data, trained = graph(device), MODELS[name]().to(device, torch.float64).eval()

    def run():
        torch.manual_seed(0)
        model = copy.deepcopy(trained)
        before = model(data.x, data.edge_index).detach()
        explainer = explain.Explainer(
            model,
            make().to(device, torch.float64),
            explanation_type=kind,
            node_mask_type=node_mask,
            edge_mask_type="object",
            model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
        )
        given = {} if kind == "model" else {"target": data.y}
        if algorithm == "PGExplainer":
            for epoch in range(2):
                for index in (3, 17):
                    explainer.algorithm.train(epoch, model, data.x, data.edge_index, index=index, **given)
        explanation = explainer(data.x, data.edge_index, index=3, **given)
        masks = [explanation.edge_mask, *([explanation.node_mask] if node_mask else [])]
        return [before, *masks, model(data.x, data.edge_index).detach()]

    assert same(run, tolerance=1e-5).kernels
