"""The counts that the pages quote, by tools/bench.py; its ranks are forked from the server of this process."""

import json
import pathlib
import sys

import pytest

import forks
from width import NIGHTLY

TOOLS = pathlib.Path(__file__).parents[2] / "tools"


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs ``tools/bench.py`` with these arguments in a folder of its own; the JSON that it wrote."""
    monkeypatch.syspath_prepend(TOOLS)
    import bench
    from benchmarks import process

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "PRELOADED", forks.PRELOADED)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench.py", *arguments, "--json", "found.json"])
        assert bench.main() == 0
        return json.loads((tmp_path / "found.json").read_text())

    return run


def values(report, name, **where):
    """Of stock and of the overlay."""
    (row,) = [row for row in report["rows"] if row["name"] == name and row["where"] == where]
    return row["stock"], row["overlay"]


@pytest.mark.skipif(not NIGHTLY, reason="three processes start: only at night")
def test_groups(bench):
    report = bench("groups", "--ones", "16")
    expected = {"torchtitan": (18, 11), "accelerate": (5, 6), "ones": (3, 3)}
    assert {recipe: values(report, "groups", recipe=recipe) for recipe in expected} == expected
    assert values(report, "new_group calls", recipe="ones") == (3 * 16, 3)
    assert all(target["met"] for target in report["targets"])


def test_plans(bench):
    """All pairs on (2, 2, 2): what the pages quote, and the cost of plans as a sum; a change of either is seen here."""
    report = bench("plans")
    from make_pages import read as figures

    quoted = figures()
    for kind, pairs_ in (("moves", "702 moves"), ("reductions", "999 reductions")):
        for name, row, size in (("collectives", "collectives", 1), ("elements", "bytes to the busiest rank", 4)):
            one = quoted[f"{kind}.{name}"]
            assert values(report, row, pairs=pairs_) == (size * one.stock, size * one.overlay)
    assert all(target["met"] for target in report["targets"])
