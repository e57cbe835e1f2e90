# Owner(s): ["oncall: distributed"]
"""Meshes that were saved, copied or loaded, and their groups."""

import io
import pickle
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh import pickling, universe
from torch_overlay.distributed._mesh.rank_map import RankMap
from torch_overlay.distributed._mesh.state import shared_state, view_of
from torch_overlay.distributed._mesh.universe import current_world, find_universe


class TestMeshSavedState(TestCase):
    """In a world of 24 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=13, world_size=24)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (6, 4), mesh_dim_names=("dp", "tp"))

    def test_a_pickle_has_no_hash(self) -> None:
        """Strings hash otherwise in another process."""
        piece = self.mesh["tp"]
        hash(piece)
        self.assertIsNone(piece.__getstate__()["_hash"])
        self.assertEqual(hash(pickle.loads(pickle.dumps(piece))), hash(piece))

    def test_a_mesh_with_a_state_can_be_pickled(self) -> None:
        shared_state(self.mesh)  # which holds groups
        again = pickle.loads(pickle.dumps(self.mesh))
        self.assertEqual(again, self.mesh)
        self.assertEqual(view_of(again).ranks(13), [*range(24)])


class TestMeshPickling(TestCase):
    """Saved as one rank of a world, loaded as another; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        self._join(rank=5)
        mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
        mesh._flatten("world")
        self.saved = io.BytesIO()
        torch.save([mesh, mesh["tp"]], self.saved)
        self.saved.seek(0)
        dist.destroy_process_group()

    def _join(self, rank: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)

    def tearDown(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        super().tearDown()

    def test_coordinates_and_ranks_are_the_loaders(self) -> None:
        self._join(rank=10)
        mesh, row = torch.load(self.saved, weights_only=False)
        self.assertEqual(mesh.get_coordinate(), [2, 2])
        self.assertEqual(row.mesh.tolist(), [8, 9, 10, 11])
        self.assertEqual(mesh["world"].get_local_rank(), 10)

    def test_an_older_file_has_the_ranks_as_a_tensor_alone(self) -> None:
        self._join(rank=10)
        mesh, _ = torch.load(self.saved, weights_only=False)
        state = mesh.__getstate__()
        del state["_flatten_rank_map"]
        older = object.__new__(DeviceMesh)
        older.__setstate__(state)
        self.assertEqual(older, mesh)
        self.assertEqual(older.get_coordinate(), [2, 2])

    def test_groups_are_found_by_their_ranks(self) -> None:
        self._join(rank=10)
        dist.new_group([0, 1])  # so that numbers differ from those of the saver
        here = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
        mesh, row = torch.load(self.saved, weights_only=False)
        for name in ("dp", "tp"):
            ranks = dist.get_process_group_ranks(here.get_group(name))
            self.assertEqual(dist.get_process_group_ranks(mesh.get_group(name)), ranks)
        self.assertEqual(dist.get_process_group_ranks(row.get_group()), [8, 9, 10, 11])

    def test_each_axis_is_found_by_itself(self) -> None:
        """Rank 9 has the saver's group along dp, and another one along tp."""
        self._join(rank=5)
        saved = io.BytesIO()
        torch.save([init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp")) for _ in range(2)], saved)
        dist.destroy_process_group()
        self._join(rank=9)
        here = [init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp")) for _ in range(2)]
        saved.seek(0)
        for made, loaded in zip(here, torch.load(saved, weights_only=False), strict=True):
            self.assertEqual(loaded.get_group("dp"), made.get_group("dp"))
            self.assertEqual(loaded.get_group("tp").size(), 4)

    def test_a_users_group_is_found_in_its_order(self) -> None:
        self._join(rank=5)
        ranks = [7, 6, 5, 4]
        mesh = DeviceMesh.from_group(dist.new_group(ranks, sort_ranks=False), "cpu")
        self.assertEqual(mesh.mesh.tolist(), ranks)
        saved = io.BytesIO()
        torch.save(mesh, saved)
        saved.seek(0)
        self.assertEqual(torch.load(saved, weights_only=False).get_group(), mesh.get_group())

    def _backward(self) -> list[DeviceMesh]:
        ranks = torch.arange(16).flip(0).reshape(4, 4)
        orders = (False, True)
        return [DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"), preserve_rank_order=kept) for kept in orders]

    def test_groups_have_the_meshs_order_where_it_says_so(self) -> None:
        """Equal meshes in another order are there, too, and their groups over the same ranks."""
        self._join(rank=5)
        saved = io.BytesIO()
        torch.save(self._backward(), saved)
        dist.destroy_process_group()
        self._join(rank=10)
        init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
        here = self._backward()
        saved.seek(0)
        for made, loaded in zip(here, torch.load(saved, weights_only=False), strict=True):
            self.assertEqual(loaded, made)
            self.assertEqual(loaded.get_local_rank("tp"), made.get_local_rank("tp"))
            ranks = dist.get_process_group_ranks(made.get_group("tp"))
            self.assertEqual(dist.get_process_group_ranks(loaded.get_group("tp")), ranks)

    def test_a_group_that_was_registered_without_ranks_is_passed_over(self) -> None:
        """As other code may do."""
        self._join(rank=10)
        books = dist.distributed_c10d._world
        books.pg_names[dist.ProcessGroup(0, 1)] = "without ranks"
        here = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
        mesh, _ = torch.load(self.saved, weights_only=False)
        self.assertEqual(mesh.get_group("tp"), here.get_group("tp"))

    def test_a_group_that_is_not_here_is_an_error(self) -> None:
        self._join(rank=10)
        mesh, _ = torch.load(self.saved, weights_only=False)
        with self.assertRaisesRegex(RuntimeError, r"no process group here has the ranks \[8, 9, 10, 11\]"):
            mesh.get_group("tp")

    def test_loaded_early_it_waits_for_the_world(self) -> None:
        mesh, row = torch.load(self.saved, weights_only=False)
        self.assertEqual(mesh.get_coordinate(), [1, 1], "of rank 5, which saved it")
        self._join(rank=10)
        here = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
        self.assertEqual(mesh.get_coordinate(), [2, 2])
        self.assertEqual(row.get_coordinate(), [2])
        self.assertEqual(mesh["tp"].get_local_rank(), 2)
        self.assertEqual(mesh.get_group("tp"), here.get_group("tp"))


class TestMeshLateGroups(TestCase):
    """Saved as one rank of a world, loaded as another; no bytes move."""

    def _join(self, rank: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)
        self.addCleanup(lambda: dist.is_initialized() and dist.destroy_process_group())

    def _make(self):
        return init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))

    def test_groups_that_are_made_later_are_found(self) -> None:
        self._join(rank=5)
        saved = io.BytesIO()
        mesh = self._make()
        torch.save([mesh, mesh["tp"]], saved)
        dist.destroy_process_group()
        for early in (False, True):
            with self.subTest(before_the_world=early):
                saved.seek(0)
                loaded = torch.load(saved, weights_only=False) if early else []
                self._join(rank=10)
                mesh, row = loaded or torch.load(saved, weights_only=False)
                self.assertEqual(mesh.get_coordinate(), [2, 2])
                with self.assertRaisesRegex(RuntimeError, "no process group here has the ranks"):
                    mesh.get_group("tp")
                here = self._make()
                self.assertEqual(mesh.get_group("tp"), here.get_group("tp"))
                self.assertEqual(row.get_group(), here.get_group("tp"))
                dist.destroy_process_group()

    def test_an_axis_that_is_found_is_not_searched_again_and_again(self) -> None:
        self._join(rank=5)
        saved = io.BytesIO()
        torch.save(self._from_groups(), saved)
        dist.destroy_process_group()
        self._join(rank=10)
        row = dist.new_subgroups_by_enumeration([[8, 9, 10, 11]], group_desc="mesh_tp")[0]
        saved.seek(0)
        mesh = torch.load(saved, weights_only=False)
        self.assertEqual(mesh.get_group("tp"), row)
        with mock.patch.object(pickling, "_find", wraps=pickling._find) as find:
            self.assertEqual(mesh.get_group("tp"), row)
            self.assertEqual(find.call_count, 0)
            column = dist.new_subgroups_by_enumeration([[2, 6, 10, 14]], group_desc="mesh_dp")[0]
            self.assertEqual(mesh.get_group("dp"), column)
            self.assertGreater(find.call_count, 0)

    def _from_groups(self):
        ranks = torch.arange(16).reshape(4, 4)
        groups = [dist.new_subgroups_by_enumeration(copies.tolist())[0] for copies in (ranks.T, ranks)]
        return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("dp", "tp"))

    def test_a_slice_finds_a_users_group_that_is_made_later(self) -> None:
        self._join(rank=5)
        saved = io.BytesIO()
        torch.save(self._from_groups(), saved)
        dist.destroy_process_group()
        self._join(rank=5)
        saved.seek(0)
        mesh = torch.load(saved, weights_only=False)
        row = mesh["tp"]
        here = self._from_groups()
        self.assertEqual(mesh.get_group("tp"), here.get_group("tp"))
        self.assertEqual(row.get_group(), here.get_group("tp"))


class TestSavedGroups(TestCase):
    """In a world of 64 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        switched_on = config.patch(mesh_share_groups="names")
        switched_on.__enter__()
        self.addCleanup(switched_on.__exit__, None, None, None)
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def _meshes(self):
        return [init_device_mesh("cpu", (4, 16), mesh_dim_names=("a", "b")) for _ in range(2)]

    def _saved(self, *meshes) -> io.BytesIO:
        saved = io.BytesIO()
        torch.save(meshes, saved)
        saved.seek(0)
        return saved

    def test_each_of_two_equal_meshes_has_its_own_groups(self) -> None:
        meshes = self._meshes()
        saved = self._saved(*meshes)
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=64)
        here = self._meshes()
        for mesh, loaded in zip(here, torch.load(saved, weights_only=False), strict=True):
            for name in ("a", "b"):  # along b the groups have the names that were saved
                self.assertEqual(loaded.get_group(name), mesh.get_group(name))
            self.assertEqual(loaded.get_coordinate(), [0, 7])

    def test_a_group_that_was_destroyed_is_not_another(self) -> None:
        saved = self._saved(self._meshes()[0])
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=64)
        one, _ = self._meshes()
        dist.destroy_process_group(one.get_group("b"))
        (loaded,) = torch.load(saved, weights_only=False)
        with self.assertRaises(RuntimeError):
            loaded.get_group("b")

    def test_views_that_are_made_later_share_groups_too(self) -> None:
        mesh, _ = self._meshes()
        saved = self._saved(mesh)
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=64)
        mesh, _ = self._meshes()
        (loaded,) = torch.load(saved, weights_only=False)
        cut = [one._unflatten(1, (2, 8), ("c", "d")) for one in (mesh, loaded)]
        self.assertEqual(cut[0].get_group("d"), cut[1].get_group("d"))

    def test_a_universe_is_found_by_its_ranks_and_number(self) -> None:
        world, ranks = current_world(), RankMap.identity(64)
        one, other = (world.open_universe(ranks) for _ in range(2))
        private = world.open_universe(ranks, world.next_private(ranks))
        self.assertIs(find_universe(RankMap(range(64)), None, 2), other)
        self.assertIs(find_universe(ranks, None, 9), one, msg="the first, where that number isn't here")
        self.assertIs(find_universe(ranks, private.private, 3), private)
        self.assertIsNone(find_universe(RankMap([1, 0]), None, 1))

    def test_a_mesh_that_is_not_here_has_groups_of_an_equal_one(self) -> None:
        """Not that of another axis over these ranks, which may even have the name that was saved."""
        mesh = self._meshes()[1]
        saved, saved_name = self._saved(mesh), mesh.get_group("b").group_name
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=64)
        mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("world",))
        others = [mesh._unflatten(0, (4, 16), names) for names in (("u", "v"), ("x", "y"))]
        equal = mesh._unflatten(0, (4, 16), ("a", "b"))
        (loaded,) = torch.load(saved, weights_only=False)
        self.assertEqual(loaded.get_group("b"), equal.get_group("b"))
        self.assertEqual(saved_name, others[1].get_group("y").group_name)

    def test_a_submesh_of_a_private_mesh_has_its_groups(self) -> None:
        with universe.private_groups():
            private = self._meshes()[0]
        (loaded,) = torch.load(self._saved(private._get_all_submeshes("b")[0]), weights_only=False)
        self.assertEqual(loaded.get_group(), private.get_group("b"))

    def test_a_private_mesh_gives_none(self) -> None:
        """Though its group along b has the name that was saved."""
        saved = self._saved(self._meshes()[0])
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=64)
        with universe.private_groups():
            private = self._meshes()[0]
        (loaded,) = torch.load(saved, weights_only=False)
        for name in ("a", "b"):
            with self.assertRaisesRegex(RuntimeError, "no process group here has the ranks"):
                loaded.get_group(name)
            self.assertEqual(private.get_group(name).size(), dict(a=4, b=16)[name])


if __name__ == "__main__":
    run_tests()
