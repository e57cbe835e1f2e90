"""The tables of the pages that a tool writes are up to date, and the changelog names what is stable."""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))

import make_pages

import torch_overlay


def test_every_table_is_up_to_date_and_stands_in_a_page():
    assert not make_pages.stale(), "run `python tools/make_pages.py` and commit the pages"
    texts = [path.read_text(encoding="utf-8") for path in make_pages.PAGES]
    found = {part["name"] for text in texts for part in make_pages.PART.finditer(text)}
    assert found == set(make_pages.parts())


def test_the_changelog_names_the_public_api():
    text = (make_pages.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (stable,) = re.findall(r"^\*\*Stable names\*\*:(.*?)\*\*", text, re.MULTILINE | re.DOTALL)
    assert {*re.findall(r"`([\w.]+)`", stable)} == {*torch_overlay.__all__, "torch_overlay.errors"}
