"""Our layouts have the names of torch's, and answer as torch's do: one text of a new member serves both."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_overlay.distributed import _mesh_layout as ours

torchs = pytest.importorskip("torch.distributed._mesh_layout", reason="a torch without layouts")
pytestmark = [
    pytest.mark.skipif(ours is torchs, reason="what the package torch_overlay does: torch has its own algebra"),
    pytest.mark.skipif(not hasattr(torchs, "_FlatLayout"), reason="layouts of an older form"),
]


@st.composite
def meshes(draw):
    """Sizes of a dense mesh, and some of its axes in any order."""
    sizes = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    order = draw(st.permutations(range(len(sizes))))
    return sizes, order[: draw(st.integers(1, len(sizes)))]


def both(made):
    """The mesh in either form."""
    sizes, order = made
    mine, theirs = (home._MeshLayout.from_sizes_strides(sizes) for home in (ours, torchs))
    return mine.select(order), torchs._MeshLayout([theirs[axis] for axis in order])


def plain(answer):
    """What tells one answer from another, whichever class gave it."""
    if hasattr(answer, "axes"):
        return [plain(axis) for axis in answer.axes]
    return (answer.shape, answer.stride) if hasattr(answer, "shape") else answer


@given(meshes(), st.data())
def test_the_same_names_give_the_same_answers(made, data):
    mine, theirs = both(made)
    for ask in ("top_level_sizes", "numel", "cosize", "collapse"):
        found = [getattr(layout, ask) for layout in (mine, theirs)]
        one, other = (plain(answer() if callable(answer) else answer) for answer in found)
        assert one == other, ask
    flats = mine.collapse(), theirs.collapse()
    for ask in ("numel", "all_ranks_from_zero", "check_sorted", "check_orthogonal"):
        one, other = (getattr(flat, ask)() for flat in flats)
        assert one == other, ask
    assert plain(flats[0].complement(math.prod(made[0]))) == plain(flats[1].complement(math.prod(made[0])))
    first = data.draw(st.sampled_from([n for n in range(1, mine.numel() + 1) if mine.numel() % n == 0]))
    parts = (first, mine.numel() // first)
    answers = []
    for flat, home in zip(flats, (ours, torchs), strict=True):
        try:
            answers.append(plain(flat.composition(home._MeshLayout.from_sizes_strides(parts))))
        except (ValueError, AssertionError):  # ours and torch's
            answers.append("refused")
    assert answers[0] == answers[1]
    one, other = (plain(layout.splice(0, 1, layout)) for layout in (mine, theirs))
    assert one == other
