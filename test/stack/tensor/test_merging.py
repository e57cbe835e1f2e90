# Owner(s): ["oncall: distributed"]
"""Collectives over a flattened mesh run as one where that is exact."""

import itertools
import random

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
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
            terms *= size if placement == Partial("sum") else 1
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
        self._check_all(flattened_mesh(2, 2), (1, 2, 3, 4, 6, 7), (Replicate(), Shard(0), Shard(1), Partial()))

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

    def test_averages_beside_sums(self) -> None:
        """An average over a mesh dim of size 1 is merged, too: what it is merged with is summed."""
        mesh, kinds = flattened_mesh(2, 1, 2), (Replicate(), Partial("avg"), Partial("sum"))
        for source, target in itertools.product(
            itertools.product(kinds, repeat=3), itertools.product((Replicate(), Shard(0)), repeat=3)
        ):
            self._check(mesh, 8, source, target)

    def test_an_average_beside_a_sum_is_one_collective(self) -> None:
        mesh = flattened_mesh(2, 1, 2)
        for source in (("avg", "avg", "sum"), ("sum", "avg", "avg"), ("sum", "sum", "avg")):
            held = DTensor.from_local(torch.ones(4), mesh, [Partial(op) for op in source], run_check=False)
            for target in (Replicate(), Shard(0)):
                with CommDebugMode() as counted:
                    held.redistribute(placements=(target,) * 3)
                self.assertEqual(counted.get_total_counts(), 1, msg=f"{source} to {target}")


class TestSafeMergingBelowOtherCuts(Moves):
    @property
    def world_size(self) -> int:
        return 8

    def _counts(self, mesh: DeviceMesh, length: int, source, target) -> list[int]:
        """How many collectives each rank runs."""
        local = chunk(torch.ones(length), source, mesh.shape, mesh.get_coordinate())
        held = DTensor.from_local(local, mesh, source, run_check=False, shape=(length,), stride=(1,))
        with CommDebugMode() as counted:
            held.redistribute(placements=target)
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(counts, torch.tensor([counted.get_total_counts()]))
        return [int(count) for count in counts]

    def test_all_ranks_merge_or_none_does(self) -> None:
        """Of 9 rows, half of the ranks gather 4, and the others 5."""
        mesh = flattened_mesh(2, 2, 2)
        self._check(mesh, 9, (Shard(0),) * 3, (Shard(0), Replicate(), Replicate()))
        sources = itertools.product((Shard(0), Partial()), repeat=3)
        targets = itertools.product((Replicate(), Shard(0)), repeat=3)
        for source, target in itertools.product(sources, targets):
            counts = self._counts(mesh, 9, source, target)
            self.assertEqual(len({*counts}), 1, msg=f"{source} to {target}: {counts}")

    def test_what_is_even_below_an_even_cut_merges(self) -> None:
        mesh = flattened_mesh(2, 2, 2)
        counts = self._counts(mesh, 16, (Shard(0),) * 3, (Shard(0), Replicate(), Replicate()))
        self.assertEqual(counts, [1] * 8)

    def test_random_moves(self) -> None:
        """Sums and averages, axes of one rank, uneven sizes; the same on every rank, so the same collectives meet."""
        chosen = random.Random(0)
        kinds = (Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("avg"))
        for sizes in ((2, 2, 2), (2, 1, 4), (4, 2)):
            mesh = flattened_mesh(*sizes)
            for _ in range(20):
                source, target = ([chosen.choice(some) for _ in sizes] for some in (kinds, kinds[:3]))
                self._check(mesh, chosen.randrange(1, 20), source, target)


class TestSafeScatters(Moves):
    @property
    def world_size(self) -> int:
        return 8

    def test_every_pair_on_even_lengths(self) -> None:
        self._check_all(flattened_mesh(2, 2, 2), (4, 6), (Replicate(), Shard(0), Partial()))

    def test_even_terms_merge_with_either_planner(self) -> None:
        mesh, whole = flattened_mesh(2, 2, 2), torch.arange(8.0)
        held = DTensor.from_local(whole / 4, mesh, (Replicate(), Partial(), Partial()), run_check=False)
        shards = (Shard(0),) * 3
        target = DTensorSpec(mesh, shards, held._spec.tensor_meta)
        for graph_based in (False, True):
            with CommDebugMode() as counted:
                moved = _redistribute.redistribute_local_tensor(
                    held.to_local(), held._spec, target, use_graph_based_transform=graph_based
                )
            self.assertEqual(counted.get_total_counts(), 1, msg=f"graph-based: {graph_based}")
            self.assertEqual(moved, chunk(whole, shards, mesh.shape, mesh.get_coordinate()))

    def test_a_strided_shard_that_is_cut_last_keeps_nothing_from_merging(self) -> None:
        """It has the order of mesh dims 1, 2, 0."""
        mesh, whole = flattened_mesh(2, 2, 2), torch.arange(16.0)
        held = DTensor.from_local(whole / 4, mesh, (Replicate(), Partial(), Partial()), run_check=False)
        with CommDebugMode() as counted:
            moved = held.redistribute(placements=(_StridedShard(0, split_factor=4), Shard(0), Shard(0))).to_local()
        self.assertEqual(counted.get_total_counts(), 1)
        last, first, second = mesh.get_coordinate()
        self.assertEqual(moved, chunk(whole, (Shard(0),) * 3, (2, 2, 2), (first, second, last)))

    def test_terms_that_become_strided_shards(self) -> None:
        """No shard order has this split factor, which must not be merged."""
        mesh, whole = flattened_mesh(2, 2, 2), torch.arange(12.0)
        held = DTensor.from_local(whole / 4, mesh, (Replicate(), Partial(), Partial()), run_check=False)
        target = (Replicate(), *(_StridedShard(0, split_factor=3),) * 2)
        _, *inner = mesh.get_coordinate()
        expected = whole
        for at in inner:
            expected = torch.cat([third.chunk(2)[at] for third in expected.chunk(3)])
        self.assertEqual(held.redistribute(placements=target).to_local(), expected)

    def test_terms_below_a_new_strided_shard(self) -> None:
        """No shard order has this split factor, so the greedy planner is used. Where the last two mesh dims cut, a rank
        has 5 rows or 3, though 8 can be divided by all three."""
        source = (Replicate(), Partial(), Partial())
        target = (_StridedShard(0, split_factor=3), Shard(0), Shard(0))
        mesh, whole = flattened_mesh(2, 2, 2), torch.arange(8.0)
        held = DTensor.from_local(whole / 4, mesh, source, run_check=False)
        outer, *inner = mesh.get_coordinate()
        strided = torch.cat([third.chunk(2)[outer] for third in whole.chunk(3)])
        expected = chunk(strided, target[1:], mesh.shape[1:], inner)
        self.assertEqual(held.redistribute(placements=target).to_local(), expected)


if __name__ == "__main__":
    run_tests()
