"""The tables of the pages that a tool writes are up to date."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))

import make_pages


def test_every_table_is_up_to_date_and_stands_in_a_page():
    assert not make_pages.stale(), "run `python tools/make_pages.py` and commit the pages"
    texts = [path.read_text(encoding="utf-8") for path in make_pages.PAGES]
    found = {part["name"] for text in texts for part in make_pages.PART.finditer(text)}
    assert found == set(make_pages.parts())
