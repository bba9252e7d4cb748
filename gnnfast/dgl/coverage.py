"""How each convolution and operator of the installed DGL is served: ``python -m gnnfast.dgl.coverage > docs/coverage_dgl.md``."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from gnnfast.dgl.backend import OPS, REDUCES
from gnnfast.dgl.install import LAYERS
from gnnfast.dgl.layers import make_checked

# Message functions by their name in dgl.function: how gspmm calls them. Others, fused with nothing, are made on edges first.
_FUSED = {"copy_u": "copy_lhs", "u_mul_e": "mul", "u_div_e": "div", "u_add_e": "add", "u_sub_e": "sub", "copy_e": "copy_rhs"}
_ENDS = {f"{a}_{op}_{b}" for a, b in (("u", "v"), ("v", "u")) for op in ("add", "sub", "mul", "div")}
_ATTENTION = ("GATConv", "GATv2Conv", "DotGatConv", "AGNNConv")
_OPTIONAL = ("EdgeWeightNorm",)  # which layers call where edges are given weights
_TYPED = {
    "RelGraphConv": "one aggregation over the edges of all types, and the matrix of each",
    "HGTConv": "attention over a row for each source and type of edges",
}
_BY_FEATURE = ("CFConv", "GatedGCNConv", "NNConv")  # whose edges have a weight for each feature, or a matrix
_SERVED = {*OPS, "div"}  # the last as a product
_OPERATORS = ("copy_lhs", "mul", "div", "add", "sub", "copy_rhs")
_WHY = {"copy_rhs": "rows of edges are read once"}


class Row(NamedTuple):
    """``served`` is how much of a class gnnfast does, ``how`` by what, or why not."""

    name: str
    served: str
    how: str


class Uses(NamedTuple):
    """What the code of a class calls: functions of ``dgl.function`` that make messages and that reduce, functions of its own in
    their place, and DGL's own ops."""

    messages: set[str]
    own: set[str]
    softmax: bool
    products: bool


def rows() -> list[Row]:
    """One for each class in ``dgl.nn.pytorch.conv``, by name."""
    package = importlib.import_module("dgl.nn.pytorch.conv")
    names = [
        m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("cugraph")
    ]  # which need another library
    found = {}
    for module in (importlib.import_module(f"{package.__name__}.{name}") for name in names):
        for name, cls in vars(module).items():
            exported = name in package.__all__ and inspect.isclass(cls) and cls.__module__ == module.__name__
            if exported:
                found[name] = _row(cls)
    return sorted(found.values())


def _row(cls: Any) -> Row:
    layer = next((layer for layer in LAYERS if layer.name == cls.__name__), None)
    if layer is not None and layer.make is not make_checked:
        what = "attention" if cls.__name__ in _ATTENTION else "linear parts, aggregation and bias"
        return Row(cls.__name__, "as a whole", _TYPED.get(cls.__name__, what))
    uses = _uses(cls)
    ours = [f"SpMM of {name}" for name in sorted(uses.messages) if _FUSED.get(name) in _SERVED]
    ours += [f"both ends of edges ({name})" for name in sorted(uses.messages & _ENDS)]
    ours += ["dot products of edges"] * ("u_dot_v" in uses.messages) + ["edge softmax"] * uses.softmax
    theirs = sorted(name for name in uses.messages if _FUSED.get(name) not in _SERVED and name not in {"u_dot_v", *_ENDS})
    ours += ["functions of its own as they run"] * bool(uses.own)
    theirs += ["typed products"] * uses.products
    checked = ", in-degrees checked once a graph" if layer is not None else ""
    if not ours and not theirs:
        return Row(cls.__name__, "DGL's own", "there is no message passing of its own")
    if not ours:
        return Row(cls.__name__, "DGL's own", f"{', '.join(theirs)}{checked}")
    ours = [f"{what} where a weight is for a head" if cls.__name__ in _BY_FEATURE and "u_mul_e" in what else what for what in ours]
    if not theirs and cls.__name__ not in _BY_FEATURE and not uses.messages & _ENDS and not uses.own:
        return Row(cls.__name__, "fused", f"{', '.join(ours)}{checked}")
    rest = f"; DGL's own: {', '.join(theirs)}" if theirs else ""
    return Row(cls.__name__, "in part", f"{', '.join(ours)}{checked}{rest}")


