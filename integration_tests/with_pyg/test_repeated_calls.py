"""What a layer gives over a graph on a CPU does not depend on whether it has met the graph before, to the last bit: so it is in PyG, of
which tests compare two calls."""

from __future__ import annotations

import pytest
import torch
from gnnfast.benchmarks import convs

F = 16
GRAPHS = {4: 6, 30: 200, 300: 3000}  # nodes, edges


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("nodes", GRAPHS)
@pytest.mark.parametrize("name", convs.ALL)
@pytest.mark.usefixtures("small")
def test_no_call_differs_from_another(name, nodes, training):
    torch.manual_seed(0)
    layer, edge_index = convs.ALL[name](F, F).eval(), torch.randint(nodes, (2, GRAPHS[nodes]))
    x = torch.randn(nodes, F, requires_grad=training)
    with torch.set_grad_enabled(training):
        first, *others = (layer(x, edges) for edges in (edge_index, edge_index, edge_index, edge_index.clone()))
    assert all(torch.equal(first, other) for other in others)
