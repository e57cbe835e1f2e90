"""A plan follows from the mesh calls of its own universe and the options: it is the same on every rank, and the same
whatever other meshes, groups and worlds come and go beside it. A random search; one process plays each rank in turn."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_overlay
from mesh_harness import fake_world, needs_overlay, overlay
from torch_overlay.distributed.tensor._runner.answers import find_answer
from torch_overlay.distributed.tensor._runner.program import Program
from way import WAY

pytestmark = needs_overlay
WORLD, NAMES = 8, ("a", "b", "c")

placements = st.lists(st.sampled_from([Replicate(), Shard(0), Shard(1), Partial()]), min_size=3, max_size=3)
questions = st.lists(
    st.tuples(placements, placements, st.sampled_from([(8, 8), (5, 3), (2, 16)])), min_size=1, max_size=4
)
# What the universe in question does itself: views that are flattened, and groups that its owner asks for.
PREPARE = ["prepare"] if WAY == "overlay" else []  # which the package has, and a torch that carries our code hasn't
views = st.lists(st.sampled_from(["ab", "bc", "ac", "abc", *PREPARE, "unflatten", "again", "existing"]), max_size=4)
# What others do: each makes a mesh and goes on with it. By rank, since a component may run on some ranks only.
KINDS = {
    "equal": lambda: init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES),
    "pairs": lambda: init_device_mesh("cpu", (4, 2), mesh_dim_names=NAMES[:2]),
    "fours": lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES[:2]),
    "permuted": lambda: DeviceMesh("cpu", torch.arange(7, -1, -1).reshape(2, 2, 2), mesh_dim_names=NAMES),
    "half": lambda: DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=NAMES[:2]),
}
others = st.lists(
    st.tuples(
        st.sampled_from(sorted(KINDS)),
        st.booleans(),
        st.lists(st.sampled_from([*PREPARE, "flatten", "destroy", "abort", "new_group"]), min_size=1, max_size=3),
        st.sets(st.integers(0, WORLD - 1), min_size=1),
    ),
    min_size=1,
    max_size=3,
)
policies = st.tuples(st.sampled_from(["names", "ranks", "off"]), st.sampled_from(["whole", "existing"]))


def act(kind: str, private: bool, deeds: list[str]) -> DeviceMesh:
    """Make another universe of the world and do what has nothing to do with the mesh in question."""
    with torch_overlay.private_groups() if private else contextlib.nullcontext():
        mesh = KINDS[kind]()
    for deed in deeds:
        with contextlib.suppress(ValueError, RuntimeError):  # what is gone already, or this rank is outside
            if deed == "prepare":
                torch_overlay.prepare(mesh)
            elif deed == "flatten":
                mesh["a", "b"]._flatten()
            elif deed == "new_group":
                dist.new_group(dist.get_process_group_ranks(mesh.get_group(0)))
            elif deed == "abort":
                mesh.abort()
            else:
                for group in mesh.get_all_groups():
                    dist.destroy_process_group(group)
    return mesh


def answer(rank, own, asked, beside, early) -> list[object]:
    """The plans on one rank, and where in the mesh the groups are by which they run. Ranks in `early` ask before and in
    between, too, so that they remember what was true then."""
    with fake_world(rank, WORLD):
        kept = [act(*what) for *what, ranks in beside[::2] if rank in ranks]
        root = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
        mesh = root._unflatten(0, (2, 2, 2), NAMES)
        deeds = [*own, *[(what, ranks) for *what, ranks in beside[1::2]]]
        for deed in deeds:
            if rank in early:
                [plan_of(mesh, *question) for question in asked]
            if isinstance(deed, tuple):
                kept += [act(*deed[0])] if rank in deed[1] else []
            elif deed == "prepare":
                torch_overlay.prepare(mesh["a", "b"])
            elif deed == "unflatten":
                mesh._unflatten("a", (2, 1), ("p", "q"))
            elif deed == "again":  # axes of the same names, on another backend
                root._unflatten(0, (2, 2, 2), NAMES, backend_override={"a": ("fake", fake_options())})
            elif deed == "existing":
                torch_overlay.enable(flatten="existing")
            else:
                mesh[tuple(deed)]._flatten(deed)
        return [plan_of(mesh, *question) for question in asked]


def fake_options():
    from torch._C._distributed_c10d import FakeProcessGroup

    return FakeProcessGroup.Options()


def plan_of(mesh: DeviceMesh, source, target, shape) -> str:
    """The text of the plan that runs; its groups hold the ranks of its axes."""
    spec = DTensor.from_local(torch.zeros(shape), mesh, [Replicate()] * 3, run_check=False)._spec
    ends = [type(spec)(mesh, tuple(given), tensor_meta=spec.tensor_meta) for given in (source, target)]
    found = find_answer(mesh, held_of(mesh, shape, source), *ends, False, None)
    assert isinstance(found, Program), found
    for name, axes in found.groups.items():
        members = mesh[tuple(NAMES[axis] for axis in axes)].mesh.flatten().tolist()
        assert sorted(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name))) == members
    return found.text


def held_of(mesh: DeviceMesh, shape, placements) -> torch.Tensor:
    """What this rank holds of a tensor of zeros."""
    local = torch.zeros(shape)
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            pieces = local.chunk(2, placement.dim)
            at = mesh.get_coordinate()[axis]
            local = pieces[at] if at < len(pieces) else local.narrow(placement.dim, 0, 0)
    return local


@settings(max_examples=settings.default.max_examples // 2)
@given(views, questions, others, policies, st.sets(st.integers(0, WORLD - 1)))
def test_plans_are_the_same_on_all_ranks_and_beside_anything(own, asked, beside, policy, early):
    share, flatten = policy
    if any("Partial" in repr(new) and old != new for ends in asked for old, new in zip(*ends[:2], strict=True)):
        asked = [(source, [Replicate()] * 3, shape) for source, _, shape in asked]

    def on(rank, beside):
        with overlay(share_groups=share, flatten=flatten):
            return answer(rank, own, asked, beside, early)

    alone = on(0, [])
    for rank in range(WORLD):
        assert on(rank, beside) == alone