def _uses(cls: Any) -> Uses:
    """What the source of a class calls, with its bases and whatever else of DGL's convolutions it names."""
    found, waiting = [], [cls]
    while waiting:
        thing = waiting.pop()
        if thing in found:
            continue
        found.append(thing)
        waiting += [c for c in getattr(thing, "__mro__", ())[1:] if _is_conv(c)]
        scope = vars(inspect.getmodule(thing))
        named = {
            scope.get(node.id) for node in ast.walk(_tree(thing)) if isinstance(node, ast.Name) and _is_conv(scope.get(node.id))
        }
        waiting += named
    messages, own, softmax, products = set(), set(), False, False
    for tree in map(_tree, found):
        # Names that stand for functions of dgl.function.
        builtin = {
            t.id
            for n in ast.walk(tree)
            if isinstance(n, ast.Assign) and _names_fn(n.value)
            for t in n.targets
            if isinstance(t, ast.Name)
        }
        for node in ast.walk(tree):
            if _names_fn(node):
                messages.add(node.func.attr)  # type: ignore[attr-defined]
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                softmax = softmax or name == "edge_softmax"
                products = products or name in ("gather_mm", "segment_mm", "TypedLinear")
                if name in ("update_all", "apply_edges"):
                    own |= {ast.unparse(a) for a in node.args if _is_own(a, builtin)}
    return Uses(messages - set(REDUCES), own, softmax, products)


def _is_conv(thing: Any) -> bool:
    plain = inspect.isclass(thing) or inspect.isfunction(thing)
    return plain and thing.__module__.startswith("dgl.nn.pytorch.conv.") and thing.__name__ not in _OPTIONAL


def _names_fn(node: Any) -> bool:
    """Whether an expression is a call of a function of ``dgl.function``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return isinstance(node.func.value, ast.Name) and node.func.value.id in ("fn", "ops")


def _is_own(argument: ast.expr, builtin: set[str]) -> bool:
    """Whether what is given for a message or a reduction is the layer's own: a lambda, a method or what a name stands for."""
    if isinstance(argument, ast.Name):
        return argument.id not in builtin
    of_self = isinstance(argument, ast.Attribute) and isinstance(argument.value, ast.Name) and argument.value.id == "self"
    return isinstance(argument, ast.Lambda) or of_self


def _tree(thing: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(thing)))


def _operators() -> Iterator[str]:
    """The table of gspmm: who aggregates, on a CPU."""
    yield f"| message | {' | '.join(REDUCES)} | why |"
    yield "|---" * (len(REDUCES) + 2) + "|"
    for op in _OPERATORS:
        name = next(n for n, o in _FUSED.items() if o == op)
        yield f"| `{name}` | {' | '.join(['gnnfast'] * len(REDUCES))} | {_WHY.get(op, 'no row per edge, weights by head too')} |"


def markdown() -> str:
    """The page."""
    import dgl

    lines = [
        "# What gnnfast does in DGL's layers and operators",
        "",
        f"Made for DGL {dgl.__version__} by `python -m gnnfast.dgl.coverage`. A row says how calls are served that no option or",
        "input keeps from it; `gnnfast.report()` says it for a model, with the reason wherever less is done. Calls too small to",
        "gain run as DGL wrote them.",
        "",
        "- *as a whole*: the layer's forward pass is gnnfast's; frames and edge data are not made.",
        "- *fused*: messages never exist; one kernel gathers, multiplies and reduces.",
        "- *in part*: some of its message passing is gnnfast's, the rest runs on DGL's kernels.",
        "",
        "On a GPU, where PyPI's DGL has no kernels, gnnfast does all of it.",
        "",
        "| class | served | by |",
        "|---|---|---|",
        *(f"| {name} | {served} | {how} |" for name, served, how in rows()),
        "",
        "## Operators on a CPU",
        "",
        "Aggregations (`gspmm`: `update_all`, `dgl.ops.u_mul_e_sum` and their like):",
        "",
        *_operators(),
        "",
        "What an edge has may be one value for all features or one for each head (dimensions of 1 at its end, as many others",
        "as the features have), or as many as these. Other broadcasts are DGL's, and so are features that are not float32,",
        "float64, float16 or bfloat16, and several edge types in one call (`multi_update_all` and `HeteroGraphConv` make one call",
        "for each). `e_mul_u`, and messages with a `v` in them, are made on edges first, and then summed as `copy_e`. Functions of",
        "your own run as they are, on rows that need not exist: [what that takes](dgl.md#functions-of-your-own).",
        "",
        "Edges (`gsddmm`: `apply_edges`, `dgl.ops.u_add_v` and their like): of features of one shape at both ends, dot",
        "products are gnnfast's, and so are sums, differences, products and quotients of a million float32 values or more. All",
        "others, which write a row per edge too, are left to DGL.",
        "`edge_softmax` by destination and by source is gnnfast's; DGL's where only some edges take part. `segment_reduce`,",
        "`segment_mm`, `gather_mm` and `scatter_add` are DGL's.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(), end="")
