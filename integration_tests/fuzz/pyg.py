"""Cases over PyG's layers."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import random
import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor

import gnnfast
from fuzz.formulas import Formulas, formula
from fuzz.world import F, World


def _pyg() -> Any:
    import torch_geometric.nn as nn

    return nn


@functools.cache
def user_classes() -> dict[str, Any]:
    from torch_geometric.nn import MessagePassing

    class Plain(MessagePassing):
        def forward(self, x, edge_index, edge_weight=None):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return x_j

    class Weighted(MessagePassing):
        def forward(self, x, edge_index, edge_weight=None):
            return self.propagate(edge_index, x=x, edge_weight=edge_weight)

        def message(self, x_j, edge_weight):
            return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j

    class Updated(Plain):
        def forward(self, x, edge_index, edge_weight=None):
            return self.propagate(edge_index, x=x, root=x)

        def update(self, inputs, root):
            return inputs + 2 * root

    class StaticUpdate(Updated):
        @staticmethod
        def update(inputs, root):
            return 3 * inputs

    class Gathers(Plain):
        def _index_select(self, src, index):
            return 3 * super()._index_select(src, index)

    class Checks(Plain):
        def _check_input(self, edge_index, size):
            raise ValueError("mine")

    class Cached(Plain):
        @functools.lru_cache(None)  # noqa: B019
        def message(self, x_j):
            return x_j

    class Own(Plain):
        def aggregate(self, inputs, index, ptr=None, dim_size=None):
            return 2 * super().aggregate(inputs, index, ptr, dim_size)

    return {c.__name__: c for c in (Plain, Weighted, Updated, StaticUpdate, Gathers, Checks, Cached, Own)}


@functools.cache
def formula_class() -> Any:
    from torch_geometric.nn import MessagePassing
    from torch_geometric.utils import softmax

    class Formula(Formulas, MessagePassing):
        """Whose message is a random formula of what both ends and the edge have."""

        def __init__(self, tree, constant, **options):
            super().__init__(**options)
            self.tree, self.constant = tree, constant
            self.make_parameters()

        def forward(self, x, edge_index, edge_weight=None):
            ids = torch.arange(edge_index.shape[1], device=x.device, dtype=x.dtype)
            attr = torch.stack([ids.cos(), ids.sin()], 1)
            return self.propagate(edge_index, x=x, attr=attr if self.constant else attr * self.shift.sum())

        def message(self, x_i, x_j, attr, index, size_i):
            given = {"x_i": x_i, "x_j": x_j, "attr": attr, "softmax": lambda score: softmax(score, index, num_nodes=size_i)}
            found = self.value(self.tree, given)
            return found.expand(-1, F) if found.shape[1] == 1 else found

    return Formula


class _OfEdges(torch.nn.Module):
    """A layer whose edges have two features."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        ids = torch.arange(edge_index.shape[1], device=x.device, dtype=x.dtype)
        return self.layer(x, edge_index, torch.stack([ids.cos(), ids.sin()], 1))  # type: ignore[no-any-return]


