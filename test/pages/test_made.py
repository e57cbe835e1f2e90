"""The tables of the pages that a tool writes: up to date, and each figure with a command that exists."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import bench  # noqa: E402
import make_pages  # noqa: E402

from torch_overlay.series import PATCHES  # noqa: E402

FIGURES = make_pages.read()


def test_every_table_is_up_to_date_and_stands_in_a_page():
    assert not make_pages.stale(), "run `python tools/make_pages.py` and commit the pages"
    texts = [path.read_text(encoding="utf-8") for path in make_pages.PAGES]
    found = {part["name"] for text in texts for part in make_pages.PART.finditer(text)}
    assert found == set(make_pages.parts())


@pytest.mark.parametrize("figure", FIGURES.values(), ids=list(FIGURES))
def test_a_figure_has_a_command_and_a_value(figure):
    script, *rest = figure.command.split()
    assert script == "-m" or (ROOT / script).is_file()
    assert script != "tools/bench.py" or rest[0] in bench.BENCHES
    assert (figure.stock is None) == (figure.overlay is None) and (figure.stock is None) != (figure.ratio is None)


def test_the_front_page_quotes_the_figures():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{FIGURES['wrong.lengths'].stock} of the 16 lengths from 1 to 16 come back wrong" in readme


def test_every_patch_and_its_end_are_on_the_page():
    page = (ROOT / "docs" / "developers" / "retired.md").read_text(encoding="utf-8")
    assert {patch.ends for patch in PATCHES if patch.ends} == set(make_pages.BRINGS)
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("| ")]
    ended = {(name, cells[1]): cells[0] for cells in rows for name in re.split(", (?=`)", cells[2])}
    for patch in PATCHES:
        end = ended[make_pages.said(patch), patch.kind.value].removeprefix("| ")
        assert end == (make_pages.link(patch.ends) if patch.ends else "-")
