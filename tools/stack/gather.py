"""What goes into one file of torch: the bodies of rows and all that they use, made to fit there."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import libcst as cst
from libcst import matchers

from .insert import Insertion
from .message import StackError
from .names import Import, bound, is_import, used
from .ours import Room, kept_function

CARRIERS = {name: f"_{name}" for name in ("DeviceMesh", "DTensorSpec", "Redistribute")}  # torch's: ours with methods


@dataclass
class Laid:
    """What goes into one file of torch.

    Attributes:
        functions: by the name of the definition that they replace.
        members: for each class, by the name of what they replace or, where there is none, join.
        helpers: definitions of ours that these use, and functions that torch's file lacks, in our order.
        imports: what all of them import.
        renamed: torch's function: the name under which it goes on.
        insertions: what goes into functions of torch's that stay.
        gone: methods of torch's that don't stay, by qualified name.
    """

    functions: dict[str, cst.FunctionDef]
    members: dict[str, dict[str, cst.BaseStatement]]
    helpers: list[cst.BaseStatement]
    imports: list[Import]
    renamed: dict[str, str]
    insertions: Sequence[Insertion] = ()
    gone: frozenset[str] = frozenset()

    @property
    def bodies(self) -> list[cst.CSTNode]:
        inserted = [line for one in self.insertions for line in one.nodes]
        members = [member for group in self.members.values() for member in group.values()]
        return [*self.helpers, *self.functions.values(), *members, *inserted]

    def bodies_of(self, names: Collection[str]) -> list[cst.CSTNode]:
        """What goes into or over these definitions at top level."""
        inserted = [line for one in self.insertions if one.place and one.place[0] in names for line in one.nodes]
        members = [m for owner, group in self.members.items() if owner in names for m in group.values()]
        return [*(f for name, f in self.functions.items() if name in names), *members, *inserted]

    @property
    def targets(self) -> set[str]:
        """The names at top level that change."""
        owners = {name.partition(".")[0] for name in self.gone}
        return {*self.functions, *self.members, *owners, *(one.place[0] for one in self.insertions if one.place)}


def gather(
    text: str,
    room: Room,
    qualnames: Sequence[str],
    insertions: Sequence[Insertion] = (),
    gone: frozenset[str] = frozenset(),
) -> Laid:
    """The bodies of these rows, the insertions and all in the room that they use, fit for torch's file of this text."""
    fit = _Fit(room)
    theirs = _definitions(parsed(text))
    if absent := sorted(gone - {*theirs}):
        raise StackError(f"torch/distributed/{room.file} defines no {', '.join(absent)}, which a patch removes")
    kept = room.kept()
    functions: dict[str, cst.FunctionDef] = {}
    helpers: dict[str, cst.BaseStatement] = {}
    members: dict[str, dict[str, cst.BaseStatement]] = {}
    for qualname in qualnames:
        owner, _, name = qualname.rpartition(".")
        if owner:
            member = fit.member(_member(room, CARRIERS.get(owner, owner), name))
            torchs = theirs.get(qualname)
            members.setdefault(owner, {})[name] = _documented(member, torchs)
        elif name in theirs:
            functions[name] = _documented(fit(room.definition(name)), theirs[name])
        else:
            helpers[name] = fit(room.definition(name))
    insertions = [replace(one, lines=tuple(map(fit, one.lines))) for one in insertions]
    laid = Laid(functions, members, [], [], {}, insertions, gone)
    bodies = laid.bodies
    taken = set(functions) | set(helpers) | set(members) | set(CARRIERS.values())
    waiting = [*bodies, *helpers.values()]
    renamed = {one: kept_method(name) for one, name in kept.items() if "." in one and one in qualnames}
    while waiting:
        for name in used(waiting.pop()) & room.defined - taken:
            taken.add(name)
            statement = fit(room.definition(name))
            helpers[name] = statement
            waiting.append(statement)
    ordered = [fit(s) for s in room.body if bound(s) & set(helpers) and not kept_function(s)]
    renamed |= {function: name for function, name in kept.items() if name in helpers}
    imports = [i for i in room.used_by([*bodies, *ordered]) if not fit.is_own(i)]
    return replace(laid, helpers=ordered, imports=imports, renamed=renamed)


def kept_method(name: str) -> str:
    """What a kept method is called in its class: ``_equals_by_value`` for ``equals_by_value = original(Class, …)``."""
    return f"_{name.lstrip('_')}"


def _member(room: Room, carrier: str, name: str) -> cst.BaseStatement:
    found = room.definition(carrier)
    if isinstance(found, cst.ClassDef):
        for statement in found.body.body:
            if isinstance(statement, cst.BaseStatement) and name in bound(statement):
                return statement
    raise StackError(f"torch_overlay/distributed/{room.file}: class {carrier} has no {name}")


