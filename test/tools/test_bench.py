"""tools/bench.py on tiny sizes: its JSON has what it says, its counts are what they should be; no times are held."""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from benchmarks import dims, mesh, pairs, redistribute  # noqa: E402
from benchmarks.report import Report, Row, Target  # noqa: E402
from benchmarks.table import shown, times  # noqa: E402

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


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_mesh(bench, tmp_path):
    worlds = (64, 128)[: 2 if NIGHTLY else 1]  # two processes each
    found = bench("mesh", "--worlds", *map(str, worlds), "--repeats", "1", "--plot", "found.png")
    for world in worlds:
        for name in (*mesh.PARTS, mesh.TOTAL, mesh.SIZE, mesh.INIT):
            assert value(found, name, "stock", ranks=world) > 0 and value(found, name, "overlay", ranks=world) > 0
        total = sum(found["facts"][str(world)][side]["new_group_calls"] for side in ("stock", "overlay"))
        # On (W / 64, 8, 8) stock asks for every copy's group, the overlay for this rank's three and the whole.
        assert total == 64 + 2 * (world // 8) + 4
    assert is_png(tmp_path / "found.png")


def test_groups(bench, tmp_path):
    found = bench("groups", "--ones", "16", "--repeats", "1", "--plot", "found.png")
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
    assert is_png(tmp_path / "found.png")


def test_dims(bench, tmp_path):
    found = bench("dims", "--worlds", "64", "--repeats", "1", "--plot", "found.png")
    where = {"ranks": 64, "class": "ParallelDims"}
    stock = (317, 14)
    for side, calls, groups in (("stock", *stock), ("overlay", 11, 11)):
        assert value(found, "new_group calls", side, **where) == calls
        assert value(found, "groups", side, **where) == groups
        assert value(found, "build", side, **where) > 0 and value(found, "memory, peak", side, **where) > 0
    assert found["facts"]["64"] == {"ranks of its groups": 2 + 2 + 8 + 2 + 2 + 8 + 1 + 8 + 2 + 16 + 64}
    assert [target["met"] for target in found["targets"]] == [True]
    if any(row["where"]["class"] == "torchtitan" for row in found["rows"]):
        where["class"] = "torchtitan"
        assert value(found, "groups", "overlay", **where) < value(found, "groups", "stock", **where)
    else:
        assert any(note.startswith("torchtitan isn't measured: ") for note in found["notes"])
    assert is_png(tmp_path / "found.png")


def test_dims_leaves_stock_out_where_it_would_take_minutes(monkeypatch):
    asked, report = [], Report("dims", "0")

    def fresh(function, side, maker, **arguments):
        asked.append((side, maker))
        numbers = dict.fromkeys((*dims.UNITS, "own"), 1)
        return numbers if maker == dims.OURS else {"missing": "not installed"}

    monkeypatch.setattr(dims.process, "fresh", fresh)
    dims.run(argparse.Namespace(worlds=[64], stock_most=8, repeats=1), report)
    assert asked == [("overlay", dims.OURS), ("overlay", dims.TITAN)]
    assert report.row("new_group calls", ranks=64, **{"class": dims.OURS}).stock is None
    assert "stock isn't measured beyond 8 ranks: --stock-most" in report.notes


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


def test_transfer(bench):
    found = bench("transfer", "--sizes", "1024", "--parameters", "12", "--rounds", "1")
    assert value(found, "12 parameters, collectives", "overlay", bytes=1024) == 1
    (one,) = found["facts"]["sizes"]
    assert one["wrong"] == 0 and one["collectives"]["stock"] >= 12 and min(one["seconds"].values()) > 0


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


def test_memory(bench):
    """Of 4 MB: stock gathers one axis, then the other; ours sorts one gather where it lies, in two parts."""
    found = bench("memory", "--size", "4194304", "--only", "S0,R,S1 -> R,R,R", "--each")
    (one,) = found["facts"]["pairs"]
    assert one["peak"] == {"stock": 6 << 20, "overlay": 6 << 20} and one["move"]
    assert [target["met"] for target in found["targets"]] == [True]


@pytest.mark.skipif(not NIGHTLY, reason="starts a job of eight ranks: only at night")
def test_steps(bench):
    found = bench("steps", "--layers", "1", "--width", "16", "--tokens", "4", "--rounds", "1")
    times = found["facts"]["steps"]
    assert times["wrong"] == 0 and times["bytes"] == 512
    assert all(times[kind] > 0 for kind in ("no sync", "run() before the step", "behind the step"))


def test_overhead(bench):
    found = bench("overhead", "--axes", "1", "--calls", "2", "--rounds", "1")
    for kind in ("plan hit", "plan miss", "plan first"):
        assert value(found, f"{kind}, mean", "stock", axes=1) > 0
        assert value(found, f"{kind}, mean", "overlay", axes=1) > 0


def test_enable(tmp_path):
    after = ("torch.distributed.tensor", "torch")[: 2 if NIGHTLY else 1]  # four processes each
    arguments = ("enable", "--repeats", "1", "--cycles", "1", "--after", *after, "--json", "found.json")
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), *arguments]
    wide = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(command, cwd=tmp_path, env=wide, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = read(tmp_path, "enable", done.stdout)
    for module in after:
        assert value(found, "first enable, wall", "overlay", after=f"import {module}") > 0
        assert value(found, "first enable, wall", "stock", after=f"import {module}") is None
        assert value(found, "the import itself, wall", "stock", after=f"import {module}") > 0


@pytest.mark.parametrize("arguments", [("mesh", "--worlds", "100"), ("groups", "--ranks", "6")])
def test_sizes_that_cannot_be_measured_are_refused(arguments):
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "must be" in done.stderr and "Traceback" not in done.stderr


# --- what checks the results of `redistribute`


@pytest.mark.parametrize("text", ["P,P", "A,P", "R,A", "A,A", "P,R"])
def test_expected_result_of_a_reduction_is_the_stacked_sources_reduced(text):
    import torch

    codes = tuple(text.split(","))
    pair = pairs.Pair((4, 2), codes, ("R", "R"))
    cells = [(i, j) for i in range(4) for j in range(2)]
    stacked = torch.stack([pairs.local_source(pair, at, (8, 8)) for at in cells]).view(4, 2, 8, 8)
    for axis, code in enumerate(codes):
        if code != "R":
            reduced = stacked.sum(axis, keepdim=True) if code == "P" else stacked.mean(axis, keepdim=True)
            stacked = reduced.expand_as(stacked)
    for at in cells:
        assert torch.equal(pairs.local_target(pair, at, (8, 8)), stacked[at])


def test_expected_shards_tile_the_whole():
    import torch

    pair = pairs.Pair((2, 2, 2), ("R", "R", "R"), ("S0", "S1", "S0"))
    parts = {(i, j, k): pairs.local_target(pair, (i, j, k), (16, 16)) for i in (0, 1) for j in (0, 1) for k in (0, 1)}
    rows = [torch.cat([parts[i, j, k] for j in (0, 1)], dim=1) for i in (0, 1) for k in (0, 1)]
    assert torch.equal(torch.cat(rows), pairs.local_source(pair, (1, 0, 1), (16, 16)))


def test_a_wrong_result_is_a_missed_target_and_named():
    one = dict(bytes=1024, pair="2,2: S0,S0 -> R,R", move=True, seconds={}, collectives=dict(stock=2, overlay=1))
    report = Report("redistribute", "0")
    redistribute._add_counts(report, [one | dict(wrong=dict(stock=False, overlay=True))])
    assert [target.met for target in report.targets] == [False]
    assert report.notes == ["overlay: wrong at 1,024 bytes: 2,2: S0,S0 -> R,R"]


def test_random_moves_are_the_same_on_every_rank():
    assert pairs.random_moves(20, 3, 8) == pairs.random_moves(20, 3, 8) != pairs.random_moves(20, 4, 8)
    assert all(pair.is_move and pair.source != pair.target for pair in pairs.random_moves(50, 0, 8))


def test_a_size_that_no_mesh_cuts_evenly_is_refused():
    for size in (0, 128, 1000):
        with pytest.raises(ValueError, match=rf"multiples of 8 float32.*got {size}$"):
            pairs.shape_of(size)
    for size in redistribute.SIZES:
        rows, columns = pairs.shape_of(size)
        assert rows * columns * 4 == size


# --- how numbers are shown


def test_numbers_are_shown_in_the_unit_that_fits():
    assert [shown(0.0000421, "s"), shown(45e6, "B"), shown(9, ""), shown(None, "s")] == ["42.1 us", "42.9 MB", "9", "-"]
    assert [times(0.974), times(12.34), times(1250.4), times(None)] == ["0.97x", "12.3x", "1,250x", "-"]


def test_gain_is_stock_over_overlay_and_a_target_includes_its_bound():
    assert Row("a", "s", 6.0, 2.0).gain == 3.0 and Row("a", "s", None, 2.0).gain is None
    assert Target("a", 2.0, 2.0).met and not Target("a", 2.1, 2.0).met
    assert Target("a", 2.0, 2.0, gain=True).met and not Target("a", 1.9, 2.0, gain=True).met
