# Owner(s): ["oncall: distributed"]
"""Compiled code makes views at other coordinates."""

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestTracedAt(TestCase):
    """In a world of 64 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=37, world_size=64)
        self.mesh = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("pp", "dp", "tp"))

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def test_each_coordinate_is_a_view(self) -> None:
        def ask(x, mesh, stage):
            part = mesh.submesh_at(("dp", "tp"), at={"pp": stage})
            return x + part.size() + 100 * part.ndim

        torch._dynamo.reset()
        graphs = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(ask, backend=graphs, fullgraph=True, dynamic=True)
        for stage in (2, 2, 3):
            self.assertEqual(compiled(torch.zeros(1), self.mesh, stage), ask(torch.zeros(1), self.mesh, stage))
        self.assertEqual(graphs.frame_count, 2)
        views = vars(self.mesh._traced_views).values()
        self.assertEqual(sorted(int(view.mesh[0, 0]) for view in views), [32, 48])


if __name__ == "__main__":
    run_tests()
