"""Random programs with gnnfast and without. ``--fuzz-cases N`` runs more of them, ``--fuzz-seed`` others."""

from __future__ import annotations

import pytest
import torch
from fuzz.cases import run_case

CHUNKS = 20


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_cases(framework, chunk, device, request):
    if framework == "pyg":
        pytest.importorskip("torch_geometric", reason="PyG is not installed")
    else:
        pytest.importorskip("dgl")
    share = {"pyg": 3, "dgl": 1}[framework]  # of four
    count = request.config.getoption("--fuzz-cases") * share // (4 * CHUNKS)
    first = request.config.getoption("--fuzz-seed") + chunk * count
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the graphs are tiny
    try:
        differences = [run_case(framework, seed, str(device)) for seed in range(first, first + count)]
    finally:
        torch.set_num_threads(threads)
    differences = [d for d in differences if d]
    assert not differences, "\n".join(differences)
