# Owner(s): ["oncall: distributed"]
"""What a rank outside a mesh knows of the mesh's dims."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh_groups import override_of
from torch_overlay.distributed._mesh_state import shared_state
from torch_overlay.distributed._universe import universe_of


class TestJointOutside(TestCase):
    """As rank 5 of 8 sees it, which is in no mesh here; no bytes move."""

    def test_it_knows_the_backends_that_were_given(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        given = (("gloo", None), (None, None))
        with config.patch(mesh_share_groups="names"):
            mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"), backend_override=given)
            mesh._unflatten("b", (2,), ("c",), backend_override={"c": "gloo"})
        universe = universe_of(shared_state(mesh))
        self.assertEqual(tuple(override_of(mesh, universe, axis) for axis in (0, 1)), given)


if __name__ == "__main__":
    run_tests()
