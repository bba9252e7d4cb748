"""The documentation: examples of docstrings run, and pages made from the code are what the code says."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import json
import re
from pathlib import Path

import pytest
import torch

import gnnfast

ROOT = Path(__file__).parents[1]
GENERATOR = ROOT / "docs" / "generate.py"
PUBLIC = [name for name in gnnfast.__all__ if name != "__version__"]
# Their example is a script: it needs a GPU, or they are only caught.
NO_DOCTEST = ("capture", "CaptureError", "FallbackError")

needs_pages = pytest.mark.skipif(not GENERATOR.is_file(), reason="the tests run outside of the source tree, which has the pages")


def _examples(name):
    thing = getattr(gnnfast, name)
    holders = [thing] if not inspect.isclass(thing) else [thing, *(f for f in vars(thing).values() if inspect.getdoc(f))]
    parser = doctest.DocTestParser()
    for holder in holders:
        text = inspect.getdoc(getattr(holder, "__func__", holder)) or ""
        found = parser.get_doctest(text, {"gnnfast": gnnfast, "torch": torch}, name, None, 0)
        if found.examples:
            yield found


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in NO_DOCTEST])
def test_examples_of_docstrings(name):
    found = list(_examples(name))
    assert found, f"the docstring of gnnfast.{name} has no example"
    printed = []
    for example in found:
        doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=printed.append)
    assert not printed, "".join(printed)


@needs_pages
def test_generated_pages():
    spec = importlib.util.spec_from_file_location("generate", GENERATOR)
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for page, make in generate.PAGES.items():
        assert (ROOT / "docs" / page).read_text() == make(), "run python docs/generate.py"


@needs_pages
def test_every_public_name_has_its_place():
    reference = (ROOT / "docs" / "api.rst").read_text()
    missing = [name for name in PUBLIC if not re.search(rf"^\.\. auto\w+:: {name}$", reference, re.M)]
    assert not missing


# ---- numbers -------------------------------------------------------------------------------------------------------------------
# A measured number is the text of a link to the result that holds it, or stands in a table under a comment that names it.
MEASURED = re.compile(r"(?<![\w.`])\d[\d.,]*(?:\s?(?:ms|us|GiB|MiB|GB|TB/s|points)\b|\s?x\b| times\b|\s?%)")
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
TABLE = re.compile(r"<!-- numbers from (\S+) -->\n((?:\|.*\n)+)")
MADE = re.compile(r"<!-- made: .*?<!-- end -->", re.S)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)
PROSE = sorted(p for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if p.name not in ("settings.md", "coverage_pyg.md"))
# What is no measurement: a limit or a rule of the code, or the amount of a loss that is asked for.
RULES = {"README.md": [], "sampling.md": ["1%"], "getting_started.md": []}


def _numbers(text):
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)", text)


def _holds(file, number, name=""):
    """Whether a number stands in a file, in a line that has the name."""
    pattern = rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)"
    return any(name in line and re.search(pattern, line) for line in file.read_text().splitlines())


@needs_pages
@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_measured_numbers_are_in_the_results_that_they_link_to(page):
    text = CODE.sub("", MADE.sub("", page.read_text()))
    for name, rows in TABLE.findall(text):
        for line in rows.splitlines()[2:]:
            row = [cell.strip() for cell in line.strip("|").split("|")]
            layer = row[0].partition(",")[0]
            for cell in row:
                assert not re.fullmatch(r"[\d.]+", cell) or _holds(ROOT / name, cell, layer), (
                    f"{name} does not have {cell} of {layer}"
                )
    for words, target in LINK.findall(text):
        if "/results/" in target:
            file = (page.parent / target).resolve()
            missing = [n for n in _numbers(words) if " cells" not in words and " graphs" not in words and not _holds(file, n)]
            assert file.is_file() and not missing, f"{target} does not have {missing}"
    left = [n for n in MEASURED.findall(LINK.sub("", TABLE.sub("", text))) if n not in RULES.get(page.name, [])]
    assert not left, f"numbers without a result: {left}"


@needs_pages
@pytest.mark.parametrize(
    "page", [*PROSE, *(ROOT / "docs" / "contributing").glob("*.md"), ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(page):
    for _, target in LINK.findall(CODE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", t.lower().replace("`", "")).replace(" ", "-") for t in titles]
            assert anchor in slugs, f"{target}: {slugs}"


# ---- lists of layers -----------------------------------------------------------------------------------------------------------
@needs_pages
def test_the_readme_names_the_operators_that_coverage_has():
    """The table of layers is made (``test_generated_pages``)."""
    coverage, readme = ((ROOT / name).read_text() for name in ("docs/coverage_dgl.md", "README.md"))
    operators = set(re.findall(r"^\| `(\w+)` \| gnnfast", coverage, re.MULTILINE))
    assert operators and operators <= set(re.findall(r"`(\w+)`", readme))
    assert all(
        f"| {kind} | {first}" in readme for kind, first in (("as a whole", "AGNNConv"), ("fused", "APPNP"), ("in part", "CFConv"))
    )


@needs_pages
def test_headline_chart():
    record = json.loads((ROOT / "benchmarks/results/h200-2026-11-25/layers_all.json").read_text())
    rows = [row for row in record["rows"] if row["graph"] == "arxiv"]
    times = {f"{row[column]:#.3g}" for row in rows for column in ("PyG ms", "gnnfast ms")}
    labels = re.findall(r">(\d+\.\d+)</text>", (ROOT / "docs" / "headline.svg").read_text())
    assert len(labels) == 12 and set(labels) <= times
