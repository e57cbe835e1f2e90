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

    def test_an_empty_list_is_refused_in_one_graph(self) -> None:
        def ask(x):
            try:
                return x + DeviceMesh.concatenate([]).ndim
            except ValueError:
                return x - 1

        torch._dynamo.reset()
        compiled = torch.compile(ask, backend="aot_eager", fullgraph=True)
        self.assertEqual(compiled(torch.zeros(1)).item(), -1)

    def test_groups_are_made_once_and_anew_after_abort_in_one_graph(self) -> None:
        def ask(x, mesh):
            return x + mesh.unflatten("dp", (2, 2), ("replicate", "shard")).ndim

        def cut():
            torch._dynamo.reset()
            torch.compile(ask, backend="aot_eager", fullgraph=True)(torch.zeros(1), self.mesh)
            (view,) = vars(self.mesh._traced_views).values()
            return view

        made = cut()
        self.assertIs(cut(), made)
        self.mesh.abort()
        self.assertEqual(dist.get_process_group_ranks(cut().get_group("shard")), [33, 37])


if __name__ == "__main__":
    run_tests()
