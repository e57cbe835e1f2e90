"""Which definitions of our new files a prefix of the stack brings: those that something in it uses, and no others.

A definition is a statement at the top of a file, or a method; a method comes with the first use of its name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

import libcst as cst

from .names import Import, bound, imports_of, imports_within, used
from .room import Room
from .walk import walk

_ANNOTATIONS = frozenset({(cst.Param, "annotation"), (cst.FunctionDef, "returns"), (cst.AnnAssign, "annotation")})
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass
class Uses:
    """What some code looks up: names of rooms' definitions, and attributes, strings that may be names included."""

    imports: list[Import] = field(default_factory=list)
    attributes: frozenset[str] = frozenset()


@functools.cache  # nodes hash by identity, and never change
def attributes(node: cst.CSTNode) -> frozenset[str]:
    """The attributes that a piece of code looks up on whatever objects."""
    names = set()
    for inner in walk(node):
        if isinstance(inner, cst.Attribute):
            names.add(inner.attr.value)
        elif isinstance(inner, cst.SimpleString) and _IDENTIFIER.fullmatch(text := inner.raw_value):
            names.add(text)
    return frozenset(names)


@functools.lru_cache(maxsize=1024)
def uses_of(text: str, package: str) -> Uses:
    """Of a file that isn't a room, a test for example."""
    module = cst.parse_module(text)
    imports = [found for statement in module.body for found in imports_of(statement, package)]
    return Uses([*imports, *imports_within(module, package)], attributes(module))


