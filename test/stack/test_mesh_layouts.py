# Owner(s): ["oncall: distributed"]
"""Members of layouts that go from an index back to coordinates, against lists of indices, which can't be wrong."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

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


instantiate_parametrized_tests(TestMeshLayouts)


if __name__ == "__main__":
    run_tests()
