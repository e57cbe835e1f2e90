# Owner(s): ["oncall: distributed"]
"""The public spellings do what the private ones do."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshPublic(TestCase):
    """In a world of 64 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=37, world_size=64)
        self.mesh = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("pp", "dp", "tp"))

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def test_flatten(self) -> None:
        one = self.mesh["dp", "tp"].flatten("model")
        self.assertEqual(one, self.mesh["dp", "tp"]._flatten("model"))
        self.assertEqual(one.mesh.tolist(), self.mesh["dp", "tp"].mesh.flatten().tolist())

    def test_unflatten(self) -> None:
        one = self.mesh.unflatten("dp", (2, 2), ("replicate", "shard"))
        self.assertEqual(one.shape, (4, 2, 2, 4))
        self.assertEqual(one.mesh, self.mesh.mesh.reshape(4, 2, 2, 4))
        self.assertEqual(one, self.mesh._unflatten(1, (2, 2), ("replicate", "shard")))

    def test_concatenate(self) -> None:
        one = DeviceMesh.concatenate([self.mesh["pp"], self.mesh["tp"]])
        self.assertEqual(one, self.mesh["pp", "tp"])

    def test_all_in_one_graph(self) -> None:
        def ask(x, mesh):
            flat, cut = mesh["dp", "tp"].flatten("model"), mesh.unflatten("pp", (2, 2), ("outer", "inner"))
            both = DeviceMesh.concatenate([mesh["pp"], mesh["tp"]])
            return x + flat.get_local_rank() + 100 * cut.ndim + 1000 * both.size() + both.get_local_rank("tp") * 1e5

        torch._dynamo.reset()
        compiled = torch.compile(ask, backend="aot_eager", fullgraph=True)
        self.assertEqual(compiled(torch.zeros(1), self.mesh), ask(torch.zeros(1), self.mesh))


if __name__ == "__main__":
    run_tests()
