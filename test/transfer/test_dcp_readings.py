"""Uneven shards of FSDP2 x TP: the shape of a local tensor tells whether FSDP2 cut it, or torch by the placements."""

import itertools

import pytest
import torch
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from torch_overlay.torch_patches.chunks import _told_apart
from way import needs_package

pytestmark = needs_package


def by_fsdp2(length, dp, tp):
    """The rows of each rank: a chunk of TP's chunk."""
    chunked = lambda rows, count: [*rows.chunk(count), *[rows[:0]] * count][:count]
    parts = [chunked(part, dp) for part in chunked(torch.arange(length), tp)]
    return {(i, j): parts[j][i].tolist() for i, j in itertools.product(range(dp), range(tp))}


def by_placements(length, dp, tp):
    """As torch cuts by them."""
    rows, held = torch.arange(length), {}
    outer, _ = _StridedShard(0, split_factor=tp)._split_tensor(rows, dp, with_padding=False)
    for i, part in enumerate(outer):
        inner, _ = Shard(0)._split_tensor(part, tp, with_padding=False)
        held |= {(i, j): inner[j].tolist() for j in range(tp)}
    return held


def read(length, dp, tp):
    placements = (_StridedShard(0, split_factor=tp), Shard(0))
    return _told_apart(placements, tuple(map(type, placements)), (length,), (dp, tp))


def test_ranks_that_hold_as_much_hold_the_same():
    count = 0
    for length, dp, tp in itertools.product(range(1, 64), (2, 3, 4), (2, 3, 4)):
        fsdp2, torchs = by_fsdp2(length, dp, tp), by_placements(length, dp, tp)
        unclear = any(len(rows) == len(torchs[place]) and rows != torchs[place] for place, rows in fsdp2.items())
        held = read(length, dp, tp)
        assert (held is not None) == (fsdp2 != torchs and not unclear), (length, dp, tp)
        for place, rows in fsdp2.items() if held else ():
            start, own = held.span(0, place)
            assert rows == [*range(start, start + own)]
        count += held is not None
    assert count > 40


@pytest.mark.parametrize("sizes", [(4, 2), (8, 2), (3, 2)])
def test_a_vocabulary_of_50257_is_read(sizes):
    assert read(50257, *sizes)


def test_what_a_rank_cannot_tell_is_left_to_torch():
    assert by_fsdp2(27, 3, 4)[2, 2] == [20] and by_placements(27, 3, 4)[2, 2] == [26]
    assert read(27, 3, 4) is None
