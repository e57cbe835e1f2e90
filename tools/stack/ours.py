"""Files of `torch_overlay/distributed` as upstream has them: whole, with modules named in full.

Lines and definitions that end with ``# overlay only`` stay here, and so does the seam: where our code is torch's own,
its functions would return their first argument, so their calls are replaced by it.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from dataclasses import dataclass

import libcst as cst
from libcst import matchers

from .message import ROOT, StackError
from .names import Import, absolute, bound, imports_of, is_import, used

OURS = ROOT / "torch_overlay" / "distributed"
HERE_ONLY = "# overlay only"
SEAM = "_torch"
# The one function of the seam that doesn't return its argument: after NAME = original(module, "function") torch's own
# function goes on under this name.
ORIGINAL = "original"

_STRING = matchers.SimpleStatementLine(body=[matchers.Expr(matchers.SimpleString())])


class _Upstream(cst.CSTTransformer):
    """Takes out what only the overlay needs, and names modules in full."""

    def __init__(self, package: str) -> None:
        super().__init__()
        self.package = package
        self.doors: set[str] = set()

    def leave_ImportFrom(self, original, updated):  # type: ignore[no-untyped-def]
        if not updated.relative:
            return updated
        module = cst.Module([]).code_for_node(updated.module) if updated.module else ""
        if module == SEAM:
            self.doors |= {alias.name.value for alias in updated.names} - {ORIGINAL}
            return cst.RemoveFromParent()
        full = cst.parse_expression(absolute(module, len(updated.relative), self.package))
        return updated.with_changes(relative=[], module=full, whitespace_after_from=cst.SimpleWhitespace(" "))

    def leave_Call(self, original, updated):  # type: ignore[no-untyped-def]
        through = isinstance(updated.func, cst.Name) and updated.func.value in self.doors
        return updated.args[0].value if through else updated

    def leave_SimpleStatementLine(self, original, updated):  # type: ignore[no-untyped-def]
        comment = updated.trailing_whitespace.comment
        return cst.RemoveFromParent() if comment and comment.value == HERE_ONLY else updated

    def _definition(self, original, updated):  # type: ignore[no-untyped-def]
        body = updated.body
        comment = body.header.comment if isinstance(body, cst.IndentedBlock) else None
        return cst.RemoveFromParent() if comment and comment.value == HERE_ONLY else updated

    leave_FunctionDef = leave_ClassDef = _definition


@dataclass(frozen=True)
class Room:
    """A file with bodies: what it imports, and its other top-level statements in their order."""

    file: str
    imports: tuple[Import, ...]
    body: tuple[cst.BaseStatement, ...]

    @property
    def package(self) -> str:
        return package_of(self.file)

    @property
    def module(self) -> str:
        """``torch.distributed.tensor._planner.plan``, what the file is imported as upstream."""
        return f"{self.package}.{pathlib.PurePosixPath(self.file).stem}"

    def definition(self, name: str) -> cst.BaseStatement:
        """The statement that defines the name. Raises StackError if none does."""
        for statement in self.body:
            if name in bound(statement):
                return statement
        raise StackError(f"torch_overlay/distributed/{self.file} defines no {name}")

    @property
    def defined(self) -> set[str]:
        return {name for statement in self.body for name in bound(statement)}

    def kept(self) -> dict[str, str]:
        """New name by torch's function, for each ``NAME = original(module, "function")``."""
        found = {}
        for statement in self.body:
            function = kept_function(statement)
            if function:
                (found[function],) = bound(statement)
        return found

    def docstring_of(self, kept: str) -> cst.BaseStatement | None:
        """The string below ``NAME = original(module, "function")``: what the function does that has this name then."""
        for statement, below in itertools.pairwise(self.body):
            if kept_function(statement) and kept in bound(statement) and matchers.matches(below, _STRING):
                return below
        return None

    def used_by(self, statements: list[cst.BaseStatement]) -> tuple[Import, ...]:
        """The imports that these statements need."""
        names = frozenset().union(*map(used, statements))
        return tuple(found for found in self.imports if found.bound in names)


def kept_function(statement: cst.BaseStatement) -> str | None:
    """The torch function that ``NAME = original(module, "function")`` keeps, or of ``original(module.Class, "method")``
    the method with its class; None for another statement."""
    if not isinstance(statement, cst.SimpleStatementLine) or not isinstance(statement.body[0], cst.Assign):
        return None
    call = statement.body[0].value
    if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Name) or call.func.value != ORIGINAL:
        return None
    home, name = call.args[0].value, call.args[1].value
    if not isinstance(name, cst.SimpleString):
        return None
    is_class = isinstance(home, cst.Attribute) and home.attr.value[0].isupper()
    return f"{home.attr.value}.{name.raw_value}" if is_class else name.raw_value


def package_of(file: str) -> str:
    """``torch.distributed.tensor`` for ``tensor/_planner/search.py``."""
    return ".".join(["torch", "distributed", *pathlib.PurePosixPath(file).parts[:-1]])


def whole(file: str, ours: pathlib.Path = OURS) -> str:
    """The text of a new file."""
    return _code(_upstream(file, ours / file))


def room(file: str, path: pathlib.Path) -> Room:
    """A file of ours whose definitions go into torch's file of this name."""
    return _room(file, _upstream(file, path))


def _upstream(file: str, path: pathlib.Path) -> cst.Module:
    """Raises StackError with file and line if it can't be parsed."""
    try:
        return _parsed(file, path.read_text(encoding="utf-8"))
    except cst.ParserSyntaxError as error:
        raise StackError(f"{path}:{error.editor_line} isn't Python: {error.message}") from error


@functools.lru_cache(maxsize=256)  # each prefix begins with the same
def _parsed(file: str, text: str) -> cst.Module:
    return cst.parse_module(text).visit(_Upstream(package_of(file)))


@functools.lru_cache(maxsize=256)  # by identity; writing it out takes as long as parsing it
def _code(module: cst.Module) -> str:
    return module.code


@functools.lru_cache(maxsize=256)
def _room(file: str, module: cst.Module) -> Room:
    statements = list(module.body[1:] if module.get_docstring() else module.body)
    imports = [found for statement in statements for found in imports_of(statement, package_of(file))]
    return Room(file, tuple(imports), tuple(s for s in statements if not is_import(s)))
