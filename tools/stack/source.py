"""A Python file as text and syntax tree: what its statements define, use and import, and edits of its text.

An edit replaces a range of the text, so all that isn't edited stays as it stands, comments and line breaks included.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .message import StackError

Edit = tuple[int, int, str]  # from byte, to byte, what stands there then
Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_TYPE = re.compile(r"[\w.\[\]]+(?:(?:, ?| \| )[\w.\[\]]+)*")  # a quoted annotation, and no prose
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


class Source:
    """The text of a file with its tree. Positions are byte offsets, as in `ast`."""

    def __init__(self, text: str, name: str) -> None:
        self.data = text.encode()
        self.lines = self.data.splitlines(keepends=True)
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise StackError(f"{name}:{error.lineno} isn't Python: {error.msg}") from error
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))

    def line(self, number: int) -> int:
        return self._starts[number - 1]

    def start(self, node: ast.AST) -> int:
        return self.line(node.lineno) + node.col_offset  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self.line(node.end_lineno) + node.end_col_offset  # type: ignore[attr-defined]

    def code(self, node: ast.AST) -> str:
        return self.data[self.start(node) : self.end(node)].decode()

    def span(self, node: ast.stmt, comments: bool = True, headings: bool = False) -> tuple[int, int]:
        """The lines of a statement, its decorators and the comments right above it, or all above it that is no code."""
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        above = (b"#", b"\n") if headings else b"#"
        while comments and first > 1 and self.lines[first - 2].lstrip(b" ").startswith(above):
            first -= 1
        return self.line(first), self.line((node.end_lineno or node.lineno) + 1)

    def statement(self, node: ast.stmt, edits: Iterable[Edit] = (), indent: int = 0, comments: bool = True) -> str:
        """The text of a statement with these edits, moved to this column."""
        start, end = self.span(node, comments)
        text = edited(self.data, [edit for edit in edits if start <= edit[0] and edit[1] <= end], start, end)
        return moved(text, indent - node.col_offset)

    def marked(self, node: ast.stmt, mark: str) -> bool:
        """True if the comment behind the statement, or behind the head of a function or class, is `mark`."""
        body = getattr(node, "body", None)
        last = node.end_lineno if not isinstance(body, list) else max(node.lineno, body[0].lineno - 1)
        return any(line.rstrip().endswith(mark.encode()) for line in self.lines[node.lineno - 1 : last])


def moved(text: str, columns: int) -> str:
    """The lines so many columns further right, or left as far as there are blanks."""
    if columns >= 0:
        return textwrap.indent(text, " " * columns)
    return re.sub(rf"^ {{1,{-columns}}}", "", text, flags=re.MULTILINE)


def edited(data: bytes, edits: Iterable[Edit], start: int = 0, end: int | None = None) -> str:
    """The text between two offsets with these edits. What lies inside an earlier edit is gone with it."""
    parts, at = [], start
    for first, last, text in sorted(edits, key=lambda edit: (edit[0], edit[1] > edit[0], -edit[1])):
        if first >= at:
            parts += [data[at:first], text.encode()]
            at = last
    return b"".join([*parts, data[at:end]]).decode()


def bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (*Function, ast.ClassDef)):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    names = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return {name.id for name in names if isinstance(name, ast.Name)}


def used(node: ast.AST) -> set[str]:
    """The names that a node looks up, in quoted annotations, too. Other text keeps an import too many at worst."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)}
    texts = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant) and type(inner.value) is str]
    return names.union(*(_NAME.findall(text) for text in texts if _TYPE.fullmatch(text)))


def blocks(body: Sequence[ast.stmt]) -> list[Sequence[ast.stmt]]:
    """The statements at top level, and those in the ``else`` of a top-level ``if``."""
    branches = [one.orelse for one in body if isinstance(one, ast.If) and not is_import(one) and one.orelse]
    return [body, *branches]


