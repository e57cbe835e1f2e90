"""Names in a syntax tree: what a statement binds, what it uses, what it imports."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from .walk import Skipped, walk

_TYPE = re.compile(r"[\w.\[\]]+(?:(?:, ?| \| )[\w.\[\]]+)*")  # no prose
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


# What is no look-up: an attribute's name, the keyword of a call.
_NO_NAMES = frozenset({(cst.Attribute, "attr"), (cst.Arg, "keyword"), (cst.ImportFrom, "module")})


@functools.cache  # nodes hash by identity, and never change
def used(node: cst.CSTNode, skipped: Skipped = frozenset()) -> frozenset[str]:
    """Every name that the node looks up, outside its ``skipped`` fields.

    A quoted annotation uses names, too; other text at worst keeps an import too many.
    """
    names = unquoted(node, skipped)
    for inner in walk(node, _NO_NAMES | skipped):
        if isinstance(inner, cst.SimpleString) and _TYPE.fullmatch(text := inner.raw_value):
            names |= set(_NAME.findall(text))
    return frozenset(names)


def unquoted(node: cst.CSTNode, skipped: Skipped = frozenset()) -> set[str]:
    """Every name that the node looks up when it is run."""
    return {inner.value for inner in walk(node, _NO_NAMES | skipped) if isinstance(inner, cst.Name)}


def bound(statement: cst.BaseStatement | cst.BaseSmallStatement) -> set[str]:
    """The names that a top-level statement defines; imports aside."""
    if isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
        return {statement.name.value}
    found: set[str] = set()
    if isinstance(statement, cst.SimpleStatementLine):
        for small in statement.body:
            if isinstance(small, cst.Assign):
                parts = [p for t in small.targets for p in _parts(t.target)]
                found |= {part.value for part in parts if isinstance(part, cst.Name)}
            elif isinstance(small, cst.AnnAssign) and isinstance(small.target, cst.Name):
                found.add(small.target.value)
    return found


def _parts(target: cst.BaseExpression) -> list[cst.BaseExpression]:
    return [element.value for element in target.elements] if isinstance(target, cst.Tuple) else [target]


@dataclass(frozen=True)
class Import:
    """One imported name.

    Attributes:
        bound: what it is called in the file.
        module: absolute.
        name: what is taken from the module; None for the module itself.
        typed: whether only the type checker needs it.
    """

    bound: str
    module: str
    name: str | None
    typed: bool = False

    def line(self) -> str:
        if self.name is None:
            renamed = "" if self.bound == self.module.partition(".")[0] else f" as {self.bound}"
            return f"import {self.module}{renamed}"
        renamed = "" if self.bound == self.name else f" as {self.bound}"
        return f"from {self.module} import {self.name}{renamed}"


def import_lines(imports: Sequence[Import]) -> list[str]:
    """One statement for each module, sorted."""
    lines = sorted(i.line() for i in imports if i.name is None)
    for module in sorted({i.module for i in imports if i.name is not None}):
        names = sorted(i.line().partition(" import ")[2] for i in imports if i.module == module and i.name is not None)
        lines.append(f"from {module} import {', '.join(names)}")
    return lines


def code_of(statements: Sequence[cst.BaseStatement]) -> str:
    return "".join(map(_code, statements))


@functools.lru_cache(maxsize=16384)  # by identity: the next prefix has most of the statements of this one
def _code(statement: cst.BaseStatement) -> str:
    return cst.Module(body=[]).code_for_node(statement)


def absolute(module: str, level: int, package: str) -> str:
    """The module of ``from ..x import y`` (level 2) in a file of ``package``.

    >>> absolute("_layout", 2, "torch.distributed.tensor")
    'torch.distributed._layout'
    """
    if not level:
        return module
    home = package.split(".")
    home = home[: len(home) - level + 1]
    return ".".join([*home, module] if module else home)


def imports_of(statement: cst.BaseStatement, package: str, typed: bool = False) -> Iterator[Import]:
    """The names that one top-level statement imports; also those in ``if TYPE_CHECKING:``."""
    if isinstance(statement, cst.If) and isinstance(statement.test, cst.Name):
        if statement.test.value == "TYPE_CHECKING" and isinstance(statement.body, cst.IndentedBlock):
            for inner in statement.body.body:
                yield from imports_of(inner, package, typed=True)
        return
    if not isinstance(statement, cst.SimpleStatementLine):
        return
    for small in statement.body:
        if isinstance(small, cst.Import):
            for alias in small.names:
                module = _dotted(alias.name)
                name = _dotted(alias.asname.name) if alias.asname else module.partition(".")[0]
                yield Import(name, module, None, typed)
        elif isinstance(small, cst.ImportFrom) and not isinstance(small.names, cst.ImportStar):
            home = absolute(_dotted(small.module) if small.module else "", len(small.relative), package)
            if home == "__future__":
                continue
            for alias in small.names:
                name = _dotted(alias.name)
                yield Import(_dotted(alias.asname.name) if alias.asname else name, home, name, typed)


def is_import(statement: cst.BaseStatement) -> bool:
    """Whether the statement only imports, at run time or for the type checker."""
    if isinstance(statement, cst.If):
        return isinstance(statement.test, cst.Name) and statement.test.value == "TYPE_CHECKING"
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    return all(isinstance(small, (cst.Import, cst.ImportFrom)) for small in statement.body)


def _dotted(node: cst.BaseExpression) -> str:
    return cst.Module([]).code_for_node(node)
