# Owner(s): ["oncall: distributed"]
"""What the same plan cut before counts where reduce-scatters merge."""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.common_utils import run_tests

from test_safe_merging import Moves, chunk, flattened_mesh


class TestSafeScatters(Moves):
    @property
    def world_size(self) -> int:
        return 8

    def test_every_pair_on_even_lengths(self) -> None:
        self._check_all(flattened_mesh(2, 2, 2), (2, 4, 6), (Replicate(), Shard(0), Partial()))

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
