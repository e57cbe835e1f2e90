# Owner(s): ["oncall: distributed"]
"""How fast the axes are, a user says by name."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed.tensor._site import Site


class TestTopology(TestCase):
    """In a world of 4 of which this process plays one; no bytes move."""

    def test_a_site_knows_it(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        self.addCleanup(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        self.assertIsNone(Site.of(mesh).settings.topology)
        with config.patch(mesh_topology=(("tp", 4e11, 1e-6),)):
            self.assertEqual(Site.of(mesh).settings.topology, (("tp", 4e11, 1e-6),))


if __name__ == "__main__":
    run_tests()
