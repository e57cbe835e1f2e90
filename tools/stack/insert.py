"""Lines that a patch puts into a function of torch's, before a statement that stands there already.

`patches/insert/PATCH/FILE` names the place by definitions inside each other, classes and functions, nested as torch's
file nests them. The innermost ends with the anchor, ``name = ...``: what stands above it goes before the only statement
of torch's function or class that binds the name. Definitions without an anchor are helpers, which come along if used.
Among the lines, ``del NAME, ...`` takes out what they make superfluous: torch's statements that bind these names, each
``if`` that asks them, and a ``with`` that is empty then. ``NAME(..., keyword=value)`` gives the keyword to torch's
calls of NAME that lack it. Parameters with a default are added to those of torch's function. ``{"key": ..., "new":
value}`` puts the new entries at the end of torch's dict that has the key, ``[first, new]`` at the end of its list that
has the first.

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
from .names import bound, used
from .ours import Room
from .ours import room as read_room

_ANCHOR = matchers.SimpleStatementLine(body=[matchers.Assign(value=matchers.Ellipsis())])
_DEL = matchers.SimpleStatementLine(body=[matchers.Del()])
_CALL = matchers.Call(matchers.Name(), [matchers.Arg(value=matchers.Ellipsis()), matchers.ZeroOrMore()])
_GIVE = matchers.SimpleStatementLine(body=[matchers.Expr(value=_CALL)])
_ENTRIES = matchers.SimpleStatementLine(body=[matchers.Expr(value=matchers.Dict() | matchers.List())])
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
        params: that the function takes from then on, after its own.
        gone: the names whose statements go.
        given: keywords for calls that lack them, by the name that is called.
        entries: of a dict or a list that has the first of them.
    """

    source: str
    place: tuple[str, ...]
    target: str
    anchor: str
    lines: tuple[cst.BaseStatement, ...]
    params: tuple[cst.Param, ...] = ()
    gone: frozenset[str] = frozenset()
    given: tuple[tuple[str, cst.Arg], ...] = ()
    entries: tuple[cst.DictElement | cst.Element, ...] = ()

    @property
    def nodes(self) -> list[cst.CSTNode]:
        """All that comes into torch's file."""
        return [*self.lines, *self.params, *(entry.value for entry in self.entries[1:])]


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
    room = read_room(file, path)
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
        raise StackError(f"{source} has no definition that ends with 'name = ...', so nothing says where its lines go")
    return InsertFile(tuple(found), replace(room, body=tuple(helpers)))


def _insertions(node: cst.CSTNode, outer: tuple[str, ...], target: str, source: str) -> Iterator[Insertion]:
    if not isinstance(node, Definition) or not isinstance(node.body, cst.IndentedBlock):
        return
    place, body = (*outer, node.name.value), node.body.body
    if isinstance(node, cst.FunctionDef):
        target = target or ".".join(place)
    if isinstance(node, cst.FunctionDef) and (new := [param for param in node.params.params if param.default]):
        yield Insertion(source, place, target, "", (), tuple(new))
    if matchers.matches(body[-1], _ANCHOR):
        (anchor,) = bound(body[-1]) or {""}
        lines = body[1:-1] if node.get_docstring() is not None else body[:-1]
        if not anchor or not lines:
            raise StackError(f"{source}: {'.'.join(place)} needs lines to insert and, at its end, one 'name = ...'")
        gone = frozenset(name for line in lines if matchers.matches(line, _DEL) for name in _deleted(line))
        given = tuple(pair for line in lines if matchers.matches(line, _GIVE) for pair in _given(line))
        found = [line.body[0].value for line in lines if matchers.matches(line, _ENTRIES)]  # type: ignore[union-attr]
        entries, *more = [tuple(one.elements) for one in found] or [()]
        lines = [line for line in lines if not matchers.matches(line, _DEL | _GIVE | _ENTRIES)]
        yield Insertion(source, place, target, anchor, tuple(lines), (), gone, given, entries)
        yield from (Insertion(source, place, target, anchor, (), entries=others) for others in more)
    found = [one for inner in body for one in _insertions(inner, place, target, source)]
    if outer and not found and isinstance(node, cst.FunctionDef) and not matchers.matches(body[-1], _ANCHOR):
        raise StackError(f"{source}: {'.'.join(place)} has nothing that ends with 'name = ...', where its lines go")
    yield from found


def _deleted(line: cst.SimpleStatementLine) -> list[str]:
    return [name.value for name in matchers.findall(line, matchers.Name())]  # type: ignore[attr-defined]


def _given(line: cst.SimpleStatementLine) -> list[tuple[str, cst.Arg]]:
    call = line.body[0].value  # type: ignore[union-attr]
    return [(call.func.value, argument) for argument in call.args[1:]]  # type: ignore[union-attr]


