# Owner(s): ["oncall: distributed"]
"""Public methods for views, and compiled code that calls them."""

import itertools

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed._mesh.universe import private_groups


class TestMeshPublic(TestCase):
    """In a world of 64 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=37, world_size=64)
        self.mesh = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("pp", "dp", "tp"))

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def test_every_order(self) -> None:
        whole = torch.arange(64, dtype=torch.int).reshape(4, 4, 4)
        names = ("pp", "dp", "tp")
        for order in itertools.permutations(range(3)):
            turned = self.mesh.permute(tuple(names[axis] for axis in order))
            self.assertEqual(turned.mesh, whole.permute(order))
            self.assertEqual(turned.get_coordinate(), [self.mesh.get_coordinate()[axis] for axis in order])
            for name in names:
                self.assertEqual(turned.get_group(name), self.mesh.get_group(name))

    def test_flattened_it_has_its_own_order(self) -> None:
        turned = self.mesh.permute(("tp", "pp", "dp"))
        ranks = turned.mesh.flatten().tolist()
        self.assertNotEqual(ranks, sorted(ranks))
        self.assertEqual(dist.get_process_group_ranks(turned._flatten("all").get_group()), ranks)

    def test_names_that_are_no_order_are_refused(self) -> None:
        for names in (("tp", "pp"), ("tp", "pp", "pp"), ("tp", "pp", "ep")):
            with self.assertRaisesRegex(ValueError, "each name of the mesh once; it has .'pp', 'dp', 'tp'., got"):
                self.mesh.permute(names)
        with self.assertRaisesRegex(ValueError, "it has none"):
            init_device_mesh("cpu", (64,)).permute(("a",))

    def test_a_view_at_another_coordinate(self) -> None:
        whole = torch.arange(64).reshape(4, 4, 4)
        for pp, dp in itertools.product(range(4), repeat=2):
            view = self.mesh.submesh_at("tp", at={"pp": pp, "dp": dp})
            self.assertEqual(view.mesh.tolist(), whole[pp, dp].tolist())
            if (pp, dp) == (2, 1):  # this rank is 37
                self.assertEqual(view.get_group(), self.mesh.get_group("tp"))
        self.assertEqual(self.mesh.submesh_at(("dp", "tp"), at={}).mesh, self.mesh["dp", "tp"].mesh)

    def test_a_flattened_view_at_another_coordinate(self) -> None:
        self.mesh["dp", "tp"]._flatten("model")
        self.assertEqual(self.mesh.submesh_at("model", at={"pp": 1}).mesh.tolist(), list(range(16, 32)))

    def test_a_mesh_without_groups_has_none_at_any_coordinate(self) -> None:
        bare = DeviceMesh("cpu", self.mesh.mesh, mesh_dim_names=("pp", "dp", "tp"), _init_backend=False)
        for pp in range(4):
            with self.assertRaisesRegex(RuntimeError, "not initialized"):
                bare.submesh_at(("dp", "tp"), at={"pp": pp}).get_group("tp")

    def test_what_is_no_coordinate_is_refused(self) -> None:
        self.mesh["dp", "tp"]._flatten("model")
        for shown, at, error, text in (
            ("tp", {"pp": 4}, ValueError, "coordinates 0 to 3"),
            ("tp", {"ep": 0}, KeyError, "No axis 'ep'"),
            ("tp", {"tp": 0}, ValueError, "is shown"),
            ("model", {"tp": 0}, ValueError, "is shown"),
            (("tp", "model"), {}, ValueError, "each once"),
        ):
            with self.assertRaisesRegex(error, text):
                self.mesh.submesh_at(shown, at=at)

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
