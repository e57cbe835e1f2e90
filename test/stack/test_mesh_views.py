# Owner(s): ["oncall: distributed"]
"""Meshes as views: what they are, hold, equal and cost."""

import copy
import pickle
import tracemalloc
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed._mesh.axes import cut_axis
from torch_overlay.distributed._mesh.state import shared_state, view_of


class TestMeshViews(TestCase):
    """In a world of 24 of which this process plays one; no bytes move."""

    RANK = 13

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=self.RANK, world_size=24)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=("pp", "dp", "tp"))

    def test_all_views_of_a_root_have_its_state(self) -> None:
        views = [self.mesh["dp"], self.mesh["pp", "tp"], self.mesh["dp", "tp"]._flatten("model"), self.mesh["model"]]
        for view in views:
            self.assertIs(shared_state(view), shared_state(self.mesh))
            self.assertEqual(view_of(view).ranks(self.RANK), view.mesh.flatten().tolist())
        self.assertIs(shared_state(self.mesh).flattened["model"], self.mesh._flatten_mapping["model"])
        again = init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=("pp", "dp", "tp"))
        self.assertIsNot(shared_state(again), shared_state(self.mesh))

    def test_a_mesh_that_holds_what_was_stored_before_gets_its_state(self) -> None:
        ranks = torch.arange(23, -1, -1).reshape(6, 4)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
        view = mesh["tp"]
        for old in (mesh, view):
            old.__dict__["_rank_map"] = ranks.flatten()
            old.__dict__.pop("_in_universe", None)
        self.assertIs(shared_state(view), shared_state(mesh))
        self.assertEqual(view_of(view).ranks(self.RANK), [15, 14, 13, 12])
        self.assertEqual(view_of(mesh).coordinate(self.RANK), (2, 2))

    def test_a_mesh_of_other_ranks_than_its_roots_keeps_them(self) -> None:
        for again in (lambda mesh: pickle.loads(pickle.dumps(mesh)), copy.copy):
            other = DeviceMesh("cpu", [self.RANK, 7], mesh_dim_names=("q",), _root_mesh=self.mesh)
            other = again(again(other))
            self.assertEqual(other._flatten_rank_map, (self.RANK, 7))
            self.assertEqual(view_of(other).ranks(self.RANK), [self.RANK, 7])
            self.assertIs(shared_state(other).registry, shared_state(other._root_mesh).registry)

    def test_slices_have_their_roots_tensor_and_tuple(self) -> None:
        self.assertEqual(self.mesh._rank_map.tolist(), list(range(24)))
        self.assertEqual(self.mesh._flatten_rank_map, tuple(range(24)))
        for name in ("_rank_map", "_flatten_rank_map"):
            self.assertIs(getattr(self.mesh["tp"], name), getattr(self.mesh, name))

    def test_coordinates_under_fake_tensors(self) -> None:
        """Where a tensor of ranks would be fake."""
        with FakeTensorMode():
            mesh = DeviceMesh("cpu", [0, 1, 2], _init_backend=False, _rank=2)
        self.assertEqual(mesh.get_coordinate(), (2,))

    def test_ranks_are_made_when_somebody_asks_for_them(self) -> None:
        mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], _init_backend=False, _rank=0)
        made = {"_rank_map", "_flatten_rank_map"}
        self.assertEqual(mesh.get_coordinate(), (1, 0))
        self.assertEqual(made & {*vars(mesh)}, set())
        self.assertEqual(mesh._flatten_rank_map, (3, 1, 0, 2))
        self.assertIn("_flatten_rank_map", vars(mesh))

    def test_a_pickle_has_the_rank_map_that_somebody_assigned(self) -> None:
        """The root's pickle keeps its own."""
        piece, ranks = self.mesh["tp"], torch.arange(24)
        piece._rank_map = ranks
        self.assertIs(piece.__getstate__()["_rank_map"], ranks)
        self.assertIs(self.mesh.__getstate__()["_rank_map"], self.mesh._rank_map)

    def test_a_mesh_without_ranks_has_no_rank_map_and_can_be_copied(self) -> None:
        """As one of a subclass whose constructor isn't DeviceMesh's."""

        class BareMesh(DeviceMesh):
            def __init__(self) -> None:
                self.purpose = "stands for a mesh"

        bare = BareMesh()
        for mesh in (bare, copy.copy(bare)):
            self.assertFalse(hasattr(mesh, "_rank_map"))
        bare._flatten_rank_map = (0, 1)  # and no layout
        self.assertEqual(copy.copy(bare).purpose, bare.purpose)

    def test_each_dim_has_a_group_and_a_rank_outside_none(self) -> None:
        ranks = [dist.get_process_group_ranks(group) for group in self.mesh.get_all_groups()]
        self.assertEqual(ranks, [[1, 13], [13, 17, 21], [12, 13, 14, 15]])
        self.assertEqual(DeviceMesh("cpu", [[0, 1], [2, 3]])._dim_group_names, [])

    def test_a_mesh_of_another_rank_map_has_its_groups_where_its_root_has(self) -> None:
        """Compiled code looks for them there."""
        for root in (self.mesh, self.mesh["tp"]):
            other = DeviceMesh("cpu", [7, 13], mesh_dim_names=("q",), _root_mesh=root)
            self.assertIs(other._get_root_mesh(), self.mesh)
            self.assertIn(other.get_group().group_name, self.mesh._pg_registry)

    def test_an_axis_is_cut_into_its_size(self) -> None:
        with self.assertRaisesRegex(ValueError, "product of mesh_sizes"):
            cut_axis(self.mesh, 2, (3, 2), ("cp", "tp"))
        with self.assertRaisesRegex(ValueError, "at least 1"):
            cut_axis(self.mesh, 2, (-2, -2), ("cp", "sp"))

    def test_new_axes_have_groups_and_the_others_keep_theirs(self) -> None:
        cut = self.mesh._unflatten(2, (2, 2), ("cp", "sp"))
        self.assertEqual(cut.shape, (2, 3, 2, 2))
        self.assertEqual(cut.get_group("dp"), self.mesh.get_group("dp"))
        self.assertEqual(
            [dist.get_process_group_ranks(cut.get_group(name)) for name in ("cp", "sp")], [[13, 15], [12, 13]]
        )
        flat = self.mesh["pp", "tp"]._flatten("model")
        self.assertEqual(dist.get_process_group_ranks(flat.get_group()), [0, 1, 2, 3, 12, 13, 14, 15])
        self.assertEqual(self.mesh["pp", "tp"]._flatten("model"), flat)

    def test_a_name_that_another_dim_has_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "no other axis"):
            self.mesh._unflatten(2, (2, 2), ("dp", "sp"))

    def test_axes_keep_their_ranks_and_groups(self) -> None:
        both = DeviceMesh._concatenate([self.mesh["pp"], self.mesh["tp"]])
        self.assertEqual(both, self.mesh["pp", "tp"])
        self.assertEqual(both.mesh.tolist(), [[0, 1, 2, 3], [12, 13, 14, 15]])
        self.assertEqual(both.get_group("tp"), self.mesh.get_group("tp"))

    def test_meshes_without_names_can_be_concatenated(self) -> None:
        cut = init_device_mesh("cpu", (24,))
        self.assertIsNone(DeviceMesh._concatenate([cut]).mesh_dim_names)

    def test_what_does_not_go_together_is_refused(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "overlapping"):
            DeviceMesh._concatenate([self.mesh["tp"], self.mesh["dp", "tp"]])
        with self.assertRaisesRegex(RuntimeError, "different device meshes"):
            DeviceMesh._concatenate([self.mesh["dp"], DeviceMesh("cpu", range(23, -1, -1), mesh_dim_names=("tp",))])
        with self.assertRaisesRegex(ValueError, "at least one mesh"):
            DeviceMesh._concatenate([])

    def test_a_mesh_that_does_not_say_its_rank_has_copies(self) -> None:
        del self.mesh._rank  # as of a subclass that makes its own state
        self.assertEqual(self.mesh._get_all_submeshes("dp")[5].get_group(), self.mesh.get_group("dp"))

    def test_a_copy_is_a_mesh_over_the_same_groups(self) -> None:
        for made in (copy.copy(self.mesh), copy.deepcopy(self.mesh["dp", "tp"])):
            self.assertEqual(made, self.mesh if made.ndim == 3 else self.mesh["dp", "tp"])
            self.assertEqual(made.get_group("tp"), self.mesh.get_group("tp"))

    def test_what_is_copied_together_has_one_root(self) -> None:
        mesh, view = copy.deepcopy([self.mesh, self.mesh["tp"]])
        self.assertIs(view._get_root_mesh(), mesh)
        self.assertIsNot(mesh, self.mesh)
        self.mesh["dp", "tp"]._flatten("model")
        self.assertEqual(mesh["model"], self.mesh["model"])

    def test_what_users_put_on_a_mesh_comes_along(self) -> None:
        self.mesh.notes = self.mesh._notes = ["kept"]
        for name in ("notes", "_notes"):
            self.assertIs(getattr(copy.copy(self.mesh), name), self.mesh.notes)
            copied = getattr(copy.deepcopy(self.mesh), name)
            self.assertEqual(copied, ["kept"])
            self.assertIsNot(copied, self.mesh.notes)
        self.mesh.get_rank = lambda: 3
        self.assertEqual(copy.copy(self.mesh).get_rank(), 3)

    def test_own_axes_come_before_flattened_views(self) -> None:
        self.mesh["pp", "tp"]._flatten("model")
        cut = self.mesh._unflatten(2, (2, 2), ("model", "sp"))
        self.assertEqual(dist.get_process_group_ranks(cut.get_group("model")), [13, 15])
        self.assertEqual(cut.get_group("model"), cut["model"].get_group())
        self.assertEqual(self.mesh.get_group("model"), self.mesh["model"].get_group())
        named = self.mesh._unflatten(2, (2, 2), ("all", "sp"))
        flat = named._flatten("all")
        self.assertEqual(dist.get_process_group_ranks(named.get_group("all")), [13, 15])
        self.assertEqual(flat.get_group("all").size(), 24)
        self.assertEqual(self.mesh["all"], flat)

    def test_a_rank_outside_is_told(self) -> None:
        outside = DeviceMesh("cpu", torch.arange(8), mesh_dim_names=("dp",))
        with self.assertRaisesRegex(RuntimeError, "Rank 13 isn't in the mesh"):
            outside.get_group("dp")

    def test_a_mesh_without_dims_has_no_group(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "without dims has no process group"):
            DeviceMesh("cpu", torch.tensor(self.RANK)).get_group()

    def test_ranks_that_the_world_lacks_are_refused_where_groups_are_made(self) -> None:
        """Without the check, the last mesh, as long as the world, would have the default group."""
        groups = [*dist.distributed_c10d._world.pg_map]
        for wrong in ([[0, 1], [13, 24]], [[-1, 13], [0, 1]], [*range(1, 25)]):
            with self.assertRaisesRegex(ValueError, "out of range"):
                DeviceMesh("cpu", wrong)
        self.assertEqual([*dist.distributed_c10d._world.pg_map], groups)
        self.assertEqual(DeviceMesh("cpu", [13, 24], _init_backend=False).size(), 2)
        with self.assertRaisesRegex(RuntimeError, "bigger than default world size"):
            init_device_mesh("cpu", (25,))

    def test_each_dim_has_a_name_and_a_backend_or_none_has(self) -> None:
        with self.assertRaisesRegex(ValueError, "needs as many mesh_dim_names"):
            DeviceMesh("cpu", [[12, 13], [14, 15]], mesh_dim_names=("dp",))
        with self.assertRaisesRegex(ValueError, "backend_override should have the same length"):
            DeviceMesh("cpu", [[12, 13], [14, 15]], backend_override=(("fake", None),))
        with self.assertRaisesRegex(ValueError, "needs as many mesh_dim_names"):
            DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("dp"))


