"""One module of `torch_overlay/distributed` as it stands at one place of the series.

A definition may stand in another form until a later patch lands: `patches/until/<that patch>/<file>` has it, with the
imports that it needs; in a method there, ``if QUESTION: ...`` leaves torch's statement as it is. `patches/lacking/<file
of torch>.<class>.<name>/<file>` has forms for trees without that member, or, without a class, that function; it may
have an `until` of its own. Lines that end with ``# overlay only`` stay here. `patches/instead/words` and
`patches/until/LATER/words` have phrases for which upstream has others.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import libcst as cst
from libcst import matchers

from .message import PATCHES, ROOT, StackError
from .names import Import, absolute, bound, imports_of, imports_within, is_import, used

OURS = ROOT / "torch_overlay" / "distributed"
HERE_ONLY = "# overlay only"
KEEP = "keep"  # NAME = keep(module, "function"): torch's own function goes on under this name


_STRING = matchers.SimpleStatementLine(body=[matchers.Expr(matchers.SimpleString())])


class _Upstream(cst.CSTTransformer):
    """Takes out what only the overlay needs, and names modules in full."""

    def __init__(self, package: str) -> None:
        super().__init__()
        self.package = package

    def leave_ImportFrom(self, original, updated):  # type: ignore[no-untyped-def]
        if not updated.relative:
            return updated
        module = cst.Module([]).code_for_node(updated.module) if updated.module else ""
        full = cst.parse_expression(absolute(module, len(updated.relative), self.package))
        return updated.with_changes(relative=[], module=full, whitespace_after_from=cst.SimpleWhitespace(" "))

    def leave_SimpleStatementLine(self, original, updated):  # type: ignore[no-untyped-def]
        comment = updated.trailing_whitespace.comment
        return cst.RemoveFromParent() if comment and comment.value == HERE_ONLY else updated

    def leave_FunctionDef(self, original, updated):  # type: ignore[no-untyped-def]
        body = updated.body
        comment = body.header.comment if isinstance(body, cst.IndentedBlock) else None
        return cst.RemoveFromParent() if comment and comment.value == HERE_ONLY else updated


@dataclass(frozen=True)
class Room:
    """A module: what it says of itself, what it imports, its other top-level statements in their order.

    Attributes:
        absent: what isn't there yet: names that some of its statements may still use, which then aren't ready.
    """

    file: str
    docstring: str
    imports: tuple[Import, ...]
    body: tuple[cst.BaseStatement, ...]
    absent: frozenset[str] = frozenset()

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
        """New name by torch's function, for each ``NAME = keep(module, "function")``."""
        found = {}
        for statement in self.body:
            function = kept_function(statement)
            if function:
                (found[function],) = bound(statement)
        return found

    def docstring_of(self, kept: str) -> cst.BaseStatement | None:
        """The string below ``NAME = keep(module, "function")``: what the function does that goes on under this name."""
        for statement, below in itertools.pairwise(self.body):
            if kept_function(statement) and kept in bound(statement) and matchers.matches(below, _STRING):
                return below
        return None

    def used_by(self, statements: list[cst.BaseStatement]) -> tuple[Import, ...]:
        """The imports that these statements need."""
        names = frozenset().union(*map(used, statements))
        return tuple(found for found in self.imports if found.bound in names)

    def needed_by(self, statements: list[cst.BaseStatement]) -> list[Import]:
        """The same, with what functions import when they run."""
        inner = [found for statement in statements for found in imports_within(statement, self.package)]
        return [*self.used_by(statements), *inner]


def kept_function(statement: cst.BaseStatement) -> str | None:
    """The torch function that ``NAME = keep(module, "function")`` keeps; None for another statement."""
    if not isinstance(statement, cst.SimpleStatementLine) or not isinstance(statement.body[0], cst.Assign):
        return None
    call = statement.body[0].value
    if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Name) or call.func.value != KEEP:
        return None
    name = call.args[1].value
    return name.raw_value if isinstance(name, cst.SimpleString) else None


def package_of(file: str) -> str:
    """``torch.distributed.tensor`` for ``tensor/_planner/plan.py``."""
    return ".".join(["torch", "distributed", *pathlib.PurePosixPath(file).parts[:-1]])


