# Owner(s): ["oncall: distributed"]
"""The public spellings do what the private ones do."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed._universe import private_groups


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

    def test_no_axis_to_unflatten_is_refused(self) -> None:
        for mesh in (self.mesh, init_device_mesh("cpu", (4, 16))):
            with self.assertRaisesRegex(ValueError, "No axis 'ep' in this mesh to unflatten"):
                mesh.unflatten("ep", (2, 2), ("outer", "inner"))

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

    def test_the_static_method_of_a_mesh_in_one_graph(self) -> None:
        def ask(x, mesh):
            return x + mesh.concatenate([mesh["pp"], mesh["tp"]]).size()

        torch._dynamo.reset()
        compiled = torch.compile(ask, backend="aot_eager", fullgraph=True)
        self.assertEqual(compiled(torch.zeros(1), self.mesh).item(), 16)

    def _compiled(self, ask):
        """Compiled anew, and what counts how often."""
        torch._dynamo.reset()
        graphs = CompileCounterWithBackend("aot_eager")
        return torch.compile(ask, backend=graphs, fullgraph=True), graphs

    def test_groups_are_made_once_in_one_graph(self) -> None:
        made = []
        for _ in range(2):
            compiled, _ = self._compiled(lambda x, mesh: x + mesh.unflatten("dp", (2, 2), ("replicate", "shard")).ndim)
            compiled(torch.zeros(1), self.mesh)
            made += vars(self.mesh._traced_views).values()
        self.assertIs(made[0], made[1])

    def test_groups_are_made_anew_after_abort_in_one_graph(self) -> None:
        """Of a view of the mesh that was given, and of one of a slice that the graph makes."""

        def cut(x, mesh):
            group = mesh.unflatten("dp", (2, 2), ("replicate", "shard")).get_group("shard")
            return funcol.all_reduce(x, "sum", group.group_name).wait()

        def flat(x, mesh):
            return funcol.all_reduce(x, "sum", mesh["dp", "tp"].flatten("model").get_group().group_name).wait()

        for ask in (cut, flat):
            compiled, graphs = self._compiled(ask)
            for count in (1, 2):
                for _ in range(2):
                    compiled(torch.zeros(1), self.mesh)
                self.assertEqual(graphs.frame_count, count)
                self.mesh.abort()

    def test_code_runs_inside_private_groups_with_groups_of_its_own_in_one_graph(self) -> None:
        compiled, graphs = self._compiled(lambda x, mesh: x + mesh.unflatten("dp", (2, 2), ("a", "b")).ndim)
        compiled(torch.zeros(1), self.mesh)
        with private_groups():
            compiled(torch.zeros(1), self.mesh)
        compiled(torch.zeros(1), self.mesh)
        self.assertEqual(graphs.frame_count, 2)
        shared, private = vars(self.mesh._traced_views).values()
        self.assertNotEqual(shared.get_group("b"), private.get_group("b"))


if __name__ == "__main__":
    run_tests()
