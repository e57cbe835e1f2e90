"""Explanations: the plan that runs, its figures, what is refused, and nothing left behind."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_overlay
import twins_tensor as twin
from torch_overlay.__main__ import main
from torch_overlay.distributed.tensor._planner.cost import leaving
from torch_overlay.show.drawing import MeshMap
from torch_overlay.show.pictures import coordinates, holders, traffic
from torch_overlay.show.plans import _side, to_torch_placement
from torch_overlay.show.stock import spec_on
from torch_overlay.show.typed import Mesh


@pytest.fixture
def said(capsys):
    """What the command prints."""

    def run(*arguments):
        code = main(["explain", *arguments])
        out, err = capsys.readouterr()
        assert code == 0, err
        assert not dist.is_initialized(), "explaining opens no process group"
        return out

    return run


def test_says_each_step_with_its_bytes_and_fits_a_terminal(said):
    text = said(*["--mesh=2,2,2", "--shape=4096,4096", "--dtype=bf16", "P,S0,R", "R,S1,S0"])
    lines = text.splitlines()
    assert lines[0] == "4096x4096 bfloat16 on a=2 x b=2 x c=2, 8 ranks" and max(map(len, lines)) <= 80
    steps = [line.split()[1:] for line in lines if re.match("  [0-9] ", line)]
    assert [step[0] for step in steps] == ["all_to_all", "all_reduce(sum)"]
    assert steps[0][1:8] == ["b", "2", "P·S1·S0", "8", "MiB", "8", "MiB"]
    assert "torch_overlay: 2 collectives" in lines and "ends the sum: all ranks get the result" in text


BAD = [
    ("--mesh=2,2 --shape=8,8 R,X R,R", "'X' in 'R,X' is no placement; there are R, S0"),
    ("--mesh=2,2 --shape=8,8 R R,R", "a mesh of 2 axes needs 2 placements, one an axis, got 1: 'R'"),
    ("--mesh=2,2 --shape=8,8 S3,R R,R", "axis 0 shards dim 3 of a tensor with 2 dims"),
    ("--mesh=2,2 --shape=8,8 P,P(max) R,R", "reductions of different kinds in one tensor: max, sum"),
    ("--mesh=2,2 --shape=8,8 --flattened=a,z R,R R,R", "--flattened: the mesh has no axis 'z'; its axes are a, b"),
    ("--mesh=2,4 --shape=15,8 --out=x.png _S0(4),S0 R,R", "a picture needs shards of which each rank's part is known"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=[row[1][:30] for row in BAD])
def test_bad_input_is_told_in_a_line(arguments, message, capsys):
    assert main(["explain", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torch_overlay explain: ") and message in error and error.count("\n") == 1


# --- what is drawn and counted ---

PLACED = st.sampled_from([("R",), ("S", 0), ("S", 1), ("P", "sum"), ("P", "avg")])


@st.composite
def cases(draw):
    sizes = draw(st.sampled_from([(4,), (2, 2), (2, 3), (2, 2, 2), (1, 2, 3)]))
    axes = st.tuples(*[PLACED] * len(sizes))
    kept = axes.map(lambda target: tuple(("R",) if placement[0] == "P" else placement for placement in target))
    return twin.Case(draw(axes), draw(kept), draw(st.tuples(st.integers(1, 9), st.integers(1, 9))), sizes)


@given(cases())
def test_traffic_is_what_the_steps_say(case):
    for step in case.steps():
        if not hasattr(step, "axes"):
            continue
        gets = [sum(row[i] for row in traffic(step)) for i in range(len(coordinates(case.sizes)))]
        for place, elements in zip(coordinates(case.sizes), gets):
            most = twin.gets(step, place)
            assert elements <= most + step.ranks  # padding is left out, and an all-reduce's parts are rounded up
            if type(step).__name__ == "AllToAll":
                assert elements == most
        assert leaving(step) + step.ranks >= max(sum(row) for row in traffic(step))


# --- in a program ---


@pytest.fixture
def mesh():
    # Rank 0 always has something to send; the fake backend refuses an all-to-all in which a rank only receives.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    dist.destroy_process_group()


def tensor(mesh: DeviceMesh, placements) -> DTensor:
    return DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False)


@pytest.mark.parametrize("words", ["R,R,R", "S1,S0,R", "S0,R,S1", "R,R,S0", "S1,S1,S1"])
@pytest.mark.parametrize("source", ["S0,S0,S1", "P,S0,R", "P,P,P", "S1,S0,P"])
def test_counts_what_runs(mesh, source, words):
    """As many collectives as CommDebugMode then sees."""
    from torch_overlay.show.typed import parse_placements

    given_, target = (tuple(map(to_torch_placement, parse_placements(text, 3))) for text in (source, words))
    with torch_overlay.enabled():
        said = torch_overlay.explain(tensor(mesh, given_), words)
        with CommDebugMode() as seen:
            tensor(mesh, given_).redistribute(mesh, target)
    assert said.plan.collectives == seen.get_total_counts()


@pytest.mark.parametrize("words", ["R,R,R", "S1,S0,R", "S0,R,S1", "R,R,S0", "S1,S1,S1"])
@pytest.mark.parametrize("source", ["S0,S0,S1", "P,S0,R", "P,P,P", "S1,S0,P", "S1,R,S1"])
@pytest.mark.parametrize("flattened", [[], [("dp", "cp"), ("dp", "cp", "tp")]])
def test_counts_what_stock_runs(mesh, source, words, flattened):
    from torch_overlay.show.typed import parse_placements

    for names in flattened:
        mesh[names]._flatten()
    given_, target = (tuple(map(to_torch_placement, parse_placements(text, 3))) for text in (source, words))
    said = torch_overlay.explain(tensor(mesh, given_), words)
    with CommDebugMode() as seen:
        tensor(mesh, given_).redistribute(mesh, target)
    assert (said.stock.collectives if said.stock else 0) == seen.get_total_counts()


def test_leaves_torch_as_found(mesh):
    groups = len(dist.distributed_c10d._world.pg_map)
    torch_overlay.explain(tensor(mesh, [Shard(0), Shard(0), Replicate()]), "R,R,R")
    assert len(dist.distributed_c10d._world.pg_map) == groups
    assert "_in_universe" not in mesh.__dict__ and dist.get_world_size() == 8


def test_group_that_the_user_flattened_is_at_hand(mesh):
    part = mesh["dp", "cp"]
    given_ = tensor(part, [Shard(0), Shard(1)])
    before = torch_overlay.explain(given_, "S1,S0")
    assert before.plan.collectives == 2 and 'would be 1 collective with mesh["dp", "cp"].flatten("dp_cp")' in str(
        before
    )
    part._flatten("dp_cp")
    assert torch_overlay.explain(given_, "S1,S0").plan.collectives == 1


LACKED = [
    ("2,2,2", "P,P,S0", "R,R,S1", 'mesh["a", "b"].flatten("a_b") and mesh["a", "b", "c"].flatten("a_b_c")'),
    ("2,2,2", "P,P,S0", "R,R,R", 'mesh["a", "b"].flatten("a_b")'),  # and over c, which has its group
    ("2,2,2,2 --flattened=a,b", "P,P,S0,S1", "R,R,R,R", 'mesh["c", "d"].flatten("c_d")'),
]


@pytest.mark.parametrize("mesh, source, target, calls", LACKED)
def test_names_only_the_groups_that_are_missing(mesh, source, target, calls, said):
    text = said(*f"--mesh={mesh} --flatten=existing --shape=4096,4096".split(), source, target)
    assert f" would be 2 collectives with {calls}" in " ".join(text.split())


USABLE = [
    ("whole", "names", 1),
    ("existing", "names", 3),
    ("whole", "off", 3),
]


@pytest.mark.parametrize("flatten, share, collectives", USABLE)
def test_which_groups_it_may_use_is_the_options_say(mesh, flatten, share, collectives, monkeypatch):
    """Also while the overlay is off, for what it would do with a mesh made under it. Nobody flattened the mesh."""
    monkeypatch.setenv("TORCH_OVERLAY_FLATTEN", flatten)
    monkeypatch.setenv("TORCH_OVERLAY_SHARE_GROUPS", share)
    placements = [Shard(0), Shard(0), Shard(1)]
    assert torch_overlay.explain(tensor(mesh, placements), "S1,S1,S0").plan.collectives == collectives
    with torch_overlay.enabled():
        made = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        assert torch_overlay.explain(tensor(made, placements), "S1,S1,S0").plan.collectives == collectives


def test_a_picture_of_a_plan(tmp_path):
    """Of one that sends, of one that doesn't, and from one mesh to another."""
    pytest.importorskip("matplotlib")
    flow = "--mesh=8 --to-mesh=4 --to-ranks=4-7 --shape=96,128 S0 S0"
    packed = "--mesh=2,2 --shape=30,8 S1,_S0(2) R,R"
    for number, given_ in enumerate(
        ("--mesh=2,2 --shape=64,64 S0,R S1,R", "--mesh=2,2 --shape=64,64 R,R S0,R", flow, packed)
    ):
        path = tmp_path / f"{number}.png"
        assert main(["explain", *given_.split(), f"--out={path}"]) == 0
        assert path.stat().st_size > 5_000