def read_room(
    file: str, later: list[str], ours: pathlib.Path = OURS, patches: pathlib.Path = PATCHES, lacking: Sequence[str] = ()
) -> Room:
    """The module as upstream has it, with the forms of its definitions before the ``later`` patches, the next first.

    Args:
        lacking: the folders of forms for what the tree lacks; a form counts where the module has its definition then.
    """
    words = read_words(patches, later)
    room = parse(file, ours / file, words)
    for path in (patches / "instead" / file, *(patches / "until" / name / file for name in reversed(later))):
        if path.exists():
            room = _with(room, parse(file, path), path)
    for path in (home / file for name in lacking for home in _lacking_homes(patches / "lacking" / name, later)):
        if path.exists() and room.defined & (forms := parse(file, path, words)).defined:
            room = _with(room, forms, path)
    return room


def _lacking_homes(folder: pathlib.Path, later: Sequence[str]) -> list[pathlib.Path]:
    """The folder, which may have an ``until`` of its own."""
    return [folder, *(folder / "until" / name for name in reversed(later))]


def absent_names(later: list[str], patches: pathlib.Path = PATCHES) -> frozenset[tuple[str, str]]:
    """Module and name of each definition that isn't there (yet), for which its form is ``name = ...``."""
    homes = [patches / "instead", *(patches / "until" / name for name in later)]
    found = set()
    for home in homes:
        for path in sorted(home.rglob("*.py")):
            room = parse(path.relative_to(home).as_posix(), path)
            absent = [bound(statement) for statement in room.body if matchers.matches(statement, _ABSENT)]
            found |= {(room.module, name) for names in absent for name in names}
    return frozenset(found)


def identities(patches: pathlib.Path = PATCHES, lacking: Sequence[str] = ()) -> frozenset[tuple[str, str]]:
    """Module and name of each function that gives back what it gets upstream, as its form in `instead` says, unless
    there is another form for what the tree lacks."""
    found = set()
    for path in sorted((patches / "instead").rglob("*.py")):
        room = parse(path.relative_to(patches / "instead").as_posix(), path)
        found |= {(room.module, s.name.value) for s in room.body if _gives_back(s)}  # type: ignore[attr-defined]
    for home in (patches / "lacking" / name for name in lacking):
        rooms = (parse(path.relative_to(home).as_posix(), path) for path in sorted(home.rglob("*.py")))
        found -= {(room.module, name) for room in rooms for name in room.defined}
    return frozenset(found)


def _gives_back(statement: cst.BaseStatement) -> bool:
    if not isinstance(statement, cst.FunctionDef) or len(statement.params.params) != 1:
        return False
    given = matchers.Return(value=matchers.Name(statement.params.params[0].name.value))
    last = statement.body.body[-1]
    return len(statement.body.body) == 1 and matchers.matches(last, matchers.SimpleStatementLine(body=[given]))


def without_absent(
    room: Room, absent: frozenset[tuple[str, str]], same: frozenset[tuple[str, str]] = frozenset()
) -> Room:
    """The room without definitions that aren't there yet, and without the calls that stand alone, or decide alone.

    A call of a function that is the ``same`` as its argument is that argument.
    """
    return _without(room, frozenset(_names_of(room, absent)), frozenset(_names_of(room, same)))


@functools.lru_cache(maxsize=1024)  # each prefix has most rooms as the one before
def _without(room: Room, names: frozenset[str], transparent: frozenset[str]) -> Room:
    if not names | transparent:
        return room
    kept = [s for s in room.body if not (bound(s) and bound(s) <= names | transparent)]
    imports = tuple(i for i in room.imports if i.bound not in names | transparent)
    body = [s.visit(_Unwrap(transparent)) for s in kept] if transparent else kept
    body = [s.visit(_WithoutCalls(names)) for s in body] if names else body  # type: ignore[union-attr]
    return replace(room, body=tuple(body), imports=imports, absent=names)  # type: ignore[arg-type]


def _names_of(room: Room, definitions: frozenset[tuple[str, str]]) -> set[str]:
    """What the room calls these: its own, and those that it imports."""
    own = {name for module, name in definitions if module == room.module}
    return own | {i.bound for i in room.imports if (i.module, i.name) in definitions}


