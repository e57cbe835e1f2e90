"""tools/bench.py on tiny sizes: its JSON has what it says, its counts are what they should be; no times are held."""

import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))


from width import NIGHTLY  # noqa: E402

KEYS = {"bench", "torch", "python", "arguments", "rows", "targets", "notes", "facts"}


@pytest.fixture
def bench(bench_here, tmp_path):
    """Runs the command in this process; the JSON that it wrote."""
    return lambda *arguments: read(tmp_path, arguments[0], bench_here(*arguments, "--json", "found.json"))


def read(folder, name, printed):
    """The JSON of a run; what it printed has every row's name."""
    found = json.loads((folder / "found.json").read_text())
    assert found.keys() == KEYS and found["bench"] == name
    for row in found["rows"]:
        assert row.keys() == {"name", "unit", "stock", "overlay", "where", "gain"}
        assert row["name"] in printed
    for note in found["notes"]:
        assert note in printed
    return found


def value(found, name, side, **where):
    (row,) = [row for row in found["rows"] if row["name"] == name and row["where"] == where]
    return row[side]


def test_groups(bench, tmp_path):
    found = bench("groups", "--ones", "16", "--repeats", "1")
    expected = {  # groups of stock and overlay, and how many of the overlay's are for a whole mesh
        "torchtitan": (18, 11, 1),
        "torchtitan, ranks": (18, 10, 1),
        "accelerate": (5, 6, 1),
        "accelerate, ranks": (5, 3, 1),
        "ones": (3, 3, 0),
        "loop": (20, 25, 1),
    }
    for recipe, (stock, overlay, whole) in expected.items():
        assert value(found, "groups", "stock", recipe=recipe) == stock
        assert value(found, "groups", "overlay", recipe=recipe) == overlay
        sets = [value(found, "distinct rank sets", side, recipe=recipe) for side in ("stock", "overlay")]
        assert sets[1] - sets[0] == whole
    assert value(found, "new_group calls", "stock", recipe="ones") == 3 * 16
    assert value(found, "new_group calls", "overlay", recipe="ones") == 3
    assert value(found, "new_group calls", "stock", recipe="8 gloo ranks") == 36
    assert value(found, "new_group calls", "overlay", recipe="8 gloo ranks") == 8
    assert value(found, "groups", "stock", recipe="8 gloo ranks") == 9
    assert value(found, "groups", "overlay", recipe="8 gloo ranks") == 8
    assert value(found, "mesh and views", "stock", recipe="8 gloo ranks") > 0
    assert all(target["met"] for target in found["targets"])


def test_plans(bench):
    """All pairs on (2, 2, 2): what the pages quote, and the cost of plans as a sum; a change of either is seen here."""
    from make_pages import read as figures

    found, quoted = bench("plans"), figures()
    for kind, pairs_ in (("moves", "702 moves"), ("reductions", "999 reductions")):
        for name, what, size in (("collectives", "collectives", 1), ("elements", "bytes to the busiest rank", 4)):
            one = quoted[f"{kind}.{name}"]
            assert value(found, what, "overlay", pairs=pairs_) == size * one.overlay
            assert value(found, what, "stock", pairs=pairs_) == size * one.stock
    assert all(target["met"] for target in found["targets"])


def test_redistribute(bench):
    found = bench("redistribute", "--sizes", "1024", "--pairs", "5", "--batches", "1", "--each")
    assert len(found["facts"]["pairs"]) == 5
    for one in found["facts"]["pairs"]:
        assert one["wrong"] == {"stock": False, "overlay": False}
        assert one["bytes"] == 1024 and min(one["seconds"].values()) > 0 and min(one["collectives"].values()) >= 1
    assert value(found, "wrong results of 5", "overlay") == 0
    if found["facts"]["patched"]:
        assert value(found, "collectives of 5 moves", "overlay") == 5
    else:
        assert any("isn't patched" in note for note in found["notes"])


@pytest.mark.skipif(not NIGHTLY, reason="starts a job of eight ranks: only at night")
def test_weights(bench):
    found = bench("weights", "--layers", "1", "--width", "16", "--rounds", "1")
    assert found["facts"]["weights"]["wrong"] == 0 and found["facts"]["weights"]["tensors"] == 11
    by_hand = value(found, "gather, broadcast, cut: collectives", "stock", way="gather, broadcast, cut")
    ours = value(found, "gather, broadcast, cut: collectives", "overlay", way="gather, broadcast, cut")
    assert (by_hand, ours) == (8 * 2 + 3 + 11, 2)  # a gather along each axis, and broadcasts; one word, one exchange


@pytest.mark.skipif(not NIGHTLY, reason="starts a job of eight ranks twice: only at night")
def test_full_state(bench):
    found = bench("full_state", "--width", "16")
    for kind in ("on every rank", "offload"):
        one, other = (found["facts"][side][kind] for side in ("stock", "overlay"))
        assert one["wrong"] == other["wrong"] == 0
        assert other["collectives"] == 3 < one["collectives"]
    assert other["peaks"][3] < one["peaks"][3]


# --- what checks the results of `redistribute`
