# Owner(s): ["oncall: distributed"]
"""What is on without a switch: a group over a whole mesh, and plans."""

import torch
from test_exchange import FakeWorld
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import run_tests


class TestDefaultPlans(FakeWorld):
    rank, ranks = 5, 64

    def test_a_move_over_two_axes_is_one_collective(self) -> None:
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("a", "b"))
        held = DTensor.from_local(torch.ones(1, 64), mesh, (Shard(0), Shard(0)), run_check=False)
        with CommDebugMode() as counted:
            held.redistribute(placements=(Replicate(), Replicate()))
        self.assertEqual(counted.get_total_counts(), 1)


if __name__ == "__main__":
    run_tests()
