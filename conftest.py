"""Runs the examples of the Markdown pages: every ```python block, one namespace a page."""

import doctest

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

collect_ignore = ["torch_overlay/_startup"]  # runs when Python starts, and does something

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS), SkipParser()],
    patterns=["README.md", "docs/*.md"],
).pytest()
