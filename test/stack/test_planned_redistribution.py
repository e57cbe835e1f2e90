# Owner(s): ["oncall: distributed"]
"""Every redistribution on a 2 x 2 x 2 mesh runs as one collective, as two if it reduces, and is exact."""

import itertools
import random

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from torch_overlay.distributed import config


def chunk(whole: torch.Tensor, placements, sizes, coordinate) -> torch.Tensor:
    """What one coordinate holds of a whole tensor, by chunking it axis after axis; the twin that can't be wrong."""
    for placement, size, at in zip(placements, sizes, coordinate, strict=True):
        if isinstance(placement, Shard):
            lengths = [len(part) for part in torch.arange(whole.shape[placement.dim]).chunk(size)]
            lengths += [0] * (size - len(lengths))
            whole = whole.split(lengths, placement.dim)[at]
    return whole


class TestPlannedMoves(DTensorOpTestBase):
    """Eight threads play the ranks."""

    @property
    def world_size(self) -> int:
        return 8

    def _mesh(self) -> DeviceMesh:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        for names in (("a", "b"), ("b", "c"), ("a", "c"), ("a", "b", "c")):
            mesh[names]._flatten("".join(names))
        return mesh

    def _check(self, mesh: DeviceMesh, shape, source, target) -> int:
        """The number of collectives, after comparing the values."""
        whole = torch.arange(1.0, 1.0 + shape[0] * shape[1]).reshape(shape)
        coordinate = mesh.get_coordinate()
        local = chunk(whole, source, mesh.shape, coordinate)
        terms = 1
        for placement, size in zip(source, mesh.shape, strict=True):
            terms *= size if placement.is_partial() else 1
        held = DTensor.from_local(
            local / terms, mesh, source, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        with CommDebugMode() as counted:
            moved = held.redistribute(placements=target).to_local()
        expected = chunk(whole, target, mesh.shape, coordinate)
        self.assertEqual(moved, expected, msg=f"{shape}, {source} to {target} at {coordinate}")
        return counted.get_total_counts()

    def _cases(self, kinds, count: int):
        """The same on every rank."""
        pairs = list(itertools.product(itertools.product(kinds, repeat=3), itertools.product(kinds[:3], repeat=3)))
        return random.Random(0).sample(pairs, count)

    @config.patch(plan_redistribution=True)
    def test_a_move_is_one_collective(self) -> None:
        mesh = self._mesh()
        for source, target in self._cases((Replicate(), Shard(0), Shard(1)), 40):
            self.assertLessEqual(self._check(mesh, (16, 16), source, target), 1, msg=f"{source} to {target}")

    @config.patch(plan_redistribution=True)
    def test_a_reduction_is_two_at_most(self) -> None:
        mesh = self._mesh()
        for source, target in self._cases((Replicate(), Shard(0), Shard(1), Partial()), 40):
            self.assertLessEqual(self._check(mesh, (16, 16), source, target), 2, msg=f"{source} to {target}")

    @config.patch(plan_redistribution=True)
    def test_uneven_and_empty_shards(self) -> None:
        mesh = self._mesh()
        for source, target in self._cases((Replicate(), Shard(0), Shard(1), Partial()), 20):
            for shape in ((5, 3), (1, 7)):
                self._check(mesh, shape, source, target)

    @config.patch(plan_redistribution=True)
    def test_ranks_that_descend(self) -> None:
        """A group may sort its ranks, so it may have another order than the mesh."""
        mesh = DeviceMesh("cpu", [[0, 2, 4, 6], [1, 3, 5, 7]], mesh_dim_names=("a", "b"))
        mesh._flatten("ab")
        for length in (4, 16):
            self._check(mesh, (length, 2), (Shard(0), Shard(0)), (Replicate(), Replicate()))


if __name__ == "__main__":
    run_tests()
