# Owner(s): ["oncall: distributed"]
"""Collectives merged over a flattened mesh give what every rank should hold, or aren't merged."""

import itertools

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase


def chunk(whole: torch.Tensor, placements, sizes, coordinate) -> torch.Tensor:
    """What one coordinate holds of a whole tensor, by chunking it axis after axis."""
    for placement, size, at in zip(placements, sizes, coordinate, strict=True):
        if isinstance(placement, Shard):
            parts = whole.chunk(size, placement.dim)
            whole = parts[at] if at < len(parts) else whole.narrow(placement.dim, 0, 0)
    return whole


def flattened_mesh(*sizes: int) -> DeviceMesh:
    """A mesh of two or three axes, every two or more of which are flattened, so that steps may merge."""
    names = "abc"[: len(sizes)]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names))
    for count in range(2, len(sizes) + 1):
        for axes in itertools.combinations(names, count):
            mesh[axes]._flatten("".join(axes))
    return mesh


class Moves(DTensorOpTestBase):
    def setUp(self) -> None:
        # Both caches are keyed by meshes, whose hash has the thread's id, and a later test's thread may get the
        # same id.
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
        super().setUp()

    def _check(self, mesh: DeviceMesh, length: int, source, target) -> None:
        whole = torch.arange(length * 3, dtype=torch.float32).reshape(length, 3) * self.world_size
        coordinate = mesh.get_coordinate()
        terms = 1
        for placement, size in zip(source, mesh.shape, strict=True):
            terms *= size if placement.is_partial() else 1
        local = chunk(whole, source, mesh.shape, coordinate) / terms
        held = DTensor.from_local(local, mesh, source, run_check=False, shape=whole.shape, stride=whole.stride())
        moved = held.redistribute(placements=target).to_local()
        expected = chunk(whole, target, mesh.shape, coordinate)
        self.assertEqual(moved, expected, msg=f"length {length}, {source} to {target} at {coordinate}")

    def _check_all(self, mesh: DeviceMesh, lengths, kinds) -> None:
        """Every pair of placements of these kinds, the last of which is Partial() and only a source, on each length."""
        sources = itertools.product(kinds, repeat=mesh.ndim)
        targets = itertools.product(kinds[:-1], repeat=mesh.ndim)
        for length, source, target in itertools.product(lengths, sources, targets):
            self._check(mesh, length, source, target)


class TestSafeMerging(Moves):
    @property
    def world_size(self) -> int:
        return 4

    def test_every_pair_on_every_length(self) -> None:
        self._check_all(flattened_mesh(2, 2), range(1, 10), (Replicate(), Shard(0), Shard(1), Partial()))

    def test_even_shards_merge(self) -> None:
        held = DTensor.from_local(torch.ones(2, 3), flattened_mesh(2, 2), (Shard(0), Shard(0)), run_check=False)
        with CommDebugMode() as counted:
            held.redistribute(placements=(Replicate(), Replicate())).to_local()
        self.assertEqual(counted.get_total_counts(), 1)

    def test_nested_strided_shards_are_refused(self) -> None:
        """No shard order has this split factor. The greedy planner leaves them out of the logical shapes, so that
        gathering one by one gives other rows."""
        mesh, strided = flattened_mesh(2, 2), (_StridedShard(0, split_factor=3),) * 2
        held = DTensor.from_local(torch.ones(3), mesh, strided, run_check=False, shape=(12,), stride=(1,))
        with self.assertRaisesRegex(AssertionError, "no flattened transforms"):
            held.redistribute(placements=(Replicate(), Replicate()))


class TestSafeMergingBelowOtherCuts(Moves):
    @property
    def world_size(self) -> int:
        return 8

    def test_half_of_the_ranks_may_merge(self) -> None:
        """Of 9 rows, half of the ranks gather 4, and the others 5, with whom they exchange nothing."""
        self._check(flattened_mesh(2, 2, 2), 9, (Shard(0),) * 3, (Shard(0), Replicate(), Replicate()))


if __name__ == "__main__":
    run_tests()
