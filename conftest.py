"""Runs the examples of the Markdown pages: every ```python block, one namespace a page."""

import doctest
import pathlib

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from torch_overlay import versions

collect_ignore = ["torch_overlay/_startup"]  # runs when Python starts, and does something
# Where another file stands in for one of ours, ours can't be imported as a file of its own, nor elsewhere the other.
collect_ignore_glob = ["torch_overlay/compat/before_*"]
for folder in map(pathlib.Path, versions.older_folders()):
    collect_ignore += [f"torch_overlay/distributed/{path.name}" for path in folder.glob("_*[a-z].py")]

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/developers/*.md"],
).pytest()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """With ``-n`` (pytest-xdist) a file stays on one worker, where what it starts for all its tests starts once."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadfile"
