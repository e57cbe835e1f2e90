"""Lay bodies into torch's file, each over the definition that it replaces, and insertions into functions that stay.

The helpers and imports that they need come along.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import libcst as cst

from .gather import Laid, blocks, parsed
from .insert import insert
from .message import StackError
from .names import Import, bound, import_lines, imports_of, is_import, unquoted, used
from .ours import Room


class _Quote(cst.CSTTransformer):
    """Quotes annotations that use names which aren't there when the file runs."""

    def __init__(self, absent: set[str]) -> None:
        super().__init__()
        self.absent = absent
        self.depth = 0

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.depth += 1

    def leave_FunctionDef(self, original, updated):  # type: ignore[no-untyped-def]
        self.depth -= 1
        return updated

    def leave_AnnAssign(self, original, updated):  # type: ignore[no-untyped-def]
        return original if self.depth else updated  # of a local variable: never looked at

    def leave_Annotation(self, original, updated):  # type: ignore[no-untyped-def]
        if not unquoted(updated.annotation) & self.absent:
            return updated
        text = cst.Module([]).code_for_node(updated.annotation).replace('"', "'")
        return updated.with_changes(annotation=cst.SimpleString(f'"{text}"'))


def lay(text: str, room: Room, laid: Laid) -> str:
    """Torch's file of this text with the bodies in it.

    Raises:
        StackError: a definition that isn't there, or a name of ours that the file uses for something else.
    """
    module = parsed(text)
    torchs = _all_imports(module, room)
    _check_names(module, room, laid, torchs)
    if not any("annotations" in line for line in _future_lines(module)):
        there = {i.bound for i in torchs if not i.typed}
        absent = {i.bound for i in laid.imports if i.typed} - there
        laid = _visited(laid, _Quote(absent), _Quote(absent | set(laid.members)))
    placed = insert(module, room.file, laid.insertions).visit(_Place(laid, room, torchs))
    missing = _missing(placed, laid)
    if missing:
        raise StackError(f"torch/distributed/{room.file} defines no {', '.join(missing)}")
    return _without_orphans(module, placed, room).code


def _visited(laid: Laid, change: cst.CSTTransformer, inside: cst.CSTTransformer) -> Laid:
    """With annotations quoted; a class isn't there yet while its own body runs, nor for the helpers before it."""
    return Laid(
        {name: f.visit(change) for name, f in laid.functions.items()},
        {c: {name: m.visit(inside) for name, m in group.items()} for c, group in laid.members.items()},
        [h.visit(inside) for h in laid.helpers],
        laid.imports,
        laid.renamed,
        laid.insertions,
        laid.gone,
    )


def _future_lines(module: cst.Module) -> list[str]:
    return [line for line in module.code.splitlines() if line.startswith("from __future__ import")]


def _all_imports(module: cst.Module, room: Room) -> list[Import]:
    return [i for block in blocks(module) for s in block for i in imports_of(s, room.package)]


def _check_names(module: cst.Module, room: Room, laid: Laid, torchs: list[Import]) -> None:
    theirs = {name for block in blocks(module) for s in block for name in bound(s)}
    imported = {i.bound: i for i in torchs}
    for name in {name for helper in laid.helpers for name in bound(helper)} | set(laid.renamed.values()):
        if name in theirs or name in imported:
            raise StackError(f"torch/distributed/{room.file} has a {name} of its own, so ours needs another name")
    for ours in laid.imports:
        other = imported.get(ours.bound)
        if ours.bound in theirs or (other and (other.module, other.name) != (ours.module, ours.name)):
            same = other and other.name == ours.name and other.name is not None
            if not same:  # one name taken from two modules, as torch re-exports many, is one thing
                raise StackError(f"torch/distributed/{room.file} calls something else {ours.bound} than {ours.line()}")


