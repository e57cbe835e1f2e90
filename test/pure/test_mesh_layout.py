"""The algebra's laws, each against a slow twin: the plain list of indices."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torch_overlay.distributed._mesh_layout import _FlatLayout, _MeshLayout
from way import WAY

pytestmark = pytest.mark.skipif(
    WAY == "patched", reason="what the package torch_overlay does: torch has its own algebra"
)


@st.composite
def modes(draw):
    """Any sizes and strides: overlapping ones and size 1 included."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=4))
    strides = draw(st.lists(st.integers(0, 12), min_size=len(sizes), max_size=len(sizes)))
    return tuple(sizes), tuple(strides)


@st.composite
def meshes(draw, max_axes=5):
    """An orthogonal mesh: a permutation of a subset of the axes of a dense one, and the dense one's size."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=max_axes))
    order = draw(st.permutations(range(len(sizes))))
    kept = draw(st.integers(1, len(sizes)))
    dense = _MeshLayout.from_sizes_strides(sizes)
    return dense.select(order[:kept]), dense.numel()


def twin(sizes, strides):
    """The indices by counting in a mixed radix, digit by digit."""
    found = []
    total = 1
    for size in sizes:
        total *= size
    for coordinate in range(total):
        digits = []
        for size in reversed(sizes):
            digits.append(coordinate % size)
            coordinate //= size
        found.append(sum(digit * stride for digit, stride in zip(reversed(digits), strides, strict=True)))
    return found


@given(modes())
def test_coalescing_keeps_the_function(made):
    layout = _FlatLayout(*made)
    assert layout.all_ranks_from_zero() == twin(*made)
    assert [layout(c) for c in range(layout.numel())] == twin(*made)
    assert _MeshLayout((layout,)).cosize() == max(twin(*made)) + 1


@given(modes())
def test_canonical_at_birth(made):
    layout = _FlatLayout(*made)
    assert 1 not in layout.shape
    assert _FlatLayout(layout.shape, layout.stride) == layout
    for (_, outer), (size, inner) in zip(
        list(zip(layout.shape, layout.stride, strict=True)),
        list(zip(layout.shape, layout.stride, strict=True))[1:],
        strict=False,
    ):
        assert outer != size * inner


@given(modes(), modes())
def test_orthogonal_layouts_of_equal_function_are_equal(one, other):
    one, other = _FlatLayout(*one), _FlatLayout(*other)
    assume(one.check_orthogonal() and other.check_orthogonal())
    assert (one == other) == (one.all_ranks_from_zero() == other.all_ranks_from_zero())


@given(meshes(), st.data())
def test_unflatten_then_flatten_is_the_identity(mesh, data):
    """What unflattening a mesh axis needs is always defined, and flattening undoes it."""
    layout, _ = mesh
    joint = layout.collapse()
    divisors = [d for d in range(1, joint.numel() + 1) if joint.numel() % d == 0]
    first = data.draw(st.sampled_from(divisors))
    try:
        axes = joint.composition(_MeshLayout.from_sizes_strides((first, joint.numel() // first)))
    except ValueError:
        # the only reason to refuse: the cut falls inside a mode that it doesn't divide
        rest = joint.numel() // first
        for size in reversed(joint.shape):
            if rest % size == 0:
                rest //= size
                continue
            assert size % rest != 0
            return
        raise
    assert axes.collapse() == joint


def answer(function, *arguments):
    """What it says, or None where it refuses, in words that quote what it was given."""
    try:
        return function(*arguments)
    except ValueError as error:
        assert str(function.__self__) in str(error)
        return None


@settings(max_examples=3 * settings.default.max_examples)
@given(modes(), st.integers(0, 40))
def test_outside_its_domain_a_layout_refuses(made, other):
    """Any sizes and strides: a ValueError, or what the list of indices says."""
    layout, indices = _FlatLayout(*made), twin(*made)
    unique = len(set(indices)) == len(indices)
    index = indices[other % len(indices)]
    assert answer(layout.coordinate, index) in ((None, indices.index(index)) if unique else (None,))
    ascending = answer(layout.ascending)
    assert ascending is None or ascending.all_ranks_from_zero() == sorted(indices)
    rest = answer(layout.complement, other)
    assert rest is None or sorted(a + b for a in indices for b in rest.all_ranks_from_zero()) == list(range(other))
    assert answer(layout.__call__, other) == (indices[other] if other < len(indices) else None)
    assert unique or not layout.check_orthogonal()
    if layout.check_orthogonal():  # and there it does answer
        assert layout.coordinate(index) == indices.index(index) and layout.ascending()


@given(st.lists(modes(), max_size=3), st.integers(0, 400))
def test_outside_its_domain_a_mesh_refuses(made, number):
    mesh = _MeshLayout(tuple(_FlatLayout(*one) for one in made))
    points = list(itertools.product(*(range(size) for size in mesh.top_level_sizes)))
    point = points[number % len(points)]
    where = {at: sum(axis(i) for axis, i in zip(mesh.axes, at, strict=True)) for at in points}
    coordinate, origin = answer(mesh.coordinate, where[point]), answer(mesh.origin, where[point])
    unique = len(set(where.values())) == len(points)
    assert coordinate in ((None, point) if unique else (None,)) and origin in ((None, 0) if unique else (None,))
    assert mesh.collapse().check_orthogonal() == (coordinate is not None)
    assert mesh == _MeshLayout(mesh.axes) and hash(mesh) == hash(_MeshLayout(mesh.axes))


@settings(max_examples=3 * settings.default.max_examples)
@given(modes(), st.lists(modes(), min_size=1, max_size=2))
def test_composition_with_axes_of_several_modes(made, inner):
    """R(c) = A(B(c)) or a refusal, also where the modes of B carry into one another on a mode of A."""
    layout, axes = _FlatLayout(*made), _MeshLayout(tuple(_FlatLayout(*one) for one in inner))
    composed = answer(layout.composition, axes)
    if composed is not None:
        assert composed.top_level_sizes == axes.top_level_sizes
        for axis, found in zip(axes.axes, composed.axes, strict=True):
            assert found.all_ranks_from_zero() == [layout(index) for index in axis.all_ranks_from_zero()]


@given(meshes())
def test_complement_covers_each_index_once(mesh):
    layout, world = mesh
    joint = layout.collapse()
    rest = joint.complement(world)
    assert sorted(a + b for a in joint.all_ranks_from_zero() for b in rest.all_ranks_from_zero()) == list(range(world))


@given(meshes())
def test_a_coordinate_is_read_back_whatever_is_added_from_outside(mesh):
    layout, world = mesh
    rest = layout.collapse().complement(world).all_ranks_from_zero()
    offsets = layout.collapse().all_ranks_from_zero()
    for base in rest:
        for number, offset in enumerate(offsets):
            assert layout.collapse().coordinate(base + offset) == number
            assert layout.origin(base + offset) == base


@given(meshes(), st.data())
def test_splice_keeps_the_rest(mesh, data):
    layout, _ = mesh
    start = data.draw(st.integers(0, len(layout.axes)))
    end = data.draw(st.integers(start, len(layout.axes)))
    new = _MeshLayout.from_sizes_strides((2, 2))
    spliced = layout.splice(start, end, new)
    assert spliced.axes[:start] == layout.axes[:start]
    assert spliced.axes[start : start + 2] == new.axes
    assert spliced.axes[start + 2 :] == layout.axes[end:]
