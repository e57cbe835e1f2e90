"""How pending reductions are planned: what each rank gets of them, and in which phases, within the budget."""

import itertools
import math
import random

import pytest

from torch_overlay.distributed.tensor._planner.regions import Box, Regions
from torch_overlay.transfers._planner.reductions import Reduced, phases, place_in
from twins_tensor import coordinates
from width import NIGHTLY

TIMES = 20 if NIGHTLY else 1


def regions(text, shape, sizes):
    """`P S0 R`: a placement for each axis."""
    words = text.split()
    return Regions.of(
        [int(word[1]) if word[0] == "S" else None for word in words],
        ["sum" if word == "P" else None for word in words],
        shape,
        sizes,
    )


@pytest.mark.parametrize(
    "before, target, after",
    [
        ("P R", "S0 R", "S0·R"),  # exactly what the target wants: nothing has to move then
        ("P R", "R R", "R·R"),
        ("P P", "S0 S1", "S0·S1"),
        ("P P", "S0 R", "S0·R"),
        ("P S0", "S0 S0", "S0#1·S0#0"),  # the target cuts by the first axis first; other parts, of the same size
        ("P S1", "S1 R", "S0·S1"),
        ("P S0", "R S0", "R·S0"),
    ],
)
def test_each_rank_gets_a_part_where_the_target_is_cut(before, target, after):
    found = Reduced.toward(*[regions(text, (8, 8), (4, 2)) for text in (before, target)])
    assert str(found.after) == after
    assert [scatters for *_, scatters in found.steps] == sorted([s for *_, s in found.steps], reverse=True)


def test_without_another_way_only_cuts_of_the_target_are_made():
    ends = [regions(text, (8, 8), (4, 2)) for text in ("P S0", "S0 S0")]
    assert str(Reduced.toward(*ends, elsewhere=False).after) == "R·S0"


@pytest.mark.parametrize(
    "shape, after", [((8, 8), "S0·R"), ((2, 8), "S1·R"), ((), "R·R"), ((1,), "R·R"), ((3, 2), "S0·R"), ((0, 4), "R·R")]
)
def test_parts_for_another_mesh_are_as_small_as_they_can_be(shape, after):
    assert str(Reduced.apart(regions("P R", shape, (4, 2))).after) == after


def drawn(rng):
    """Some tensors with axes pending, each with how it is reduced."""
    sizes = rng.choice([(4,), (2, 2), (3, 2), (2, 3, 2)])
    found = []
    for _ in range(rng.randint(1, 4)):
        shape = tuple(rng.choice((1, 2, 5, 8, 12)) for _ in range(rng.randint(0, 3)))
        kinds = ["P", "R", *[f"S{dim}" for dim in range(len(shape))]]
        before = regions(" ".join([rng.choice(kinds) for _ in sizes]), shape, sizes)
        target = regions(" ".join([rng.choice(kinds[1:]) for _ in sizes]), shape, sizes)
        ways = Reduced.toward(before, target), Reduced.apart(before), Reduced.everywhere(before)
        found.append(rng.choice(ways) if before.pending else None)
    return found


def packed_by(part, coordinate):
    """Bytes that a rank packs for a part, with what makes the pieces for all ranks equal."""
    reduction, slab = part.reduction, part.slab
    whole = Box((0,) * len(reduction.before.shape), reduction.before.shape)

    def elements(each, at):
        return each.box(at).meet(slab or whole).elements

    if not reduction.scattered:
        return elements(reduction.before, coordinate)
    ranges = [
        range(size) if axis in reduction.scattered else [at]
        for axis, (size, at) in enumerate(zip(reduction.before.sizes, coordinate, strict=True))
    ]
    pieces = [elements(reduction.after, at) for at in itertools.product(*ranges)]
    return max(pieces) * len(pieces)


@pytest.mark.parametrize("seed", range(10 * TIMES))
def test_phases_bring_each_element_once_and_stay_within_their_share(seed):
    cut = 0
    for number in range(40):
        rng = random.Random(100 * seed + number)
        reductions, budget = drawn(rng), rng.choice((20, 100, 400, 10_000))
        found = phases(reductions, [4] * len(reductions), budget)
        assert [part.number for part in found[0] if part.reduction is None] == [
            n for n, each in enumerate(reductions) if each is None
        ]
        cells = [[] for _ in reductions]
        for parts in found:
            pending = [part for part in parts if part.reduction is not None]
            for part in pending:
                shape = part.reduction.before.shape
                slab = part.slab or Box((0,) * len(shape), shape)
                cells[part.number] += itertools.product(*[range(s, s + n) for s, n in zip(*slab, strict=True)])
                cut += part.slab is not None
            grid = {part.reduction.before.sizes for part in pending}
            for at in coordinates(*grid) if grid else ():
                packed = {part: 4 * packed_by(part, at) for part in pending}
                assert all(size <= part.packed for part, size in packed.items())
                # gloo copies what it scatters; what is reduced everywhere is reduced in place
                twice = sum([size for part, size in packed.items() if part.reduction.scattered])
                needed = 2 * twice + sum([part.results(4) for part in pending])
                assert needed <= budget or (len(pending) == 1 and needed == 4), (parts, packed)
        for reduction, numbers in zip(reductions, cells, strict=True):
            shape = reduction.before.shape if reduction is not None else None
            assert reduction is None or sorted(numbers) == list(itertools.product(*map(range, shape)))
    assert cut


