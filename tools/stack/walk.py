"""A quick way through a syntax tree that is only read; libcst's visitors take ten times as long."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import libcst as cst

Skipped = frozenset[tuple[type[cst.CSTNode], str]]
_LAYOUT = ("whitespace", "leading_lines", "lines_", "trailing", "header", "footer", "comma", "dot", "lpar", "rpar")


def walk(node: cst.CSTNode, skipped: Skipped = frozenset()) -> Iterator[cst.CSTNode]:
    """The node and all inside it, in the order of the text; white space, comments and the ``skipped`` fields aside."""
    waiting = [node]
    while waiting:
        here = waiting.pop()
        yield here
        inside: list[cst.CSTNode] = []
        for name in _fields(type(here), skipped):
            value = getattr(here, name)
            if isinstance(value, cst.CSTNode):
                inside.append(value)
            elif isinstance(value, (list, tuple)):
                inside += value
        waiting += reversed(inside)


@functools.cache
def _fields(kind: type[cst.CSTNode], skipped: Skipped) -> tuple[str, ...]:
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return tuple(name for name in names if not name.startswith(_LAYOUT) and (kind, name) not in skipped)
