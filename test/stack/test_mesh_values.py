# Owner(s): ["oncall: distributed"]
"""Values that a mesh is made of: layouts, rank maps, views, what a constructor is given."""

import itertools
import sys

import torch
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed._mesh.arguments import read_names, read_sizes
from torch_overlay.distributed._mesh.rank_map import RankMap, View
from torch_overlay.distributed._mesh_layout import _FlatLayout, _MeshLayout


class TestMeshLayouts(TestCase):
    """Layouts of one and of several modes, in order and not."""

    AXES = [((4,), (2,)), ((2, 2), (4, 1)), ((2, 3), (1, 2)), ((3,), (4,)), ((2, 2, 2), (2, 8, 1)), ((), ())]

    @parametrize("sizes, strides", AXES)
    def test_an_index_is_read_back(self, sizes, strides) -> None:
        layout = _FlatLayout(sizes, strides)
        steps = itertools.product(*map(range, sizes))
        expected = [sum(s * d for s, d in zip(step, strides, strict=True)) for step in steps]
        self.assertEqual([layout(c) for c in range(layout.numel())], expected)
        self.assertEqual([layout.coordinate(index) for index in expected], [*range(layout.numel())])
        self.assertEqual(layout.ascending().all_ranks_from_zero(), sorted(expected))

    @parametrize("sizes, strides", AXES)
    def test_a_coordinate_is_read_back_in_every_copy(self, sizes, strides) -> None:
        layout = _FlatLayout(sizes, strides)
        for start in layout.complement(48).all_ranks_from_zero():
            for number, offset in enumerate(layout.all_ranks_from_zero()):
                self.assertEqual(layout.coordinate(start + offset), number)

    @parametrize("order", [(0, 1, 2), (2, 0, 1), (0, 2), (2, 1)])
    def test_a_mesh_knows_where_each_copy_starts(self, order) -> None:
        mesh = _MeshLayout.from_sizes_strides((2, 3, 4)).select(order)
        for index in range(24):
            place = (index // 12, index // 4 % 3, index % 4)
            self.assertEqual(mesh.coordinate(index), tuple(place[axis] for axis in order))
            self.assertEqual(mesh.origin(index), index - sum(place[axis] * (12, 4, 1)[axis] for axis in order))

    def test_an_index_that_says_nothing_is_an_error(self) -> None:
        overlapping = _FlatLayout((2, 2), (1, 1))
        for ask in (overlapping.coordinate, _MeshLayout((overlapping,)).origin, _MeshLayout((overlapping,)).coordinate):
            with self.assertRaisesRegex(ValueError, "only (an )?orthogonal"):
                ask(1)
        with self.assertRaisesRegex(ValueError, "orthogonal"):
            overlapping.ascending()
        with self.assertRaisesRegex(ValueError, "takes coordinates 0 to 3, got 4"):
            _FlatLayout((4,), (2,))(4)
        for standing in (_FlatLayout((4,), (0,)).coordinate, _MeshLayout((_FlatLayout((4,), (0,)),)).origin):
            with self.assertRaisesRegex(ValueError, r"orthogonal.* got .*4.*0.* and index 3"):
                standing(3)
        with self.assertRaisesRegex(ValueError, r"can be sorted by its modes, got .*4.*0"):
            _FlatLayout((4,), (0,)).ascending()
        with self.assertRaisesRegex(ValueError, r"a copy of .*4.*2.* holds indices from 0 on, got index -1"):
            _FlatLayout((4,), (2,)).coordinate(-1)
        with self.assertRaisesRegex(ValueError, r"each axis at most once, got \(0, 0\) of .*2.*4"):
            _MeshLayout.from_sizes_strides((2, 4)).select((0, 0))


instantiate_parametrized_tests(TestMeshLayouts)


class TestRankMap(TestCase):
    def test_from_index_to_rank_and_back(self) -> None:
        for ranks in ([0, 1, 2, 3], [3, 1, 2, 0], [8, 9, 4], []):
            stored = RankMap(ranks)
            self.assertEqual([stored[index] for index in range(len(ranks))], ranks)
            self.assertEqual([stored.index(rank) for rank in ranks], list(range(len(ranks))))
            self.assertIsNone(stored.index(7))
            self.assertEqual(stored, RankMap(ranks))
        self.assertNotEqual(RankMap([0, 1, 2]), RankMap([0, 2, 1]))

    def test_ranks_in_order_take_no_memory(self) -> None:
        large, small = (sum(map(sys.getsizeof, vars(RankMap.identity(n)).values())) for n in (1 << 20, 64))
        self.assertEqual(large, small)

    def test_a_rank_stands_there_once(self) -> None:
        with self.assertRaisesRegex(ValueError, "must not contain duplicate entries"):
            RankMap([0, 2, 0])


class TestRankViews(TestCase):
    def test_each_rank_sees_its_own_copy_of_a_layout(self) -> None:
        shape, order = (2, 3, 2), [5, 2, 7, 0, 3, 6, 1, 4, 11, 10, 8, 9]
        for ranks in (range(12), order):
            whole = torch.tensor(list(ranks)).reshape(shape)
            layout = _MeshLayout.from_sizes_strides(shape)
            for axes in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
                view = View(RankMap(ranks), layout.select(axes))
                for place in itertools.product(*map(range, shape)):
                    rank = int(whole[place])
                    picked = whole[tuple(slice(None) if axis in axes else place[axis] for axis in range(3))]
                    self.assertEqual(view.ranks(rank), picked.flatten().tolist(), msg=f"{axes} of rank {rank}")
                    self.assertEqual(view.coordinate(rank), tuple(place[axis] for axis in axes))


class TestMeshArguments(TestCase):
    def test_each_dim_has_a_size_and_a_name(self) -> None:
        self.assertEqual((read_sizes([2, 4]), read_names(["dp", "tp"], 2)), ((2, 4), ("dp", "tp")))
        for size in (0, -1, 2.0, "2"):
            with self.assertRaisesRegex(ValueError, "at least 1"):
                read_sizes((4, size))
        self.assertEqual(read_names((name for name in "ab"), 2), ("a", "b"))
        for wrong in (("dp",), ("dp", [])):
            with self.assertRaises(ValueError):
                read_names(wrong, 2)


if __name__ == "__main__":
    run_tests()