def pyg_layer(r: random.Random) -> tuple[str, Any]:
    """A layer from F to F features, called as (x, edge_index, edge_weight or None)."""
    nn, yes, aggr = _pyg(), lambda: r.random() < 0.5, r.choice(["sum", "mean", "max", "min"])
    flow = r.choice(["source_to_target"] * 3 + ["target_to_source"])

    def unweighted(layer: Any) -> Any:
        return lambda x, e, w: layer(x, e)

    makers = {
        "GCNConv": lambda: nn.GCNConv(F, F, cached=yes(), improved=yes(), add_self_loops=yes(), bias=yes(), flow=flow),
        "GCNConv as given": lambda: nn.GCNConv(F, F, normalize=False, bias=yes(), flow=flow),
        "SAGEConv": lambda: nn.SAGEConv(F, F, aggr=aggr, root_weight=yes(), project=yes(), normalize=yes(), bias=yes()),
        "GraphConv": lambda: nn.GraphConv(F, F, aggr=aggr, bias=yes()),
        "GINConv": lambda: nn.GINConv(torch.nn.Linear(F, F), train_eps=yes()),
        "SGConv": lambda: nn.SGConv(F, F, K=r.choice([1, 2]), cached=r.random() < 0.2, add_self_loops=yes()),
        "SSGConv": lambda: nn.SSGConv(F, F, alpha=0.1, K=2, cached=r.random() < 0.2),
        "TAGConv": lambda: nn.TAGConv(F, F, K=2, normalize=yes()),
        "APPNP": lambda: nn.APPNP(K=2, alpha=0.1, cached=yes(), dropout=r.choice([0.0, 0.5])),
        "LGConv": lambda: nn.LGConv(normalize=yes()),
        "MixHopConv": lambda: nn.MixHopConv(F, 2, powers=[0, 1, 2]),
        "ARMAConv": lambda: nn.ARMAConv(F, F, num_stacks=2, num_layers=2),
        "GatedGraphConv": lambda: nn.GatedGraphConv(F, 2, aggr=aggr),
        "SimpleConv": lambda: nn.SimpleConv(aggr, flow=flow),
        "ChebConv": lambda: nn.ChebConv(F, F, K=2),
        "WLConvContinuous": lambda: nn.WLConvContinuous(),
        "ClusterGCNConv": lambda: nn.ClusterGCNConv(F, F),
        "GATConv": lambda: nn.GATConv(
            F, 3, heads=2, add_self_loops=yes(), residual=yes(), bias=yes(), dropout=r.choice([0.0, 0.5])
        ),
        # Two heads: with int32 ids torch's scatter, and so PyG, fails for three.
        "GATConv mean": lambda: nn.GATConv(F, F, heads=2, concat=False, add_self_loops=yes(), negative_slope=0.9),
        "GATv2Conv": lambda: nn.GATv2Conv(F, 3, heads=2, add_self_loops=yes(), share_weights=yes()),
        "GATv2Conv edges": lambda: _OfEdges(nn.GATv2Conv(F, 3, heads=2, edge_dim=2, add_self_loops=yes(), residual=yes())),
        "TransformerConv": lambda: nn.TransformerConv(F, 3, heads=2, beta=yes(), bias=yes(), dropout=r.choice([0.0, 0.5])),
        "AGNNConv": lambda: nn.AGNNConv(add_self_loops=yes()),
        "PNAConv": lambda: nn.PNAConv(
            F,
            4,
            r.sample(["mean", "min", "max", "std", "var", "sum"], 3),
            ["identity", "amplification"],
            torch.tensor([1, 2, 3]),
            towers=2,
            divide_input=yes(),
            flow=flow,
        ),
        "ResGatedGraphConv": lambda: nn.ResGatedGraphConv(F, F),
        "FeaStConv": lambda: nn.FeaStConv(F, F, heads=2),
        "SuperGATConv": lambda: nn.SuperGATConv(F, 3, heads=2, attention_type=r.choice(["MX", "SD"])).eval(),
        "GENConv": lambda: nn.GENConv(F, F, aggr=r.choice(["softmax", "softmax", "std", "max"]), learn_t=yes()),
        "CGConv": lambda: nn.CGConv(F),
        "EdgeConv": lambda: nn.EdgeConv(torch.nn.Linear(2 * F, F), aggr=aggr),
        "FiLMConv": lambda: nn.FiLMConv(F, F, aggr=aggr),
        "LEConv": lambda: nn.LEConv(F, F),
        "GeneralConv": lambda: nn.GeneralConv(F, F, heads=2, attention=yes()),
        "MultiAggregation": lambda: nn.SAGEConv(F, F, aggr=["mean", "max", "var"]),
        "Formula": lambda: formula_class()(formula(r, 4), yes(), aggr=r.choice([aggr, "sum", "mean", "softmax"]), flow=flow),
        **{name: (lambda c=c: c(aggr=aggr, flow=flow)) for name, c in user_classes().items()},
    }
    common = ["GCNConv", "SAGEConv", "GraphConv", "Plain", "Weighted", "GATConv", "TransformerConv", "Formula"]
    name = r.choice([*makers, *common * 3])
    layer = makers[name]()
    layer.takes_weight = name in (
        "GCNConv", "GCNConv as given", "GraphConv", "SGConv", "SSGConv", "TAGConv", "APPNP", "LGConv", "MixHopConv", "ARMAConv", "GatedGraphConv",
        "SimpleConv", "ChebConv", "WLConvContinuous", "Weighted",
    )  # fmt: skip
    return name, layer


