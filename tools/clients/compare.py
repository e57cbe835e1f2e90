"""Both sides of one client, as an entry of the record: what they did, and in what they differ."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.sides import OVERLAY, SIDES, STOCK

from .launch import Outcome

MOST_WORDS = 160


def entry(outcomes: dict[str, Sequence[Outcome]]) -> dict[str, Any]:
    """What is recorded of a client: counts of rank 0's first run, times of every run, results of all ranks.

    A side that failed has only the line that says why, and nothing is compared then.
    """
    failed = {side: bad.failed for side in SIDES for bad in outcomes[side] if bad.failed}
    if failed:
        return {"failed": failed}
    first = {side: outcomes[side][0] for side in SIDES}
    return {
        **{side: _side(outcomes[side]) for side in SIDES},
        "warnings that differ": _warnings(first),
        "results": results(first[STOCK].kept, first[OVERLAY].kept),
        "losses": losses(*([found["losses"] for found in first[side].ranks] for side in SIDES)),
    }


def _side(runs: Sequence[Outcome]) -> dict[str, Any]:
    """What rank 0 noted in the first run; the seconds, one list a run, and the warnings are those of all ranks."""
    rank = runs[0].ranks[0]
    phases = {}
    for name, phase in rank["phases"].items():
        calls = [zip(*(rank["phases"][name]["seconds"] for rank in run.ranks), strict=True) for run in runs]
        phases[name] = {
            "collectives": sum(phase["kinds"].values()),
            "kinds": phase["kinds"],
            "calls": phase["calls"],
            "seconds": [[float(f"{sum(of_ranks):.3g}") for of_ranks in run] for run in calls],
        }
    return {
        "groups": rank["groups"],
        "new_group": rank["new_group"],
        "warnings": len(runs[0].warnings),
        "numbers": rank["numbers"],
        "phases": phases,
    }


def results(stock: list[dict], overlay: list[dict]) -> dict[str, dict[str, Any]]:
    """For each set of tensors: how many there are on all ranks, how many are equal to the bit, the largest difference.

    A tensor that only one side has, or that has another shape or type there, differs by infinity.
    """
    import torch

    found = {}
    for name in stock[0]:
        differences = []
        for ours, theirs in zip(stock, overlay, strict=True):
            for key in ours[name].keys() | theirs[name].keys():
                a, b = ours[name].get(key), theirs[name].get(key)
                alike = a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype
                if not alike:
                    differences.append(math.inf)
                elif torch.equal(a, b):
                    differences.append(0.0)
                else:
                    differences.append((a.double() - b.double()).abs().max().item())
        equal = differences.count(0.0)
        largest = max(differences, default=0.0)
        found[name] = {"tensors": len(differences), "equal": equal, "largest difference": float(f"{largest:.2g}")}
    return found


def losses(stock: list[list[float]], overlay: list[list[float]]) -> dict[str, Any]:
    """How many losses and norms of all ranks are equal to the bit, and by what part of itself the worst differs."""
    pairs = [pair for both in zip(stock, overlay, strict=True) for pair in zip(*both, strict=True)]
    worst = max((abs(a - b) / abs(a) for a, b in pairs if a != b), default=0.0)
    return {"all": len(pairs), "equal": sum(a == b for a, b in pairs), "largest difference": float(f"{worst:.2g}")}


def _warnings(first: dict[str, Outcome]) -> dict[str, list[int]]:
    """[lines on stock, under the overlay] of each warning whose count differs, without what names a run or a rank."""
    counts = {side: Counter(map(plain, first[side].warnings)) for side in SIDES}
    texts = sorted(counts[STOCK].keys() | counts[OVERLAY].keys())
    found = {text: [counts[side][text] for side in SIDES] for text in texts}
    return {text: both for text, both in found.items() if both[0] != both[1]}


def plain(line: str) -> str:
    """A warning without rank, time, process and folders.

    >>> plain("[rank3]:W1122 13:50:07.080000 18098 torch/distributed/x.py:390] While moving")
    'torch/distributed/x.py: While moving'
    >>> plain("/a/b/site-packages/torch/distributed/y.py:331: UserWarning: Mind the gap")
    'torch/distributed/y.py: UserWarning: Mind the gap'
    """
    line = re.sub(r"^(\[rank\d+\]:)?W\d{4} [\d:.]+ +\d+ ", "", line)
    line = re.sub(r"^\S*/site-packages/", "", line)
    line = re.sub(r"/tmp/\S+", "...", line)
    return re.sub(r"\.py:\d+[\]:]+", ".py:", line)[:MOST_WORDS]


def gain(stock: Sequence[Sequence[float]], overlay: Sequence[Sequence[float]]) -> float | None:
    """How many times less time the overlay takes, by the best call of each run; None where the sides' runs overlap.

    One run a side can't tell: what else the machine does may last as long as a run.

    >>> gain([[2.0, 9.0, 2.2], [2.2, 3.0]], [[1.0, 1.1, 1.0], [1.1, 7.0]])
    2.0
    >>> gain([[2.0, 2.1, 2.2], [1.0, 1.1]], [[1.0, 1.1, 1.0], [1.1, 7.0]]) is None
    True
    """
    if min(len(stock), len(overlay)) < 2 or not all((*stock, *overlay)):
        return None
    ours, theirs = ([min(run) for run in side] for side in (overlay, stock))
    if max(ours) >= min(theirs) and max(theirs) >= min(ours):
        return None
    return round(statistics.mean(theirs) / statistics.mean(ours), 2)
