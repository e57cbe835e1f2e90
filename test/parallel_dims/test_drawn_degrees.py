"""`draw --degrees`: all meshes of a run, their groups against the twin."""

import pytest

import torch_overlay
from dims_twin import RECIPE, Twin, all_degrees, overlay
from mesh_harness import fake_world
from torch_overlay.__main__ import main
from torch_overlay.parallel_dims import ParallelDims
from torch_overlay.show.drawing import of_degrees
from torch_overlay.show.typed import parse_degrees as parse
from width import sample


@pytest.mark.parametrize("size", [8, 24])
def test_groups_are_the_twins(size):
    """Every axis of every mesh is there by its name, once, with the groups that nested loops give."""
    for degrees in sample(all_degrees(size), 15 if size > 8 else 1):
        shown, twin = of_degrees(ParallelDims(**degrees)), Twin(**degrees)
        by_name = {name: axis for axis in shown.axes for name in axis.label.split(" = ")}
        assert sorted(by_name) == sorted({axis for _, axis in twin.axes()})
        assert len(by_name) == sum(axis.label.count(" = ") + 1 for axis in shown.axes)
        assert len({frozenset(axis.groups) for axis in shown.axes}) == len(shown.axes)
        for mesh, axis in twin.axes():
            assert sorted(by_name[axis].groups) == sorted(twin.groups(mesh, axis))


def test_meshes_that_were_built_are_drawn_as_their_degrees():
    with overlay(True), fake_world(37, 64):
        drawn = str(torch_overlay.draw(RECIPE.build("cpu")))
    assert drawn == str(torch_overlay.draw(of_degrees(RECIPE), gpus_per_host=8))


def test_degrees_as_they_are_typed():
    assert parse("dp_shard=4, tp=2 ,ep=4", None) == ParallelDims(dp_shard=4, tp=2, ep=4)
    assert parse("tp=2", None) == ParallelDims(dp_shard=1, tp=2)
    assert parse("tp=2", 8) == ParallelDims(dp_shard=4, tp=2)
    assert parse("tp=2,dp_shard=4,ep=-1", None) == ParallelDims(dp_shard=4, tp=2, ep=8)
    assert parse("dp_shard=2,pp=-1", 8) == ParallelDims(pp=4, dp_shard=2)


BAD = [
    ("--degrees pp", "needed degrees as pp=2,tp=4, out of pp, dp_replicate, dp_shard, cp, tp, ep, etp; got 'pp'"),
    ("--degrees dp=2", "out of pp, dp_replicate, dp_shard, cp, tp, ep, etp; got 'dp=2'"),
    ("--degrees tp=2,tp=4", "--degrees names tp twice: 'tp=2,tp=4'"),
    ("--degrees tp=x", "--degrees: tp needs a number of ranks, got 'x'"),
    ("--degrees tp=0", "tp must be a number of ranks from 1 on, or -1 for what is left; got 0"),
    ("--degrees dp_shard=-1,tp=2", "what -1 stands for is known with --ranks, how many ranks there are"),
    ("--degrees tp=2,ep=3", "ep * etp must divide dp_shard * cp * tp (2); got 3 * 1 = 3. Would fit: ep out of 1, 2"),
    ("--degrees tp=3 --ranks 8", "got 1 * 1 * 1 * 3 = 3. Would fit: tp out of 1, 2, 4, 8"),
    ("--degrees tp=2 --axes a", "--axes and --permute are for --mesh"),
    ("--mesh 2 --ranks 2", "--ranks is for --degrees"),
]


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_input_is_told_in_a_line(arguments, message, capsys):
    assert main(["draw", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torch_overlay draw: ") and message in error and error.count("\n") == 1
