"""GraphSAGE on sampled neighbourhoods, a new graph in each step. The loader samples with pyg-lib or torch-sparse where they are
installed; without them this script draws neighbours itself, so that it runs everywhere."""

import time

import torch
import torch.nn.functional as F
from data import arguments, citations
from torch_geometric.nn import SAGEConv
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
from torch_geometric.utils import subgraph

import gnnfast  # the only line that was added


class SAGE(torch.nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = SAGEConv(features, 64), SAGEConv(64, classes)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def batches(data, size):
    """Pairs of a graph whose first ``batch_size`` nodes are those to train on, and their number."""
    if WITH_PYG_LIB or WITH_TORCH_SPARSE:
        from torch_geometric.loader import NeighborLoader

        for batch in NeighborLoader(data, [10, 10], batch_size=size, input_nodes=data.train_mask, shuffle=True):
            yield batch, batch.batch_size
        return
    for seeds in data.train_mask.nonzero()[:, 0].split(size):
        nodes = seeds
        for _ in range(2):  # two hops
            reached = torch.isin(data.edge_index[1], nodes)
            nodes = torch.cat([nodes, data.edge_index[0, reached]]).unique()
        nodes = torch.cat([seeds, nodes[~torch.isin(nodes, seeds)]])
        place = torch.full((data.num_nodes,), -1)
        place[nodes] = torch.arange(nodes.numel())
        edges, _ = subgraph(nodes, data.edge_index, num_nodes=data.num_nodes)
        batch = type(data)(x=data.x[nodes], edge_index=place[edges], y=data.y[nodes])
        yield batch, seeds.numel()


args = arguments(epochs=3)
torch.manual_seed(0)
data, classes = citations()
model = SAGE(data.num_features, classes).to(args.device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
begin = time.time()
for _ in range(args.epochs):
    model.train()
    for batch, size in batches(data, 64):
        batch = batch.to(args.device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x, batch.edge_index)[:size], batch.y[:size])
        loss.backward()
        optimizer.step()
model.eval()
with torch.no_grad():
    whole = data.to(args.device)
    right = model(whole.x, whole.edge_index).argmax(1) == whole.y
print(f"loss {loss.item():.3f}, test accuracy {right[whole.test_mask].float().mean().item():.3f}, {time.time() - begin:.1f} s")
print(gnnfast.report())