class Reach:
    """Follows uses from room to room.

    Args:
        room: the room of a file.
        room_file: the file of ours that an import names, None for torch's; and whether it names the file itself.
    """

    def __init__(self, room: Callable[[str], Room], room_file: Callable[[Import], tuple[str, bool] | None]) -> None:
        self._room, self._room_file = room, room_file
        self._seen: dict[str, set[int]] = {}  # by file, the places of the statements
        self._attributes: set[str] = set()
        self._methods: dict[str, list[tuple[str, cst.FunctionDef]]] = {}  # waiting for a use of their name
        self._ready: dict[tuple[str, str | None], bool] = {}
        self._kept: set[int] = set()  # the ids of the methods that came
        self._waiting: list[tuple[str, cst.CSTNode]] = []

    def add(self, uses: Uses) -> None:
        """Bring what these uses need, and what that needs."""
        for found in uses.imports:
            self._ask(found)
        self._look_up(uses.attributes)
        self._follow()

    def add_known(self, uses: Uses) -> None:
        """The same for uses of files that are there already; what else they use isn't brought.

        Nor is what needs a definition that comes later: who asks for it looks into something that isn't there yet.
        """
        known: list[Import] = []
        for found in uses.imports:
            named = self._room_file(found)
            if named and named[0] in self._seen:
                room = self._room(named[0])
                whole = [Import(name, room.module, name) for name in sorted(room.defined)]
                known += whole if named[1] else [found]
        methods = {
            name
            for name in uses.attributes & {*self._methods}
            if all(self._is_ready(file, method) for file, method in self._methods[name])
        }
        self.add(Uses([found for found in known if self._has_all(found)], frozenset(methods)))

    def add_bodies(self, room: Room, bodies: Iterable[cst.CSTNode]) -> None:
        """Bring what these bodies, which lie in torch's file of the room, need."""
        bodies = list(bodies)
        for found in room.needed_by(bodies):  # type: ignore[arg-type]
            self._ask(found)
        for body in bodies:
            self._look_up(attributes(body))
        self._follow()

    def add_file(self, file: str, names: Collection[str], methods: Collection[str]) -> None:
        """Bring the definitions of a file that have such names, and such methods of theirs."""
        self._touch(file)
        for place, statement in enumerate(self._room(file).body):
            if bound(statement) & {*names}:
                self._bring(file, place)
        for name in {*methods} & {*self._methods}:
            for waiting in [one for one in self._methods[name] if one[0] == file]:
                self._methods[name].remove(waiting)
                self._bring_method(*waiting)
        self._follow()

    def rooms(self) -> dict[str, Room]:
        """The files, with the definitions that came, in the order in which they were asked for."""
        return {file: self._cut(file, places) for file, places in self._seen.items() if places}

    def _ask(self, found: Import) -> None:
        named = self._room_file(found)
        if named is None:
            return
        file, whole = named
        self._touch(file)
        for place, statement in enumerate(self._room(file).body):
            if whole or found.name in bound(statement):
                self._bring(file, place)

    def _has_all(self, found: Import) -> bool:
        """Whether an imported definition lies in a file that is there, and all that it needs does."""
        named = self._room_file(found)
        if named is None or named[0] not in self._seen:
            return named is None
        if found.name is None:
            return True
        file = named[0]
        if (file, found.name) not in self._ready:
            self._ready[file, found.name] = True  # for definitions that use each other
            there = [s for s in self._room(file).body if found.name in bound(s)]
            self._ready[file, found.name] = all(self._is_ready(file, statement) for statement in there)
        return self._ready[file, found.name]

    def _is_ready(self, file: str, node: cst.CSTNode) -> bool:
        room = self._room(file)
        names = used(node)
        own = [Import(name, room.module, name) for name in sorted(names & room.defined)]
        return not names & room.absent and all(map(self._has_all, [*own, *room.needed_by([node])]))  # type: ignore[list-item]

    def _touch(self, file: str) -> None:
        """What stands in a file without a name comes with the file."""
        if file not in self._seen:
            self._seen[file] = set()
            for place, statement in enumerate(self._room(file).body):
                if not bound(statement):
                    self._bring(file, place)

    def _bring(self, file: str, place: int) -> None:
        if place in self._seen[file]:
            return
        self._seen[file].add(place)
        statement = self._room(file).body[place]
        if not isinstance(statement, cst.ClassDef):
            self._waiting.append((file, statement))
            return
        for part in (*statement.bases, *statement.decorators, *statement.body.body):
            if _is_method(part):
                self._methods.setdefault(part.name.value, []).append((file, part))
            else:
                self._waiting.append((file, part))
        self._look_up(self._attributes)

    def _look_up(self, names: Iterable[str]) -> None:
        names = set(names)
        self._attributes |= names
        for name in names & set(self._methods):
            for file, method in self._methods.pop(name):
                self._bring_method(file, method)

    def _bring_method(self, file: str, method: cst.FunctionDef) -> None:
        self._kept.add(id(method))
        self._waiting.append((file, method))

    def _follow(self) -> None:
        while self._waiting:
            file, node = self._waiting.pop()
            room = self._room(file)
            names = used(node) & room.defined
            for place, statement in enumerate(room.body):
                if bound(statement) & names:
                    self._bring(file, place)
            for found in room.needed_by([node]):  # type: ignore[list-item]
                self._ask(found)
            self._look_up(attributes(node))

    def _cut(self, file: str, places: set[int]) -> Room:
        room = self._room(file)
        body = [self._without_methods(room.body[place]) for place in sorted(places)]
        at_run_time = {"Any"}.union(*(used(s, _ANNOTATIONS) for s in body))  # no guard for what typing has
        imports = [i if i.bound in at_run_time else replace(i, typed=True) for i in room.used_by(body)]
        return replace(room, body=tuple(body), imports=tuple(imports))

    def _without_methods(self, statement: cst.BaseStatement) -> cst.BaseStatement:
        if not isinstance(statement, cst.ClassDef):
            return statement
        left = [part for part in statement.body.body if not _is_method(part) or id(part) in self._kept]
        return statement.with_changes(body=statement.body.with_changes(body=left))


def _is_method(part: cst.CSTNode) -> bool:
    """A method that somebody must name to call it."""
    return isinstance(part, cst.FunctionDef) and not part.name.value.startswith("__")
