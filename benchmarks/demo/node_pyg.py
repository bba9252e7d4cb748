"""A plain PyG training script: node classification, full batch. Only the import of gnnfast was added."""

import argparse
import json
import resource
import time

import torch
import torch.nn.functional as F
from demo_data import load
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

import gnnfast

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=["GCN", "GraphSAGE", "GIN"])
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--dropout", type=float, default=0.5)
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data, num_classes = load()
data = data.to(device)


def conv(inputs, outputs):
    if args.model == "GCN":
        return GCNConv(inputs, outputs)
    if args.model == "GraphSAGE":
        return SAGEConv(inputs, outputs)
    return GINConv(torch.nn.Sequential(torch.nn.Linear(inputs, 64), torch.nn.ReLU(), torch.nn.Linear(64, outputs)))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = conv(data.num_features, 64), conv(64, num_classes)

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, args.dropout, self.training)
        return self.conv2(x, edge_index)


model = Net().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
losses, times = [], []
for _ in range(args.epochs):
    begin = time.perf_counter()
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    times.append(time.perf_counter() - begin)

model.eval()
with torch.no_grad():
    correct = (model(data.x, data.edge_index).argmax(1) == data.y)[data.test_mask]
memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
result = {
    "accuracy": correct.float().mean().item(),
    "losses": losses,
    "epoch_ms": 1e3 * sorted(times)[len(times) // 2],
    "memory": memory,
}
print(json.dumps(result | {"gnnfast": gnnfast.report().as_dict(), "device": str(device)}))