def inside(node: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    """Each list of statements in a definition or module; those of definitions inside it aside."""
    for field in ("body", "orelse", "finalbody"):
        statements = getattr(node, field, None)
        if isinstance(statements, list):
            yield statements
            for statement in statements:
                if not isinstance(statement, (*Function, ast.ClassDef)):
                    yield from inside(statement)


def find(tree: ast.AST, place: Sequence[str]) -> ast.AST | None:
    """The definition at this place, ``("DeviceMesh", "__init__")``; None if there is none."""
    if not place:
        return tree
    definitions = (s for statements in inside(tree) for s in statements if bound(s) == {place[0]})
    return next((inner for one in definitions if (inner := find(one, place[1:]))), None)


@dataclass(frozen=True)
class Import:
    bound: str  # what it is called in the file
    home: str  # the module, absolute
    module: str  # as the file writes it
    name: str | None  # what is taken from the module; None for the module itself
    typed: bool = False  # True if only the type checker needs it


def imports(body: Iterable[ast.stmt], package: str, typed: bool = False) -> Iterator[Import]:
    """The names that these statements import, those in ``if TYPE_CHECKING:`` included."""
    for statement in body:
        if isinstance(statement, ast.If) and is_import(statement):
            yield from imports(statement.body, package, typed=True)
        elif isinstance(statement, ast.Import):
            for one in statement.names:
                yield Import(one.asname or one.name.partition(".")[0], one.name, one.name, None, typed)
        elif isinstance(statement, ast.ImportFrom) and statement.module != "__future__":
            module = "." * statement.level + (statement.module or "")
            home = absolute(statement.module or "", statement.level, package)
            for one in statement.names:
                yield Import(one.asname or one.name, home, module, one.name, typed)


def is_import(statement: ast.stmt) -> bool:
    """True if the statement only imports, at run time or for the type checker."""
    if isinstance(statement, ast.If):
        return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    return isinstance(statement, (ast.Import, ast.ImportFrom))


def absolute(module: str, level: int, package: str) -> str:
    """The module of ``from ..x import y`` (level 2) in a file of ``package``.

    >>> absolute("_layout", 2, "torch.distributed.tensor")
    'torch.distributed._layout'
    """
    home = package.split(".")
    return ".".join([*home[: len(home) - level + 1], *filter(None, [module])]) if level else module


def import_edits(source: Source, body: Sequence[ast.stmt], new: Sequence[Import], checks: bool) -> Iterator[Edit]:
    """Edits that add imports to a block: names to an import of their module, if it has one; the others behind its first
    import, or into its ``if TYPE_CHECKING:``, if the file `checks`."""
    beside = {one: there for one in new if (there := _import_of(one, body)) is not None}
    for one, there in beside.items():
        yield _named_in(source, there, one)
    new = [one for one in new if one not in beside]
    if not new:
        return
    indent = body[0].col_offset
    first = next((number for number, one in enumerate(body) if is_import(one)), 0)
    last = first
    while last < len(body) and isinstance(body[last], (ast.Import, ast.ImportFrom)):
        last += 1
    at = source.span(body[last - 1])[1] if last else source.span(body[0])[0]
    typed = [one for one in new if one.typed]
    text = _import_lines([one for one in new if not one.typed])
    if typed and not checks:
        text += "from typing import TYPE_CHECKING\n"
    there = next((one for one in body if isinstance(one, ast.If) and is_import(one)), None)
    if typed and there is not None:
        end = source.span(there.body[-1])[1]
        yield end, end, textwrap.indent(_import_lines(typed), " " * (indent + 4))
    elif typed:
        text += "\nif TYPE_CHECKING:\n" + textwrap.indent(_import_lines(typed), "    ")
    yield at, at, textwrap.indent(text, " " * indent)


def _import_of(one: Import, body: Sequence[ast.stmt]) -> ast.ImportFrom | None:
    """The statement of a block that imports from the module of a new import which runs."""
    for there in body:
        if isinstance(there, ast.ImportFrom) and one.name == one.bound and not one.typed:
            module = "." * there.level + (there.module or "")
            if module in (one.module, one.home):
                return there
    return None


def _named_in(source: Source, there: ast.ImportFrom, one: Import) -> Edit:
    """The edit that puts a name into an import, in the order of the names."""
    after = [alias for alias in there.names if alias.name.lower() > one.bound.lower()]
    own_lines = there.names[-1].lineno != there.lineno
    if not after:
        at = source.end(there.names[-1])
        return at, at, f",\n{' ' * there.names[-1].col_offset}{one.bound}" if own_lines else f", {one.bound}"
    at = source.start(after[0])
    return at, at, f"{one.bound},\n{' ' * after[0].col_offset}" if own_lines else f"{one.bound}, "


def _import_lines(new: Sequence[Import]) -> str:
    def renamed(one: Import, name: str) -> str:
        return name if one.bound in (name, name.partition(".")[0]) else f"{name} as {one.bound}"

    lines = sorted(f"import {renamed(one, one.module)}\n" for one in new if one.name is None)
    for module in sorted({one.module for one in new if one.name is not None}):
        names = sorted(renamed(one, one.name) for one in new if one.module == module and one.name is not None)
        lines.append(f"from {module} import {', '.join(names)}\n")
    return "".join(lines)


@functools.lru_cache(maxsize=256)  # each patch reads the same files
def read(text: str, name: str) -> Source:
    return Source(text, name)
