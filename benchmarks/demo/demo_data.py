"""The graph of the demo: Cora through PyG's loader, or, without its files and a network, the karate club that PyG embeds."""

import os
import shutil
import tempfile
from pathlib import Path


def load():
    """The data set's graph with features, labels and masks, and its number of classes."""
    from torch_geometric.datasets import KarateClub, Planetoid
    from torch_geometric.transforms import NormalizeFeatures

    root = Path(os.environ.get("GNNFAST_DEMO_ROOT") or tempfile.mkdtemp(prefix="gnnfast-demo-"))
    folder = Path(os.environ.get("GNNFAST_DATA", "")) / "planetoid"
    raw = root / "Cora" / "raw"
    if folder.is_dir() and not raw.exists():
        raw.mkdir(parents=True)
        for file in folder.glob("ind.cora.*"):
            shutil.copy(file, raw)
        if not (raw / "ind.cora.test.index").exists():
            raise FileNotFoundError(f"{folder} holds no ind.cora.test.index")
    if os.environ.get("GNNFAST_DEMO_GRAPH") == "karate":
        dataset = KarateClub()
        data = dataset[0]
        data.test_mask = ~data.train_mask
        return data, dataset.num_classes
    dataset = Planetoid(str(root), "Cora", transform=NormalizeFeatures())
    return dataset[0], dataset.num_classes
