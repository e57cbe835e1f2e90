"""What the demo's table says: each thing measured, both runs beside each other, and why it comes out so."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch_overlay.demo.config import Config
from torch_overlay.demo.result import Result, Side
from torch_overlay.show.words import joined


@dataclass(frozen=True)
class Row:
    """One thing measured: both runs' numbers, how many times better the second is, and a sentence or two."""

    label: str
    first: str
    second: str
    better: str
    why: str = ""


def sections(result: Result) -> list[list[Row]]:
    """The table. Where stock runs against itself there is nothing to explain."""
    found = [_group_rows(result), _collective_rows(result), _training_rows(result)]
    if result.control:
        found = [[Row(row.label, row.first, row.second, row.better) for row in rows] for rows in found]
    return found


def times_better(cost: float, other: float) -> str:
    """How many times less the other costs.

    >>> times_better(33, 11), times_better(44, 42), times_better(48, 48), times_better(36, 39), times_better(600, 3)
    ('3x', '1.05x', 'same', '0.92x', '200x')
    """
    if cost == other:
        return "same"
    if not cost or not other:
        return "-"
    gain = cost / other
    text = f"{gain:.2f}" if gain < 2 else f"{gain:.1f}" if gain < 10 else f"{gain:,.0f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}x"


def times_faster(first: list[float], second: list[float]) -> str:
    """How many times faster the second is by its median; `~same` where the middle halves of the times overlap.

    >>> times_faster([2.0, 2.1, 1.9], [1.0, 1.1, 0.9]), times_faster([1.0, 1.4, 0.9], [1.1, 1.3, 1.0])
    ('2x', '~same')
    """
    if min(len(first), len(second)) < 2:
        return "-"  # no telling how much a time varies
    (low, middle, high), (other_low, other_middle, other_high) = (
        statistics.quantiles(times, n=4, method="inclusive") for times in (first, second)
    )
    apart = low > other_high or other_low > high
    return times_better(middle, other_middle) if apart else "~same"


def _group_rows(result: Result) -> list[Row]:
    first, second = result.sides
    # Without the overlay, ParallelDims lets one group stand in for all axes of one rank.
    lone = second.new_group_calls > first.new_group_calls
    rows = [
        _count(
            "process groups of a rank",
            result,
            lambda side: side.groups,
            "Each is a communicator: sockets and threads under gloo, GPU memory under NCCL. Stock makes one for each "
            "axis of each mesh; the overlay makes one for an axis, whichever meshes have it, and one over all axes of "
            "a mesh.",
        ),
        _count(
            "new_group calls of a rank",
            result,
            lambda side: side.new_group_calls,
            "The overlay makes a group for each axis of one rank, too; on stock, ParallelDims lets one stand in."
            if lone
            else "On stock every rank takes part in making every group, so that the calls grow with the job. Under the "
            "overlay a rank makes only the groups that it is in.",
        ),
    ]
    if first.threads is None:
        return rows
    more = (second.sockets or 0) > (first.sockets or 0)
    return [
        *rows,
        _count("threads of a process", result, lambda side: side.threads or 0),
        _count("sockets of a process", result, lambda side: side.sockets or 0, _about_sockets(result) if more else ""),
    ]


def _about_sockets(result: Result) -> str:
    cost = "gloo gives a group threads, and connects all its members."
    if not result.config.joined:
        return f"{cost} Here that is the cost of groups for axes of one rank."
    return (
        f"{cost} The overlay's group over all axes has {result.config.ranks} of them, and costs more here than the "
        'saved groups did. The option flatten="existing" does without it.'
    )


def _collective_rows(result: Result) -> list[Row]:
    first, second = result.sides
    kinds = sorted(first.collectives | second.collectives)
    unlike = [kind for kind in kinds if first.collectives.get(kind) != second.collectives.get(kind)]
    times = [[1000 * seconds for seconds in side.state_seconds] for side in result.sides]
    one, other = (f"{statistics.median(some):.0f}" for some in times)
    return [
        _count("collectives of a step", result, lambda side: side.collectives_per_step, _about_step(result, kinds)),
        *(_count(f"  {kind}", result, partial(_of_kind, kind)) for kind in unlike),
        _count("collectives of a full save", result, lambda side: side.state_collectives, _about_save(result)),
        Row("time of a full save, ms", one, other, times_faster(*times)),
    ]


