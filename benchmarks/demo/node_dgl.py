"""A plain DGL training script: node classification, full batch. Only the import of gnnfast was added."""

import argparse
import json
import resource
import time

import gnnfast

import dgl  # isort: skip
import torch
import torch.nn.functional as F
from demo_data import load
from dgl.nn import GraphConv, SAGEConv

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=["GCN", "GraphSAGE"])
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--dropout", type=float, default=0.5)
args = parser.parse_args()

torch.manual_seed(args.seed)
data, num_classes = load()
graph = dgl.graph((data.edge_index[0], data.edge_index[1]), num_nodes=data.num_nodes)


def conv(inputs, outputs):
    if args.model == "GCN":
        return GraphConv(inputs, outputs)
    return SAGEConv(inputs, outputs, "mean")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = conv(data.num_features, 64), conv(64, num_classes)

    def forward(self, g, x):
        x = self.conv1(g, x).relu()
        x = F.dropout(x, args.dropout, self.training)
        return self.conv2(g, x)


if args.model == "GCN":
    graph = dgl.add_self_loop(graph)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
losses, times = [], []
for _ in range(args.epochs):
    begin = time.perf_counter()
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(graph, data.x)[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    times.append(time.perf_counter() - begin)

model.eval()
with torch.no_grad():
    correct = (model(graph, data.x).argmax(1) == data.y)[data.test_mask]
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
result = {
    "accuracy": correct.float().mean().item(),
    "losses": losses,
    "epoch_ms": 1e3 * sorted(times)[len(times) // 2],
    "memory": memory,
}
print(json.dumps(result | {"gnnfast": gnnfast.report().as_dict(), "device": "cpu"}))
