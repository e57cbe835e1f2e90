"""Random redistributions against the whole tensor cut by hand; the first that fails is printed as code to paste.

    python tools/fuzz_redistribute.py --simulate --cases 100000 --seed 0
    python tools/fuzz_redistribute.py --ranks 8 --cases 5000 --seed 0 --stock

`--simulate` plans each case and runs all its ranks in this process, with no communication and without torch.
`--ranks 8` runs each on gloo ranks under the overlay; with `--stock` the same cases on torch as released, too.
Exit status 1 if a case was wrong, raised or hung (under the overlay; what stock does is only counted).
"""

from __future__ import annotations

import argparse
import math
import pathlib
import random
import sys
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "test")]

from torch_overlay.distributed.tensor._planner.cost import Cost  # noqa: E402
from torch_overlay.distributed.tensor._planner.regions import OPS, NotPlanned  # noqa: E402
from twins_tensor import Case  # noqa: E402

MOST_RANKS, MOST_ELEMENTS = 24, 96


def random_case(rng: random.Random) -> Case:
    sizes = _sizes(rng)
    shape = _shape(rng, sizes)
    ops = rng.choice([("sum",), ("avg",), ("sum", "avg"), (rng.choice([*OPS]),)])
    pending = rng.choice([0, 0, 0.4])
    source = tuple(_placement(rng, shape, ops, pending) for _ in sizes)
    target = tuple(_target(rng, old, shape, pending > 0) for old in source)
    source, source_order = _order(rng, source, shape, sizes)
    target, target_order = _order(rng, target, shape, sizes)
    return Case(
        source,
        target,
        shape,
        sizes,
        _groups(rng, len(sizes)),
        source_order,
        target_order,
        rng.choice([1, 2, 4, 8]),
        _cost(rng),
    )


def _sizes(rng):
    while True:
        sizes = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 4)))
        if math.prod(sizes) <= MOST_RANKS:
            return sizes


def _shape(rng, sizes):
    while True:
        even = rng.random() < 0.3
        lengths = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16] if not even else [2, 4, 8, math.prod(sizes)]
        shape = tuple(rng.choice(lengths) for _ in range(rng.randint(0, 3)))
        if math.prod(shape) <= MOST_ELEMENTS:
            return shape


def _placement(rng, shape, ops, pending):
    if rng.random() < pending:
        return ("P", rng.choice(ops))
    if shape and rng.random() < 0.65:
        return ("S", rng.randrange(len(shape)))
    return ("R",)


def _target(rng, old, shape, pending):
    if pending and rng.random() < 0.25:
        # What stays pending, and what torch can make pending from the source.
        return old if old[0] == "P" else ("P", "sum") if old[0] == "S" else ("P", rng.choice(["sum", "avg"]))
    return _placement(rng, shape, (), 0)


def _order(rng, placements, shape, sizes):
    if rng.random() < 0.8:
        return placements, None
    order = tuple(rng.sample(range(len(sizes)), len(sizes)))
    for dim, length in enumerate(shape):
        axes = [a for a in order if placements[a] == ("S", dim)]
        if axes != sorted(axes) and length % math.prod(sizes[a] for a in axes):
            return placements, None
    if rng.random() < 0.5:
        return placements, order
    return tuple(_strided(placements, sizes, order, axis) for axis in range(len(sizes))), None


def _strided(placements, sizes, order, axis):
    if placements[axis][0] != "S":
        return placements[axis]
    before = [a for a in order[: order.index(axis)] if placements[a] == placements[axis] and a > axis]
    factor = math.prod(sizes[a] for a in before)
    return placements[axis] if factor == 1 else ("SS", placements[axis][1], factor)


def _groups(rng, axes):
    if rng.random() < 0.6:
        return None
    return tuple(tuple(sorted(rng.sample(range(axes), rng.randint(1, axes)))) for _ in range(rng.randint(0, 3)))


def _cost(rng):
    if rng.random() < 0.6:
        return rng.choice([Cost(), Cost(latency=0.0)])  # where only bytes count, more plans balance their senders
    return Cost(latency=rng.choice([0.0, 30e-6, 1.0, 10 ** rng.uniform(-6, -3)]), bandwidth=10 ** rng.uniform(6, 11))


def _consistent(case: Case) -> bool:
    ops = [{p[1] for p in placements if p[0] == "P"} for placements in (case.source, case.target)]
    return all(len(kinds) < 2 or kinds == {"sum", "avg"} for kinds in ops)


def simulate(cases: int, seed: int) -> int:
    rng = random.Random(seed)
    counts = {"right": 0, "wrong": 0, "raised": 0, "not ours": 0}
    began, first = time.perf_counter(), None
    done = 0
    while done < cases:
        case = random_case(rng)
        if not _consistent(case):
            continue
        done += 1
        try:
            problem = case.problem()
            outcome = "wrong" if problem else "right"
        except NotPlanned as error:
            outcome, problem = "not ours", str(error)
        except Exception:  # whatever it is, the case is worth printing
            outcome, problem = "raised", traceback.format_exc()
        counts[outcome] += 1
        if outcome in ("wrong", "raised") and first is None:
            first = case
            print(f"{outcome}: {problem}\nfrom twins_tensor import *\nfrom math import inf", flush=True)
            print(f"{case!r}.problem()", flush=True)
    seconds = time.perf_counter() - began
    print(f"{done} cases, seed {seed}: {', '.join(f'{n} {k}' for k, n in counts.items())}; {seconds:.1f} s")
    return counts["wrong"] + counts["raised"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--simulate", action="store_true", help="all ranks in this process, no torch")
    how.add_argument("--ranks", type=int, metavar="N", help="N gloo ranks, each a process")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="with --ranks: stop after so many")
    parser.add_argument("--stock", action="store_true", help="with --ranks: the same cases on stock torch, too")
    parser.add_argument("--unplanned", action="store_true", help="with --ranks: by torch's own steps, merged if exact")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds after which a rank counts as hung")
    parser.add_argument("--backend", default="gloo", help="with --ranks: of the world, gloo or nccl")
    parser.add_argument("--device", default="cpu", help="with --ranks: cpu or cuda, each rank on its own")
    parser.add_argument("--ranks-per-gpu", type=int, default=1, metavar="N", help="with --ranks: that share a device")
    parser.add_argument("--alone", action="store_true", help="with --ranks: no second thread with another mesh")
    args = parser.parse_args()
    if args.simulate:
        return 1 if simulate(args.cases, args.seed) else 0
    from fuzz_ranks import run

    world = dict(backend=args.backend, device=args.device, ranks_per_gpu=args.ranks_per_gpu)
    world |= dict(alone=args.alone, unplanned=args.unplanned)
    counts = run(args.ranks, args.cases, args.seed, args.seconds, args.stock, args.limit, **world)
    return 1 if counts["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