def _of_kind(kind: str, side: Side) -> int:
    return side.collectives.get(kind, 0)


def _about_step(result: Result, kinds: list[str]) -> str:
    config = result.config
    parts = [f"{result.second.collectives.get(kind, 0)} {kind}" for kind in kinds]
    text = f"{joined(parts)}; nearly all are FSDP2's and tensor parallelism's own." if parts else "None."
    if not config.joined:
        return f"{text} Each sum is over one axis, so that there is nothing to merge."
    norms = f"To clip, the norm of the gradient is summed {_sums(config)}"
    count = len(config.joined)
    if config.flatten:
        both = ", and so does the overlay" if config.dp_replicate > 1 else ""
        return f"{text} {norms}, in one all-reduce each. Without --flatten stock takes {count} more{both}."
    if config.lacks_groups:
        return (
            f"{text} {norms}: an all-reduce for each axis, since no group is over just the two. {call(config)} would "
            f"make it. With --flatten the demo does, and a step takes {count} fewer."
        )
    return f"{text} {norms}: one all-reduce each in the overlay's group over all axes of the mesh, two on stock."


def _sums(config: Config) -> str:
    (one, other), *experts = config.joined
    return f"over {one} and {other}" + "".join(f" (that of experts over {a} and {b})" for a, b in experts)


def _about_save(result: Result) -> str:
    text = (
        f"A full save makes each of the {result.first.parameters} weights whole on every rank, out of its shards: "
        "stock one after the other, the overlay those together that the same axes cut"
    )
    if not result.config.lacks_groups:
        return f"{text}."
    return (
        f"{text}, but for what two axes cut, which is gathered over one after the other for want of a group over both. "
        "With --flatten that goes together, too."
    )


def call(config: Config) -> str:
    """The mesh call that `--flatten` makes for dense weights; that for experts is alike."""
    one, other = config.joined[0]
    return f'mesh["{one}", "{other}"].flatten("{one}_{other}")'


def _training_rows(result: Result) -> list[Row]:
    first, second = result.sides
    one, other = (f"{side.tokens_per_second(result.config):,.0f}" for side in result.sides)
    why = (
        "By the median step, of gloo on this machine's cores. ~same: the steps of one run differ more than the runs do."
    )
    return [Row("tokens a second", one, other, times_faster(first.step_seconds, second.step_seconds), why)]


def verdict(result: Result) -> list[str]:
    """What both runs learned and whether it is the same, as paragraphs."""
    first = result.first
    apart, steps = result.loss_difference, len(first.losses)
    same = f"equal to the last bit at all {steps} steps" if apart == 0 else f"at most {apart:.2g} apart at a step"
    lines = [f"Loss: {first.losses[0]:.3f} at the first step, {first.losses[-1]:.3f} at the last; {same}."]
    weights = result.weights
    if result.same_weights:
        return [*lines, f"Weights after {steps} steps: all {weights.elements:,} numbers are equal to the last bit."]
    lines.append(
        f"Weights after {steps} steps: {weights.different:,} of {weights.elements:,} numbers differ, by at most "
        f"{weights.largest:.2g} ({weights.name}, where the largest is {weights.scale:.2g})."
    )
    return [*lines, f"Reason: {_reason(result)}"]


def _reason(result: Result) -> str:
    config = result.config
    if result.control or not config.joined:
        return "none that is known. Both runs do the same sums in the same order, so please report this."
    return (
        f"the gradient is clipped by its norm, the root of a sum {_sums(config)}. Stock takes a root after each axis "
        "and squares it for the next one; the overlay takes one root, of the whole sum. The last bit of the norm may "
        "differ, and each step carries that on. Without clipping (--clip 1e9) all weights are equal to the last bit. "
        "docs/numerics.md has all such cases."
    )


def _count(label: str, result: Result, value: Callable[[Side], int], why: str = "") -> Row:
    first, second = (value(side) for side in result.sides)
    return Row(label, f"{first:,}", f"{second:,}", times_better(first, second), why)
