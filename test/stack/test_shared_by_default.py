# Owner(s): ["oncall: distributed"]
"""An axis has one group in all views without a switch."""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config


class TestSharedByDefault(TestCase):
    """In a world of 64 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def test_views_share_the_group_of_an_axis(self) -> None:
        mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("world",))
        one, other = (mesh._unflatten(0, (4, 16), ("a", name)) for name in ("b", "c"))
        self.assertEqual(one.get_group("a"), other.get_group("a"))


class TestSharedByNone(DTensorOpTestBase):
    """Four threads play the ranks."""

    @property
    def world_size(self) -> int:
        return 4

    @config.patch(mesh_share_groups="off", plan_redistribution=False)
    def test_a_gather_over_a_turned_mesh_is_in_its_order_or_refused(self) -> None:
        """As long as groups sort their ranks, that of a flattened view isn't taken for it."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        turned = DeviceMesh._concatenate([mesh["b"], mesh["a"]])
        turned._flatten("ba")
        whole = torch.arange(8)
        local = whole.chunk(2)[turned.get_local_rank("b")].chunk(2)[turned.get_local_rank("a")]
        held = DTensor.from_local(local, turned, (Shard(0), Shard(0)), run_check=False)
        with contextlib.suppress(KeyError):  # "their groups would not have the mesh's order"
            self.assertEqual(held.full_tensor(), whole)


if __name__ == "__main__":
    run_tests()
