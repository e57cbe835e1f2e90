"""Rank maps and views of them against plain lists. Exact cases are in test/stack/test_mesh_values.py."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_overlay.distributed._mesh.rank_map import RankMap, View
from torch_overlay.distributed._mesh_layout import _MeshLayout


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_equal_means_equal_ranks(one, other):
    assert (RankMap(one) == RankMap(other)) == (one == other)
    if one == other:
        assert hash(RankMap(one)) == hash(RankMap(other))
    assert RankMap(one).is_identity == (one == list(range(6)))
    assert pickle.loads(pickle.dumps(RankMap(one))) == RankMap(one)


@pytest.mark.skipif(not hasattr(View, "window"), reason="a later patch of the stack brings it")
@given(st.permutations(range(12)), st.permutations(range(3)), st.integers(1, 3))
def test_a_window_is_the_copy_that_another_rank_sees(ranks, order, kept):
    view = View(RankMap(ranks), _MeshLayout.from_sizes_strides((2, 3, 2)).select(order[:kept]))
    for rank in range(12):
        mine = view.ranks(rank)
        elsewhere = view.window(view.layout, view.start(rank))
        assert elsewhere.ranks(99) == mine
        for other in range(12):
            assert elsewhere.coordinate(other) == (view.coordinate(other) if other in mine else None)
        assert elsewhere.rank_map == RankMap(mine)
        assert [elsewhere.rank_map[index] for index in range(len(mine))] == mine


def test_a_rank_outside_sees_the_first_copy():
    view = View(RankMap([4, 5, 6, 7]), _MeshLayout.from_sizes_strides((2, 2)).select([1]))
    assert view.coordinate(0) is None
    assert view.ranks(0) == [4, 5]
