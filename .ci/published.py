"""Makes a source tree the one that is uploaded: ``python published.py TREE REPOSITORY``.

A project's page on PyPI shows README beside nothing else, so its links become absolute ones into the repository, at the tag of the
version, and instead of cloning it says to install. Where the repository is becomes part of the metadata.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?)\[([^][]*)\]\(([^()\s]+)\)")
CLONE = re.compile(r"```\ngit clone <this repository>.*?```\n", re.DOTALL)
INSTALL = "```\npip install gnnfast    # needs torch >= 2.10\n```\n"


def readme(text: str, repository: str, version: str) -> str:
    """README as it is shown far from the files it links to."""

    def absolute(link: re.Match[str]) -> str:
        image, words, target = link.groups()
        if re.match(r"\w+:|#", target):
            return link.group()
        return f"{image}[{words}]({repository}/{'raw' if image else 'blob'}/v{version}/{target})"

    text, found = CLONE.subn(INSTALL, text)
    if found != 1:
        raise SystemExit("README does not say once how it is installed from <this repository>")
    return LINK.sub(absolute, text)


def pyproject(text: str, repository: str, version: str) -> str:
    """The project's metadata, with its URLs."""
    urls = {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/v{version}/docs/index.md",
        "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    lines = [f'{name} = "{url}"' for name, url in urls.items()]
    head, scripts, tail = text.partition("[project.scripts]\n")
    if not scripts:
        raise SystemExit("pyproject.toml has no [project.scripts], before which its URLs are put")
    return "\n".join([f"{head}[project.urls]", *lines, "", f"{scripts}{tail}"])


def main(tree: str, repository: str) -> int:
    root, repository = Path(tree), repository.rstrip("/")
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", repository):
        raise SystemExit(f"REPOSITORY is {repository!r}, and must be like https://example.org/owner/gnnfast")
    metadata = (root / "pyproject.toml").read_text()
    version = re.search(r'^version = "([^"]+)"$', metadata, re.MULTILINE)
    if version is None:
        raise SystemExit("pyproject.toml names no version")
    for name, make in (("README.md", readme), ("pyproject.toml", pyproject)):
        (root / name).write_text(make((root / name).read_text(), repository, version[1]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