SHAPES = (70, 100), (71, 99), (100, 70), (4096, 64), (16, 16)
BUDGETS = 600, 2000, 4096, 9000, 16000, 65536, 200_000
WEIGHTS = (  # of real models, at the default budget: shape, sizes of the mesh, bytes of an element
    ((128_256, 8192), (4, 8), 2),
    ((152_064, 8192), (8, 8), 4),
    ((128, 4096, 14_336), (8, 4), 2),
    ((28_672, 8192), (2, 2), 4),
    ((8192, 28_672), (2, 8), 4),
)


def read_outside(reduction, itemsize, budget):
    """The slabs of which some rank would read what isn't inside of what it holds, and how many slabs there are; every
    element that a rank holds is in one of them."""
    found, slabs = [], [part.slab for parts in phases([reduction], [itemsize], budget) for part in parts]
    for at in coordinates(reduction.before.sizes):
        held, seen = reduction.before.box(at), 0
        for slab in slabs:
            if slab is not None:
                box = place_in(held, held.meet(slab))
                ends = zip(*box, held.length, strict=True)
                found += [slab] * any(start < 0 or start + length > have for start, length, have in ends)
                seen += box.elements
        assert slabs == [None] or seen == held.elements
    return found, len(slabs)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_rank_reads_outside_of_its_shard(shape):
    """All placements of two axes with something pending, at seven budgets: a slab may miss what a rank holds."""
    cut = 0
    for words in itertools.product(("R", "S0", "S1", "P"), repeat=2):
        if "P" in words:
            before = regions(" ".join(words), shape, (2, 2))
            for budget in BUDGETS:
                outside, slabs = read_outside(Reduced.apart(before), 4, budget)
                assert not outside, (words, budget, outside)
                cut += slabs > 1
    assert cut


@pytest.mark.parametrize("shape, sizes, itemsize", WEIGHTS)
def test_weights_of_real_models_at_the_default_budget(shape, sizes, itemsize):
    for dim in range(len(shape)):
        for words in (f"S{dim} P", f"P S{dim}"):
            outside, _ = read_outside(Reduced.apart(regions(words, shape, sizes)), itemsize, 256 << 20)
            assert not outside


def test_a_large_tensor_goes_in_slabs_that_leave_each_rank_its_part():
    """Along the dim that the reduction doesn't cut; in no more phases than the budget asks for."""
    before = regions("P R", (64, 64), (4, 2))
    found = phases([Reduced.apart(before)], [4], 64 * 64 * 4)
    slabs = [part.slab.length for parts in found for part in parts]
    assert slabs == [(64, 25), (64, 25), (64, 14)]
    assert all(part.reduction.scattered == (0,) and part.results(4) * 4 == part.packed for [part] in found)
    assert math.prod([len(parts) for parts in found]) == 1


def test_a_large_vector_is_reduced_everywhere():
    """Slabs of it would each be one rank's part."""
    found = phases([Reduced.apart(regions("P R", (64,), (4, 2)))], [4], 128)
    assert len(found) == 6 and not any(part.reduction.scattered for [part] in found)


def test_where_the_backend_scatters_it_is_asked_to():
    """gloo reduces everything either way; every other backend brings each rank its own part only."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import torch_overlay

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4, 2))
        tensors = [DTensor.from_local(torch.ones(n, 3), mesh, [Partial(), Replicate()]) for n in (4, 5)]
        with torch_overlay.enabled(), CommDebugMode() as comm:
            found = torch_overlay.redistribute(tensors, placements=[Shard(0), Replicate()])
        assert [tuple(tensor.to_local().shape) for tensor in found] == [(1, 3), (2, 3)]
        assert {op.__name__.rpartition(".")[2]: n for op, n in comm.get_comm_counts().items()} == {
            "_reduce_scatter_base_": 1
        }
    finally:
        dist.destroy_process_group()