class _Place(cst.CSTTransformer):
    """Puts everything where it belongs in one pass.

    If a branch of a top-level ``if`` has targets, what they use goes into that branch, and to the top level only what
    targets there use: the branch may be the one that doesn't run, and then its imports can't be had.
    """

    def __init__(self, laid: Laid, room: Room, torchs: list[Import]) -> None:
        super().__init__()
        self.laid, self.room = laid, room
        there = {i.bound for i in torchs if not i.typed}
        typed = {i.bound for i in torchs}
        self.knows_checking = "TYPE_CHECKING" in there
        self.new = [i for i in laid.imports if i.bound not in (typed if i.typed else there)]
        self.top: frozenset[str] = frozenset()  # the names that top-level targets use

    def visit_Module(self, node: cst.Module) -> None:
        top, *branches = blocks(node)
        inner = [block for block in branches if self._has_targets(block)]
        if not inner:
            self.top = frozenset(
                {i.bound for i in self.new} | {n for helper in self.laid.helpers for n in bound(helper)}
            )
            return
        self.top = self._used_in(top)
        for name in sorted(self.top & frozenset().union(*map(self._used_in, inner))):
            if any(name in bound(helper) for helper in self.laid.helpers):
                raise StackError(f"torch/distributed/{self.room.file}: {name} is used inside and outside of a branch")

    def _used_in(self, statements: Sequence[cst.BaseStatement]) -> frozenset[str]:
        """The names that the targets among these statements use, through helpers, too."""
        here = {name for statement in statements for name in bound(statement)}
        waiting = self.laid.bodies_of(here)
        names: set[str] = set()
        while waiting:
            new = used(waiting.pop()) - names
            names |= new
            waiting += [helper for helper in self.laid.helpers if bound(helper) & new]
        return frozenset(names)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False  # nothing is placed inside a function

    def leave_ClassDef(self, original, updated):  # type: ignore[no-untyped-def]
        owner = updated.name.value
        left = dict(self.laid.members.get(owner, {}))
        if owner not in {*self.laid.members, *(name.partition(".")[0] for name in self.laid.gone)}:
            return updated
        body = []
        for statement in updated.body.body:
            name = next(iter(bound(statement)), "") if isinstance(statement, cst.BaseStatement) else ""
            if f"{owner}.{name}" in self.laid.gone:
                continue
            if name not in left:
                body.append(statement)
            elif isinstance(left[name], cst.FunctionDef) and not isinstance(statement, cst.FunctionDef):
                continue  # declared as an attribute, and now a property
            elif isinstance(statement, cst.FunctionDef):
                if kept := self.laid.renamed.get(f"{owner}.{name}"):
                    body.append(statement.with_changes(name=cst.Name(kept)))
                body.append(left.pop(name).with_changes(leading_lines=_blank(1)))
            else:
                body.append(_valued(statement, left.pop(name)))
        values = [left.pop(name) for name in list(left) if not isinstance(left[name], cst.FunctionDef)]
        at = next(i for i, s in enumerate(body) if isinstance(s, cst.FunctionDef))
        body[at:at] = values
        body += [member.with_changes(leading_lines=_blank(1)) for member in left.values()]
        return updated.with_changes(body=updated.body.with_changes(body=body))

    def leave_Else(self, original, updated):  # type: ignore[no-untyped-def]
        if not isinstance(updated.body, cst.IndentedBlock):
            return updated
        own = [i for i in self.new if i.bound not in self.top and not _standard(i)]
        helpers = [helper for helper in self.laid.helpers if not bound(helper) <= self.top]
        body = self._block(updated.body.body, own, helpers)
        return updated.with_changes(body=updated.body.with_changes(body=body))

    def leave_Module(self, original, updated):  # type: ignore[no-untyped-def]
        own = [i for i in self.new if i.bound in self.top or _standard(i)]
        if not self.laid.targets:  # only what the file lacks: at its end
            helpers = [helper.with_changes(leading_lines=_blank(2)) for helper in self.laid.helpers]
            return updated.with_changes(body=with_imports([*updated.body, *helpers], own, self.knows_checking))
        if not self._has_targets(updated.body):
            return updated.with_changes(body=with_imports(updated.body, [i for i in own if _standard(i)], True))
        helpers = [helper for helper in self.laid.helpers if bound(helper) <= self.top]
        return updated.with_changes(body=self._block(updated.body, own, helpers))

    def _has_targets(self, statements: Sequence[cst.BaseStatement]) -> bool:
        return any(bound(s) & self.laid.targets for s in statements)

    def _block(self, statements, imports, helpers):  # type: ignore[no-untyped-def]
        """A block that has targets gets the helpers before the first, and the imports after its own."""
        if not self._has_targets(statements):
            return statements
        body: list[cst.BaseStatement] = []
        for statement in statements:
            if helpers and self._has_targets([statement]):
                body, helpers = [*body, *helpers], []
            body += self._replaced(statement)
        return with_imports(body, imports, self.knows_checking)

    def _replaced(self, statement: cst.BaseStatement) -> list[cst.BaseStatement]:
        name = next(iter(bound(statement)), "")
        ours = self.laid.functions.get(name) if isinstance(statement, cst.FunctionDef) else None
        if ours is None:
            return [statement]
        if name not in self.laid.renamed:
            return [ours.with_changes(leading_lines=statement.leading_lines)]
        kept = statement.with_changes(name=cst.Name(self.laid.renamed[name]))
        docstring = self.room.docstring_of(self.laid.renamed[name])
        if docstring is not None and statement.get_docstring() is not None:
            kept = kept.with_changes(body=kept.body.with_changes(body=[docstring, *kept.body.body[1:]]))
        return [kept, ours.with_changes(leading_lines=_blank(2))]


