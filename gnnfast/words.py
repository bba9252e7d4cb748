"""What counters mean, in words that users of PyG and DGL know: kernels, reasons, and what would make a call fast."""

from __future__ import annotations

import re

FRAMEWORKS = {"pyg": "PyG", "dgl": "DGL"}

# What a kernel's name in the counters stands for: the first pattern that matches the whole name.
KERNELS = (
    (r"gar dot", "dot product of each edge (CSR)"),
    (r"gas dot", "dot product of each edge (COO)"),
    (r"(?:linear and )?gar (\w+)(?: and linear)?", r"\1 over edges grouped by destination (CSR)"),
    (r"(?:linear and )?gas (\w+)(?: and linear)?", r"\1 over edges as they come (COO)"),
    (r"several reductions", "several reductions, each neighbour read once"),
    (r"softmax aggregation", "softmax aggregation, each neighbour read once"),
    (r"gates, (\w+)", r"\1 of gates, no row per edge"),
    (r"attention", "attention in one kernel, nothing per edge"),
    (r"edge softmax", "softmax over the edges of each node"),
    (r"sparse features (\w+)", r"\1 of features without their zeros"),
    (r"sparse product", "linear layer on features without their zeros"),
    (r"sampled (\w+)", r"\1 over a sample of the edges"),
    (r"linear first", "linear layer before the aggregation"),
    (r"gathers and reductions", "message() and aggregation, over gnnfast's gathers"),
    (r"gathers and ([\w ]+)", r"message(), gathered and reduced (\1) by gnnfast"),
    (r"chunks of edges", "message(), in chunks that fit the memory"),
    (r"edges", "both ends of each edge, in one pass"),
    (r"edges (\w+)", r"\1 over rows of edges"),
    (r"rows of edges", "operations of message() on rows of edges"),
    (r"function of edges", "your function, what it can of it at nodes"),
    (r"by edge type", "one edge type after the other"),
    (r"in parts", "attention in several kernels"),
    (r"in one operation|remembered|remembered structure", "GCN normalisation"),
    (r"on the host", "DGL on the host"),
    (r"PyG's own", "PyG's own operations"),
)
# Counted beside the aggregation that they belong to.
PARTS = ("linear first", "sparse product", "in one operation", "remembered", "remembered structure", "on the host", "in parts",
         "rows of edges")  # fmt: skip

# Kernels around the framework's own code: what of a call that code is.
OWN_CODE = (
    (r"gathers and reductions", "message() and aggregation run over rows of edges"),
    (r"gathers and .*|chunks of edges|rows of edges", "message() makes rows of edges"),
)

SMALL = re.compile(r"too small to gain|a small graph that was not met before")  # left alone: the host decides
CONVERTED = re.compile(r"converting pays|on a CPU converting costs less")  # this call made CSR of a graph first
SCATTERED = re.compile(r"cheaper than converting so far|converting takes longer than scattering")  # a graph too new to convert

