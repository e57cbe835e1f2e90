# Owner(s): ["oncall: distributed"]
"""Operations on layouts against lists of indices, which can't be wrong."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed._layout import Layout, MeshLayout

AXES = [((4,), (2,)), ((2, 2), (4, 1)), ((2, 3), (1, 2)), ((3,), (4,)), ((2, 2, 2), (2, 8, 1)), ((), ())]


class TestMeshLayouts(TestCase):
    """Layouts of one and of several modes, in order and not."""

    @parametrize("sizes, strides", AXES)
    def test_an_index_is_read_back(self, sizes, strides) -> None:
        layout = Layout(sizes, strides)
        steps = itertools.product(*map(range, sizes))
        expected = [sum(s * d for s, d in zip(step, strides, strict=True)) for step in steps]
        self.assertEqual(layout.indices(), expected)
        self.assertEqual([layout.coordinate(layout(c)) for c in range(layout.numel)], [*range(layout.numel)])

    @parametrize("sizes, strides", AXES)
    def test_a_layout_and_its_complement_cover_each_index_once(self, sizes, strides) -> None:
        layout = Layout(sizes, strides)
        rest = layout.complement(48)
        covered = sorted(a + b for a in layout.indices() for b in rest.indices())
        self.assertEqual(covered, [*range(48)])

    def test_a_mesh_knows_where_each_copy_starts(self) -> None:
        mesh = MeshLayout.dense((2, 3, 4))
        for index in range(24):
            self.assertEqual(mesh.coordinate(index), (index // 12, index // 4 % 3, index % 4))
            self.assertEqual(mesh.select((0, 2)).origin(index), index // 4 % 3 * 4)

    def test_what_the_algebra_does_not_answer_is_an_error(self) -> None:
        with self.assertRaisesRegex(ValueError, "doesn't divide"):
            Layout((4, 3), (1, 8)).compose(MeshLayout((Layout((3,), (2,)),)))
        with self.assertRaisesRegex(ValueError, "orthogonal"):
            Layout((2, 2), (1, 1)).coordinate(1)
        with self.assertRaisesRegex(ValueError, "multiple of"):
            Layout((4,)).complement(6)


instantiate_parametrized_tests(TestMeshLayouts)


if __name__ == "__main__":
    run_tests()
