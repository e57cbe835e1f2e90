"""What stock keeps apart, as programs: threads, replicas, batches and owners that know nothing of one another.

Each case is `case(rank, world_size)`, runs on all ranks of a fresh world, and raises where a number is wrong. No two
threads share a group on stock, so each is a correct program there.
"""

from __future__ import annotations

import gc
import threading

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import isolation_tools
from isolation_tools import (
    ELEMENTS,
    JOIN_SECONDS,
    P,
    R,
    all_right,
    at_once,
    held_by_this_process,
    number,
    private,
    reduce,
    reduce_metric,
)
from width import NIGHTLY

S = Shard
TIMES = 60


def made(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh(torch.device(isolation_tools.DEVICE).type, sizes, mesh_dim_names=names)


def square() -> DeviceMesh:
    return made((2, 2), ("dp", "tp"))


def cube(*names: str) -> DeviceMesh:
    """On four ranks the last axis has one."""
    return made((2, 2, dist.get_world_size() // 4), names)


def metric_beside_redistribution(rank: int, world_size: int) -> None:
    """A thread reduces a metric on the default group while the main thread reduces over both axes."""
    mesh = square()
    at_once(lambda: reduce(mesh, (P, P), 1, TIMES), lambda: reduce_metric(2, TIMES))


def two_meshes_two_axes(rank: int, world_size: int) -> None:
    """Two meshes of the same ranks, each used by its own thread, over both axes."""
    one, other = square(), square()
    at_once(lambda: reduce(one, (P, P), 1, TIMES), lambda: reduce(other, (P, P), 2, TIMES))


def two_private_meshes(rank: int, world_size: int) -> None:
    """The same over both axes, with meshes that are private."""
    with private():
        one, other = square(), square()
    at_once(lambda: reduce(one, (P, P), 1, TIMES), lambda: reduce(other, (P, P), 2, TIMES))


def a_view_made_in_a_private_block(rank: int, world_size: int) -> None:
    """Two views of one root with axes of the same names, the second of them private, each used by its own thread."""
    root = made((4,), ("world",))
    one = root._unflatten(0, (2, 2), ("dp", "tp"))
    with private():
        other = root._unflatten(0, (2, 2), ("dp", "tp"))
    at_once(lambda: reduce(one, (P, P), 1, TIMES), lambda: reduce(other, (P, P), 2, TIMES))
    at_once(lambda: reduce(one["tp"], (P,), 3, TIMES), lambda: reduce(other["tp"], (P,), 4, TIMES))


def views_of_a_private_mesh(rank: int, world_size: int) -> None:
    """A slice and a flattened view of a public mesh in one thread, those of a private mesh in another."""
    public = cube("dp", "cp", "tp")
    with private():
        own = cube("dp", "cp", "tp")

    def use(pair: DeviceMesh, flat: DeviceMesh, who: int) -> None:
        for turn in range(8):
            reduce(pair, (P, P), who + turn, 5)
            reduce(flat, (P,), who + turn, 5)

    views = [(mesh["dp", "cp"], mesh["dp", "cp"]._flatten("dp_cp")) for mesh in (public, own)]
    at_once(lambda: use(*views[0], 10), lambda: use(*views[1], 50))


def one_replica_gathers(rank: int, world_size: int) -> None:
    """Replica 0 alone asks for the full tensor, as to evaluate; the other waits at a barrier of all. Then again where
    somebody flattened the whole mesh."""
    mesh = cube("dp_replicate", "dp_shard", "tp")
    replica, row, column = mesh.get_coordinate()
    whole = torch.arange(24.0, device=isolation_tools.DEVICE).reshape(4, 6)
    local = whole.chunk(2)[row].chunk(mesh.size(2), 1)[column].contiguous()
    for _ in range(2):
        for step in range(3 if replica == 0 else 0):
            placed = DTensor.from_local(local + step, mesh, (R, S(0), S(1)), run_check=False)
            assert torch.equal(placed.full_tensor(), whole + step)
        dist.barrier()
        mesh._flatten("everybody")


def an_empty_last_batch(rank: int, world_size: int) -> None:
    """The last batch of one replica is empty, and no rank of the other can know it."""
    mesh = cube("dp", "cp", "tp")
    replica, row, column = mesh.get_coordinate()
    for step in range(4):
        batch = 0 if (step, replica) == (3, 1) else 2
        whole = torch.arange(batch * 24.0, device=isolation_tools.DEVICE).reshape(batch, 4, 6) + step + 100 * replica
        local = whole.chunk(2, 1)[row].chunk(mesh.size(2), 2)[column].contiguous()
        placed = DTensor.from_local(local, mesh, (S(0), S(1), S(2)), run_check=False)
        assert torch.equal(placed.redistribute(placements=(S(0), R, R)).to_local(), whole)


def one_owner_destroys_its_groups(rank: int, world_size: int) -> None:
    """A component destroys the groups of its mesh; a mesh of equal ranks goes on, and so does one made anew."""
    mine, theirs = square(), square()
    use_every_way(mine)
    use_every_way(theirs)
    destroy_groups(theirs)
    use_every_way(mine)
    again = square()
    use_every_way(again)
    use_every_way(mine)
    destroy_groups(mine)
    use_every_way(again)


def equal_meshes_in_two_threads(rank: int, world_size: int) -> None:
    """What operations give on two equal meshes is reduced, that of each mesh in its own thread."""
    one, other = square(), square()
    ready = {0: threading.Event(), 1: threading.Event(), 2: threading.Event()}
    ready[0].set()

    def use(mesh: DeviceMesh, who: int) -> None:
        # What a thread remembers is its own; and a copy reduces, so that threads take turns where both use both meshes.
        assert ready[who - 1].wait(JOIN_SECONDS)
        for first in (one, other):
            ones = torch.ones(ELEMENTS, dtype=torch.float64, device=isolation_tools.DEVICE)
            DTensor.from_local(ones, first, (P, P), run_check=False).clone()
        ready[who].set()
        assert ready[2].wait(JOIN_SECONDS)
        reduce(mesh, (P, P), who, TIMES, torch.clone)

    at_once(lambda: use(one, 1), lambda: use(other, 2))


def meshes_rebuilt_after_their_groups_were_destroyed(rank: int, world_size: int) -> None:
    """Round after round; nothing of a round stays: no thread, no file, no memory."""
    import torch_overlay

    rounds, held = 240 if NIGHTLY else 12, []
    for turn in range(rounds):
        mesh = square()
        reduce(mesh, (P, P), turn, 2, torch.clone)
        leaf = DTensor.from_local(torch.ones(ELEMENTS), mesh, (R, S(0)), run_check=False).requires_grad_()
        (leaf * 2).redistribute(placements=(R, R)).sum().backward()
        assert leaf.grad.device_mesh is mesh and torch.all(leaf.grad.full_tensor() == 2)
        served = torch.zeros(leaf.shape)
        with torch_overlay.Transfer([leaf.grad], [served]) as transfer:
            transfer.run()
        assert torch.all(served == 2)
        destroy_groups(mesh)
        del mesh, leaf
        gc.collect()
        dist.barrier()  # all have destroyed theirs
        held.append(held_by_this_process())
    half = len(held) // 2
    for name in held[0]:
        early, late = (max(one[name] for one in part) for part in (held[4:half], held[half:]))
        assert late <= early + (4 << 20 if name == "bytes" else 0), f"{name} grow: {[one[name] for one in held]}"


def one_pair_destroys_its_group(rank: int, world_size: int) -> None:
    """Ranks 0 and 1 destroy their tp group, ranks 2 and 3 keep theirs; then all build the mesh again."""
    mesh = square()
    use_every_way(mesh)
    if rank < 2:
        dist.destroy_process_group(mesh.get_group("tp"))
    dist.barrier()
    use_every_way(square())


def groups_of_size_1_are_destroyed(rank: int, world_size: int) -> None:
    """Every group of a mesh is destroyed once, those of its two axes of one rank too."""
    for _ in range(2):
        mesh = made((2, 2, 1, 1), ("dp", "tp", "cp", "ep"))
        reduce(mesh, (P, P, P, P), 1, 3)
        destroy_groups(mesh)
    reduce_metric(2, 3)
    use_every_way(square())


def destroy_groups(mesh: DeviceMesh) -> None:
    for group in mesh.get_all_groups():
        dist.destroy_process_group(group)


def use_every_way(mesh: DeviceMesh) -> None:
    """Over both axes, over one, gathered, and by hand on the group of each axis."""
    reduce(mesh, (P, P), 1, 3)
    reduce(mesh, (P, R), 2, 3)
    row, column = mesh.get_coordinate()
    whole = torch.arange(24.0, device=isolation_tools.DEVICE).reshape(4, 6)
    local = whole.chunk(2)[row].chunk(2, 1)[column].contiguous()
    placed = DTensor.from_local(local, mesh, (S(0), S(1)), run_check=False)
    assert torch.equal(placed.redistribute(placements=[Replicate()] * 2).to_local(), whole)
    rank = dist.get_rank()
    for axis, ranks in ("dp", mesh.mesh[:, column]), ("tp", mesh.mesh[row]):
        mine = torch.full((ELEMENTS,), number(3, rank, 0), dtype=torch.float64, device=isolation_tools.DEVICE)
        dist.all_reduce(mine, group=mesh.get_group(axis))
        all_right([(mine, sum(number(3, other, 0) for other in ranks.tolist()))])