def with_imports(
    statements: Sequence[cst.BaseStatement], new: Sequence[Import], checks: bool
) -> list[cst.BaseStatement]:
    """The block with more imports after the first run of its own; ``checks``: it knows TYPE_CHECKING."""
    body = list(statements)
    if not new:
        return body
    first = next((i for i, s in enumerate(body) if is_import(s)), 0)
    end = next((i for i in range(first, len(body)) if not _plain_import(body[i])), len(body))
    typed = [i for i in new if i.typed]
    lines = [
        *([] if checks or not typed else ["from typing import TYPE_CHECKING"]),
        *import_lines([*set(new) - set(typed)]),
    ]
    if typed:
        lines.append("if TYPE_CHECKING:\n" + "".join(f"    {line}\n" for line in import_lines(typed)))
    body[end:end] = [cst.parse_statement(line) for line in lines]
    return body


def _plain_import(statement: cst.BaseStatement) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and is_import(statement)


def _standard(found: Import) -> bool:
    return found.module.partition(".")[0] in sys.stdlib_module_names


def _valued(declared: cst.SimpleStatementLine, ours: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
    """``name: type`` of torch's with the value of ours, and what ours says to type checkers."""
    small = declared.body[0]
    value = ours.body[0].value
    if isinstance(small, cst.AnnAssign):
        equal = cst.AssignEqual()
        body = [small.with_changes(value=value, equal=equal)]
        return declared.with_changes(body=body, trailing_whitespace=ours.trailing_whitespace)
    return ours


def _blank(count: int) -> list[cst.EmptyLine]:
    return [cst.EmptyLine(indent=False)] * count


def _missing(module: cst.Module, laid: Laid) -> list[str]:
    """Targets for which nothing was there."""
    statements = {name: s for block in blocks(module) for s in block for name in bound(s)}
    kept = [name for function, name in laid.renamed.items() if "." not in function]
    missing = [name for name in (*laid.functions, *laid.members, *kept) if name not in statements]
    return sorted(missing)


def _without_orphans(before: cst.Module, after: cst.Module, room: Room) -> cst.Module:
    """Without imports that torch's code used before and nothing uses now."""
    names = frozenset().union(*(used(s) for s in before.body if not is_import(s)))
    now = {"TYPE_CHECKING"}
    for block in blocks(after):
        for statement in block:
            if isinstance(statement, cst.If) and isinstance(statement.orelse, cst.Else):
                now |= used(statement.test) | used(statement.body)  # the rest is a block of its own
            elif not is_import(statement):
                now |= used(statement)
    return after.visit(_Drop(names - now))


class _Drop(cst.CSTTransformer):
    """Takes names out of the file's imports; those inside functions stay."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self.names = names

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False

    def visit_If(self, node: cst.If) -> bool:
        return not is_import(node)

    def leave_ImportFrom(self, original, updated):  # type: ignore[no-untyped-def]
        if isinstance(updated.names, cst.ImportStar):
            return updated
        left = [a for a in updated.names if (a.asname.name.value if a.asname else a.name.value) not in self.names]
        if not left:
            return cst.RemoveFromParent()
        left[-1] = (
            left[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT) if len(left) < len(updated.names) else left[-1]
        )
        return updated.with_changes(names=left)

    def leave_Import(self, original, updated):  # type: ignore[no-untyped-def]
        left = [a for a in updated.names if a.asname or cst.Module([]).code_for_node(a.name) not in self.names]
        if not left:
            return cst.RemoveFromParent()
        left[-1] = left[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated.with_changes(names=left)
