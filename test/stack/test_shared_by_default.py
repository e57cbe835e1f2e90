# Owner(s): ["oncall: distributed"]
"""An axis has one group in all views without a switch."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


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


if __name__ == "__main__":
    run_tests()