class TestLargeMesh(TestCase):
    """In a world of 4,096 of which this process plays one; no bytes move."""

    WORLD, RANK = 4096, 1234

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=self.RANK, world_size=self.WORLD)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (64, 8, 8), mesh_dim_names=("pp", "dp", "tp"))

    def test_coordinates_need_no_tensor_of_the_ranks(self) -> None:
        self.assertNotIn("_rank_map", vars(self.mesh))
        self.assertEqual(self.mesh.get_coordinate(), [19, 2, 2])
        self.assertEqual(self.mesh["pp", "tp"].get_coordinate(), [19, 2])

    def test_equal_meshes_are_equal_and_hash_alike(self) -> None:
        again = init_device_mesh("cpu", (64, 8, 8), mesh_dim_names=("pp", "dp", "tp"))
        self.assertEqual(again, self.mesh)
        self.assertEqual(hash(again["tp"]), hash(self.mesh["tp"]))
        self.assertEqual(again._stable_hash(), self.mesh._stable_hash())
        self.assertNotEqual(self.mesh["tp"], self.mesh["dp"])

    def test_a_hash_needs_no_tuple_of_the_ranks(self) -> None:
        hash(self.mesh)
        self.assertNotIn("_flatten_rank_map", vars(self.mesh))

    def test_the_order_of_the_ranks_counts(self) -> None:
        ranks = torch.arange(4096).reshape(1024, 4)
        meshes = [DeviceMesh("cpu", given, _init_backend=False) for given in (ranks, ranks.clone(), ranks.flip(0))]
        self.assertEqual(meshes[0], meshes[1])
        self.assertNotEqual(meshes[0], meshes[2])

    def test_a_view_costs_the_same_in_any_world(self) -> None:
        self.mesh["dp", "tp"]  # what is made once
        tracemalloc.start()
        kept = [self.mesh["dp", "tp"] for _ in range(10)]
        size = tracemalloc.get_traced_memory()[0] / len(kept)
        tracemalloc.stop()
        self.assertLess(size, 16_000, msg="bytes of one view")

    def test_a_mesh_without_groups_can_be_sliced(self) -> None:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), _init_backend=False)
        self.assertEqual(mesh["tp"].shape, (2,))

    def test_a_slice_of_a_flattened_axis_keeps_its_name(self) -> None:
        self.mesh["dp", "tp"]._flatten("model")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            view = self.mesh["model"]
        self.assertEqual(view.mesh.tolist(), list(range(19 * 64, 20 * 64)))
        self.assertEqual(self.mesh["pp"]["model"], view)

    def test_no_group_in_another_order_than_the_mesh_is_found(self) -> None:
        """A collective over it would bring the parts in the wrong order."""
        turned = DeviceMesh._concatenate([self.mesh["tp"], self.mesh["dp"]])
        flat = turned._flatten("turned")
        try:
            turned._get_slice_mesh_layout(("tp", "dp"))
        except KeyError:
            return
        self.assertEqual(dist.get_process_group_ranks(flat.get_group()), flat.mesh.tolist())

    def _mesh(self, kept: bool) -> DeviceMesh:
        ranks = torch.arange(4096).flip(0).reshape(1024, 4)
        return DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"), preserve_rank_order=kept)

    def test_groups_have_the_order_of_the_ranks(self) -> None:
        mesh = self._mesh(kept=True)
        for group in (mesh.get_group("tp"), mesh["tp"].get_group()):
            self.assertEqual(dist.get_process_group_ranks(group), [1235, 1234, 1233, 1232])

    def test_views_inherit_it(self) -> None:
        mesh = self._mesh(kept=True)
        cut = mesh["tp"]._unflatten(0, (2, 2), ("cp", "sp"))
        self.assertEqual(dist.get_process_group_ranks(cut.get_group("cp")), [1234, 1232])
        flat = mesh._flatten("all").get_group()
        self.assertEqual(dist.get_process_group_ranks(flat), list(range(4095, -1, -1)))

    def test_it_counts_in_comparisons(self) -> None:
        self.assertNotEqual(self._mesh(kept=True), self._mesh(kept=False))
        self.assertEqual(self._mesh(kept=True), self._mesh(kept=True))
        with self.assertRaisesRegex(RuntimeError, "with and without preserve_rank_order"):
            DeviceMesh._concatenate([self._mesh(kept=True)["dp"], self._mesh(kept=False)["tp"]])