def insert(module: cst.Module, file: str, insertions: Sequence[Insertion]) -> cst.Module:
    """The file with the lines in it.

    Raises:
        StackError: a place that isn't there, or in which not just one statement binds the anchor's name.
    """
    for one in insertions:
        visitor = _Insert(one)
        module = module.visit(visitor)
        if visitor.found != (1 if one.anchor else 0) or (one.place and not visitor.entered):
            there = f"binds {one.anchor} {visitor.found or 'no'} time{'s' * (visitor.found != 1)}"
            if one.place and not visitor.entered:
                there = "isn't there"
            raise StackError(
                f"torch/distributed/{file}: {'.'.join(one.place) or 'its top level'} {there}, and {one.source} goes "
                f"before the one statement that does"
            )
        if visitor.gone != one.gone:
            left = ", ".join(sorted(one.gone - visitor.gone))
            raise StackError(
                f"torch/distributed/{file}: {'.'.join(one.place)} binds no {left}, and {one.source} takes that out"
            )
        idle = [name for name, argument in one.given if (name, argument.keyword.value) not in visitor.told]  # type: ignore[union-attr]
        if idle:
            raise StackError(
                f"torch/distributed/{file}: {'.'.join(one.place)} has no call of {', '.join(idle)} that lacks what "
                f"{one.source} gives it"
            )
        if one.entries and not visitor.filled:
            raise StackError(
                f"torch/distributed/{file}: {'.'.join(one.place)} has no dict or list as {one.source} names it"
            )
    return module


def _same(one: cst.BaseElement | cst.BaseDictElement, known: cst.BaseElement | cst.BaseDictElement) -> bool:
    """Whether these are entries of one key, or of one value in a list."""
    if isinstance(one, cst.DictElement) and isinstance(known, cst.DictElement):
        return one.key.deep_equals(known.key)
    return isinstance(one, cst.Element) and isinstance(known, cst.Element) and one.value.deep_equals(known.value)


class _Insert(cst.CSTTransformer):
    def __init__(self, insertion: Insertion) -> None:
        super().__init__()
        self.insertion = insertion
        self.at: list[str] = []
        self.found = 0
        self.gone: frozenset[str] = frozenset()
        self.told: set[tuple[str, str]] = set()
        self.filled = False
        self.entered = False

    def _enter(self, node: cst.ClassDef | cst.FunctionDef) -> bool:
        """Whether the place is in there, or is this."""
        self.at.append(node.name.value)
        at, place = tuple(self.at), self.insertion.place
        self.entered |= at == place
        return at == place[: len(at)] or at[: len(place)] == place != ()

    def _leave(self, original, updated):  # type: ignore[no-untyped-def]
        self.at.pop()
        return updated

    visit_ClassDef = visit_FunctionDef = _enter
    leave_ClassDef = _leave

    def leave_FunctionDef(self, original, updated):  # type: ignore[no-untyped-def]
        if tuple(self.at) == self.insertion.place and self.insertion.params:
            params = [*updated.params.params, *self.insertion.params]
            updated = updated.with_changes(params=updated.params.with_changes(params=params))
        return self._leave(original, updated)

    def leave_IndentedBlock(self, original, updated):  # type: ignore[no-untyped-def]
        return self._filled(updated) if self.at and tuple(self.at) == self.insertion.place else updated

    def leave_Module(self, original, updated):  # type: ignore[no-untyped-def]
        return updated if self.insertion.place else self._filled(updated)

    def leave_Call(self, original, updated):  # type: ignore[no-untyped-def]
        if tuple(self.at) != self.insertion.place:
            return updated
        for name, argument in self.insertion.given:
            there = {one.keyword.value for one in updated.args if one.keyword}
            if matchers.matches(updated.func, matchers.Name(name)) and argument.keyword.value not in there:
                updated = updated.with_changes(args=[*updated.args, argument])
                self.told.add((name, argument.keyword.value))
        return updated

    def _grow(self, original, updated):  # type: ignore[no-untyped-def]
        if tuple(self.at) != self.insertion.place or not self.insertion.entries:
            return updated
        known, *new = self.insertion.entries
        if not any(_same(one, known) for one in updated.elements):
            return updated
        self.filled = True  # a later release may have some of them
        new = [entry for entry in new if not any(_same(one, entry) for one in updated.elements)]
        return updated.with_changes(elements=[*updated.elements, *new])

    leave_Dict = leave_List = _grow

    def _filled(self, updated):  # type: ignore[no-untyped-def]
        body: list[cst.BaseStatement] = []
        for statement in updated.body:
            if self._goes(statement):
                continue
            if self.insertion.anchor in bound(statement):
                self.found += 1
                body += self.insertion.lines
            body.append(statement)
        return updated.with_changes(body=body)

    def _goes(self, statement: cst.BaseStatement) -> bool:
        names = bound(statement)
        if names and names <= self.insertion.gone:
            self.gone |= names
            return True
        if isinstance(statement, cst.With):
            return not statement.body.body
        return isinstance(statement, cst.If) and bool(used(statement.test) & self.insertion.gone)
