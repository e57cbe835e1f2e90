# Owner(s): ["oncall: distributed"]
"""Axes are found by their names: those of the mesh, then flattened views of its root."""

import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed._mesh_axes import ascending, select
from torch_overlay.distributed._mesh_state import view_of


class TestMeshSliceNames(TestCase):
    """In a world of 4,096 of which this process plays one; no bytes move."""

    WORLD, RANK = 4096, 1234

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=self.RANK, world_size=self.WORLD)
        self.mesh = init_device_mesh("cpu", (64, 8, 8), mesh_dim_names=("pp", "dp", "tp"))

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def test_a_slice_of_a_flattened_axis_keeps_its_name(self) -> None:
        self.mesh["dp", "tp"]._flatten("model")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            view = self.mesh["model"]
        self.assertEqual(view.mesh.tolist(), list(range(19 * 64, 20 * 64)))
        self.assertEqual(self.mesh["pp"]["model"], view)

    def test_a_mesh_whose_axes_do_not_ascend_is_sliced_in_its_own_order(self) -> None:
        turned = DeviceMesh._concatenate([self.mesh["tp"], self.mesh["dp"], self.mesh["pp"]])
        self.assertEqual(turned["tp", "dp"].mesh.tolist(), torch.arange(19 * 64, 20 * 64).reshape(8, 8).T.tolist())
        with self.assertRaisesRegex(KeyError, "ascending order"):
            turned["tp", "pp", "dp"]

    def test_no_group_in_another_order_than_the_mesh_is_found(self) -> None:
        """A collective over it would bring the parts in the wrong order."""
        turned = DeviceMesh._concatenate([self.mesh["tp"], self.mesh["dp"]])
        flat = turned._flatten("turned")
        try:
            turned._get_slice_mesh_layout(("tp", "dp"))
        except KeyError:
            return
        self.assertEqual(dist.get_process_group_ranks(flat.get_group()), flat.mesh.tolist())

    def test_axes_are_found_by_name(self) -> None:
        ranks = torch.arange(self.WORLD).reshape(64, 8, 8)[19]
        layout = view_of(self.mesh).show(select(self.mesh, ("tp", "dp")))
        self.assertEqual(layout.ranks(self.RANK), ranks.T.flatten().tolist())
        self.assertEqual(select(self.mesh, ("dp", "tp")), ascending(self.mesh, ("dp", "tp")))
        with self.assertRaisesRegex(KeyError, "ascending order"):
            ascending(self.mesh, ("tp", "dp"))
        with self.assertRaisesRegex(KeyError, "Invalid mesh_dim_names"):
            select(self.mesh, ("cp",))


if __name__ == "__main__":
    run_tests()
