"""Many tensors explained: what is said is what runs, and each process finds it for all ranks without a message."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_overlay
from torch_overlay.__main__ import main
from torch_overlay.transfers._planner.schedule import Flow
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


def test_every_missing_byte_is_in_the_matrix():
    for seed in range(60):
        tensors = draw(40_000 + seed)
        moves = [each.move() for each in tensors]
        flow = Flow.of(moves, 1 << 20)
        into = [sum(size for (_, receiver), size in flow.sent.items() if receiver == rank) for rank in range(8)]
        assert into == lacking(tensors, 8)[1], tensors
        assert all(sender != receiver for sender, receiver in flow.sent)


def test_the_command_line(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    for arguments, said in (
        ("--mesh 2,2 --to-mesh 4 --to-ranks 4-7 --shape 8,8 S0,S1 S0", "from ranks 0-3 to ranks 4-7"),
        ("--mesh 64 --to-mesh 8x8 --shape 4096,4096 S0 S0,S1", "... 64 ranks; the busiest sends"),
    ):
        assert main(["explain", *arguments.split()]) == 0
        text = capsys.readouterr().out
        assert said in text and max(map(len, text.splitlines())) <= 80
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--mesh 4 --to-mesh 4 --ranks 1,1,2,3 --shape 8 S0 S0", "--ranks: the mesh needs 4 different ranks"),
        ("--mesh 4 --to-mesh 4 --shape 8 S0 P", "a tensor can't get a pending reduction on another mesh; asked for P"),
        ("--mesh 2 --to-mesh 4 --shape 8,8 P S0", "a tensor is reduced before it goes to another mesh"),
        ("--mesh 4 --to-mesh 4 --budget 9 --shape 8 S0 R", "A budget of 9 bytes is too small"),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(arguments, message, capsys):
    assert main(["explain", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torch_overlay explain: ") and message in error and error.count("\n") == 1
