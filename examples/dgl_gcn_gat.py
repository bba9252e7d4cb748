"""Node classification with a GCN and a GAT on a whole graph: python dgl_gcn_gat.py [cpu | cuda]"""

import gnnfast  # noqa: F401 - the one line

import dgl.nn as dglnn  # isort: skip
import torch
import torch.nn as nn
import torch.nn.functional as F
from dgl_data import chosen_device, cora


class GCN(nn.Module):
    def __init__(self, in_size, hid_size, out_size):
        super().__init__()
        self.layers = nn.ModuleList()
        self.layers.append(dglnn.GraphConv(in_size, hid_size, activation=F.relu))
        self.layers.append(dglnn.GraphConv(hid_size, out_size))
        self.dropout = nn.Dropout(0.5)

    def forward(self, g, features):
        h = features
        for i, layer in enumerate(self.layers):
            if i != 0:
                h = self.dropout(h)
            h = layer(g, h)
        return h


class GAT(nn.Module):
    def __init__(self, in_size, hid_size, out_size, heads=(8, 1)):
        super().__init__()
        self.gat_layers = nn.ModuleList()
        self.gat_layers.append(dglnn.GATConv(in_size, hid_size, heads[0], feat_drop=0.6, attn_drop=0.6, activation=F.elu))
        self.gat_layers.append(dglnn.GATConv(hid_size * heads[0], out_size, heads[1], feat_drop=0.6, attn_drop=0.6))

    def forward(self, g, inputs):
        h = inputs
        for i, layer in enumerate(self.gat_layers):
            h = layer(g, h)
            h = h.mean(1) if i == 1 else h.flatten(1)
        return h


@torch.no_grad()
def evaluate(g, features, labels, mask, model):
    model.eval()
    predicted = model(g, features)[mask].argmax(dim=1)
    return (predicted == labels[mask]).float().mean().item()


def train(g, features, labels, model, epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    train_mask = g.ndata["train_mask"]
    for _ in range(epochs):
        model.train()
        loss = F.cross_entropy(model(g, features)[train_mask], labels[train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    device = chosen_device(__doc__)
    g, num_classes = cora()
    g = g.to(device)
    features, labels = g.ndata["feat"], g.ndata["label"]
    for cls, hid_size in ((GCN, 16), (GAT, 8)):
        torch.manual_seed(0)
        model = cls(features.shape[1], hid_size, num_classes).to(device)
        loss = train(g, features, labels, model, epochs=60)
        accuracy = evaluate(g, features, labels, g.ndata["test_mask"], model)
        print(f"{cls.__name__} on {device}: loss {loss:.3f}, test accuracy {accuracy:.3f}")
