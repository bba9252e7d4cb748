"""The documentation: examples of docstrings run, and pages made from the code are what the code says."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
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
