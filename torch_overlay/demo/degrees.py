"""Which degrees and sizes make a run: what isn't given follows from the number of ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch_overlay.demo.config import Config

DEGREES = ("dp_replicate", "dp_shard", "tp", "ep")
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Config)}


def complete(given: Mapping[str, Any]) -> Config:
    """The run that is asked for.

    Degrees that aren't given follow from the others: tensor parallelism over 2 ranks and two replicas if they fit, the
    rest is sharded, the experts are spread over tp's ranks or, without tp, over some of dp_shard. Sizes that aren't
    given are the defaults, or the next larger ones that these degrees divide.

    Raises:
        ValueError: what is given doesn't fit together.

    >>> three = complete({"ranks": 3})
    >>> [getattr(three, name) for name in (*DEGREES, "experts", "batch")]
    [1, 3, 1, 3, 6, 18]
    """
    values = {**_DEFAULTS, **given}
    if values["ranks"] >= 1 and min(given.get(name, 1) for name in DEGREES) >= 1:
        values |= _degrees(values["ranks"], given)
        values |= _sizes(values, given)
    return Config(**values)


def _degrees(ranks: int, given: Mapping[str, Any]) -> dict[str, int]:
    known = math.prod(given.get(name, 1) for name in ("dp_replicate", "dp_shard"))
    tp = given.get("tp") or (2 if ranks % (2 * known) == 0 else 1)
    least = given.get("dp_shard", 2)
    replicas = given.get("dp_replicate") or (2 if ranks % (2 * least * tp) == 0 else 1)
    shards = given.get("dp_shard") or max(1, ranks // (tp * replicas))
    return {"tp": tp, "dp_replicate": replicas, "dp_shard": shards, "ep": given.get("ep") or _ep(tp, shards)}


def _ep(tp: int, shards: int) -> int:
    """As tp; without tp, the smallest degree that spreads the experts at all."""
    if tp > 1:
        return tp
    return next((degree for degree in range(2, shards + 1) if shards % degree == 0), 1)


def _sizes(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that aren't given, rounded up to what the degrees divide."""
    tp, ep, shards = values["tp"], values["ep"], values["dp_shard"]
    factors = {"experts": ep, "heads": tp, "seq": tp, "batch": values["dp_replicate"] * shards}
    sizes = {name: _up(values[name], factor) for name, factor in factors.items() if name not in given}
    if "width" not in given:
        heads = {**values, **sizes}["heads"]
        sizes["width"] = _up(values["width"], math.lcm(2 * heads, max(1, shards * tp // ep)))
    return sizes


def _up(value: int, factor: int) -> int:
    return -(-value // factor) * factor


def changed(config: Config, given: Mapping[str, Any]) -> dict[str, int]:
    """What `complete` chose other than the default, where nothing was given."""
    names = (*DEGREES, "experts", "heads", "seq", "batch", "width")
    return {
        name: getattr(config, name) for name in names if name not in given and getattr(config, name) != _DEFAULTS[name]
    }


def fitting(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What would fit instead, each as what to give: one number changed, the nearest first, other ranks last.

    Three at most.

    >>> fitting({"tp": 3})
    [{'tp': 4}, {'tp': 2}, {'ranks': 9, 'tp': 3}]
    """
    found = []
    for name in {"ranks": 0, **given}:
        value = {**_DEFAULTS, **given}[name]
        if not isinstance(value, int):
            continue
        for numbers in (range(value - 1, 0, -1), range(value + 1, 4 * max(value, 2))):
            near = next((number for number in numbers if _fits({**given, name: number})), None)
            if near is not None:
                other_ranks = name == "ranks" and bool(given.keys() - {"ranks"})
                found.append((other_ranks, abs(math.log(near / max(value, 1))), {**given, name: near}))
    nearest = [one for *_, one in sorted(found, key=lambda found: found[:2])][:3]
    return [{name: one[name] for name in _DEFAULTS if name in one} for one in nearest]


def _fits(given: Mapping[str, Any]) -> bool:
    try:
        complete(given)
    except ValueError:
        return False
    return True


def flags(values: Mapping[str, Any]) -> str:
    """As they are typed.

    >>> flags({"ranks": 3, "dp_shard": 3})
    '--ranks 3 --dp-shard 3'
    """
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())
