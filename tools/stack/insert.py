"""Lines that a patch puts into a function of torch's, before a statement that stands there already.

`patches/insert/PATCH/FILE` names the place by definitions inside each other, classes and functions, nested as torch's
file nests them. The innermost function ends with the anchor, ``name = ...``: what stands above it goes before the only
statement of torch's function that binds the name. Definitions without an anchor are helpers, which come along if used.
A file that itself ends with an anchor goes to the top level of torch's file. If a later patch binds a name there again,
its statement takes the place of the one before.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import libcst as cst
from libcst import matchers

from .message import PATCHES, StackError
from .names import bound
from .room import Room, parse

_ANCHOR = matchers.SimpleStatementLine(body=[matchers.Assign(value=matchers.Ellipsis())])
Definition = (cst.FunctionDef, cst.ClassDef)


@dataclass(frozen=True)
class Insertion:
    """What goes where.

    Attributes:
        source: the file of ours, for messages.
        place: the names of the definitions around it, the outermost first.
        target: the function that a row names, which is the place or lies around it.
        anchor: the name that torch's statement binds.
        lines: what goes before that statement.
    """

    source: str
    place: tuple[str, ...]
    target: str
    anchor: str
    lines: tuple[cst.BaseStatement, ...]


@dataclass(frozen=True)
class InsertFile:
    """All that one patch puts into one file of torch."""

    insertions: tuple[Insertion, ...]
    helpers: Room

    def added_to(self, room: Room) -> Room:
        """The room with these helpers beside its own definitions."""
        twice = room.defined & self.helpers.defined
        if twice:
            raise StackError(f"{self.insertions[0].source} defines {sorted(twice)}, and {room.file} does, too")
        imports = tuple(dict.fromkeys([*room.imports, *self.helpers.imports]))
        return replace(room, body=(*room.body, *self.helpers.body), imports=imports)


def read_insertions(patch: str, file: str, patches: pathlib.Path = PATCHES) -> InsertFile | None:
    """What the patch puts into the file; None if nothing. Raises StackError for a file that names no place."""
    path = patches / "insert" / patch / file
    if not path.exists():
        return None
    source = f"patches/insert/{patch}/{file}"
    room = parse(file, path)
    found: list[Insertion] = []
    helpers: list[cst.BaseStatement] = []
    if room.body and matchers.matches(room.body[-1], _ANCHOR):
        (anchor,) = bound(room.body[-1])
        return InsertFile((Insertion(source, (), "", anchor, room.body[:-1]),), replace(room, body=()))
    for statement in room.body:
        inside = list(_insertions(statement, (), "", source))
        found += inside
        helpers += [] if inside else [statement]
    if not found:
        raise StackError(f"{source} has no function that ends with 'name = ...', so nothing says where its lines go")
    return InsertFile(tuple(found), replace(room, body=tuple(helpers)))


def _insertions(node: cst.CSTNode, outer: tuple[str, ...], target: str, source: str) -> Iterator[Insertion]:
    if not isinstance(node, Definition) or not isinstance(node.body, cst.IndentedBlock):
        return
    place, body = (*outer, node.name.value), node.body.body
    if isinstance(node, cst.FunctionDef):
        target = target or ".".join(place)
        if matchers.matches(body[-1], _ANCHOR):
            (anchor,) = bound(body[-1]) or {""}
            lines = body[1:-1] if node.get_docstring() is not None else body[:-1]
            if not anchor or not lines:
                raise StackError(f"{source}: {'.'.join(place)} needs lines to insert and, at its end, one 'name = ...'")
            yield Insertion(source, place, target, anchor, tuple(lines))
    for inner in body:
        yield from _insertions(inner, place, target, source)


def insert(module: cst.Module, file: str, insertions: Sequence[Insertion]) -> cst.Module:
    """The file with the lines in it.

    Raises:
        StackError: a place that isn't there, or in which not just one statement binds the anchor's name.
    """
    for one in insertions:
        visitor = _Insert(one)
        module = module.visit(visitor)
        if visitor.found != 1:
            there = f"binds {one.anchor} {visitor.found or 'no'} time{'s' * (visitor.found != 1)}"
            if not visitor.entered and one.place:
                there = "isn't there"
            raise StackError(
                f"torch/distributed/{file}: {'.'.join(one.place) or 'its top level'} {there}, and {one.source} goes "
                f"before the one statement that does"
            )
    return module


class _Insert(cst.CSTTransformer):
    def __init__(self, insertion: Insertion) -> None:
        super().__init__()
        self.insertion = insertion
        self.at: list[str] = []
        self.found = 0
        self.entered = False

    def _enter(self, node: cst.ClassDef | cst.FunctionDef) -> None:
        self.at.append(node.name.value)
        self.entered |= tuple(self.at) == self.insertion.place

    def _leave(self, original, updated):  # type: ignore[no-untyped-def]
        self.at.pop()
        return updated

    visit_ClassDef = visit_FunctionDef = _enter
    leave_ClassDef = leave_FunctionDef = _leave

    def leave_IndentedBlock(self, original, updated):  # type: ignore[no-untyped-def]
        return self._filled(updated) if self.at and tuple(self.at) == self.insertion.place else updated

    def leave_Module(self, original, updated):  # type: ignore[no-untyped-def]
        return updated if self.insertion.place else self._filled(updated)

    def _filled(self, updated):  # type: ignore[no-untyped-def]
        body: list[cst.BaseStatement] = []
        for statement in updated.body:
            if self.insertion.anchor in bound(statement):
                self.found += 1
                body += self.insertion.lines
            body.append(statement)
        return updated.with_changes(body=body)
