# Owner(s): ["oncall: distributed"]
"""Compiled code makes views of meshes."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestTracedViews(TestCase):
    """In a world of 64 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=37, world_size=64)
        self.mesh = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("pp", "dp", "tp"))

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def test_one_graph(self) -> None:
        def ask(x, mesh):
            turned = mesh.permute(("tp", "pp", "dp"))
            return x + turned.get_local_rank("tp") + 10 * turned["pp", "dp"].size()

        torch._dynamo.reset()
        for mesh in (self.mesh, init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("pp", "dp", "tp"))):
            graphs = CompileCounterWithBackend("aot_eager")
            compiled = torch.compile(ask, backend=graphs, fullgraph=True)
            for _ in range(2):
                self.assertEqual(compiled(torch.zeros(1), mesh), ask(torch.zeros(1), mesh))
            self.assertEqual(graphs.frame_count, 1)
        views = dict(vars(mesh._traced_views))
        self.assertEqual(len(views), 1)
        torch._dynamo.reset()
        torch.compile(ask, backend="aot_eager", fullgraph=True)(torch.zeros(1), mesh)
        for name, view in vars(mesh._traced_views).items():
            self.assertIs(view, views[name], msg="made once, however often the code is compiled")

    def test_an_equal_mesh_of_another_root_compiles_anew_in_one_graph(self) -> None:
        """Each has a view of its own, with its own groups."""
        graphs = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(
            lambda x, mesh: x + mesh.permute(("tp", "pp", "dp")).ndim, backend=graphs, fullgraph=True
        )
        torch._dynamo.reset()
        other = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("pp", "dp", "tp"))
        self.assertEqual(self.mesh, other)
        for count, mesh in enumerate((self.mesh, other), 1):
            for _ in range(2):
                compiled(torch.zeros(1), mesh)
            self.assertEqual(graphs.frame_count, count)
            (view,) = vars(mesh._traced_views).values()
            self.assertEqual(view.get_group("tp"), mesh.get_group("tp"))

    def test_a_view_of_a_slice_has_the_groups_of_the_mesh_that_was_given_in_one_graph(self) -> None:
        """The graph has their names in it, and so is the given mesh's alone."""

        def ask(x, mesh):
            group = mesh["dp", "tp"].permute(("tp", "dp")).get_group("tp")
            return funcol.all_reduce(x, "sum", group.group_name).wait()

        torch._dynamo.reset()
        graphs = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(ask, backend=graphs, fullgraph=True)
        other = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("pp", "dp", "tp"))
        for count, mesh in enumerate((self.mesh, other), 1):
            for _ in range(2):
                compiled(torch.zeros(1), mesh)
            self.assertEqual(graphs.frame_count, count)
            self.assertIn(mesh.get_group("tp").group_name, str(graphs.graphs[-1].code))


if __name__ == "__main__":
    run_tests()
