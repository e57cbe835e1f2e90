"""Many tensors explained: what is said is what runs, and each process finds it for all ranks without a message."""

import pathlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_overlay
from torch_overlay.__main__ import main
from torch_overlay.show import pictures
from torch_overlay.transfers._planner.flow import Flow
from transfer_twin import draw, lacking
from way import needs_package

pytestmark = needs_package
R, S, P = Replicate(), Shard, Partial()


@pytest.fixture
def world():
    """A world of eight ranks of which this process is one; the others answer at once, with nothing."""
    dist.init_process_group("fake", rank=1, world_size=8, store=FakeStore())
    with torch_overlay.enabled():
        yield
    dist.destroy_process_group()


def grid(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp", "pp")[: len(sizes)])


def tensor(mesh, placements, rows=64):
    return DTensor.from_local(torch.ones(rows, 32), mesh, placements)


def ran(call):
    with CommDebugMode() as comm:
        call()
    return comm.get_total_counts()


SOURCES = [(S(0), S(1)), (S(0), R), (R, R), (S(1), S(0))]


@pytest.mark.parametrize("target", [R, S(0), (S(1), R)])
def test_what_is_said_is_what_runs(world, target):
    mesh = grid(4, 2)
    tree = {"a": [tensor(mesh, source) for source in SOURCES * 2], "b": 3}
    said = torch_overlay.explain(tree, target)
    assert said.tensors == 8 and said.alone == 0 and said.flow.exchanges <= 1
    assert ran(lambda: torch_overlay.redistribute(tree, placements=target)) == said.flow.exchanges


def test_what_is_pending_is_said_to_go_by_itself(world):
    mesh, serve = grid(4, 2), DeviceMesh("cpu", torch.arange(4, 8), _init_backend=False)
    tree = [tensor(mesh, (P, S(1))), tensor(mesh, (S(0), R))]
    assert "1 exchange, 1 tensor one by one" in str(torch_overlay.explain(tree, R))
    assert "1 reduction, 1 exchange" in str(torch_overlay.explain(tree, S(0), device_mesh=serve))


def test_tensors_without_a_group_are_counted(world):
    """Those that move along one axis go together; those that move along two, for which there is no group, don't."""
    with torch_overlay.enabled(flatten="existing"):
        mesh = grid(2, 2, 2)["dp", "pp"]
        tree = [tensor(mesh, source) for source in ((S(0), S(1)), (S(0), R), (S(1), R), (S(0), S(0)))]
        said = torch_overlay.explain(tree, R)
        assert (said.flow.exchanges, said.alone) == (1, 2)
        assert "1 exchange, 2 tensors one by one" in str(said)


@pytest.mark.parametrize(
    "sizes, sources, exchanges, alone",
    [
        ((8,), [(S(0),), (S(1),)], 1, 0),  # FSDP only, or TP only
        ((4, 2), [(S(0), R), (S(1), R)], 1, 0),  # along dp; every tp rank beside the other
        ((4, 2), [(R, S(0)), (R, S(1))], 1, 0),  # along tp
        ((4, 2), [(S(0), R), (R, S(1))], 2, 0),  # some along dp, some along tp: one each
        ((4, 2), [(S(0), R), (R, S(1)), (S(0), S(1))], 2, 10),
    ],
)
def test_what_moves_along_one_axis_goes_together_without_joint_groups(world, sizes, sources, exchanges, alone):
    """Of ten tensors of each kind. What moves along both axes takes torch's own two collectives, one by one."""
    with torch_overlay.enabled(flatten="existing"):
        mesh = grid(*sizes)
        tree = [tensor(mesh, source) for source in sources * 10]
        said = torch_overlay.explain(tree, R)
        assert (said.flow.exchanges, said.alone) == (exchanges, alone)
        assert ran(lambda: torch_overlay.redistribute(tree, placements=R)) == exchanges + 2 * alone
        if alone:
            mesh["dp", "tp"].flatten("dp_tp")
            assert torch_overlay.explain(tree, R).flow.exchanges == 1
            assert ran(lambda: torch_overlay.redistribute(tree, placements=R)) == 1


def test_a_small_budget_makes_more_exchanges(world):
    tree = [tensor(grid(4, 2), (S(0), S(1))) for _ in range(10)]
    said = torch_overlay.explain(tree, R, budget=1 << 19)
    assert said.flow.exchanges > 2 and said.flow.staged <= 1 << 19
    with pytest.raises(ValueError, match="budget of 99 bytes is too small"):
        torch_overlay.explain(tree, R, budget=99)


def test_lanes_do_the_same_beside_one_another(world):
    """Along dp alone: four ranks of each tp coordinate, and nothing between the two halves."""
    said = torch_overlay.explain([tensor(grid(4, 2), (S(0), S(1)))], (R, S(1)))
    assert said.flow.exchanges == 1 and len(said.flow.sent) == 2 * 4 * 3
    assert all(sender % 2 == receiver % 2 for sender, receiver in said.flow.sent)


def test_to_another_mesh(world):
    serve = DeviceMesh("cpu", torch.arange(4, 8), _init_backend=False)
    source = tensor(grid(4, 2), (S(0), S(1)))
    for said in (
        torch_overlay.explain({"w": source}, S(0), device_mesh=serve),
        torch_overlay.explain(source, (S(0),), device_mesh=serve),
    ):
        assert (said.targets, said.flow.exchanges) == ((4, 5, 6, 7), 1)
        text = str(said)
        assert max(map(len, text.splitlines())) <= 80
        out, into = said.sums()
        assert sum(out.values()) == sum(into.values()) == said.size * 7 // 8 and set(into) == {4, 5, 6, 7}


def test_every_missing_byte_is_in_the_matrix():
    for seed in range(60):
        tensors = draw(40_000 + seed)
        moves = [each.move() for each in tensors]
        flow = Flow.of(moves, 1 << 20)
        into = [sum(size for (_, receiver), size in flow.sent.items() if receiver == rank) for rank in range(8)]
        assert into == lacking(tensors, 8)[1], tensors
        assert all(sender != receiver for sender, receiver in flow.sent)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--mesh 2,2 --to-mesh 4 --to-ranks 4-7 --shape 8,8 S0,S1 S0", "from ranks 0-3 to ranks 4-7"),
        ("--mesh 2,2 --to-mesh 4 --ranks 3,1,2,0 --shape 8,8 S0,S1 S0", "1 tensor, 128 B, on ranks 0-3"),
        ("--mesh 64 --to-mesh 8x8 --shape 4096,4096 S0 S0,S1", "... 64 ranks; the busiest sends"),
        ("--mesh 8 --to-mesh 8 --shape 4096,4096 S0 S0", "overlay: 0 exchanges (budget 256 MiB)"),
    ],
)
def test_the_command_line(arguments, said, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["explain", *arguments.split()]) == 0
    text = capsys.readouterr().out
    assert said in text and max(map(len, text.splitlines())) <= 80
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            "--mesh 4 --to-mesh 4 --to-ranks 4-8 --shape 8 S0 S0",
            "--to-ranks: the mesh needs 4 different ranks, got '4-8'",
        ),
        ("--mesh 4 --to-mesh 4 --ranks 1,1,2,3 --shape 8 S0 S0", "--ranks: the mesh needs 4 different ranks"),
        ("--mesh 4 --to-mesh 4 --ranks a --shape 8 S0 S0", "--ranks: needed ranks, as 0-3 or 4,5,6,7, got 'a'"),
        ("--mesh 4 --to-mesh 4 --tensors 0 --shape 8 S0 S0", "--tensors needs 1 or more, got 0"),
        ("--mesh 4 --to-mesh 4 --shape 8 S0 P", "a tensor can't get a pending reduction on another mesh; asked for P"),
        ("--mesh 2 --to-mesh 4 --shape 8,8 P S0", "a tensor is reduced before it goes to another mesh"),
        ("--mesh 4 --tensors 3 --shape 8 S0 R", "--tensors is for --to-mesh"),
        ("--mesh 4 --to-mesh 4 --budget 9 --shape 8 S0 R", "A budget of 9 bytes is too small"),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(arguments, message, capsys):
    assert main(["explain", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torch_overlay explain: ") and message in error and error.count("\n") == 1


def test_what_is_no_tree_of_tensors_is_refused(world):
    with pytest.raises(TypeError, match="needs DTensors, in dicts, lists and tuples; got none in a dict"):
        torch_overlay.explain({"a": 3}, R)


@pytest.mark.parametrize("ranks, words", [(8, {"48K", "sends", "gets"}), (64, {"gets, at most 80 KiB"})])
def test_pictures_say_the_bytes_and_clip_nothing(ranks, words, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[1] / "explain")
    from test_pictures import assert_nothing_clipped, written

    figures = []
    monkeypatch.setattr(pictures.pyplot(), "close", figures.append)
    half = ranks // 2
    size = {8: "96,128", 64: "640,128"}[ranks]
    arguments = (
        f"--mesh {ranks} --to-mesh {half} --to-ranks {half}-{ranks - 1} --shape {size} --dtype fp32 --tensors 8 S0 S0"
    )
    assert main(["explain", *arguments.split(), "--out", str(tmp_path / "flow.png")]) == 0
    (figure,) = figures
    monkeypatch.undo()
    assert_nothing_clipped(figure)
    found = dict(written(figure))
    assert words <= set(found), sorted(found)
    legend = next(box for text, box in found.items() if text.startswith("A cell"))
    assert not any(box.overlaps(legend) for text, box in found.items() if not text.startswith("A cell"))
    pictures.pyplot().close(figure)
