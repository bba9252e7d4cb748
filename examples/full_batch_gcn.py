"""A GCN on a citation graph, the whole graph in each step."""

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
        x = self.conv1(x, edge_index).relu()
        return self.conv2(F.dropout(x, training=self.training), edge_index)


args = arguments(epochs=30)
torch.manual_seed(0)
data, classes = citations()
data = data.to(args.device)
model = GCN(data.num_features, classes).to(args.device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
begin = time.time()
for _ in range(args.epochs):
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    right = model(data.x, data.edge_index).argmax(1) == data.y
print(f"loss {loss.item():.3f}, test accuracy {right[data.test_mask].float().mean().item():.3f}, {time.time() - begin:.1f} s")
print(gnnfast.report())
