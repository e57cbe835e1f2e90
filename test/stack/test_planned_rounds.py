# Owner(s): ["oncall: distributed"]
"""An exchange in rounds gives what one in one piece gives, and holds less in each."""

import torch
import torch.distributed as dist
from functorch.compile import aot_function, default_partition, min_cut_rematerialization_partition
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed.tensor._joint_groups import Group
from torch_overlay.distributed.tensor._pack import Place, part
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllToAll
from torch_overlay.distributed.tensor._rounds import all_to_all_in_rounds


class TestRoundsRun(DTensorOpTestBase):
    """Four threads play the ranks."""

    @property
    def world_size(self) -> int:
        return 4

    def test_rows_to_columns(self) -> None:
        mesh = init_device_mesh("cpu", (4,))
        group = Group(mesh.get_group().group_name, (0, 1, 2, 3), in_order=True)
        for shape in ((8, 8), (5, 7), (1, 3), (9, 2)):
            for rounds in (1, 2, 4):
                whole = torch.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)
                before, after = (Regions.of((dim,), (None,), shape, (4,)) for dim in (0, 1))
                held, wanted = before.box((self.rank,)), after.box((self.rank,))
                step, place = AllToAll(before, after, (0,), rounds=rounds), Place((self.rank,), held, wanted)
                with CommDebugMode() as counted:
                    moved = all_to_all_in_rounds(step, place, group)(part(whole, held))
                self.assertEqual(moved, part(whole, wanted), msg=f"{shape} in {rounds} rounds on rank {self.rank}")
                self.assertEqual(counted.get_total_counts(), rounds, msg="ranks that have nothing take part, too")

    def test_sums(self) -> None:
        mesh = init_device_mesh("cpu", (4,))
        group = Group(mesh.get_group().group_name, (0, 1, 2, 3), in_order=True)
        whole = torch.arange(64.0).reshape(8, 8)
        pending = Regions.of((None,), ("sum",), (8, 8), (4,))
        for dim in (0, 1):
            parts = Regions.of((dim,), (None,), (8, 8), (4,))
            place = Place((self.rank,), pending.box((self.rank,)), parts.box((self.rank,)))
            step = AllToAll(pending, parts, (0,), "sum", (0,), rounds=2)
            with CommDebugMode() as counted:
                summed = all_to_all_in_rounds(step, place, group)(whole * (self.rank + 1))
            self.assertEqual(summed, part(whole * 10, place.wanted), msg=f"{dim} on rank {self.rank}")
            self.assertEqual(counted.get_total_counts(), 2)


class Exchanged(torch.autograd.Function):
    """An exchange as a compiler sees it, which makes a graph for each direction."""

    @staticmethod
    def forward(ctx, local, exchange):
        ctx.shape = local.shape
        return exchange(local)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(ctx.shape), None


def forward_calls(exchange, partition) -> list[str]:
    """What the forward graph of training calls, where this rank's tensor has no elements."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = aot_function(lambda local: Exchanged.apply(local, exchange), keep, partition_fn=partition)
    compiled(torch.ones(0, 3, requires_grad=True))
    return [str(node.target) for node in graphs[0].graph.nodes]


class TestRoundsCompiled(TestCase):
    """In a world of 4 of which this process plays the last; no bytes move."""

    def test_a_rank_that_has_nothing_takes_part_in_each_round(self) -> None:
        """Nobody reads what arrives there, and the others would wait for this rank."""
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
        self.addCleanup(dist.destroy_process_group)
        group = Group(init_device_mesh("cpu", (4,)).get_group().group_name, (0, 1, 2, 3), in_order=True)
        rows, columns = (Regions.of((dim,), (None,), (1, 3), (4,)) for dim in (0, 1))
        place = Place((3,), rows.box((3,)), columns.box((3,)))
        exchange = all_to_all_in_rounds(AllToAll(rows, columns, (0,), rounds=2), place, group)
        for partition in (default_partition, min_cut_rematerialization_partition):
            called = forward_calls(exchange, partition)
            self.assertEqual(sum("all_to_all_single" in name for name in called), 2, msg=f"{partition.__name__}")


if __name__ == "__main__":
    run_tests()
