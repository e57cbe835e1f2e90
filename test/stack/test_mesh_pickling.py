# Owner(s): ["oncall: distributed"]
"""A loaded mesh belongs to the process that loads it."""

import io

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class SavedMeshTest(TestCase):
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


class TestMeshPickling(SavedMeshTest):
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


if __name__ == "__main__":
    run_tests()
