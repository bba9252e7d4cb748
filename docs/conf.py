"""How the pages are built: ``make docs``."""

import re

import gnnfast

project = "gnnfast"
author = "the authors of gnnfast"
version = release = gnnfast.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "gnnfast"
html_copy_source = False
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # docstrings say what the types alone do not: shapes and dtypes
napoleon_use_rtype = False


def _links_to_files(_app, _page, text):
    """Files of the repository that are no pages, such as results, are for download."""
    text[0] = re.sub(r"\]\((\.\./(?:\.\./)?[^)#.][^)#]*\.md)(?:#[^)]*)?\)", r"](path:\1)", text[0])


def setup(app):
    app.connect("source-read", _links_to_files)
