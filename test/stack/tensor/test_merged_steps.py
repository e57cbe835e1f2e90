"""What is left to torch's steps is merged only where that is exact; most moves are planned, so here none is.

It stays here: upstream the steps have the first patch of the stack.
"""

from unittest import mock

import test_merging
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from torch_overlay.compat import merging
from torch_overlay.distributed.tensor import _redistribute
from torch_overlay.distributed.tensor._runner.answers import Fallback
from way import needs_package


@needs_package
class TestMergedSteps(test_merging.Moves):
    @property
    def world_size(self) -> int:
        return 8

    def setUp(self) -> None:
        """Once for all ranks, which are threads: each would find the other's in place, and put that back."""
        merge = merging.merge_transform_infos
        for patched in (
            mock.patch.object(_redistribute, "find_answer", return_value=Fallback("the test says so")),
            mock.patch.object(merging, "merge_transform_infos", wraps=merge),
            mock.patch.object(merging, "_warn_of_uneven_cuts", wraps=merging._warn_of_uneven_cuts),
        ):
            patched.start()
            self.addCleanup(patched.stop)
        super().setUp()

    def test_every_pair_on_even_lengths(self) -> None:
        mesh = test_merging.flattened_mesh(2, 2, 2)
        self._check_all(mesh, (4, 6), (Replicate(), Shard(0), Partial()))
        assert merging.merge_transform_infos.called

    def test_averages_beside_sums_are_one_collective(self) -> None:
        mesh = test_merging.flattened_mesh(2, 1, 4)
        for source in (("avg", "avg", "sum"), ("sum", "avg", "sum"), ("sum", "sum", "avg")):
            placements = [Partial(op) for op in source]
            self._check(mesh, 8, placements, (Replicate(),) * 3)
            self._check(mesh, 8, placements, (Shard(0),) * 3)
            held = DTensor.from_local(torch.ones(8), mesh, placements, run_check=False)
            for target in (Replicate(), Shard(0)):
                with CommDebugMode() as counted:
                    held.redistribute(placements=(target,) * 3).to_local()
                self.assertEqual(counted.get_total_counts(), 1, msg=f"{source} to {target}")

    def test_all_ranks_merge_or_none_does(self) -> None:
        """And what isn't merged for its length says so."""
        mesh = test_merging.flattened_mesh(2, 2, 2)
        self._check(mesh, 9, (Shard(0),) * 3, (Shard(0), Replicate(), Replicate()))
        assert merging._warn_of_uneven_cuts.called

    def test_even_shards_merge_whatever_ran_before(self) -> None:
        mesh, shards = test_merging.flattened_mesh(2, 2, 2), (Shard(0),) * 3
        for _ in range(10):  # ranks are threads here, and must not decide for each other
            self._check(mesh, 5, shards, (Replicate(),) * 3)
        held = DTensor.from_local(torch.ones(1, 3), mesh, shards, run_check=False)
        with CommDebugMode() as counted:
            held.redistribute(placements=(Replicate(),) * 3).to_local()
        self.assertEqual(counted.get_total_counts(), 1)
