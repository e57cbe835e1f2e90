"""Random cases for real ranks: meshes permuted, partial, flattened and reordered, all types and reductions, some beside
another mesh that a second thread uses."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import torch
from fuzz_redistribute import _order, _placement, _shape, _target

from twins_ranks import BITWISE, NAMES, Case, MeshRecipe

FLOATS = ("float32", "float64", "bfloat16", "float16")
WHOLE = ("int64", "int32")
MOVED = (*FLOATS, *WHOLE, "int8", "uint8", "bool", "int16", "complex64", "float8_e4m3fn", "float8_e5m2")
MESHES_AT_ONCE, CASES_PER_MESH = 6, 15
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
EMBEDS = RELEASE >= (2, 14)
OPS = ("avg", "max", "min", "product", *BITWISE)


def random_cases(seed: int, world: int) -> Iterator[Case]:
    """Cases without end. Several meshes live at a time, and each serves some cases before another takes its place."""
    rng = random.Random(seed)
    meshes = [random_mesh(rng, world) for _ in range(MESHES_AT_ONCE)]
    for number in itertools.count():
        if number % CASES_PER_MESH == 0:
            meshes[rng.randrange(len(meshes))] = random_mesh(rng, world)
        case = random_case(rng, rng.choice(meshes))
        if _consistent(case):
            yield case


def random_mesh(rng: random.Random, world: int) -> MeshRecipe:
    """Mostly over the whole world; the ranks in any order; a view of the root, or the root."""
    count = world if rng.random() < 0.6 else rng.randint(1, world)
    sizes = _factors(rng, count)
    ranks = list(range(world)) if count == world else sorted(rng.sample(range(world), count))
    if rng.random() < 0.4:
        rng.shuffle(ranks)
    names = NAMES[: len(sizes)]
    subsets = ["".join(c) for n in range(2, len(names) + 1) for c in itertools.combinations(names, n)]
    often = rng.choice([0, 0.4])  # half of the meshes have nothing flattened
    flattened = tuple(group for group in subsets if rng.random() < often)
    return MeshRecipe(tuple(ranks), sizes, _view(rng, names), flattened)


def _factors(rng: random.Random, count: int) -> tuple[int, ...]:
    sizes, left = [], count
    while left > 1:
        size = rng.choice([n for n in range(2, left + 1) if left % n == 0])
        sizes.append(size)
        left //= size
    sizes += [1] * (rng.random() < 0.2 or not sizes)
    rng.shuffle(sizes)
    return tuple(sizes)


def _view(rng: random.Random, names: str) -> tuple[str, ...]:
    kind = rng.random()
    if kind < 0.55:
        return ()
    kept = [name for name in names if rng.random() < 0.8] or [names[0]]
    if kind < 0.7:
        return tuple(kept)
    if kind < 0.85 and len(kept) > 1:  # some axes flattened into one
        cut = rng.randint(2, len(kept))
        kept = ["".join(kept[:cut]), *kept[cut:]]
    if kind > 0.78:
        rng.shuffle(kept)
    return tuple(kept)


def random_case(rng: random.Random, mesh: MeshRecipe) -> Case:
    sizes = mesh.view_sizes
    shape = _shape(rng, sizes)
    ops = rng.choice([("sum",), ("sum",), ("sum", "avg"), (rng.choice(OPS),)])
    pending = rng.choice([0, 0, 0.4])
    source = tuple(_placement(rng, shape, ops, pending) for _ in sizes)
    target = tuple(_target(rng, old, shape, pending > 0) for old in source)
    source, source_order = _order(rng, source, shape, sizes)
    target, target_order = _order(rng, target, shape, sizes)
    plain = source_order is None and target_order is None
    grown = any(new[0] == "P" and old != new for old, new in zip(source, target))
    return Case(
        mesh,
        source,
        target,
        shape,
        _dtype(rng, {p[1] for p in (*source, *target) if p[0] == "P"}),
        source_order,
        target_order,
        rng.choice(["whole", "whole", "whole", "existing"]),
        rng.random() < 0.8,
        plain and not grown and rng.random() < 0.5,
        rng.random() < 0.15,
        rng.random() < 0.3,
    )


def _dtype(rng: random.Random, ops: set[str]) -> str:
    if not ops:
        return rng.choice(MOVED)
    if "avg" in ops:
        return rng.choice(FLOATS)
    if ops & BITWISE.keys():
        return rng.choice(WHOLE)
    return rng.choice([*FLOATS, *WHOLE, *(["complex64"] if ops == {"sum"} else [])])


def _consistent(case: Case) -> bool:
    """What torch takes: one kind of reduction, and before 2.14 no shard that becomes a term of a sum."""
    ops = [{p[1] for p in placements if p[0] == "P"} for placements in (case.source, case.target)]
    if any(len(kinds) > 1 and kinds != {"sum", "avg"} for kinds in ops):
        return False
    if len(set().union(*ops)) > 1 and set().union(*ops) & BITWISE.keys():
        return False  # no type takes part in both
    embeds = any(old[0] in ("S", "SS") and new[0] == "P" for old, new in zip(case.source, case.target))
    return EMBEDS or not embeds
