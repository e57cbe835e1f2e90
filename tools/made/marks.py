"""Parts of a page that a tool writes: between two comments that name the part."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

PART = re.compile(r"(<!-- made by tools/make_pages\.py: (?P<name>[\w-]+) -->\n).*?(<!-- made: end -->)", re.DOTALL)


def names(page: str) -> list[str]:
    """The parts that a page has.

    >>> names("<!-- made by tools/make_pages.py: figures -->\\nold\\n<!-- made: end -->")
    ['figures']
    """
    return [found["name"] for found in PART.finditer(page)]


def fill(page: str, parts: dict[str, str]) -> str:
    """The page with these parts written anew; KeyError names a part that nobody makes.

    >>> page = "before\\n<!-- made by tools/make_pages.py: x -->\\nold\\n<!-- made: end -->\\nafter"
    >>> fill(page, {"x": "new"}).splitlines()[2:5]
    ['', 'new', '']
    """
    return PART.sub(lambda found: f"{found[1]}\n{parts[found['name']]}\n\n{found[3]}", page)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