class Pyg(World):
    steps: ClassVar[dict[str, int]] = {
        "train": 10, "evaluate": 10, "change_edges": 3, "change_weight": 6, "change_x": 4, "optimise": 6, "cast": 2, "copy": 2,
        "reset": 1, "other_graph": 3, "toggle": 1, "norm": 3, "cached": 3, "patch": 3, "hook": 1, "freeze": 1, "sparse": 2,
        "default_dtype": 1,
    }  # fmt: skip

    def __init__(self, seed: int, device: str, on: bool) -> None:
        super().__init__(seed, device, on)
        r = random.Random(seed)
        torch.manual_seed(seed)
        self.name, layer = pyg_layer(r)
        self.layers = [layer.to(device, torch.float64) for layer in (layer, copy.deepcopy(layer))]
        self.weight_kind = r.choice(["none", "constant", "constant", "leaf", "parameter", "parameter"])
        self.x_kind, self.x_form = r.choice(["constant", "leaf", "parameter"]), r.choice(["plain"] * 3 + ["relu", "strided", "nan"])
        # Which of their gradients are then finite is not PyG's: products with parameters, and variances, are made at nodes.
        finite = ("PNAConv", "AGNNConv", "GeneralConv", "SuperGATConv", "FeaStConv", "Formula", "MultiAggregation")
        if self.name in finite and self.x_form == "nan":
            self.x_form = "plain"
        self.edge_form = r.choice(["plain"] * 4 + ["strided", "EdgeIndex", "int32"])
        self.settings = r.choice([{}] * 4 + [{"kernel": "gas"}, {"kernel": "gar"}, {"feature_density_threshold": 1.0}])
        # Which of several loops of a node gives its weight is open on a GPU: PyG writes them to one place in any order.
        self.one_loop = device != "cpu" and self.layers[0].takes_weight
        self.graphs = [self.graph(r) for _ in range(2)]
        self.at = 0

    def graph(self, r: random.Random) -> dict[str, Any]:
        n = r.choice([1, 2, 5, 12])
        e = r.choice([0, 1, 8, 30])
        found: dict[str, Any] = {"n": n, "e": e, "base": self.edges(r, n, e)}
        found["edge_index"] = self.form(found["base"], n)
        x = self.randn(n, F)
        if self.x_form == "relu":
            x = x.relu()
        elif self.x_form == "strided":
            x = self.randn(F, n).t()
        elif self.x_form == "nan" and n:
            x[0, 0], x[-1, -1] = float("nan"), float("inf")
        found["x"] = self.leaf(x, self.x_kind)
        weight = None if self.weight_kind == "none" or not self.layers[0].takes_weight else self.rand(e) + 0.1
        if self.one_loop and n == 1 and e > 1:
            weight = None
        found["weight"] = None if weight is None else self.leaf(weight, self.weight_kind)
        return found

    def edges(self, r: random.Random, n: int, e: int) -> Tensor:
        kind = r.choice(["random", "random", "hub", "sorted", "loops"])
        src, dst = self.ids(n, e), self.ids(n, e)
        if kind == "hub":
            dst = torch.zeros_like(dst)
        elif kind == "sorted":
            dst = dst.sort().values
        elif kind == "loops":
            src = dst.clone()
        if self.one_loop:
            loops = (src == dst).nonzero().view(-1)
            first = {node: at for at, node in reversed(list(zip(loops.tolist(), src[loops].tolist())))}
            again = [at for at in loops.tolist() if at not in first.values()]
            dst[again] = (dst[again] + 1) % max(n, 1)
        return torch.stack([src, dst])

    def form(self, base: Tensor, n: int) -> Any:
        if self.edge_form == "strided":
            return base.t().contiguous().t()
        if self.edge_form == "int32":  # never trained: torch's index_add, in PyG's backward pass, is wrong for strided gradients
            return base.int()
        if self.edge_form == "EdgeIndex":
            from torch_geometric import EdgeIndex

            return EdgeIndex(base, sparse_size=(n, n))
        return base

    # ---- use -----------------------------------------------------------------------------------------------------------------
    @property
    def now(self) -> dict[str, Any]:
        return self.graphs[self.at]

    def call(self, layer: Any, x: Tensor, edge_index: Any = None) -> Tensor:
        g = self.now
        edge_index = g["edge_index"] if edge_index is None else edge_index
        # Dropout as the framework draws it, so that both sides have the same.
        with gnnfast.override(dropout="framework", **self.settings) if self.on else contextlib.nullcontext():
            if self.name == "ClusterGCNConv" or not layer.takes_weight:
                return layer(x, edge_index)
            return layer(x, edge_index, g["weight"])

    def train(self, r: random.Random) -> None:
        if self.edge_form == "int32":
            return self.evaluate(r)
        layer, g = r.choice(self.layers).train(), self.now
        leaves = [t for t in (g["x"], g["weight"], *layer.parameters()) if t is not None and t.requires_grad]
        hidden = r.random() < 0.6
        x = g["x"] * 1 if hidden else g["x"]
        after = r.choice(["", "", "x.relu_", "x +=", "out.relu_"])
        out = self.call(layer, x)
        if hidden and after == "x.relu_":
            x.relu_()
        elif hidden and after == "x +=" and out.shape == x.shape:
            x += out
        elif after == "out.relu_":
            out = (out * 1).relu_()
        if out.requires_grad:
            self.gradients(r, f"train {after}", out, leaves)
        else:
            self.record("train", out)

    def evaluate(self, r: random.Random) -> None:
        layer = r.choice(self.layers).eval()
        mode = r.choice([torch.no_grad, torch.no_grad, torch.inference_mode, contextlib.nullcontext])
        for _ in range(r.choice([1, 2, 3])):
            with mode():
                self.record("evaluate", self.call(layer, self.now["x"]))

    # ---- changes ---------------------------------------------------------------------------------------------------------------
    def change_edges(self, r: random.Random) -> None:
        g = self.now
        new = self.edges(r, g["n"], g["e"])
        how, edge_index = r.choice(["copy_", "column", "data =", "new"]), g["edge_index"]
        plain = type(edge_index) is Tensor
        if how == "copy_" or (how == "data =" and not plain):
            (edge_index if plain else g["base"]).copy_(new)
        elif how == "column" and g["e"]:
            first = (edge_index if plain else edge_index.as_tensor())[:, 0]
            first.copy_(first.new_tensor([0, g["n"] - 1 if self.one_loop else 0]))
        elif how == "data =":
            edge_index.data = new.to(edge_index.dtype)
        elif how == "new":
            g["base"] = new
            g["edge_index"] = self.form(new, g["n"])

    def copy(self, r: random.Random) -> None:
        how = r.choice(["deepcopy", "pickle", "state_dict"])
        if how == "deepcopy":
            self.layers[1] = copy.deepcopy(self.layers[0])
        elif how == "state_dict":
            self.layers[1].load_state_dict(self.layers[0].state_dict())
        elif self.name not in user_classes() and self.name != "Formula":
            self.layers[1] = pickle.loads(pickle.dumps(self.layers[0]))

    def reset(self, r: random.Random) -> None:
        if hasattr(self.layers[0], "reset_parameters"):
            self.layers[0].reset_parameters()

    def freeze(self, r: random.Random) -> None:
        for t in (self.now["weight"], *self.layers[0].parameters()):
            if t is not None and t.is_leaf:
                t.requires_grad_(not t.requires_grad)

    # ---- what is remembered ------------------------------------------------------------------------------------------------------
    def norm(self, r: random.Random) -> None:
        import torch_geometric.transforms as T
        from torch_geometric.data import Data
        from torch_geometric.nn.conv.gcn_conv import gcn_norm

        g = self.now
        if type(g["edge_index"]) is not Tensor:
            return
        arguments = (g["edge_index"], g["weight"], g["n"], r.random() < 0.5, r.random() < 0.7)
        how = r.choice(["mul_", "requires_grad_", "ids", "transform", "none"])
        if how == "transform":
            data = Data(
                edge_index=g["edge_index"], edge_weight=None if g["weight"] is None else g["weight"].detach(), num_nodes=g["n"]
            )
            first, second = T.GCNNorm()(data), T.GCNNorm()(data)
            first.edge_weight.mul_(3)
            self.record("GCNNorm", second.edge_index.long(), second.edge_weight)
            return
        for _ in range(2):
            index, weight = gcn_norm(*arguments)
            self.record("gcn_norm", index.long(), weight, index.requires_grad, weight.requires_grad, weight.dtype)
            if how == "mul_":
                weight.detach().mul_(2)
            elif how == "requires_grad_" and weight.is_leaf:
                weight.requires_grad_()
            elif how == "ids" and index is not g["edge_index"] and index.numel():
                index[:, 0] = 0
        self.record("evaluate", self.call(self.layers[0].eval(), g["x"].detach()))

    def cached(self, r: random.Random) -> None:
        for layer in self.layers:
            layer.eval()
            self.call(layer, self.now["x"].detach())
        kept = getattr(self.layers[0], "_cached_edge_index", None)
        if kept is not None and kept[1] is not None:
            kept[1].detach().mul_(2)
        for layer in self.layers:
            self.record("evaluate after a change of what layer 0 keeps", self.call(layer, self.now["x"].detach()))
        if kept is not None:
            for layer in self.layers:
                layer._cached_edge_index = None

    def default_dtype(self, r: random.Random) -> None:
        from torch_geometric.nn.conv.gcn_conv import gcn_norm

        g = self.now
        if type(g["edge_index"]) is not Tensor:
            return
        for dtype in (torch.float64, torch.float32):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            self.undo.append(lambda before=before: torch.set_default_dtype(before))
            self.record("gcn_norm by default dtype", gcn_norm(g["edge_index"], None, g["n"])[1])

    def sparse(self, r: random.Random) -> None:
        g = self.now
        if (
            self.name not in ("GCNConv", "SAGEConv", "GraphConv", "GINConv", "Weighted")
            or self.layers[0].flow != "source_to_target"
        ):
            return
        i = (g["base"][1], g["base"][0])
        values = (g["weight"].detach() if g["weight"] is not None else self.rand(g["e"])).to(g["x"].dtype, copy=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adj = torch.sparse_coo_tensor(torch.stack(i), values, (g["n"], g["n"])).coalesce().to_sparse_csr()
            layout = r.choice(["csr", "coo"])
            adj = adj if layout == "csr" else adj.to_sparse_coo()
            x = g["x"].detach().nan_to_num(0, 0, 0)
            for _ in range(2):
                self.record(f"sparse {layout}", self.layers[0].eval()(x, adj))
                with torch.no_grad():
                    (adj.values() if layout == "csr" else adj._values()).mul_(2)

    # ---- other functions in PyG's place ------------------------------------------------------------------------------------------
    def patch(self, r: random.Random) -> None:
        from torch_geometric.nn import MessagePassing, aggr
        from torch_geometric.nn.aggr import base

        def scaled(owner: Any, name: str, factor: float) -> None:
            old = vars(owner)[name]

            def other(*args: Any, **kwargs: Any) -> Any:
                found = old(*args, **kwargs)
                return factor * found if isinstance(found, Tensor) else found

            setattr(owner, name, other)
            self.undo.append(lambda: setattr(owner, name, old))

        def recode(function: Any, other: Any) -> None:
            old = function.__code__
            function.__code__ = other.__code__
            self.undo.append(lambda: setattr(function, "__code__", old))

        self.record("before", self.call(self.layers[0].eval(), self.now["x"].detach()))
        what = r.choice(["aggregate", "update", "_index_select", "scatter", "sum", "message code", "aggregate code", "instance"])
        layer = self.layers[0]
        if what in ("aggregate", "_index_select"):
            scaled(MessagePassing, what, 3.0)
        elif what == "update":
            old = MessagePassing.update
            MessagePassing.update = lambda self, inputs: 3 * inputs
            self.undo.append(lambda: setattr(MessagePassing, "update", old))
        elif what == "scatter":
            scaled(base, "scatter", 3.0)
        elif what == "sum":
            for kind in (aggr.SumAggregation, aggr.MeanAggregation, aggr.MaxAggregation, aggr.MinAggregation):
                scaled(kind, "forward", 3.0)
        elif what == "message code" and self.name == "Plain":

            def message(self, x_j):
                return 2 * x_j

            recode(user_classes()["Plain"].message, message)
        elif what == "aggregate code":

            def aggregate(self, inputs, index, ptr=None, dim_size=None):
                return 2 * self.aggr_module(inputs, index, ptr=ptr, dim_size=dim_size, dim=self.node_dim)

            recode(MessagePassing.aggregate, aggregate)
        elif what == "instance":
            old = layer.aggregate
            layer.aggregate = lambda *args, **kwargs: 3 * old(*args, **kwargs)
            self.undo.append(lambda: layer.__dict__.pop("aggregate"))
        self.record(f"with another {what}", self.call(layer, self.now["x"].detach()))
        while self.undo:
            self.undo.pop()()
        self.record("and without", self.call(layer, self.now["x"].detach()))

    def hook(self, r: random.Random) -> None:
        layer = self.layers[0].eval()
        double = lambda *args: 2 * args[-1]  # noqa: E731
        register = r.choice(
            [
                lambda: layer.register_propagate_forward_hook(double),
                lambda: layer.register_message_forward_hook(double),
                lambda: layer.register_aggregate_forward_hook(double),
                lambda: layer.register_forward_hook(double),
                lambda: layer.aggr_module.register_forward_hook(double),
            ]
        )
        handle = register()
        self.undo.append(handle.remove)
        self.record("hooked", self.call(layer, self.now["x"].detach()))
