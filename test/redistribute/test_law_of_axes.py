"""The law of axes: a collective talks only along axes whose placement changes, or on which torch's own steps talk.

Torch is asked for its steps, on a mesh of a fake world; the planner is asked for its plan, with every set of joint
groups that may be at hand. A group over more axes than that would make ranks take part that have no part in it, and
wait for those that don't come.
"""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as torch_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from mesh_harness import fake_world, make_root
from torch_overlay.distributed.tensor._planner.cost import Cost, collectives
from torch_overlay.distributed.tensor._planner.steps import Collective
from twins_tensor import Case
from width import NIGHTLY, sample

WORDS = {"R": ("R",), "S0": ("S", 0), "S1": ("S", 1), "P": ("P", "sum")}
PLACEMENTS = {("R",): Replicate(), ("S", 0): Shard(0), ("S", 1): Shard(1), ("P", "sum"): Partial()}
SHAPES = [(16, 16), (5, 3), (7, 1), (2, 9), (0, 4)]  # even, uneven, too short for its cuts, empty


@pytest.fixture(scope="module", autouse=True)
def world():
    """A world for all the meshes here."""
    with fake_world(size=24):
        yield
        torch_on.cache_clear()


@functools.cache
def torch_on(sizes):
    """`Torch` on the mesh of these sizes."""
    return Torch(sizes)


class Torch:
    """Torch's own steps on one mesh."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.mesh = make_root(range(math.prod(sizes)), sizes, "abcd"[: len(sizes)])

    def spec(self, placements, shape, order):
        found = tuple(PLACEMENTS[p] for p in placements)
        more = {}
        if order is not None:
            dims = [(d, tuple(a for a in order if placements[a] == ("S", d))) for d in range(len(shape))]
            more = {"shard_order": tuple(entry for entry in dims if entry[1])}
            more["shard_order"] = tuple(torch_redistribute.ShardOrderEntry(*entry) for entry in more["shard_order"])
        meta = TensorMeta(torch.Size(shape), (shape[1], 1), torch.float32)
        return DTensorSpec(self.mesh, found, tensor_meta=meta, **more)

    @functools.cache  # noqa: B019
    def steps(self, source, target, shape=(16, 16), source_order=None, target_order=None):
        """The axis of each step, its placements before and after. With default orders the shape doesn't matter."""
        specs = self.spec(source, shape, source_order), self.spec(target, shape, target_order)
        infos = torch_redistribute._gen_transform_infos_non_cached(*specs)
        return [(info.mesh_dim, *info.src_dst_placements) for info in infos if self.sizes[info.mesh_dim] > 1]

    def talks(self, *question):
        """The axes on which torch communicates, one for each collective."""
        return [axis for axis, *change in self.steps(*question) if communicates(*change)]


def communicates(source, target):
    return source.is_partial() or (source.is_shard() and not target.is_partial())


def all_pairs(count):
    """Every question but those that are another's mirror image, with the dims of the tensor swapped."""
    for source, target in itertools.product(itertools.product(WORDS, repeat=count), repeat=2):
        dims = [word for word in (*source, *target) if word[0] == "S"]
        if NIGHTLY or not dims or dims[0] == "S0":
            yield tuple(WORDS[w] for w in source), tuple(WORDS[w] for w in target)


def joint(count):
    """The tuples of axes that may have a joint group."""
    return [axes for n in range(2, count + 1) for axes in itertools.combinations(range(count), n)]


def subsets(items):
    return [some for n in range(len(items) + 1) for some in itertools.combinations(items, n)]


def wider(case, torch_axes):
    """The steps of the plan that talk along an axis that the question leaves alone."""
    changed = {axis for axis, (old, new) in enumerate(zip(case.source, case.target, strict=True)) if old != new}
    allowed = changed.union(torch_axes)
    return [step for step in case.steps() if isinstance(step, Collective) and not allowed.issuperset(step.axes)]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2)])
def test_every_pair_with_every_set_of_groups(sizes):
    torch_says, broken = torch_on(sizes), []
    sets = [*subsets(joint(len(sizes))), None]
    for number, (source, target) in enumerate(all_pairs(len(sizes))):
        axes = torch_says.talks(source, target)
        for place, groups in sample(enumerate(sets), 5, number % 5):
            for shape in SHAPES if NIGHTLY or len(sizes) < 3 else [SHAPES[(number + place) % len(SHAPES)]]:
                case = Case(source, target, shape, sizes, groups)
                broken += [(case, step.axes) for step in wider(case, axes)]
    assert broken == []


WORDED = st.sampled_from(list(WORDS.values()))


def ends(count):
    """Source and target, of which some axes are alike, as they mostly are."""
    axis = st.one_of(WORDED.map(lambda word: (word, word)), st.tuples(WORDED, WORDED))
    return st.lists(axis, min_size=count, max_size=count).map(lambda axes: tuple(zip(*axes, strict=True)))


def groups(count):
    """Every set of groups; None is all of them."""
    return st.none() | st.sets(st.sampled_from(joint(count))).map(lambda found: tuple(sorted(found)))


LENGTHS = st.tuples(st.integers(0, 17), st.integers(0, 17))
COSTS = st.sampled_from([Cost(), Cost(latency=1.0), Cost(latency=0.0)])


@settings(max_examples=5 * settings.default.max_examples)
@given(st.sampled_from([(2, 2, 2, 2), (2, 3, 2, 2), (3, 1, 2, 2)]), ends(4), groups(4), LENGTHS, COSTS)
def test_four_axes(sizes, ends, groups, shape, cost):
    case = Case(*ends, shape, sizes, groups, cost=cost)
    assert wider(case, torch_on(sizes).talks(*ends)) == []


@settings(max_examples=2 * settings.default.max_examples)
@given(ends(3), groups(3), LENGTHS, st.permutations(range(3)), st.permutations(range(3)))
def test_explicit_shard_orders(ends, groups, shape, source_order, target_order):
    """Orders in which axes cut a dim, other than the mesh's: torch searches for its steps, and the size decides."""
    shape = tuple(8 * (length + 1) for length in shape)  # our cuts in such an order are even
    orders = tuple(source_order), tuple(target_order)
    assume(not any(old[0] == "S" and new[0] == "P" for old, new in zip(*ends, strict=True)))  # no such step in a search
    case = Case(*ends, shape, (2, 2, 2), groups, *orders)
    assert wider(case, torch_on((2, 2, 2)).talks(*ends, shape, *orders)) == []


# --- counts ---


def ends_reductions(source, target):
    return any(old[0] == "P" != new[0] for old, new in zip(source, target, strict=True))


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2)])
@pytest.mark.parametrize("shape", [(16, 16), (5, 3)])
def test_no_pair_takes_more_collectives_than_torch(sizes, shape):
    """With no joint group at hand, nor with the group of the whole mesh, which never makes it more. What crosses all
    axes takes one with that group, and two if it reduces too."""
    more = []
    for source, target in all_pairs(len(sizes)):
        cases = [Case(source, target, shape, sizes, groups) for groups in ((), (range(len(sizes)),), None)]
        alone, whole = (collectives(case.steps()) for case in cases[:2])
        most, talks = alone, len(torch_on(sizes).talks(source, target))
        if whole > 1 and talks == len(sizes) and crossed(cases[2]) == set(range(len(sizes))):
            most = 1 + ends_reductions(source, target)
        if not (whole <= alone <= talks and whole <= most):
            more.append((source, target, whole, alone, talks))
    assert more == []


def crossed(case):
    return {axis for step in case.steps() if isinstance(step, Collective) for axis in step.axes}