def test_a_picture_shows_each_box_of_a_rank():
    mesh = Mesh((2, 2), ("a", "b"), (0, 1, 2, 3))
    packed = spec_on(mesh, (Shard(1), _StridedShard(0, split_factor=2)), (16, 16), torch.float32, "cpu")
    assert holders(_side(packed)) == {
        ((row, column), (4, 8)): [position]
        for position, (column, rows) in enumerate(itertools.product((0, 8), ((0, 8), (4, 12))))
        for row in rows
    }
    ordered = spec_on(mesh, (Shard(0), Shard(0)), (3,), torch.float32, "cpu")
    ordered.shard_order = (ShardOrderEntry(0, (1, 0)),)
    assert holders(_side(ordered)) == {((0,), (1,)): [0], ((1,), (1,)): [2], ((2,), (1,)): [1]}


def test_a_picture_leaves_pyplot_alone(tmp_path):
    """Its backend and its figures are the program's, also if the file can't be written."""
    matplotlib = pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    before, figures = matplotlib.get_backend(), pyplot.get_fignums()
    other = "svg" if before != "svg" else "agg"
    pyplot.switch_backend(other)
    try:
        mesh = MeshMap.of("ab", (2, 2), range(4))
        torch_overlay.draw(mesh, str(tmp_path / "mesh.png"))
        for out, error in (("mesh.nothing", ValueError), ("nowhere/mesh.png", OSError)):
            with pytest.raises(error):
                torch_overlay.draw(mesh, str(tmp_path / out))
        assert matplotlib.get_backend().lower() == other and pyplot.get_fignums() == figures
    finally:
        pyplot.switch_backend(before)