class TestEqualMeshes(TestCase):
    """In a world of 8 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.addCleanup(dist.destroy_process_group)

    def test_a_result_lies_on_the_mesh_of_its_operand(self) -> None:
        meshes = [init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b")) for _ in range(3)]
        self.assertEqual(meshes[0], meshes[1])
        for mesh in (*meshes, meshes[0]["b"], meshes[1]["b"]):
            held = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)] * mesh.ndim, run_check=False)
            for result in (held + 1, held.detach(), held @ held.t(), held.sum()):
                self.assertIs(result.device_mesh._get_root_mesh(), mesh._get_root_mesh())

    def test_copies_share_what_is_remembered(self) -> None:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        specs = [
            DTensor.from_local(torch.ones(2), m, [Shard(0)] * 2, run_check=False)._spec for m in (mesh, copy.copy(mesh))
        ]
        self.assertEqual(*specs)


class TestMeshCheck(TestCase):
    def test_a_mesh_says_what_it_is_before_it_makes_groups(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        said = []
        leaving = "torch_overlay.distributed._mesh.groups.leave_line"
        with mock.patch(leaving, lambda describe, ranks: said.append(describe())):
            init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
            DeviceMesh("cpu", [3, 2, 1, 0])
        self.assertRegex(said[0], r"^\(dp=2, tp=4\) on cpu over ranks 0 to 7 as .*2.*4.*4.*1")
        self.assertRegex(said[1], r"^\(4\) on cpu over ranks .*3.*0.* #[0-9a-f]{8} as .*4.*1")


if __name__ == "__main__":
    run_tests()
