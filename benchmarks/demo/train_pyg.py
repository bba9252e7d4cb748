"""A plain PyG training script. Only the import of gnnfast was added."""

import sys

import torch
import torch.nn.functional as F
from demo_data import load
from measure import training
from torch_geometric.loader import RandomNodeLoader
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import gnnfast  # noqa: F401

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(torch.nn.Module):
    def __init__(self, conv, num_features, num_classes):
        super().__init__()
        self.conv1, self.conv2 = conv(num_features, 64), conv(64, num_classes)

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
        return self.conv2(x, edge_index)


def run(name, conv, graph, epochs, parts=1):
    torch.manual_seed(0)
    data, num_classes, source = load(graph)
    batches = [data.to(device)] if parts == 1 else RandomNodeLoader(data, parts, shuffle=True)
    model = Net(conv, data.num_features, num_classes).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch():
        model.train()
        for batch in batches:
            batch = batch.to(device)
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)
            loss = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])
            loss.backward()
            optimizer.step()
        return loss

    @torch.no_grad()
    def evaluate():
        model.eval()
        whole = data.to(device)
        return (model(whole.x, whole.edge_index).argmax(1) == whole.y)[whole.test_mask].float().mean()

    training(name, f"{graph} ({source})", epochs, epoch, evaluate)


def gat(inputs, outputs):
    return GATConv(inputs, outputs // 8, heads=8) if outputs == 64 else GATConv(inputs, outputs)


run("GCN", GCNConv, "cora", 40)
for graph in sys.argv[1:]:
    run("GCN", GCNConv, graph, 10)
    run("SAGE", SAGEConv, graph, 4)
    if graph != "large":  # of whose messages PyG alone would want some 20 GB
        run("GAT", gat, graph, 6)
    run("GCN mini", GCNConv, graph, 8, parts=4)
