"""What is left to torch's steps is merged only where that is exact; most moves are planned, so here none is.

It stays here: upstream the steps have the first patch of the stack.
"""

from unittest import mock

from torch.distributed.tensor import Partial, Replicate, Shard

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
