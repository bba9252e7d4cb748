"""Node classification with GraphSAGE on sampled neighbours: python dgl_sage_sampling.py [cpu | cuda]"""

import gnnfast  # noqa: F401 - the one line

import dgl  # isort: skip
import dgl.nn as dglnn  # isort: skip
import torch
import torch.nn as nn
import torch.nn.functional as F
from dgl.dataloading import DataLoader, MultiLayerFullNeighborSampler, NeighborSampler
from dgl_data import chosen_device, cora


class SAGE(nn.Module):
    def __init__(self, in_size, hid_size, out_size):
        super().__init__()
        self.layers = nn.ModuleList()
        self.layers.append(dglnn.SAGEConv(in_size, hid_size, "mean"))
        self.layers.append(dglnn.SAGEConv(hid_size, out_size, "mean"))
        self.dropout = nn.Dropout(0.5)

    def forward(self, blocks, x):
        h = x
        for i, (layer, block) in enumerate(zip(self.layers, blocks)):
            h = layer(block, h)
            if i != len(self.layers) - 1:
                h = self.dropout(F.relu(h))
        return h


@torch.no_grad()
def evaluate(g, nodes, model, device):
    model.eval()
    loader = DataLoader(g, nodes, MultiLayerFullNeighborSampler(2), device=device, batch_size=512)
    right = 0
    for _, _, blocks in loader:
        predicted = model(blocks, blocks[0].srcdata["feat"]).argmax(1)
        right += (predicted == blocks[-1].dstdata["label"]).sum().item()
    return right / len(nodes)


def train(g, nodes, model, device, epochs):
    sampler = NeighborSampler([10, 10], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    loader = DataLoader(g, nodes, sampler, device=device, batch_size=64, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    for _ in range(epochs):
        model.train()
        for _, _, blocks in loader:
            loss = F.cross_entropy(model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


if __name__ == "__main__":
    device = chosen_device(__doc__)
    torch.manual_seed(0)
    dgl.seed(0)
    g, num_classes = cora()  # sampled on the CPU, blocks go to the device
    model = SAGE(g.ndata["feat"].shape[1], 32, num_classes).to(device)
    loss = train(g, g.ndata["train_mask"].nonzero().view(-1), model, device, epochs=15)
    accuracy = evaluate(g, g.ndata["test_mask"].nonzero().view(-1), model, device)
    print(f"GraphSAGE on {device}: loss {loss:.3f}, test accuracy {accuracy:.3f}")
