"""Pending reductions of trees on real ranks, held against torch's own steps wherever these are right."""

import math
import random

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_overlay
from mesh_ranks import SHUFFLED, WORLD, make_root
from on_device import from_host
from rank_gradients import leaf
from width import NIGHTLY, sample

R, S, P = Replicate(), Shard, Partial
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
COMPLEX = torch.complex64, torch.complex128
WHOLE = torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64
OPS = {
    "sum": (*FLOATS, *COMPLEX, *WHOLE),
    "avg": (*FLOATS, *COMPLEX),
    "max": (*FLOATS, *WHOLE),
    "min": (*FLOATS, *WHOLE),
    "product": (*FLOATS, *WHOLE),
    "band": WHOLE,
    "bor": WHOLE,
    "bxor": WHOLE,
}
MESHES = ((range(WORLD), (4, 2)), (SHUFFLED, (2, 4)), (range(6), (3, 2)), (range(6), (2, 3)), (range(WORLD), (8,)))
SPECIAL = float("inf"), -float("inf"), -0.0, float("nan")


@from_host
def term(dtype, shape, seed, op):
    """Small whole numbers, whose sums and products are exact; of floats, some aren't finite. Of NaN and another number
    gloo calls either the greater one."""
    rng = torch.Generator().manual_seed(seed)
    found = torch.randint(-3, 4, shape, generator=rng)
    if not dtype.is_floating_point and not dtype.is_complex:
        return found.to(dtype)
    found = found.to(dtype)
    if dtype.is_complex:
        return found * (1 - 2j)
    places = torch.randint(0, 40, shape, generator=rng)
    for number, value in enumerate(SPECIAL[: 3 if op in ("max", "min") else 4]):
        found[places == number] = value
    return found


