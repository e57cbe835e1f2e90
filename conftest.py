"""Runs the examples of the Markdown pages: every ```python block, one namespace a page."""

import doctest

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

collect_ignore = ["torch_overlay/_startup"]  # runs when Python starts, and does something

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/developers/*.md"],
).pytest()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """With ``-n`` (pytest-xdist) a file stays on one worker, where what it starts for all its tests starts once."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadfile"
