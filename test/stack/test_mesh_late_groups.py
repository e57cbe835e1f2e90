# Owner(s): ["oncall: distributed"]
"""A mesh that is loaded before its groups are made finds them later."""

import io
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import _mesh_pickle


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
        with mock.patch.object(_mesh_pickle, "_find", wraps=_mesh_pickle._find) as find:
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


if __name__ == "__main__":
    run_tests()
