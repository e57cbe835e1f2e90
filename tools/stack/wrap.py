"""Fit our lines to upstream's width where its formatter doesn't: docstrings, comments and long string literals.

Our files are 120 columns wide, upstream's 88. Lines that torch's file has already stay as they are, and so do examples.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Collection, Iterator

from .rules import WIDTH

_BULLET = re.compile(r"[*-] |\d+\. ")
_SECTION = re.compile(r"( *)(?:Args|Attributes|Raises|Returns|Yields):$")
_FIELD = re.compile(r"[\w.*]+: ")  # in a section
_MARKER = re.compile(r"#\s*(?:type:|noqa|pyrefly|mypy|pylint|fmt)")


def wrapped(text: str, there: Collection[str]) -> str:
    """The file with our lines in it at most so wide, as far as words allow; ``there`` are lines that stay."""
    for narrowed in (_docstrings, _comments, _strings):
        text = narrowed(text, there) if _wide(text, there) else text
    return text


def comments_above(text: str, there: Collection[str]) -> str:
    """The file with comments above the lines that they make too wide: a formatter would break the code instead."""
    wide = _wide(text, there)
    lines = text.splitlines()
    found = (
        [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT] if wide else []
    )
    for token in reversed(found):  # from the end, so that numbers stay right
        row, column = token.start
        code = lines[row - 1][:column].rstrip()
        if row in wide and code and not _MARKER.match(token.string):
            indent = code[: len(code) - len(code.lstrip())]
            lines[row - 1 : row] = [indent + token.string, code]
    return "\n".join(lines) + "\n"


def _wide(text: str, there: Collection[str]) -> set[int]:
    return {i for i, line in enumerate(text.splitlines(), 1) if len(line) > WIDTH and line not in there}


def _docstrings(text: str, there: Collection[str]) -> str:
    lines = text.splitlines()
    wide = _wide(text, there)
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    spans = [(n.body[0].lineno, n.body[0].end_lineno or 0) for n in nodes if ast.get_docstring(n) is not None]
    for start, end in sorted(spans, reverse=True):  # from the end, so that numbers stay right
        if wide & {*range(start, end + 1)}:
            lines[start - 1 : end] = _flowed(lines[start - 1 : end], there)
    return "\n".join(lines) + "\n"


def _flowed(lines: list[str], there: Collection[str]) -> list[str]:
    """Each wide line gives its last words to the next line of its paragraph, or to a new one."""
    done: list[str] = []
    waiting = [*lines]
    fields: str | None = None  # how far the fields of the section are indented
    while waiting:
        line = waiting.pop(0)
        words = line.strip()
        if section := _SECTION.match(line):
            fields = section[1] + "    "
        if len(line) <= WIDTH or line in there or words.startswith((">>>", "... ")):
            done.append(line)
            continue
        indent, after = _indent(line), waiting[0] if waiting else ""
        deeper = _indent(after)
        item = _is_item(line, fields)
        continues = after.strip() not in ("", '"""') and not _is_item(after, fields)
        if not item or not continues or len(deeper) <= len(indent):
            more = "  " if _BULLET.match(words) else "    "
            deeper, continues = indent + more * item, continues and not item and deeper == indent
        first, *rest = textwrap.wrap(
            words, WIDTH - len(indent), break_long_words=False, break_on_hyphens=False, drop_whitespace=True
        ) or [words]
        done.append(indent + first)
        left = " ".join(rest)
        if left.strip() == '"""':
            waiting.insert(0, deeper + left)
        elif left:
            waiting[:1] = [f"{deeper}{left} {after.strip()}"] if continues else [deeper + left, *waiting[:1]]
    return done


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _is_item(line: str, fields: str | None) -> bool:
    """Whether the lines that continue this one stand deeper than it."""
    return bool(_BULLET.match(line.strip()) or (_indent(line) == fields and _FIELD.match(line.strip())))


def _comments(text: str, there: Collection[str]) -> str:
    """Comments on lines of their own flow on; one behind code moves above it."""
    lines = text.splitlines()
    wide = _wide(text, there)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT and not _MARKER.match(t.string)}
    done: list[str] = []
    number = 0
    while number < len(lines):
        number += 1
        line, token = lines[number - 1], found.get(number)
        if number not in wide or token is None:
            done.append(line)
            continue
        indent = _indent(line)
        said = [token.string.lstrip("# ")]
        alone = line.lstrip().startswith("#")
        while alone and number + 1 in found and lines[number].startswith(f"{indent}# ") and lines[number] not in there:
            number += 1
            said.append(lines[number - 1].strip().lstrip("# "))
        done += textwrap.wrap(" ".join(said), WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        done += [] if alone else [line[: token.start[1]].rstrip()]
    return "\n".join(done) + "\n"


def _strings(text: str, there: Collection[str]) -> str:
    """Long literals in two, which the formatter lays out; literals side by side are one."""
    wide = _wide(text, there)
    lines = text.splitlines()
    found = [*_literals(text)]
    for (number, start), (last, end), literal in reversed(found):  # from the end, so that columns stay right
        if number == last and number in wide and end > WIDTH - 1 and (pieces := _halves(literal, start)):
            lines[number - 1] = f"{lines[number - 1][:start]}{pieces}{lines[number - 1][end:]}"
    return "\n".join(lines) + "\n"


def _literals(text: str) -> Iterator[tuple[tuple[int, int], tuple[int, int], str]]:
    """Start, end and text of each, but for those that are statements by themselves, as docstrings are."""
    lines = text.splitlines(keepends=True)
    found: list[tuple[tuple[int, int], tuple[int, int], str]] = []
    depth, begun, alone = 0, (0, 0), True  # since Python 3.12 the parts of an f-string are tokens
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        if kind == "FSTRING_START" and depth == 1:
            begun = token.start
        elif kind == "FSTRING_END" and not depth:
            is_one = begun[0] == token.end[0]
            literal = lines[begun[0] - 1][begun[1] : token.end[1]] if is_one else ""
            found.append((begun, token.end, literal))
        elif kind == "STRING" and not depth:
            found.append((token.start, token.end, token.string))
        elif kind == "NEWLINE":
            yield from [] if alone else found
            found, alone = [], True
        elif not depth and kind not in ("NL", "COMMENT", "INDENT", "DEDENT"):
            alone = False


def _halves(literal: str, column: int) -> str | None:
    """Two literals, cut at the last space that fits; None if there is none, or if the literal has a prefix or quotes
    by which it can't be cut."""
    opened = re.match(r"([fF]?)([\"'])(?!\2\2)", literal)
    if opened is None:
        return None
    depth, place = 0, 0
    for i, sign in enumerate(literal[: WIDTH - 2 - column]):
        depth += ((sign == "{") - (sign == "}")) * bool(opened[1])
        place = i + 1 if sign == " " and not depth and i >= opened.end() else place
    if not place:
        return None
    halves = literal[:place] + opened[2], opened[0] + literal[place:]
    return " ".join(half if re.search("[{}]", half) else half.lstrip("fF") for half in halves)
