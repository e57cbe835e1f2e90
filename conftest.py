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
release = versions.found()
number = (99,) if release is None else release.number
if number < (2, 10):
    collect_ignore.append("torch_overlay/compat/debug_mode.py")  # there is no DebugMode
# Sections of pages (all, if none is named) whose examples need a later torch: since when, and why.
SINCE = {
    "start.md": ("", (2, 11), "it clears a cache of torch's by a function that came with 2.11"),
    "redistribution.md": ("", (2, 11), "before 2.10 torch has no DebugMode, and its steps are others"),
    "transfer.md": ("", (2, 10), "before 2.10 transfers need the overlay to be on"),
    "state_dicts.md": ("", (2, 10), "before 2.10 transfers need the overlay to be on"),
}

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/developers/*.md"],
).pytest()


def pytest_collection_modifyitems(items):
    """Skip what the running torch is too old for, but not the line by which a page ends what it began."""
    for item in items:
        heading, since, why = SINCE.get(item.path.name, ("", (0,), ""))
        if number < since:
            text = item.path.read_text(encoding="utf-8")
            lines, line = text.splitlines(), item.location[1] - 1
            first = lines.index(heading) if heading else 0
            last = next((n for n in range(first + 1, len(lines)) if heading and lines[n].startswith("## ")), len(lines))
            if first <= line < last and not (heading and "destroy_process_group" in lines[line]):
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """With ``-n`` (pytest-xdist) a file stays on one worker, where what it starts for all its tests starts once."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadfile"
