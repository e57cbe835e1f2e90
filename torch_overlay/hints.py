"""What a mistyped word was meant to be. Standard library only."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence that names the closest known word; empty if none is close.

    >>> did_you_mean("flaten", ["flatten", "cost"])
    "; did you mean 'flatten'?"
    """
    by_letters = {each.lower().lstrip("-"): each for each in known}  # dashes and capitals make no two words alike
    close = difflib.get_close_matches(word.lower().lstrip("-"), by_letters, n=1)
    return f"; did you mean {by_letters[close[0]]!r}?" if close else ""
