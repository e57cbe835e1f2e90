"""Ranks and axes as text, for error messages, logs and `status()`."""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def ranks_text(ranks: Sequence[int]) -> str:
    """A short text for ranks. Ranks with a constant step are a span, up to 16 others
    are all listed, and of more the first eight and the last. Empty for no rank.

    >>> ranks_text([0, 1, 2, 3]), ranks_text([0, 8, 16, 24]), ranks_text([0, 1, 4, 5])
    ('0-3', '0-24 by 8', '0, 1, 4, 5')
    >>> ranks_text([rank * rank for rank in range(100)])
    '0, 1, 4, 9, 16, 25, 36, 49, … 9801 (100 ranks)'
    """
    count = len(ranks)
    # Two ranks are shorter as a list.
    step = ranks[1] - ranks[0] if count > 2 else 0
    if step > 0 and all(map(operator.eq, ranks, itertools.count(ranks[0], step))):
        return f"{ranks[0]}-{ranks[-1]}" + ("" if step == 1 else f" by {step}")
    if count <= 16:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:8]))}, … {ranks[-1]} ({count} ranks)"


def of_ranks(ranks: Sequence[int]) -> str:
    """The text of `ranks_text` after the word "rank" or "ranks".

    >>> of_ranks([3]), of_ranks([0, 1, 2])
    ('rank 3', 'ranks 0-2')
    """
    return f"rank{'' if len(ranks) == 1 else 's'} {ranks_text(ranks)}"


def axes_text(names: Sequence[str]) -> str:
    """Names of axes in a sentence.

    >>> axes_text(["tp"]), axes_text(["tp", "ep"]), axes_text([])
    ("axis 'tp'", "axes 'tp' and 'ep'", 'a mesh')
    """
    if not names:
        return "a mesh"
    word = "axis" if len(names) == 1 else "axes"
    return f"{word} {' and '.join(map(repr, names))}"
