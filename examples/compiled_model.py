"""The same GCN under torch.compile, in one graph: its layers stay served."""

import time

import torch
import torch.nn.functional as F
from data import arguments, citations
from torch_geometric.nn import GCNConv

import gnnfast  # the only line that was added


class GCN(torch.nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(features, 64), GCNConv(64, classes)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


args = arguments(epochs=10)
torch.manual_seed(0)
data, classes = citations()
data = data.to(args.device)
model = GCN(data.num_features, classes).to(args.device)
compiled = torch.compile(model, fullgraph=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
begin = time.time()
for _ in range(args.epochs):
    optimizer.zero_grad()
    loss = F.cross_entropy(compiled(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
with torch.no_grad():
    right = model(data.x, data.edge_index).argmax(1) == data.y
print(f"loss {loss.item():.3f}, test accuracy {right[data.test_mask].float().mean().item():.3f}, {time.time() - begin:.1f} s")
print(gnnfast.report())
