"""What a mistyped word was meant to be. Standard library only."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence that names the closest known word; empty if none is close.

    >>> did_you_mean("flaten", ["flatten", "cost"])
    "; did you mean 'flatten'?"
    """
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""
