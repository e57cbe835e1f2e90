"""What shares a group and what does not; on the fake backend, where only the bookkeeping is real."""

import datetime

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from mesh_harness import fake_world, group_ranks, needs_overlay, open_groups, overlay

pytestmark = needs_overlay


@pytest.fixture(autouse=True)
def world():
    with fake_world(1, 8):
        yield


def grid(*names: str, **how) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=names or ("dp", "tp"), **how)


def test_names_differ_and_the_group_is_one():
    """Two roots of one layout, other names: the same groups, which carry all their names."""
    one, other = grid("dp", "tp"), grid("rows", "columns")
    assert one.get_group("tp") is other.get_group("columns")
    assert one != other, "sharing a group doesn't make meshes equal"
    described = one.get_group("tp").group_desc
    assert "tp" in described and "columns" in described


def test_the_same_ranks_by_another_way_share():
    """A slice flattened, an axis unflattened, an explicit rank list: what counts is the ranks in order."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    flat = mesh["b", "c"]._flatten("bc")
    assert flat.get_group() is grid().get_group("tp")
    assert DeviceMesh("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]]).get_group(1) is flat.get_group()


def test_the_world_serves_the_layout_that_is_the_whole_world():
    """In rank order, whatever the way to it; in another order it is another group."""
    assert grid()._flatten("all").get_group() is dist.group.WORLD
    assert init_device_mesh("cpu", (8,)).get_group() is dist.group.WORLD
    backwards = DeviceMesh("cpu", list(range(7, -1, -1)))
    assert backwards.get_group() is not dist.group.WORLD
    assert group_ranks(backwards, 0) == tuple(range(7, -1, -1))
    assert backwards.get_local_rank() == backwards.get_coordinate()[0] == 6


def test_an_order_is_part_of_what_a_group_is():
    """[0, 1] and [1, 0] are two groups: collectives over them move data to different places."""
    there, back = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 0])
    assert there.get_group() is not back.get_group()
    assert (group_ranks(there, 0), group_ranks(back, 0)) == ((0, 1), (1, 0))


def test_private_groups_are_shared_with_nobody():
    """Made anew inside the block, and not found later."""
    import torch_overlay

    shared = grid()
    with torch_overlay.private_groups():
        own, also_own = grid(), grid()
    later = grid()
    groups = [mesh.get_group("tp") for mesh in (shared, own, also_own)]
    assert len(set(map(id, groups))) == 3
    assert later.get_group("tp") is groups[0]


def test_share_groups_off_is_stock():
    with overlay(share_groups=False):
        assert grid().get_group("tp") is not grid().get_group("tp")


def test_groups_of_the_user_are_never_taken():
    """A group from ``new_group`` with the very same ranks stays the user's."""
    own = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])][0]
    assert grid().get_group("tp") is not own


def test_meshes_from_groups_neither_take_nor_give():
    """``from_group`` means this group: no later mesh gets it, and it gets no other."""
    own = dist.new_group([0, 1, 2, 3])
    mesh = DeviceMesh.from_group(own, "cpu", mesh_dim_names=("x",))
    assert mesh.get_group() is own
    assert DeviceMesh("cpu", [0, 1, 2, 3]).get_group() is not own
    again = DeviceMesh.from_group(own, "cpu", mesh_dim_names=("y",))
    assert again.get_group() is own


def test_backend_and_options_are_part_of_the_key():
    """Another backend is another group; equal backends by value share."""
    plain, fake = grid(), grid(backend_override={"tp": "fake"})
    assert plain.get_group("dp") is fake.get_group("dp")
    again = grid(backend_override={"tp": "fake"})
    assert again.get_group("tp") is fake.get_group("tp")


def test_options_of_equal_value_share_and_others_do_not():
    """Two objects that say the same are the same; another timeout is another group."""

    def options(seconds):
        made = fake_options()
        made._timeout = datetime.timedelta(seconds=seconds)
        return made

    ten, same, twenty = (grid(backend_override={"tp": ("fake", options(s))}) for s in (10, 10, 20))
    assert ten.get_group("tp") is same.get_group("tp")
    assert ten.get_group("tp") is not twenty.get_group("tp")


def fake_options():
    from torch._C._distributed_c10d import FakeProcessGroup

    return FakeProcessGroup.Options()


def test_a_destroyed_group_is_not_found_again():
    """One group destroyed by the user: the next mesh makes a live one."""
    gone = grid().get_group("tp")
    dist.destroy_process_group(gone)
    alive = grid().get_group("tp")
    assert alive is not gone and alive in open_groups()


def test_no_stale_group_after_the_world_is_made_anew():
    """Torch counts group names from 0 again: an old mesh must not get a new mesh's group of the same name."""
    old = grid()
    old_name = old._dim_group_names[1]
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    new = init_device_mesh("cpu", (4, 2), mesh_dim_names=("a", "b"))
    grid("x", "y")
    assert new.get_group("b") in open_groups()
    assert set(distributed_c10d._world.pg_names.values()) >= set(new._dim_group_names), old_name
    for axis in ("dp", "tp"):
        try:
            group = old.get_group(axis)
        except (RuntimeError, KeyError, ValueError):
            continue
        assert group in open_groups()
        assert tuple(dist.get_process_group_ranks(group)) == {"dp": (1, 5), "tp": (0, 1, 2, 3)}[axis]


def test_every_handle_of_an_aborted_mesh_is_gone():
    """abort() ends the groups of the mesh; a new mesh of the same layout gets live ones."""
    mesh = grid()
    ended = mesh.get_all_groups()
    mesh.abort()
    assert not set(map(id, ended)) & set(map(id, open_groups()))
    assert grid().get_group("tp") in open_groups()
