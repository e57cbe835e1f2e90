# Owner(s): ["oncall: distributed"]
"""Groups over several axes."""

import datetime
import gc
import itertools
import pickle
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh.groups import (
    Request,
    axis_group,
    joint_group_name,
    joint_groups_known,
    override_of,
)
from torch_overlay.distributed._mesh.rank_map import RankMap, View
from torch_overlay.distributed._mesh.state import shared_state
from torch_overlay.distributed._mesh.universe import current_world, find_group, private_groups, universe_of
from torch_overlay.distributed._mesh_layout import _MeshLayout


class TestJointNames(TestCase):
    """On a 2 x 2 x 2 mesh, as rank 5 of 8 sees it; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        switched_on = config.patch(mesh_share_groups="names")
        switched_on.__enter__()
        self.addCleanup(switched_on.__exit__, None, None, None)
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))

    def test_a_flattened_view_adds_its_dims(self) -> None:
        mesh = self.mesh
        self.assertIsNone(joint_group_name(mesh, (1, 2)))
        known = joint_groups_known(mesh)
        flat = mesh["b", "c"]._flatten("bc")
        self.assertNotEqual(joint_groups_known(mesh), known)
        self.assertEqual(joint_group_name(mesh, (2, 1)), flat.get_group().group_name, msg="in whatever order")
        self.assertEqual(joint_group_name(mesh["b", "c"], (0, 1)), flat.get_group().group_name)
        self.assertIsNone(joint_group_name(mesh, (0, 1)))

    def test_dims_with_other_options_are_not_joined(self) -> None:
        options = FakeProcessGroup.Options()
        options._timeout = datetime.timedelta(seconds=7)
        mesh = self.mesh._unflatten("c", (2, 1), ("d", "e"), backend_override={"d": options})
        mesh["a", "b"]._flatten("ab")
        mesh["b", "d"]._flatten("bd")
        self.assertIsNotNone(joint_group_name(mesh, (0, 1)))
        self.assertIsNone(joint_group_name(mesh, (1, 2)))
        mesh["a", "d"]._flatten("ad", backend_override=options)
        self.assertIsNone(joint_group_name(mesh, (0, 2)), msg="nor if the view has one's options")

    def test_a_flattened_view_without_a_group_adds_none(self) -> None:
        """As that of a loaded mesh whose group isn't here."""
        self.mesh["b", "c"]._flatten("bc")
        saved = pickle.dumps(self.mesh)
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        self.assertIsNone(joint_group_name(pickle.loads(saved), (1, 2)))

    def test_a_private_view_uses_no_flattened_view(self) -> None:
        outside = self.mesh["b", "c"]._flatten("bc")._unflatten(0, (2, 2), ("x", "y"))
        self.assertIsNotNone(joint_group_name(outside, (0, 1)))
        with private_groups():
            inside = self.mesh["bc"]._unflatten(0, (2, 2), ("x", "y"))
        self.assertIsNone(joint_group_name(inside, (0, 1)))

    def test_a_rank_outside_knows_the_backends_that_were_given(self) -> None:
        given = (("gloo", None), (None, None))
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"), backend_override=given)
        mesh._unflatten("b", (2,), ("c",), backend_override={"c": "gloo"})
        universe = universe_of(shared_state(mesh))
        self.assertEqual(tuple(override_of(mesh, universe, axis) for axis in (0, 1)), given)

    def test_a_joint_group_is_neither_an_axis_nor_the_default_group(self) -> None:
        ranks = RankMap.identity(8)
        universe = current_world().open_universe(ranks)

        def asked(size: int, name: str, joint: bool):
            view = View(ranks, _MeshLayout.from_sizes_strides((8 // size, size)).select((1,)))
            return axis_group(universe, Request(view, name, (None, None), "cpu", joint=joint))

        group = asked(4, "b,c", True)
        self.assertEqual(asked(4, "y,z", True), group, msg="whatever its dims are called")
        self.assertIsNot(asked(8, "a,b,c", True), dist.group.WORLD)
        self.assertFalse(any(entry.serves_axis for entry in universe.table.entries.values()))
        self.assertNotEqual(asked(4, "b,c", False), group)


SETS = [axes for count in (2, 3) for axes in itertools.combinations(range(3), count)]


class TestJointGroups(TestCase):
    """On a 2 x 2 x 2 mesh, as rank 5 of 8 sees it; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.addCleanup(dist.destroy_process_group)

    def _choose(self, joint: str, share: str = "names") -> None:
        chosen = config.patch(mesh_share_groups=share, mesh_joint_groups=joint)
        chosen.__enter__()
        self.addCleanup(chosen.__exit__, None, None, None)

    def _mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))

    @parametrize("joint, there", [("existing", []), ("whole", [(0, 1, 2)])])
    def test_what_a_mesh_brings(self, joint, there) -> None:
        self._choose(joint)
        mesh = self._mesh()
        names = {axes: joint_group_name(mesh, axes) for axes in SETS}
        self.assertEqual([axes for axes in SETS if names[axes]], there)
        for axes in there:
            ranks = mesh[tuple("abc"[axis] for axis in axes)].mesh.flatten().tolist()
            group = dist.distributed_c10d._resolve_process_group(names[axes])
            self.assertEqual(dist.get_process_group_ranks(group), ranks)

    def test_an_unflattened_view_brings_one(self) -> None:
        self._choose("whole")
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("a",))
        known = joint_groups_known(mesh)
        view = mesh._unflatten("a", (2, 4), ("b", "c"))
        self.assertIsNotNone(joint_group_name(view, (0, 1)))
        self.assertNotEqual(joint_groups_known(mesh), known)
        with private_groups():
            private = mesh._unflatten("a", (2, 2, 2), ("b", "c", "d"))
        self.assertIsNone(joint_group_name(private, (0, 1, 2)))

    def test_views_share_nothing_where_sharing_is_off(self) -> None:
        self._choose("whole", share="off")
        self.assertIsNone(joint_group_name(self._mesh(), (0, 1, 2)))

    @parametrize("joint, share", [("existing", "names"), ("whole", "names"), ("whole", "off")])
    def test_the_default_group_serves_who_chose_it(self, joint, share) -> None:
        self._choose("existing")
        mesh = self._mesh()
        self.assertEqual(mesh._flatten("abc").get_group(), dist.group.WORLD)
        self._choose(joint, share)
        name = joint_group_name(mesh, (0, 1, 2))
        self.assertEqual(name == dist.group.WORLD.group_name, joint == "existing")

    def test_a_rank_outside_has_no_group(self) -> None:
        self._choose("whole")
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
        self.assertEqual(joint_group_name(mesh, (0, 1)), "")

    def test_a_rank_outside_asks_for_the_groups_that_members_ask_for(self) -> None:
        """Those over dims with equal backends, whatever another view has along the same ranks."""
        self._choose("whole")
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
        mesh._unflatten("b", (2,), ("c",), backend_override={"c": "gloo"})
        self.assertEqual(joint_group_name(mesh, (0, 1)), "")
        unlike = (("gloo", None), (None, None))
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"), backend_override=unlike)
        self.assertIsNone(joint_group_name(mesh, (0, 1)))

    def test_ranks_ask_for_the_same_groups_where_sharing_is_off(self) -> None:
        """For those of the dims alone. The backends of these, which differ here, aren't known outside."""
        self._choose("whole", share="off")
        asked = []
        for rank in (1, 5):  # a member and one outside
            dist.destroy_process_group()
            dist.init_process_group("cpu:fake,cuda:fake", store=FakeStore(), rank=rank, world_size=8)
            before = distributed_c10d._world.group_count
            given = (("fake", None), (None, None))
            with config.patch(mesh_create_groups="world"):
                mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"), backend_override=given)
            asked.append(distributed_c10d._world.group_count - before)
            self.assertIsNone(joint_group_name(mesh, (0, 1)))
        self.assertEqual(asked, [4, 4])


instantiate_parametrized_tests(TestJointGroups)


class TestJointClosed(TestCase):
    """In a world of 16 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        chosen = config.patch(mesh_share_groups="names", mesh_joint_groups="whole")
        chosen.__enter__()
        self.addCleanup(chosen.__exit__, None, None, None)
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16)
        self.addCleanup(dist.destroy_process_group)

    @parametrize("destroyed, held, there", [(2, False, False), (1, False, True), (2, True, True)])
    def test_they_go_with_the_mesh_and_its_groups(self, destroyed, held, there) -> None:
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("a", "b"))
        name = joint_group_name(mesh, (0, 1))
        for axis in ("a", "b")[:destroyed]:
            dist.destroy_process_group(mesh.get_group(axis))
        holder = mesh if held else None
        del mesh
        gc.collect()
        self.assertIsNotNone(find_group(name), msg="not before the next mesh")
        init_device_mesh("cpu", (4, 4), mesh_dim_names=("a", "b"))
        self.assertEqual(find_group(name) is not None, there, msg=str(holder))

    def test_they_stay_where_ranks_end_a_communicator_together(self) -> None:
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("a", "b"))
        name = joint_group_name(mesh, (0, 1))
        for group in mesh.get_all_groups():
            dist.destroy_process_group(group)
        del mesh
        gc.collect()
        with mock.patch.object(distributed_c10d, "get_backend", lambda group: "nccl"):
            init_device_mesh("cpu", (4, 4))
        self.assertIsNotNone(find_group(name))

    def test_groups_may_be_destroyed_after_the_next_mesh(self) -> None:
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("a", "b"))
        name, groups = joint_group_name(mesh, (0, 1)), mesh.get_all_groups()
        del mesh
        gc.collect()
        init_device_mesh("cpu", (4, 4))
        for group in groups:
            self.assertIsNotNone(find_group(name))
            dist.destroy_process_group(group)
        init_device_mesh("cpu", (4, 4))
        self.assertIsNone(find_group(name))

    @parametrize("create", ["members", "world"])
    def test_a_mesh_that_is_loaded_later_gets_a_live_one(self, create) -> None:
        with config.patch(mesh_create_groups=create):
            mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("a", "b"))
            saved = pickle.dumps(mesh)
            name, known = joint_group_name(mesh, (0, 1)), joint_groups_known(mesh)
            for group in mesh.get_all_groups():
                dist.destroy_process_group(group)
            del mesh
            gc.collect()
            init_device_mesh("cpu", (4, 4))
            self.assertEqual(find_group(name) is None, create == "members")
            self.assertEqual(joint_groups_known(pickle.loads(saved)) == known, create == "world", msg="says so")
            view = pickle.loads(saved)._unflatten("b", (2, 4), ("c", "d"))
            self.assertIsNotNone(find_group(joint_group_name(view, (0, 1, 2))))


instantiate_parametrized_tests(TestJointClosed)


if __name__ == "__main__":
    run_tests()
