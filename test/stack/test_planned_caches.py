# Owner(s): ["oncall: distributed"]
"""What identifies compiled code says what its plans depend on."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config


class TestStableHash(TestCase):
    """In a world of 4 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        self.addCleanup(dist.destroy_process_group)

    def _hash(self, flattened: bool) -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        if flattened:
            mesh._flatten("ab")
        meta = TensorMeta(torch.Size((4, 4)), (4, 1), torch.float32)
        return DTensorSpec(mesh, (Replicate(), Replicate()), tensor_meta=meta)._stable_hash()

    def test_groups_and_settings_count(self) -> None:
        joint = {"mesh_share_groups": "names", "mesh_joint_groups": "existing"}
        with config.patch(plan_redistribution=True, **joint):
            first, again, flattened = self._hash(False), self._hash(False), self._hash(True)
        self.assertEqual(first, again)
        self.assertNotEqual(first, flattened)
        with config.patch(plan_redistribution=True, **{**joint, "mesh_joint_groups": "create"}):
            self.assertNotEqual(self._hash(True), flattened)


if __name__ == "__main__":
    run_tests()
