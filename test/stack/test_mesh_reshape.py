# Owner(s): ["oncall: distributed"]
"""Flattened and unflattened views: their ranks, their groups, and what is refused."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed._mesh_axes import cut_axis
from torch_overlay.distributed._mesh_layout import _MeshLayout
from torch_overlay.distributed._mesh_state import view_of


class TestMeshReshape(TestCase):
    """In a world of 24 of which this process plays one; no bytes move."""

    RANK = 13

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=self.RANK, world_size=24)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=("pp", "dp", "tp"))

    def test_an_axis_is_cut(self) -> None:
        cut, names = cut_axis(self.mesh, 2, (2, 2), ("cp", "sp"))
        self.assertEqual(names, ["pp", "dp", "cp", "sp"])
        shown = [view_of(self.mesh).show(_MeshLayout((axis,))).ranks(self.RANK) for axis in cut.axes]
        self.assertEqual(shown, [[13, 15], [12, 13]])
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


if __name__ == "__main__":
    run_tests()
