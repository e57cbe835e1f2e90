"""The tables of the pages that tools write: up to date, complete, and each figure with a command that exists."""

import doctest
import json
import pathlib
import re
import sys

import pytest

from width import NIGHTLY

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import bench  # noqa: E402
import figures as counting  # noqa: E402
import make_pages  # noqa: E402
from made import clients, compatibility, figures, marks, recipes, retired  # noqa: E402

from torch_overlay.series import PATCHES  # noqa: E402
from torch_overlay.versions import SUPPORTED  # noqa: E402

FIGURES = figures.read()


def test_every_table_is_up_to_date():
    assert not make_pages.stale(), "run `python tools/make_pages.py` and commit the pages"


def test_every_table_stands_in_a_page():
    found = {name for path in make_pages.PAGES for name in marks.names(path.read_text(encoding="utf-8"))}
    assert found == set(make_pages.parts())


@pytest.mark.parametrize("module", [compatibility, figures, marks])
def test_examples_in_docstrings(module):
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


def test_a_changed_table_is_noticed(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(marks.fill("<!-- made by tools/make_pages.py: x -->\n<!-- made: end -->", {"x": "| old |"}))
    monkeypatch.setattr(make_pages, "PAGES", [page])
    monkeypatch.setattr(make_pages, "parts", lambda: {"x": "| new |"})
    assert [*make_pages.stale()] == [page]


@pytest.mark.parametrize("figure", FIGURES.values(), ids=list(FIGURES))
def test_a_figure_has_a_command_and_a_value(figure):
    script, *rest = figure.command.split()
    assert (ROOT / script).is_file()
    if script == "tools/bench.py":
        assert rest[0] in bench.BENCHES
    assert (figure.stock is None) == (figure.overlay is None) and (figure.stock is None) != (figure.ratio is None)
    assert not figure.recipe or figure.recipe in recipes.RECIPES


def test_figures_of_plans_are_those_of_the_golden_files():
    """The overlay's half of the recipe `pairs`, which needs torch and seconds, from what the planner's tests hold."""
    for kind in ("moves", "reductions"):
        golden = (ROOT / "test" / "pure" / "golden" / f"{kind}_2x2x2.txt").read_text(encoding="utf-8")
        arriving = [int(count) // 4 for count in re.findall(r"\)(?: avg| sum)? (\d+) B", golden)]
        assert FIGURES[f"{kind}.collectives"].overlay == len(arriving)
        assert FIGURES[f"{kind}.elements"].overlay == sum(arriving)


def test_the_front_page_quotes_the_figures():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{FIGURES['wrong.lengths'].stock} of the 16 lengths from 1 to 16 come back wrong" in readme


def test_a_figure_that_differs_is_named(monkeypatch):
    quoted = FIGURES["moves.collectives"]
    counted = {one.name: (one.stock, one.overlay) for one in FIGURES.values() if one.recipe == "pairs"}
    monkeypatch.setitem(recipes.RECIPES, "pairs", lambda: counted)
    assert counting.differences("pairs") == {}
    counted[quoted.name] = quoted.stock, 7
    assert counting.differences("pairs") == {quoted.name: (quoted.stock, 7)}


@pytest.mark.skipif(not NIGHTLY, reason="counts stock's plans and groups again: TORCH_OVERLAY_NIGHTLY=1")
@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_figures_are_what_is_counted(recipe):
    assert counting.differences(recipe) == {}


def test_every_patch_and_its_end_are_on_the_page():
    page = (ROOT / "docs" / "developers" / "retired.md").read_text(encoding="utf-8")
    assert {patch.ends for patch in PATCHES if patch.ends} == set(retired.BRINGS)
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("| ")]
    ended = {(name, cells[1]): cells[0] for cells in rows for name in re.split(", (?=`)", cells[2])}
    for patch in PATCHES:
        end = ended[retired.said(patch), patch.kind.value].removeprefix("| ")
        assert end == (retired.link(patch.ends) if patch.ends else "-")


def test_the_table_of_what_was_tested_is_that_of_the_records():
    """Each supported release has a row, and what was only skipped doesn't count as tested."""
    table = compatibility.part()
    assert all(re.search(rf"^\| {re.escape(release)}", table, re.MULTILINE) for release in SUPPORTED)
    assert compatibility._ended({"skipped": 3}) == "not tested"
    assert compatibility._ended({"passed": 1200, "skipped": 3}) == "1,200 passed, 3 skipped"


def test_a_run_is_recorded_by_backend(monkeypatch, tmp_path):
    case = tmp_path / "test_case.py"
    case.write_text("FakeStore = None\ndef test_one(): pass\ndef test_two(): assert 0\n")
    monkeypatch.setattr(compatibility, "FILE", tmp_path / "runs.json")
    for _ in range(2):  # the second record takes the place of the first
        assert compatibility.record(["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(case)]) == 1
    (run,) = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert run["cases"] == {"fake": {"failed": 1, "passed": 1}}


def test_the_table_of_clients_has_what_differs():
    def side(collectives, calls):
        phases = {"save": {"collectives": 2 * collectives, "calls": 2}, "step": {"collectives": 9, "calls": 1}}
        return {"phases": phases, "new_group": calls}

    record = {
        "clients": {"one": {"title": "One", "stock": side(34, 8), "overlay": side(17, 2)}, "two": {"skipped": ""}}
    }
    found = clients.table(record, ("one", "two", "three")).splitlines()[2:]
    assert found == ["| One | collectives: save | 34 | 17 | 2.0x |", "|  | calls of `new_group` | 8 | 2 | 4.0x |"]
    assert clients.table({"clients": {}}, ("one",)) == clients.NONE
