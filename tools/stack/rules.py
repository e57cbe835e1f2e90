"""What upstream's reviewers ask of a patch, beside lint. A breach is refused by file and line."""

from __future__ import annotations

import ast
import collections
import difflib
import functools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from .message import PatchMessage, StackError
from .render import State
from .source import blocks, bound, imports, is_import, read

FOR_USERS = {"private_groups"}  # of torch, in files that are new
MESSAGE_WIDTH, SIZE = 72, 2000
# The last: torch as somebody else, which it isn't upstream; not a path, a name in code, or a release.
WORDS = re.compile(
    r"torch's own|\bstock\b|overlay|NotOurs|\bthe room\b"
    r"""|(?<![\w."'`/])torch(?:'s)?\b(?![\w."'`/=]| \d|(?<=\(torch)[,)])""",
    re.IGNORECASE,
)
_IMPORT = re.compile(r"\s*(>>> |#? ?)?(import|from) ")


@dataclass(frozen=True)
class Breach:
    rule: str
    path: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.why}"


@dataclass(frozen=True)
class Change:
    path: str
    before: str
    text: str  # the file after it
    added: frozenset[int]  # the numbers of the lines that weren't there before
    removed: int  # how many lines aren't there any more

    @property
    def is_test(self) -> bool:
        return self.path.startswith("test/")

    def lines(self) -> Iterator[tuple[int, str]]:
        return ((i, line) for i, line in enumerate(self.text.splitlines(), 1) if i in self.added)


def changes(before: State, after: State) -> list[Change]:
    return [
        _change(path, before.get(path) or "", after[path] or "")
        for path in sorted(after)
        if after[path] != before.get(path)
    ]


@functools.lru_cache(maxsize=256)
def _change(path: str, old: str, new: str) -> Change:
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    added: set[int] = set()
    removed = 0
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        if kind != "equal":
            added |= {*range(j1 + 1, j2 + 1)}
            removed += i2 - i1
    return Change(path, old, new, frozenset(added), removed)


def numbers(before: State, after: State) -> str:
    changed = changes(before, after)
    code, tests = [c for c in changed if not c.is_test], [c for c in changed if c.is_test]
    counts = [f"+{sum(len(c.added) for c in some)} -{sum(c.removed for c in some)}" for some in (code, tests)]
    return f"{len(changed)} files {counts[0]}, tests {counts[1]}"


TABLE_HEAD = ("stack", "patch", "files", "added", "removed", "tests added", "rows")


def table(messages: Sequence[PatchMessage], states: Sequence[State]) -> str:
    """A line a patch: files and lines without tests, lines of tests, rows of the overlay's table; and the sums."""
    lines = []
    for message, before, after in zip(messages, states, states[1:], strict=False):
        changed = changes(before, after)
        code, tests = [c for c in changed if not c.is_test], [c for c in changed if c.is_test]
        counts = (len(code), sum(len(c.added) for c in code), sum(c.removed for c in code))
        lines.append((message.stack, f"`{message.name}`", *counts, sum(len(c.added) for c in tests), len(message.rows)))
    sums = [sum(int(line[column]) for line in lines) for column in range(2, 7)]
    rows = [TABLE_HEAD, ("---", "---", *["---:"] * 5), *lines, ("all", f"{len(lines)} patches", *sums)]
    return "".join(f"| {' | '.join(f'{c:,}' if isinstance(c, int) else c for c in row)} |\n" for row in rows)


def breaches(message: PatchMessage, before: State, after: State, new: Collection[str]) -> list[Breach]:
    """All of them in one patch; `new` has the paths of all files that the stack brings."""
    changed = changes(before, after)
    said = [*_message(message), *_size(message, changed)]
    for change in changed:
        for number, line in change.lines():
            words = () if _IMPORT.match(line) else WORDS.finditer(line)
            said += [Breach("words", change.path, number, f"{word[0]!r}") for word in words]
        said += [] if change.is_test else _forward(change, after, new)
    return said


def refuse(broken: Sequence[Breach]) -> None:
    if broken:
        raise StackError("The stack breaks upstream's rules:\n" + "\n".join(f"  {breach}" for breach in broken))


def _message(message: PatchMessage) -> Iterator[Breach]:
    path = f"patches/{message.name}.md"
    lines = [(1, message.title), *enumerate(message.body.splitlines(), message.line)]
    for number, line in lines:
        if len(line) > MESSAGE_WIDTH and " " in line.strip():
            yield Breach("message", path, number, f"{len(line)} columns, at most {MESSAGE_WIDTH}")
        for word in () if _IMPORT.match(line) else WORDS.finditer(line):
            yield Breach("words", path, number, f"{word[0]!r}")


def _size(message: PatchMessage, changed: Sequence[Change]) -> Iterator[Breach]:
    lines = sum(len(change.added) + change.removed for change in changed)
    if lines > SIZE:
        yield Breach("size", f"patches/{message.name}.md", 1, f"{lines} changed lines, at most {SIZE}")


def _forward(change: Change, after: State, new: Collection[str]) -> Iterator[Breach]:
    """Imports of files, or of names in them, that a later patch brings."""
    package = ".".join(change.path.split("/")[:-1])
    for one in imports([node for node in ast.walk(ast.parse(change.text)) if is_import(node)], package):
        home = one.home.replace(".", "/")
        text = after.get(f"{home}.py") if f"{home}.py" in new else None
        lacks = any(path in new and not after.get(path) for path in (f"{home}.py", f"{home}/{one.name}.py"))
        if lacks or (text and one.name not in _definitions(text)):
            yield Breach("forward", change.path, 1, f"no patch before brings {one.home}.{one.name}")


def unused_in_fixes(messages: Sequence[PatchMessage], rendered: Sequence[State]) -> Iterator[Breach]:
    """What nothing uses after its own patch, of patches that stand alone. The others bring whole files first."""
    for message, before, after in zip(messages, rendered, rendered[1:], strict=False):
        if message.stack == "fixes":
            yield from unused(before, after)


def unused(before: State, after: State) -> Iterator[Breach]:
    """Definitions that are named nowhere else in `after`. Tests are users of public names alone."""
    names = collections.Counter(_words("\n".join(text for text in after.values() if text)))
    tests = collections.Counter(_words("\n".join(text for path, text in after.items() if text and path[:5] == "test/")))
    for change in changes(before, after):
        there = {*_definitions(change.before)} if change.before else set()
        for name, text in _definitions(change.text).items() if not change.is_test else ():
            users = names[name] - (tests[name] if name.startswith("_") else 0) - _words(text).count(name)
            if name not in there and name not in FOR_USERS and not name.startswith("__") and not users:
                yield Breach("unused", change.path, 1, f"nothing uses {name}")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


@functools.lru_cache(maxsize=512)
def _definitions(text: str) -> dict[str, str]:
    source = read(text, "a rendered file")
    outer = [one for block in blocks(source.tree.body) for one in block]
    inner = [one for owner in outer if isinstance(owner, ast.ClassDef) for one in owner.body]
    return {name: source.statement(one) for one in (*inner, *outer) for name in bound(one)}
