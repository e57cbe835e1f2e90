"""Words for people: placements, numbers and amounts as they are typed and as they are read. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..distributed.tensor._planner.regions import OPS
from .placements import Partial, Placement, Replicate, Shard, StridedShard

_WORDS = re.compile(r"(?P<strided>_?SS?)(?P<dim>\d+)(\((?P<factor>\d+)\))?|P(\((?P<op>\w+)\))?|R")
_KNOWN = f"R, S0, S1, ..., P (a sum), P({'), P('.join(OPS[1:])}), or _S0(2), strided with a split factor of 2"


def placements(text: str, axes: int) -> tuple[Placement, ...]:
    """Placements as words, one for each axis of the mesh: ``P,S0,R``.

    Raises:
        ValueError: a word that is none, or too many or few of them; says which words there are.

    >>> placements("P(max), _S0(2), R", 3)
    (Partial(op='max'), StridedShard(dim=0, split_factor=2), Replicate())
    """
    found = tuple(_placement(word.strip(), text) for word in text.split(","))
    if len(found) != axes:
        raise ValueError(f"a mesh of {axes} axes needs {axes} placements, one an axis, got {len(found)}: {text!r}")
    return found


def _placement(word: str, text: str) -> Placement:
    match = _WORDS.fullmatch(word)
    if match is None:
        raise ValueError(f"{word!r} in {text!r} is no placement; there are {_KNOWN}")
    if word == "R":
        return Replicate()
    if word.startswith("P"):
        op = match["op"] or "sum"
        if op not in OPS:
            raise ValueError(f"{word!r} in {text!r} is no reduction that torch knows; there are {', '.join(OPS)}")
        return Partial(op)
    dim, factor = int(match["dim"]), match["factor"]
    if (match["strided"] == "S") != (factor is None):
        raise ValueError(f"{word!r} in {text!r}: a shard is S{dim}, a strided one is _S{dim}(2), with its split factor")
    return Shard(dim) if factor is None else StridedShard(dim, int(factor))


def integers(text: str, what: str, least: int = 1) -> tuple[int, ...]:
    """Whole numbers, separated by commas.

    >>> integers("2,2,2", "the sizes of the mesh")
    (2, 2, 2)
    """
    try:
        found = tuple(int(word) for word in text.split(",")) if text else ()
    except ValueError:
        raise ValueError(f"{what}: needed whole numbers, separated by commas, got {text!r}") from None
    if any(number < least for number in found):
        raise ValueError(f"{what}: needed numbers of at least {least}, got {text!r}")
    return found


def names(text: str | None, count: int) -> tuple[str, ...]:
    """The names of the axes; a, b, c as they come if none are given.

    >>> names(None, 3)
    ('a', 'b', 'c')
    """
    if text is None:
        return tuple(chr(ord("a") + axis) if axis < 26 else f"a{axis}" for axis in range(count))
    found = tuple(word.strip() for word in text.split(","))
    if len(found) != count or len(set(found)) != count or "" in found:
        raise ValueError(f"a mesh of {count} axes needs {count} different names, got {text!r}")
    return found


def chosen(text: str, known: Sequence[str], what: str) -> tuple[int, ...]:
    """Which axes are meant, by name or by number.

    >>> chosen("tp,0", ["dp", "tp"], "--permute")
    (1, 0)
    """
    found = []
    for word in text.split(","):
        word = word.strip()
        axis = known.index(word) if word in known else int(word) if word.isdigit() else -1
        if not 0 <= axis < len(known):
            raise ValueError(f"{what}: the mesh has no axis {word!r}; its axes are {', '.join(known)}")
        found.append(axis)
    if len(set(found)) != len(found):
        raise ValueError(f"{what} names an axis twice: {text!r}")
    return tuple(found)


def amount(count: int) -> str:
    """Bytes: exact up to 9999 and where a power of 1024 divides them, else to two digits.

    >>> amount(192), amount(16 * 2**20), amount(768 * 2**10), amount(25_000_000)
    ('192 B', '16 MiB', '768 KiB', '24 MiB')
    """
    if count < 10_000:
        return f"{count} B"
    value, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1000:
            break
        value, unit = value / 1024, bigger
    return f"{int(value) if value.is_integer() else two_digits(value)} {unit}"


def duration(seconds: float) -> str:
    """A time to two digits.

    >>> duration(0.000451), duration(2.54)
    ('450 us', '2.5 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{two_digits(seconds * factor)} {unit}"
    return f"{two_digits(seconds * 1e6)} us"


def two_digits(value: float) -> str:
    """An estimate, with the digits that mean something.

    >>> two_digits(0.194), two_digits(1.0), two_digits(1234.5)
    ('0.19', '1', '1200')
    """
    return f"{float(f'{value:.2g}'):.10g}"


def counted(count: int, noun: str) -> str:
    """`2 collectives`, `1 collective`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def joined(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def mesh(
    sizes: str, axes: str | None, permuted: str | None
) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...] | None]:
    """The mesh that ``--mesh``, its axes' names and ``--permute`` describe: sizes, names, order (None: as they come).

    >>> mesh("2,4", "dp,tp", "tp,dp")
    ((2, 4), ('dp', 'tp'), (1, 0))
    """
    read = integers(sizes, "--mesh, the sizes of its axes")
    if not read:
        raise ValueError("--mesh needs the size of at least one axis, as 2,4")
    called = names(axes, len(read))
    return read, called, chosen(permuted, called, "--permute") if permuted else None
