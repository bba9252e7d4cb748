"""Node classification with an RGCN on a heterogeneous graph: python dgl_rgcn.py [cpu | cuda]"""

import gnnfast  # noqa: F401 - the one line

import dgl.nn as dglnn  # isort: skip
import torch
import torch.nn as nn
import torch.nn.functional as F
from dgl_data import chosen_device, library


class RGCN(nn.Module):
    def __init__(self, in_size, hid_size, out_size, rel_names):
        super().__init__()
        self.conv1 = dglnn.HeteroGraphConv(
            {rel: dglnn.GraphConv(in_size, hid_size, norm="right") for rel in rel_names}, aggregate="sum"
        )
        self.conv2 = dglnn.HeteroGraphConv(
            {rel: dglnn.GraphConv(hid_size, out_size, norm="right") for rel in rel_names}, aggregate="sum"
        )

    def forward(self, graph, inputs):
        h = self.conv1(graph, inputs)
        h = {k: F.relu(v) for k, v in h.items()}
        return self.conv2(graph, h)


@torch.no_grad()
def evaluate(g, features, labels, mask, model):
    model.eval()
    predicted = model(g, features)["paper"][mask].argmax(dim=1)
    return (predicted == labels[mask]).float().mean().item()


def train(g, features, labels, mask, model, epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        model.train()
        loss = F.cross_entropy(model(g, features)["paper"][mask], labels[mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    device = chosen_device(__doc__)
    torch.manual_seed(0)
    g, num_classes = library()
    g = g.to(device)
    # Nodes have no features that say something: each gets an embedding of its own to learn.
    embeddings = nn.ParameterDict({kind: nn.Parameter(0.5 * g.nodes[kind].data["feat"]) for kind in g.ntypes}).to(device)
    labels, train_mask = g.nodes["paper"].data["label"], g.nodes["paper"].data["train_mask"]
    model = RGCN(16, 32, num_classes, g.etypes).to(device)
    model.embeddings = embeddings
    loss = train(g, dict(embeddings.items()), labels, train_mask, model, epochs=40)
    accuracy = evaluate(g, dict(embeddings.items()), labels, ~train_mask, model)
    print(f"RGCN on {device}: loss {loss:.3f}, test accuracy {accuracy:.3f}")