class _Fit(cst.CSTTransformer):
    """Makes our code fit torch's file of the same name: it needs no door to itself, and no `self: DeviceMesh`."""

    def __init__(self, room: Room) -> None:
        super().__init__()
        self.module = room.module
        self.methods = {name for function, name in room.kept().items() if "." in function}
        self.doors = {i.bound for i in room.imports if i.name and f"{i.module}.{i.name}" == self.module}

    def __call__(self, node):  # type: ignore[no-untyped-def]
        return node.visit(self)

    def is_own(self, found: Import) -> bool:
        """An import of torch's file by itself, or of a name that it defines."""
        return found.module == self.module or found.bound in self.doors

    def member(self, node):  # type: ignore[no-untyped-def]
        """A method without our headings between methods."""
        lines = [line for line in node.leading_lines if not line.comment or not line.comment.value.startswith("# ---")]
        return self(node.with_changes(leading_lines=lines))

    def leave_Attribute(self, original, updated):  # type: ignore[no-untyped-def]
        if isinstance(updated.value, cst.Name) and updated.value.value in self.doors:
            return updated.attr
        return updated

    def leave_Call(self, original, updated):  # type: ignore[no-untyped-def]
        """Inside its class, `super(Class, cls)` needs no arguments; our carrier isn't that class. A method of torch's
        that goes on under another name is one there."""
        if matchers.matches(updated.func, matchers.Name("super")):
            return updated.with_changes(args=())
        if isinstance(updated.func, cst.Name) and updated.func.value in self.methods:
            method = cst.Attribute(updated.args[0].value, cst.Name(kept_method(updated.func.value)))
            return updated.with_changes(func=method, args=updated.args[1:])
        return updated

    def leave_Param(self, original, updated):  # type: ignore[no-untyped-def]
        return updated.with_changes(annotation=None) if updated.name.value == "self" else updated


def _documented(ours: cst.BaseStatement, torchs: cst.FunctionDef | None) -> cst.BaseStatement:
    """Ours with what torch's says of itself: the docstring, and the types of parameters that both have, unless
    ours takes more."""
    if torchs is None or not isinstance(ours, cst.FunctionDef):
        return ours
    types = {p.name.value: p.annotation for p in _params(torchs) if p.annotation}
    params = ours.params.visit(_Retype(types))
    ours = ours.with_changes(params=params, returns=torchs.returns or ours.returns)
    if torchs.get_docstring() is None or not isinstance(ours.body, cst.IndentedBlock):
        return ours
    body = list(ours.body.body)
    if ours.get_docstring() is not None:
        body = body[1:]
    return ours.with_changes(body=ours.body.with_changes(body=[torchs.body.body[0], *body]))


def _params(function: cst.FunctionDef) -> list[cst.Param]:
    params = function.params
    return [*params.posonly_params, *params.params, *params.kwonly_params]


class _Retype(cst.CSTTransformer):
    def __init__(self, types: dict[str, cst.Annotation]) -> None:
        super().__init__()
        self.types = types

    def leave_Param(self, original, updated):  # type: ignore[no-untyped-def]
        torchs = self.types.get(updated.name.value, updated.annotation)
        return updated if _members(torchs) < _members(updated.annotation) else updated.with_changes(annotation=torchs)


def _members(annotation: cst.Annotation | None) -> set[str]:
    """Of a union of types, or one of them, as text."""
    code = cst.Module([]).code_for_node(annotation.annotation) if annotation is not None else ""
    return {member.strip() for member in code.split("|")}


@functools.lru_cache(maxsize=16)
def parsed(text: str) -> cst.Module:
    """A file's tree; torch's files are long, and each prefix begins with the same."""
    return cst.parse_module(text)


def blocks(module: cst.Module) -> list[Sequence[cst.BaseStatement]]:
    """The statements at top level, and those in the branches of a top-level ``if``."""
    found: list[Sequence[cst.BaseStatement]] = [module.body]
    for statement in module.body:
        if isinstance(statement, cst.If) and not is_import(statement) and isinstance(statement.orelse, cst.Else):
            found.append(statement.orelse.body.body)
    return found


def _definitions(module: cst.Module) -> dict[str, cst.FunctionDef]:
    """Functions and methods of a file by their qualified names."""
    found: dict[str, cst.FunctionDef] = {}
    for statement in (s for block in blocks(module) for s in block):
        if isinstance(statement, cst.FunctionDef):
            found[statement.name.value] = statement
        elif isinstance(statement, cst.ClassDef):
            inner = [s for s in statement.body.body if isinstance(s, cst.FunctionDef)]
            found |= {f"{statement.name.value}.{function.name.value}": function for function in inner}
    return found