class ReductionCases:
    """Cases for ``EightRanks``."""

    def stock(self, tensor, placements):
        """Reduced by torch's own steps, and cut then, which it can always do; None if it refuses."""
        torch_overlay.disable()
        try:
            whole = tensor.redistribute(placements=[R] * len(placements))
            return whole.redistribute(placements=placements).to_local()
        except (RuntimeError, ValueError):
            return None
        finally:
            torch_overlay.enable(**self.overlay_options)

    def drawn(self, rng, mesh, seed):
        """A tensor for each operation and type, of which a change sees a fifth at each of five seeds, with placements
        that it is to have."""
        sizes, here = tuple(mesh.shape), mesh.get_coordinate()
        for op, dtype in sample(((op, dtype) for op, dtypes in OPS.items() for dtype in dtypes), 5, seed):
            ops = [rng.choice((op, "sum", "avg")) if op in ("sum", "avg") else op for _ in sizes]
            source = [rng.choice((P(op if dtype in WHOLE else each), R, S(0), S(1))) for each in ops]
            source[rng.randrange(len(sizes))] = P(op)
            target = [rng.choice((R, S(0), S(1))) for _ in sizes]
            shape = rng.choice((5, 8, 12)), rng.choice((4, 7, 12))
            # Replicas hold equal terms: which ones depends on the axes that cut, or are pending.
            own = sum(at * 10**axis for axis, at in enumerate(here) if not source[axis].is_replicate())
            value = term(dtype, shape, 100 * seed + own, op)
            whole = DTensor.from_local(value, mesh, [R] * len(sizes), run_check=False)
            local = whole.redistribute(placements=[R if p.is_partial() else p for p in source]).to_local()
            like = dict(run_check=False, shape=shape, stride=(shape[1], 1))
            yield DTensor.from_local(local, mesh, source, **like), target

    def differing(self, seed):
        """What a tree gives otherwise than stock on this rank."""
        ranks, sizes = MESHES[seed % len(MESHES)]
        mesh = make_root(ranks, sizes, ("a", "b")[: len(sizes)])
        if self.rank not in ranks:
            return
        cases = dict(enumerate(self.drawn(random.Random(seed), mesh, seed)))
        tree = {f"{number}": tensor for number, (tensor, _) in cases.items()}
        rule = {f"{number}": target for number, (_, target) in cases.items()}
        found = torch_overlay.redistribute(tree, placements=rule, budget=(1 << 20, 1 << 13)[seed % 2])
        exact = 3 not in sizes  # divisions by three round, and so does what is added to them
        for number, (tensor, target) in cases.items():
            want, got = self.stock(tensor, target), found[f"{number}"].to_local()
            near = 8 * torch.finfo(tensor.dtype).eps if not exact and tensor.dtype not in WHOLE else 0
            same = want is not None and torch.allclose(got, want, rtol=near, atol=near, equal_nan=True)
            if not same:
                yield f"seed {seed}: {tensor.dtype} {tensor.placements} to {target} on {sizes}: {got}, stock {want}"

    def check_against_stock(self, seed):
        every = [None] * WORLD
        dist.all_gather_object(every, list(self.differing(seed)))
        self.assertTrue(not any(every), "\n".join([text for some in every for text in some]))

    def check_small_budgets(self, seed):
        """Tensors larger than a tiny budget, cut by some axes and pending over others, beside some that aren't pending;
        on their mesh and to another."""
        rng = random.Random(seed)
        ranks, sizes = rng.choice((*MESHES[:2], (range(WORLD), (2, 2, 2))))
        mesh, other = make_root(ranks, sizes, ("a", "b", "c")[: len(sizes)]), make_root(SHUFFLED, (8,), ("d",))
        onto = rng.choice((mesh, other))
        source, wanted, here = [], [], mesh.get_coordinate()
        for _ in range(rng.randint(1, 3)):
            ndim = rng.randint(1, 3)
            shape = [rng.randint(1, 40 if ndim < 3 else 24) for _ in range(ndim)]
            ends = R, P(), *map(S, range(len(shape)))
            placements = [rng.choice(ends) for _ in sizes]
            if rng.random() < 0.8:
                placements[rng.randrange(len(sizes))] = P()
            base = torch.arange(math.prod(shape), dtype=rng.choice((torch.float32, torch.int64))).reshape(shape) % 50
            own, terms = 0, 1
            for size, at, placement in zip(sizes, here, placements, strict=True):
                if placement.is_partial():
                    own, terms = own * size + at, terms * size
            source.append(leaf(mesh, base + own, tuple(placements), None, False))
            after = tuple(rng.choice((R, *ends[2:])) for _ in onto.shape)
            wanted.append(leaf(onto, base * terms + sum(range(terms)), after, None, False))
        budget = rng.choice((1800, 2400, 4000, 9000))
        said = f"seed {seed}: {[tensor._spec for tensor in source]} to {[tensor._spec for tensor in wanted]}, {budget}"
        after = {f"{number}": tensor.placements for number, tensor in enumerate(wanted)}
        found = torch_overlay.redistribute(source, onto, after, budget=budget)
        for moved, want in zip(found, wanted, strict=True):
            self.assertTrue(torch.equal(moved.to_local(), want.to_local()), said)

    def test_averages_do_not_overflow(self):
        """Where every term can be said in a type, so can their average, whatever their sum would be; of a sum beside an
        average, too, if what is summed is small in the end."""
        for ranks, sizes in MESHES:
            mesh = make_root(ranks, sizes, ("a", "b")[: len(sizes)])
            if self.rank not in ranks:
                continue
            tree, want = {}, {}
            for dtype in (*FLOATS, *COMPLEX):
                for name, ops, sign, average in self.averages(mesh):
                    most, name = torch.finfo(dtype).max, f"{name} of {dtype} on {sizes}"
                    local = torch.full((6, 4), sign * most, dtype=dtype)
                    tree[name] = DTensor.from_local(local, mesh, [P(op) for op in ops], run_check=False)
                    want[name] = torch.full((6, 4), average * most, dtype=dtype)
            for target in (R, S(0), S(1)):
                for name, tensor in torch_overlay.redistribute(tree, placements=target).items():
                    local = tensor.to_local()
                    self.assertTrue(
                        torch.equal(local, want[name][: local.shape[0], : local.shape[1]]), f"{name}: {local}"
                    )
            if len(ranks) == WORLD:
                self.check_averages_on_another(tree, want)

    def averages(self, mesh):
        """(name, operations by axis, the sign of this rank's terms, of the average)"""
        yield "avg", ["avg"] * mesh.ndim, 1, 1
        if mesh.ndim > 1:
            here = mesh.get_local_rank(1)
            yield "avg beside sum", ["avg", "sum"], 1 if here == 0 else -1 if here == 1 else 0, 0

    def check_averages_on_another(self, tree, want):
        other = make_root(range(WORLD), (8,), ("c",))
        moved = torch_overlay.redistribute(tree, other, R)
        for name, each in want.items():
            self.assertTrue(torch.equal(moved[name].to_local(), each), name)


for first in range(0, 400, 20) if NIGHTLY else (0,):

    def check(self, seeds=range(first, first + (20 if NIGHTLY else 3))):
        for seed in seeds:
            self.check_small_budgets(seed)

    setattr(ReductionCases, f"test_random_budgets_{first:03}", check)

# Two hundred at night.
for first in range(0, 200, 20) if NIGHTLY else (0,):

    def check(self, seeds=range(first, first + (20 if NIGHTLY else 3))):
        for seed in seeds:
            self.check_against_stock(seed)

    setattr(ReductionCases, f"test_random_reductions_as_stock_{first:03}", check)
