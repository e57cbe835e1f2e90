"""What upstream's reviewers ask of a patch, beside lint. A breach is refused by file and line."""

from __future__ import annotations

import ast
import difflib
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .message import PatchMessage, StackError

FOR_USERS = {"private_groups"}  # of torch, in files that are new
MESSAGE_WIDTH, SIZE = 72, 2000
# The last: torch as somebody else, which it isn't upstream; not a path, a name in code, or a release.
WORDS = re.compile(
    r"torch's own|\bstock\b|overlay|NotOurs|\bthe room\b"
    r"""|(?<![\w."'`/])torch(?:'s)?\b(?![\w."'`/=]| \d|(?<=\(torch)[,)])""",
    re.IGNORECASE,
)
_IMPORT = re.compile(r"\s*(>>> |#? ?)?(import|from) ")
_CHANGES = {"add", "append", "clear", "discard", "extend", "setdefault", "update"}
State = Mapping[str, "str | None"]  # path: text, None where the file isn't there


@dataclass(frozen=True)
class Breach:
    """One line that upstream wouldn't take."""

    rule: str
    path: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.why}"


@dataclass(frozen=True)
class Change:
    """What a patch does to one file.

    Attributes:
        text: the file after it.
        added: the numbers of the lines that weren't there before.
        removed: how many lines aren't there any more.
    """

    path: str
    before: str
    text: str
    added: frozenset[int]
    removed: int

    @property
    def is_test(self) -> bool:
        return self.path.startswith("test/")

    def lines(self) -> Iterator[tuple[int, str]]:
        """The added ones, with their numbers."""
        return ((i, line) for i, line in enumerate(self.text.splitlines(), 1) if i in self.added)


def changes(before: State, after: State) -> list[Change]:
    """The files that differ, in the order of their paths."""
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
    """``3 files +21 -0, tests +100 -0``."""
    found = changes(before, after)
    code, tests = [c for c in found if not c.is_test], [c for c in found if c.is_test]
    counts = [f"+{sum(len(c.added) for c in some)} -{sum(c.removed for c in some)}" for some in (code, tests)]
    return f"{len(found)} files {counts[0]}, tests {counts[1]}"


def breaches(message: PatchMessage, before: State, after: State, new: Collection[str]) -> list[Breach]:
    """All of them in one patch.

    Args:
        new: the paths of all files that the stack brings.
    """
    found = changes(before, after)
    said = [*_message(message), *_size(message, found)]
    for change in found:
        for number, line in change.lines():
            words = () if _IMPORT.match(line) else WORDS.finditer(line)
            said += [Breach("words", change.path, number, f"{word[0]!r}") for word in words]
        if not change.is_test:
            said += [*_releases(change), *_forward(change, after, new)]
    return said


def refuse(found: Sequence[Breach]) -> None:
    """Raises StackError for any."""
    if found:
        raise StackError("The stack breaks upstream's rules:\n" + "\n".join(f"  {breach}" for breach in found))


def _message(message: PatchMessage) -> Iterator[Breach]:
    path = f"patches/{message.name}.md"
    lines = [(1, message.title), *enumerate(message.body.splitlines(), message.line)]
    for number, line in lines:
        if len(line) > MESSAGE_WIDTH and " " in line.strip():
            yield Breach("message", path, number, f"{len(line)} columns, at most {MESSAGE_WIDTH}")
        for word in WORDS.finditer(line):
            yield Breach("words", path, number, f"{word[0]!r}")


def _size(message: PatchMessage, found: Sequence[Change]) -> Iterator[Breach]:
    lines = sum(len(change.added) + change.removed for change in found)
    if lines > SIZE:
        yield Breach("size", f"patches/{message.name}.md", 1, f"{lines} changed lines, at most {SIZE}")


def _forward(change: Change, after: State, new: Collection[str]) -> Iterator[Breach]:
    """Imports of files, or of names in them, that a later patch brings."""
    for node in ast.walk(_tree(change.text)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("torch.distributed"):
            continue
        home = f"{(node.module or '').replace('.', '/')}"
        for name in (alias.name for alias in node.names):
            lacks = [path for path in (f"{home}.py", f"{home}/{name}.py") if path in new and not after.get(path)]
            text = after.get(f"{home}.py") if f"{home}.py" in new else None
            if lacks or (text and name not in {*_definitions(text)}):
                yield Breach("forward", change.path, node.lineno, f"no patch before brings {node.module}.{name}")


def _releases(change: Change) -> Iterator[Breach]:
    """Questions after the release of the torch that runs, which upstream is."""
    tree = _tree(change.text)
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) in change.added and (why := _asks_release(node, imported)):
            yield Breach("releases", change.path, node.lineno, why)


