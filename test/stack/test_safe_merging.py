# Owner(s): ["oncall: distributed"]
"""Collectives merged over a flattened mesh give what every rank should hold, or aren't merged."""

import itertools

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase


def chunk(whole: torch.Tensor, placements, sizes, coordinate) -> torch.Tensor:
    """What one coordinate holds of a whole tensor, by chunking it axis after axis; the twin that can't be wrong."""
    for placement, size, at in zip(placements, sizes, coordinate, strict=True):
        if isinstance(placement, Shard):
            lengths = [len(part) for part in torch.arange(whole.shape[placement.dim]).chunk(size)]
            lengths += [0] * (size - len(lengths))
            whole = whole.split(lengths, placement.dim)[at]
    return whole


class TestSafeMerging(DTensorOpTestBase):
    """On a 2 x 2 mesh whose axes are flattened, so that steps may merge."""

    @property
    def world_size(self) -> int:
        return 4

    def setUp(self) -> None:
        # Keyed by meshes, which belong to threads; the next threads may have the numbers of those before.
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
        super().setUp()

    def _check(self, mesh: DeviceMesh, length: int, source, target) -> None:
        whole = torch.arange(length * 3, dtype=torch.float32).reshape(length, 3)
        coordinate = mesh.get_coordinate()
        local = chunk(whole, source, mesh.shape, coordinate)
        if any(placement.is_partial() for placement in source):
            terms = 1
            for placement, size in zip(source, mesh.shape, strict=True):
                terms *= size if placement.is_partial() else 1
            local = local / terms
        held = DTensor.from_local(local, mesh, source, run_check=False, shape=whole.shape, stride=whole.stride())
        moved = held.redistribute(placements=target).to_local()
        expected = chunk(whole, target, mesh.shape, coordinate)
        self.assertEqual(moved, expected, msg=f"length {length}, {source} to {target} at {coordinate}")

    def test_uneven_and_even_lengths(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mesh._flatten("ab")
        for length in range(1, 10):
            self._check(mesh, length, (Shard(0), Shard(0)), (Replicate(), Replicate()))

    def test_every_pair_on_uneven_shards(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mesh._flatten("ab")
        kinds = (Replicate(), Shard(0), Shard(1), Partial())
        for source, target in itertools.product(
            itertools.product(kinds, repeat=2), itertools.product(kinds[:3], repeat=2)
        ):
            self._check(mesh, 5, source, target)

    def test_even_shards_merge_whatever_ran_before(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mesh._flatten("ab")
        for _ in range(10):  # ranks are threads here, and must not decide for each other
            self._check(mesh, 5, (Shard(0), Shard(0)), (Replicate(), Replicate()))
        held = DTensor.from_local(torch.ones(2, 3), mesh, (Shard(0), Shard(0)), run_check=False)
        with CommDebugMode() as counted:
            held.redistribute(placements=(Replicate(), Replicate())).to_local()
        self.assertEqual(counted.get_total_counts(), 1)


if __name__ == "__main__":
    run_tests()
