"""What is uploaded reads well where none of its files are near: README's links are absolute, and lead to files that there are."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://example.org/owner/gnnfast"
pytestmark = pytest.mark.skipif(
    not (ROOT / ".ci" / "published.py").is_file(), reason="the tests run outside of the source tree, which has what is published"
)


@pytest.fixture
def published():
    spec = importlib.util.spec_from_file_location("published", ROOT / ".ci" / "published.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path):
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_links_are_absolute_and_lead_somewhere(published, tree):
    before = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    published.main(str(tree), REPOSITORY + "/")
    readme, version = (tree / "README.md").read_text(), re.search(r'version = "(.+)"', (ROOT / "pyproject.toml").read_text())[1]
    links = re.findall(r"(!?)\[[^][]*\]\(([^)]+)\)", readme)
    assert len(links) == len(before) > 20
    for image, link in links:
        folder = f"{REPOSITORY}/{'raw' if image else 'blob'}/v{version}/"
        assert link.startswith(folder) and (ROOT / link.removeprefix(folder).partition("#")[0]).exists(), link
    assert "pip install gnnfast" in readme and "this repository" not in readme


def test_metadata_has_urls(published, tree):
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")  # which pytest brings
    published.main(str(tree), REPOSITORY)
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    urls = project.pop("urls")
    assert urls["Homepage"] == REPOSITORY and {"Documentation", "Changelog", "Issues"} < urls.keys()
    assert project == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("repository", ["", "github.com/owner/gnnfast", "https://example.org"])
def test_what_is_no_repository_is_refused(published, tree, repository):
    with pytest.raises(SystemExit, match="REPOSITORY is"):
        published.main(str(tree), repository)
    assert (tree / "README.md").read_text() == (ROOT / "README.md").read_text()
