"""The pages that people read: what looks like an example runs as one, links lead on, each option is explained."""

import dataclasses
import re

import pytest

import house
from torch_overlay.choices import DEFAULT

PAGES = [house.ROOT / "README.md", *sorted((house.ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prompts_stand_in_blocks_that_run(page):
    """conftest.py runs the blocks marked ``python``; a prompt in any other is an example that nobody checks."""
    idle = [text for language, text in FENCE.findall(page.read_text()) if ">>> " in text and language != "python"]
    assert not idle


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


def test_every_page_is_in_the_index():
    index = house.ROOT / "docs" / "index.md"
    listed = set(re.findall(r"^\| \[[^]]+\]\(([^)]+\.md)\) \|", index.read_text(), re.MULTILINE))
    pages = {page.relative_to(index.parent).as_posix() for page in PAGES if index.parent in page.parents}
    assert listed == pages - {"index.md"}


def test_options_page_has_a_row_for_each_option():
    """Name and default as they are in the code."""
    text = (house.ROOT / "docs" / "options.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", text, re.MULTILINE)
    assert rows == [(f.name, repr(f.default).replace("'", '"')) for f in dataclasses.fields(DEFAULT)]
