"""Ranks and axes as text, for error messages, logs and `status()`."""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for people, as briefly as they allow: from one to another, else all of
    them, else the first eight.

    >>> ranks_text([0, 1, 2, 3]), ranks_text([0, 8, 16, 24]), ranks_text([0, 1, 4, 5])
    ('0-3', '0-24 by 8', '0, 1, 4, 5')
    >>> ranks_text([rank * rank for rank in range(100)])
    '0, 1, 4, 9, 16, 25, 36, 49, … 9801 (100 ranks)'
    """
    count, step = len(ranks), ranks[1] - ranks[0] if len(ranks) > 2 else 0
    if step > 0 and all(map(operator.eq, ranks, itertools.count(ranks[0], step))):
        return f"{ranks[0]}-{ranks[-1]}" + ("" if step == 1 else f" by {step}")
    if count <= 16:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:8]))}, … {ranks[-1]} ({count} ranks)"


def of_ranks(ranks: Sequence[int]) -> str:
    """Ranks for people, with the word before them.

    >>> of_ranks([3]), of_ranks([0, 1, 2])
    ('rank 3', 'ranks 0-2')
    """
    return f"rank{'' if len(ranks) == 1 else 's'} {ranks_text(ranks)}"


def axes_text(names: Sequence[str]) -> str:
    """Axes for people: ``axis 'tp'``, ``axes 'tp' and 'ep'``; of no names ``a
    mesh``."""
    if not names:
        return "a mesh"
    word = "axis" if len(names) == 1 else "axes"
    return f"{word} {' and '.join(map(repr, names))}"
