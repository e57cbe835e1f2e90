"""What is left to torch's steps is merged only where that is exact; most moves are planned, so here none is.

It stays here: upstream the steps have the first patch of the stack.
"""

from unittest import mock

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import test_safe_merging
from torch_overlay.distributed.tensor import _redistribute
from torch_overlay.distributed.tensor._answers import Fallback
from way import merges, needs_package


@needs_package
class TestMergedSteps(test_safe_merging.Moves):
    @property
    def world_size(self) -> int:
        return 8

    def setUp(self) -> None:
        """Once for all ranks, which are threads: each would find the other's in place, and put that back."""
        for name, how in (
            ("find_answer", {"return_value": Fallback("the test says so")}),
            ("merge_transform_infos", {"wraps": _redistribute.merge_transform_infos}),
        ):
            patched = mock.patch.object(_redistribute, name, **how)
            patched.start()
            self.addCleanup(patched.stop)
        super().setUp()

    def test_every_pair_on_even_lengths(self) -> None:
        mesh = test_safe_merging.flattened_mesh(2, 2, 2)
        self._check_all(mesh, (2, 4, 6), (Replicate(), Shard(0), Partial()))
        assert _redistribute.merge_transform_infos.called == merges()

    def test_even_shards_merge_whatever_ran_before(self) -> None:
        mesh, shards = test_safe_merging.flattened_mesh(2, 2, 2), (Shard(0),) * 3
        for _ in range(10):  # ranks are threads here, and must not decide for each other
            self._check(mesh, 5, shards, (Replicate(),) * 3)
        held = DTensor.from_local(torch.ones(1, 3), mesh, shards, run_check=False)
        with CommDebugMode() as counted:
            held.redistribute(placements=(Replicate(),) * 3).to_local()
        self.assertEqual(counted.get_total_counts(), 1 if merges() else 3)
