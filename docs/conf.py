"""The site: ``sphinx-build -W -b html docs out/site``. The pages are Markdown that GitHub shows, too."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch_overlay  # noqa: E402

project = "torch_overlay"
author = "torch_overlay contributors"
release = version = torch_overlay.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

root_doc = "index"
html_theme = "furo"
html_title = f"torch_overlay {release}"
html_show_copyright = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]  # code and tables that stay inside of a narrow window
html_last_updated_fmt = None  # the same pages give the same site

# Anchors as GitHub makes them, so that one link serves both.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# Every name in backticks of a docstring that looks like ours must be there; names of torch lead nowhere.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!torch_overlay(\.|$)).*")]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

LISTED = re.compile(r"^\| \[([^]]+)\]\(([a-z_/]+)\.md\) \|", re.MULTILINE)
INDEXES = (root_doc, "developers/index")


def add_toctree(app, page, source):
    """The pages in the order of an index's table; Sphinx warns of what neither index lists."""
    if page in INDEXES:
        pages = "\n".join(f"{title} <{name}>" for title, name in LISTED.findall(source[0]))
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def setup(app):
    app.connect("source-read", add_toctree)
    return {"parallel_read_safe": True}
