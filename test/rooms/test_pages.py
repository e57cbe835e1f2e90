"""The pages that people read: links lead on, examples run, each option is explained."""

import dataclasses
import pathlib
import re

import pytest

from torch_overlay.choices import DEFAULT

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_and_prompts_stand_in_blocks_that_run(page):
    """conftest.py runs the blocks marked ``python``."""
    text = page.read_text(encoding="utf-8")
    assert not [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not [block for language, block in FENCE.findall(text) if ">>> " in block and language != "python"]


def test_options_page_has_a_row_for_each_option():
    """Name and default as they are in the code."""
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", text, re.MULTILINE)
    assert rows == [(f.name, repr(f.default).replace("'", '"')) for f in dataclasses.fields(DEFAULT)]