# What a user can do about a reason: the first pattern that is found in it.
ADVICE = (
    (r"hooks are registered|global module hooks", "remove the hooks, or register them on the model rather than on the layer"),
    (r"explainer is active", "nothing to do: explainers need PyG's own messages"),
    (r"decomposed_layers", "leave decomposed_layers at 1: gnnfast makes no tensor per edge that would need it"),
    (r"the adjacency is a|edge_index is a |src is a |a sparse matrix|the sparse matrix|the SparseTensor",
     "pass edge_index [2, E] as a tensor"),
    (r"edge_index is computed within", "make edge_index an argument of the compiled function"),
    (r"edge_index is torch\.|edge_index is .* of shape", "pass edge_index as [2, E] of int64 or int32"),
    (r"is not contiguous", "call .contiguous() once, before training"),
    (r"on different devices", "move features and edge_index to one device"),
    (r"no kernels for device type", "gnnfast has kernels for cpu and cuda"),
    (r"built without nvcc|build without CUDA|is not in the installed package|cannot be loaded", "run `gnnfast doctor`"),
    (r"x has layout|x stores entries", "x.to_sparse_csr() before training"),
    (r"captured", "run the step twice before it is captured"),
    (r"torch\.func|forward-mode|TorchDispatchMode|ONNX|torch\.jit", "nothing to do: kernels cannot follow it"),
    (r"autocast", "run this layer under torch.autocast(device, enabled=False)"),
    (r"features are torch\.|is torch\.(float8|int|bool|complex)", "use float32, float64, float16 or bfloat16 features"),
    (r"is overridden|overrides a method|is not the known one|is another than the layer's",
     "inherit the method, or give message() as x_j or edge_weight * x_j"),
    (r"size is not a pair|the number of nodes is not known", "pass size=(number of sources, number of destinations)"),
    (r"sizes do not fit", "check the sizes of features, edge_index and size="),
    (r"invalid input", "check the ids in edge_index: each must be below the number of nodes"),
    (r"several edge types", "one edge type at a time: multi_update_all, g[etype], or dgl.to_homogeneous"),
    (r"torch\.compile is tracing", "leave the DGL model out of torch.compile"),
    (r"only some edges take part", "give edge_softmax all edges"),
    (r"a Python function", "use built-in functions, such as dgl.function.u_mul_e and dgl.function.sum"),
    (r"reduce is '", "sum, mean, max and min are served"),
    (r"op is |reduce is |operands are of |at both ends",
     "in update_all() copy_u and u_mul_e with sum, mean, max, min are served, on a CPU copy_e, u_add_e and u_sub_e too; "
     "in apply_edges() u_dot_v, on a CPU u_add_v, u_sub_v, u_mul_v and u_div_v too"),
    (r"faster in DGL|are faster to train", "nothing to do: DGL is faster here"),
    (r" runs \w+( on|$)", "what it does to each row of one end alone costs less before message passing, a row for each node"),
    (r"message\(\) is not x_j", "gnnfast.profile() says what message() takes; x_j and edge_weight * x_j are served without it"),
    (r"do not agree", "the same dtype and device for features and the layer, or torch.autocast"),
    (r"an option is not served", "leave the layer's options at their defaults, where the model allows"),
    (r"flow is target_to_source", "build the layer with flow='source_to_target' and flip edge_index"),
    (r"not passed to propagate", "pass it to propagate() by name"),
    (r"a small graph that was not met before", "nothing to do for a mini-batch; else keep one graph instead of making it again"),
    (r"too small to gain", "larger batches"),
    (r"too many nodes or edges", "gnnfast takes ids of 32 bits: split the graph"),
    (r"(?:is|are) a \w", "pass a plain torch.Tensor"),
    (r"weights of shape", "weights must be one an edge, or one an edge and head"),
    (r"there is no kernel for heads so wide", "use narrower heads"),
    (r"aggregation is|the layer aggregates something else", "sum, mean, max, min, several of these, and softmax are served"),
    (r"do not fit", "check the shapes that are passed"),
)  # fmt: skip


def place(name: str) -> tuple[str, str]:
    """The layer and the framework of a counter's place: ``("GCNConv", "PyG")`` for ``"pyg GCNConv"``; none for gnnfast's own."""
    first, _, rest = name.partition(" ")
    return (rest, FRAMEWORKS[first]) if first in FRAMEWORKS else (name, "")


def label(name: str) -> str:
    """A counter's place as users read it: ``"GCNConv (PyG)"``."""
    layer, framework = place(name)
    return f"{layer} ({framework})" if framework else layer


def own_code(kernel: str) -> str:
    """What of a call a kernel leaves to the framework's own code; empty if nothing."""
    return next((words for pattern, words in OWN_CODE if re.fullmatch(pattern, kernel)), "")


def kernel(name: str) -> str:
    """A kernel's name in words."""
    for pattern, words in KERNELS:
        found = re.fullmatch(pattern, name)
        if found:
            text = found.expand(words)
            before, after = name.startswith("linear and "), name.endswith(" and linear")
            return ("linear layer, then " if before else "") + text + (", then linear layer" if after else "")
    return name


def advice(reason: str) -> str:
    """What would make a call fast that was left to the framework for this reason; empty if nothing is known."""
    return next((words for pattern, words in ADVICE if re.search(pattern, reason)), "")
