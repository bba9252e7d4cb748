"""A plain DGL training script. Only the import of gnnfast was added."""

import sys

import gnnfast  # noqa: F401

import dgl  # isort: skip
import torch
import torch.nn.functional as F
from demo_data import load
from dgl.nn import GATConv, GraphConv
from measure import training


class Net(torch.nn.Module):
    def __init__(self, conv, num_features, num_classes):
        super().__init__()
        self.conv1, self.conv2 = conv(num_features, 64), conv(64, num_classes)

    def forward(self, blocks, x):
        x = self.conv1(blocks[0], x).flatten(1).relu()
        return self.conv2(blocks[-1], x).flatten(1)


def run(name, conv, graph, epochs, batch_size=None):
    torch.manual_seed(0)
    dgl.seed(0)
    data, num_classes, source = load(graph)
    g = dgl.add_self_loop(dgl.graph((data.edge_index[0], data.edge_index[1]), num_nodes=data.num_nodes))
    model = Net(conv, data.num_features, num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ids = data.train_mask.nonzero().view(-1)
    loader = [(torch.arange(data.num_nodes), ids, [g])]
    if batch_size:
        loader = dgl.dataloading.DataLoader(g, ids, dgl.dataloading.NeighborSampler([10, 10]), batch_size=batch_size, shuffle=True)

    def epoch():
        model.train()
        for inputs, outputs, blocks in loader:
            optimizer.zero_grad()
            out = model(blocks, data.x[inputs] if batch_size else data.x)
            loss = F.cross_entropy(out if batch_size else out[outputs], data.y[outputs])
            loss.backward()
            optimizer.step()
        return loss

    @torch.no_grad()
    def evaluate():
        model.eval()
        return (model([g], data.x).argmax(1) == data.y)[data.test_mask].float().mean()

    training(name, f"{graph} ({source})", epochs, epoch, evaluate)


def gat(inputs, outputs):
    return GATConv(inputs, outputs // 8, 8) if outputs == 64 else GATConv(inputs, outputs, 1)


run("GraphConv", GraphConv, "cora", 40)
for graph in sys.argv[1:]:
    run("GraphConv", GraphConv, graph, 10)
    run("GAT", gat, graph, 10)
    run("GAT mini", gat, graph, 4, batch_size=512)
