# Owner(s): ["oncall: distributed"]
"""What a pickled mesh leaves behind."""

import pickle

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed._mesh_state import shared_state, view_of


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


if __name__ == "__main__":
    run_tests()