def _asks_release(node: ast.AST, imported: set[str]) -> str | None:
    if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.__version__", "torch.version"):
        return ast.unparse(node)
    if isinstance(node, ast.Name) and node.id == "TorchVersion":
        return node.id
    if isinstance(node, ast.ExceptHandler) and node.type and "ImportError" in ast.unparse(node.type):
        return "except ImportError"
    if isinstance(node, ast.Compare) and any("__annotations__" in ast.unparse(c) for c in node.comparators):
        return ast.unparse(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
        asks = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
        root = ast.unparse(node.args[0]).partition(".")[0]
        # Of an instance it may be an honest question; a module or a class has the name or has it not.
        if asks and isinstance(node.args[1], ast.Constant) and root in imported:
            return ast.unparse(node)
    return None


def unused(before: State, after: State) -> Iterator[Breach]:
    """Definitions that nothing uses once the whole stack is in; tests are users of what torch's users may call."""
    for change in changes(before, after):
        if change.is_test:
            continue
        there = set(_definitions(change.before))
        for qualname, node in _definitions(change.text).items():
            name = qualname.rpartition(".")[2]
            if qualname in there or (name.startswith("__") and name.endswith("__")):
                continue
            if name not in FOR_USERS and not _is_used(
                name, node, change.path, after, not name.startswith("_") and bool(change.before)
            ):
                yield Breach("unused", change.path, node.lineno, f"nothing uses {qualname}")


def _is_used(name: str, node: ast.stmt, path: str, state: State, tests: bool) -> bool:
    own = {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    for other, text in state.items():
        if text is None or not other.endswith(".py") or (other.startswith("test/") and not tests):
            continue
        lines = _uses(text).get(name, frozenset())
        if lines - (own if other == path else frozenset()):
            return True
    return False


@functools.lru_cache(maxsize=512)
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


@functools.lru_cache(maxsize=512)
def _definitions(text: str) -> dict[str, ast.stmt]:
    """Functions, classes and values of a file, and the methods and attributes of its classes, by qualified name."""
    found: dict[str, ast.stmt] = {}
    waiting: list[tuple[str, ast.stmt]] = [("", s) for s in _tree(text).body]
    while waiting:
        outer, node = waiting.pop()
        if isinstance(node, ast.If):
            waiting += [(outer, s) for s in (*node.body, *node.orelse)]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.setdefault(f"{outer}{node.name}", node)
            if isinstance(node, ast.ClassDef):
                waiting += [(f"{node.name}.", s) for s in node.body]
            elif outer:
                found = {**{f"{outer}{name}": s for name, s in _attributes_set(node)}, **found}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {f"{outer}{target.id}": node for target in targets if isinstance(target, ast.Name)}
    return found


def _attributes_set(method: ast.FunctionDef) -> Iterator[tuple[str, ast.stmt]]:
    """What a method sets of its ``self``."""
    for node in ast.walk(method):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield target.attr, node


@functools.lru_cache(maxsize=512)
def _uses(text: str) -> dict[str, frozenset[int]]:
    """The lines in which each name is looked up: not an import, a place in ``__all__``, or what only changes it."""
    found: dict[str, set[int]] = {}
    listed = [n for n in _tree(text).body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    skipped = {id(inner) for node in listed for inner in ast.walk(node)}
    skipped |= {id(changed) for node in ast.walk(_tree(text)) if (changed := _only_changed(node))}
    for node in ast.walk(_tree(text)):
        names: list[str] = []
        if id(node) in skipped or not isinstance(getattr(node, "ctx", None), (ast.Load, type(None))):
            continue
        if isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"[A-Za-z_]\w*", node.value) if re.fullmatch(r"[\w.\[\], |]+", node.value) else []
        for name in names:
            found.setdefault(name, set()).add(node.lineno)
    return {name: frozenset(lines) for name, lines in found.items()}


def _only_changed(node: ast.AST) -> ast.expr | None:
    """What is changed and not asked: of ``x[key] = value``, of ``x[key] += 1``, of ``x.add(value)`` alone."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return node.value
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        return node.value.func.value if node.value.func.attr in _CHANGES else None
    return None