class _Unwrap(cst.CSTTransformer):
    """Puts the argument of a call of these names in place of the call."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self.names = names

    def leave_Call(self, original, updated):  # type: ignore[no-untyped-def]
        called = isinstance(updated.func, cst.Name) and updated.func.value in self.names
        return updated.args[0].value if called else updated


_MEMBERS = matchers.ClassDef(bases=[matchers.Arg(value=matchers.Ellipsis())])
_ABSENT = matchers.SimpleStatementLine(body=[matchers.Assign(value=matchers.Ellipsis())])


class _WithoutCalls(cst.CSTTransformer):
    """Takes out ``name(...)`` as a statement, and ``if name(...):`` with what it guards."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        called = matchers.OneOf(*(matchers.Call(func=matchers.Name(name)) for name in sorted(names)))
        self.alone = matchers.SimpleStatementLine(body=[matchers.Expr(value=called)])
        self.called = called

    def leave_SimpleStatementLine(self, original, updated):  # type: ignore[no-untyped-def]
        return cst.RemoveFromParent() if matchers.matches(updated, self.alone) else updated

    def leave_If(self, original, updated):  # type: ignore[no-untyped-def]
        empty = isinstance(updated.body, cst.IndentedBlock) and not updated.body.body
        gone = empty or matchers.matches(updated.test, self.called)
        return cst.RemoveFromParent() if gone and updated.orelse is None else updated


@functools.lru_cache(maxsize=1024)
def _with(room: Room, earlier: Room, path: pathlib.Path) -> Room:
    forms = {name: statement for statement in earlier.body for name in bound(statement)}
    unknown = sorted(set(forms) - room.defined)
    wanted = frozenset().union(*(used(other) - bound(other) for other in earlier.body))
    helpers = [name for name in unknown if name in wanted]
    if len(helpers) < len(unknown):
        raise StackError(f"{path.relative_to(path.parents[2])} has {unknown}, which {room.file} doesn't define")
    body = [forms[name] for name in helpers]
    for statement in room.body:
        names = bound(statement)
        if names & set(forms) and not names <= set(forms):
            raise StackError(f"{path.relative_to(path.parents[2])} has a form for some of {sorted(names)}, not for all")
        body.append(_in_form(statement, forms[min(names)]) if names & set(forms) else statement)
    both = dict.fromkeys([*room.imports, *earlier.imports])
    plain = {(i.bound, i.module) for i in both if not i.typed}
    imports = [i for i in both if i.module != room.module and not (i.typed and (i.bound, i.module) in plain)]
    return replace(room, body=tuple(body), imports=tuple(imports))


def _in_form(statement: cst.BaseStatement, form: cst.BaseStatement) -> cst.BaseStatement:
    """The form; of ``class NAME(...)``, its docstring and members in place of those of their names, and no member whose
    form is ``name = ...``."""
    if not matchers.matches(form, _MEMBERS) or not isinstance(statement, cst.ClassDef):
        return form
    members = form.body.body  # type: ignore[attr-defined]
    forms = {name: member for member in members for name in bound(member)}  # type: ignore[arg-type]
    left = [forms.get(min(bound(part), default=""), part) for part in statement.body.body]  # type: ignore[arg-type]
    if form.get_docstring() is not None:  # type: ignore[attr-defined]
        left[0] = members[0]
    left = [part for part in left if not matchers.matches(part, _ABSENT)]
    return statement.with_changes(body=statement.body.with_changes(body=left))


def read_words(patches: pathlib.Path, later: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """What our texts say otherwise than upstream's, a line ``ours => theirs``: in `until/LATER/words`, then `instead`.

    Raises StackError for a line that says something else.
    """
    paths = [*(patches / "until" / name / "words" for name in later), patches / "instead" / "words"]
    found = []
    for path in filter(pathlib.Path.exists, paths):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            ours, arrow, theirs = line.partition(" => ")
            if not ours or not arrow:
                raise StackError(f"{path.relative_to(patches.parent)}:{number}: needs 'ours => theirs': {line!r}")
            found.append((ours, theirs))
    return tuple(found)


def parse(file: str, path: pathlib.Path, words: Sequence[tuple[str, str]] = ()) -> Room:
    """A file of ours as a room, in upstream's words. Raises StackError with file and line if it can't be parsed."""
    try:
        text = path.read_text(encoding="utf-8")
        for ours, theirs in words:
            text = text.replace(ours, theirs)
        return _parse_text(file, text)
    except cst.ParserSyntaxError as error:
        raise StackError(f"{path}:{error.editor_line} isn't Python: {error.message}") from error


@functools.lru_cache(maxsize=256)  # each prefix begins with the same
def _parse_text(file: str, text: str) -> Room:
    module = cst.parse_module(text).visit(_Upstream(package_of(file)))
    docstring = module.get_docstring(clean=False) or ""
    statements = list(module.body[1:] if docstring else module.body)
    imports = [found for statement in statements for found in imports_of(statement, package_of(file))]
    return Room(file, docstring, tuple(imports), tuple(s for s in statements if not is_import(s)))
