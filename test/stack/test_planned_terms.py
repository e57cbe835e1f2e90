# Owner(s): ["oncall: distributed"]
"""An all-to-all brings each rank the terms of its box, and it adds them."""

import functools
import operator

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from torch_overlay.distributed.tensor._exchange import all_to_all, landing
from torch_overlay.distributed.tensor._joint_groups import Group
from torch_overlay.distributed.tensor._pack import Place, part
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllToAll


class TestTerms(DTensorOpTestBase):
    """Four threads play the ranks."""

    @property
    def world_size(self) -> int:
        return 4

    def _exchanged(self, step, place, local) -> torch.Tensor:
        group = Group(init_device_mesh("cpu", (4,)).get_group().group_name, (0, 1, 2, 3), in_order=True)
        pack, exchange, land = all_to_all(step, place, group, torch.ops._c10d_functional.wait_tensor)
        return land(exchange(pack(local)))

    def test_terms_are_added(self) -> None:
        for shape in ((8, 8), (5, 7), (1, 3)):
            whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
            pending, rows = Regions.of((None,), ("sum",), shape, (4,)), Regions.of((0,), (None,), shape, (4,))
            held, wanted = pending.box((self.rank,)), rows.box((self.rank,))
            step, place = AllToAll(pending, rows, (0,), "sum", (0,)), Place((self.rank,), held, wanted)
            moved = self._exchanged(step, place, whole * (self.rank + 1))
            self.assertEqual(moved, part(whole * 10, wanted), msg=f"{shape} on rank {self.rank}")

    def test_each_reduction_is_done(self) -> None:
        whole = torch.arange(15).reshape(5, 3)
        pending, rows = Regions.of((None,), ("sum",), (5, 3), (4,)), Regions.of((0,), (None,), (5, 3), (4,))
        place = Place((self.rank,), pending.box((self.rank,)), rows.box((self.rank,)))
        terms = [whole * (rank + 1) for rank in range(4)]
        for op, brought in (
            ("sum", torch.stack(terms).sum(0)),
            ("max", torch.stack(terms).amax(0)),
            ("min", torch.stack(terms).amin(0)),
            ("product", torch.stack(terms).prod(0)),
            ("band", functools.reduce(operator.and_, terms)),
            ("bor", functools.reduce(operator.or_, terms)),
            ("bxor", functools.reduce(operator.xor, terms)),
        ):
            moved = self._exchanged(AllToAll(pending, rows, (0,), op, (0,)), place, terms[self.rank])
            self.assertEqual(moved, part(brought, place.wanted), msg=op)

    def test_nothing_comes_from_what_arrived(self) -> None:
        """A compiler keeps a collective only if something depends on it."""
        pending, rows = Regions.of((None,), ("sum",), (1, 3), (4,)), Regions.of((0,), (None,), (1, 3), (4,))
        group = Group("", (0, 1, 2, 3), in_order=True)
        land = landing(AllToAll(pending, rows, (0,), "sum", (0,)), (), [0] * 4, group, (0, 3))
        self.assertTrue(land(torch.zeros(0, requires_grad=True)).requires_grad)


if __name__ == "__main__":
    run_tests()
