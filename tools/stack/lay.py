"""Lay bodies of ours into torch's file, each over the definition that it replaces, with the helpers that they use.

A body of ours takes torch's docstring and torch's types of the parameters that both have. What torch's class declares
and ours gives a value keeps its declaration.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Collection, Iterator, Sequence

from .insert import Insertion
from .message import StackError
from .ours import CARRIERS, Room, kept_method
from .source import Edit, Function, Source, blocks, bound, edited, import_edits, imports, moved, read, used


class Laid:
    """Torch's file with what one patch brings.

    Args:
        text: the file after the patches before, and with the lines that this patch inserts.
        original: the file without any patch.
        rows: functions and methods to lay, by qualified name; one that torch lacks is added.
        gone: methods that go.
        inserted: what this patch inserted, which may use helpers and imports.
    """

    def __init__(
        self,
        text: str,
        original: str,
        room: Room,
        rows: Sequence[str],
        gone: Collection[str],
        inserted: Sequence[Insertion],
    ) -> None:
        self.room, self.rows, self.inserted = room, rows, inserted
        self.name = f"torch/distributed/{room.file}"
        self.theirs = read(text, self.name)
        self.original = _named(read(original, self.name))
        self.named = _named(self.theirs)
        self.gone = {qualname: self._must_have(qualname) for qualname in gone}
        owners = [qualname.partition(".")[0] for qualname in (*rows, *gone)]
        targets = {*owners, *(one.place[0] for one in inserted if one.place)}
        with_targets = [block for block in blocks(self.theirs.tree.body) if targets & _names(block)]
        # A definition in the `else` of an `if` may be the one that doesn't run. What it uses stands there, too.
        self.home = with_targets[-1] if with_targets else None
        self.first = next((one for one in self.home or () if bound(one) & targets), None)
        self.imported = [one for block in blocks(self.theirs.tree.body) for one in imports(block, "torch.distributed")]
        runtime = {one.bound for one in self.imported if not one.typed}
        self.absent = {one.bound for one in room.imports if one.typed} - runtime
        self.classes = {owner for owner in owners if isinstance(self.named.get(owner), ast.ClassDef)}
        self.edits: list[Edit] = [(*self.theirs.span(node), "") for node in self.gone.values()]
        self.pieces: list[str] = []

    def text(self) -> str:
        indent = self.home[0].col_offset if self.home else 0
        added: list[ast.stmt] = []
        members: dict[str, list[str]] = {}
        for qualname in self.rows:
            owner, _, name = qualname.rpartition(".")
            if owner:
                members.setdefault(owner, []).append(name)
                continue
            if name not in self.room.definitions:
                raise StackError(f"torch_overlay/distributed/{self.room.file} defines no {name}")
            ours, torchs = self.room.definitions[name], self.named.get(name)
            if isinstance(torchs, Function):
                self._replace(name, torchs, self._piece(ours, self.absent, torchs), "\n\n")
            else:
                added.append(ours)
        for owner, names in members.items():
            self._lay_members(owner, names)
        helpers = "".join(
            f"\n\n{self._piece(one, self.absent | self.classes, None, indent, comments=True)}"
            for one in self._helpers(added)
        )
        at = len(self.theirs.data) if self.first is None else self.theirs.span(self.first)[0]
        self.edits.append((at, at, f"{helpers}\n\n" if helpers else ""))
        self._import()
        return edited(self.theirs.data, self.edits)

    def _must_have(self, qualname: str) -> ast.stmt:
        if qualname not in self.named:
            raise StackError(f"{self.name} defines no {qualname}")
        return self.named[qualname]

    def _replace(self, qualname: str, torchs: ast.stmt, ours: str, apart: str) -> None:
        """Ours in place of torch's, or behind it where torch's goes on under another name."""
        start, end = self.theirs.span(torchs, comments="." in qualname)
        if qualname not in self.room.kept:
            self.edits.append((start, end, ours))
            return
        kept = self.room.kept[qualname]
        head = self.theirs.start(torchs) + len("def ")
        name = kept_method(kept) if "." in qualname else kept
        self.edits += [(head, head + len(torchs.name), name), (end, end, apart + ours)]  # type: ignore[attr-defined]
        said = self.room.docstring_of(kept)
        if said is not None and "." not in qualname and (docstring := _docstring(torchs)):
            text = self.room.source.statement(said, indent=docstring.col_offset, comments=False)
            self.edits.append((*self.theirs.span(docstring, comments=False), text))

    def _lay_members(self, owner: str, names: Sequence[str]) -> None:
        torchs_class = self._must_have(owner)
        assert isinstance(torchs_class, ast.ClassDef)
        indent = torchs_class.body[0].col_offset
        values, methods = "", ""
        for name in names:
            ours, torchs = self.room.member(owner, name), self.named.get(f"{owner}.{name}")
            quoted = self.absent | {owner}
            if isinstance(ours, Function):
                text = f"\n{self._piece(ours, quoted, torchs, indent)}"
                if isinstance(torchs, Function):
                    self._replace(f"{owner}.{name}", torchs, text, "")
                    continue
                methods += text
                if torchs is not None:  # declared as an attribute, and now a property
                    self.edits.append((*self.theirs.span(torchs), ""))
            elif isinstance(torchs, ast.AnnAssign):
                line = self.room.source.statement(ours, comments=False)
                value = line[line.index("=") :]  # with what it says to type checkers
                self.pieces.append(f"_ {value}")
                at = self.theirs.end(torchs)
                self.edits.append((at, self.theirs.span(torchs)[1], f" {value}"))
            else:
                values += self._piece(ours, quoted, None, indent, comments=True)
        first = next(number for number, one in enumerate(torchs_class.body) if isinstance(one, Function))
        at, end = self.theirs.span(torchs_class.body[first - 1])[1], self.theirs.span(torchs_class.body[-1])[1]
        self.edits += [(at, at, f"\n{values}" if values else ""), (end, end, methods)]

    def _helpers(self, added: list[ast.stmt]) -> list[ast.stmt]:
        """The definitions of ours that these and what is laid use, in our order."""
        definitions, waiting = self.room.definitions, [*self._placed(), *added]
        helpers = {id(one): one for one in added}
        known = {*self.rows, *self.named, *CARRIERS.values(), *self.room.kept.values()}
        while waiting:
            for name in used(waiting.pop()) & {*definitions} - known:
                known.add(name)
                helpers[id(definitions[name])] = definitions[name]
                waiting.append(definitions[name])
        imported = {one.bound for one in self.imported} - {one.bound for one in self.room.imports}
        taken = {name for one in helpers.values() for name in bound(one)} & {*self.original, *imported}
        if taken:
            raise StackError(f"{self.name} has a {', '.join(sorted(taken))} of its own, so ours needs another name")
        return [one for one in self.room.source.tree.body if id(one) in helpers]

    def _placed(self) -> list[ast.AST]:
        """What is laid or inserted, by its text: that has torch's types in place of some of ours."""
        pieces: list[ast.AST] = [ast.parse(f"if True:\n{moved(text, 4)}") for text in self.pieces]
        return pieces + [one.node for one in self.inserted if one.place]

    def _import(self) -> None:
        """Add the imports that what is laid or inserted needs, and the file lacks."""
        needed = frozenset().union(*map(used, self._placed()))
        runtime = {one.bound for one in self.imported if not one.typed}
        every = {one.bound: one for one in self.imported}
        offered = [*self.room.imports, *(one for inserted in self.inserted for one in inserted.imports)]
        new = [one for one in dict.fromkeys(offered) if one.bound in needed]
        for one in new:
            other = every.get(one.bound)
            if one.bound in self.original or (other and other.name != one.name):
                raise StackError(f"{self.name} calls something else {one.bound} than {one.home} does")
        new = [one for one in new if one.bound not in (every if one.typed else runtime)]
        checks = "TYPE_CHECKING" in runtime
        top, home = self.theirs.tree.body, self.home or self.theirs.tree.body
        standard = [one for one in new if home is top or one.home.partition(".")[0] in sys.stdlib_module_names]
        self.edits += import_edits(self.theirs, top, standard, checks)
        checks = checks or any(one.typed for one in standard)
        self.edits += import_edits(self.theirs, home, [one for one in new if one not in standard], checks)

    def _piece(
        self,
        ours: ast.stmt,
        quoted: set[str],
        torchs: ast.stmt | None,
        indent: int | None = None,
        comments: bool = False,
    ) -> str:
        """The text of a definition of ours, fit for torch's file."""
        source, edits = self.room.source, [*self.room.edits]
        retyped: set[ast.expr] = set()
        if isinstance(ours, ast.FunctionDef) and isinstance(torchs, ast.FunctionDef):
            for edit, annotation in self._types(ours, torchs):
                edits.append(edit)
                retyped.add(annotation)
            if docstring := _docstring(torchs):
                said, first = _docstring(ours), ours.body[0]
                start, end = source.span(said, comments=False) if said else (source.span(first)[0],) * 2
                text = self.theirs.data[slice(*self.theirs.span(docstring, comments=False))].decode()
                edits.append((start, end, moved(text, first.col_offset - docstring.col_offset)))
        for annotation in _annotations(ours):
            if used(annotation) & quoted and annotation not in retyped and not isinstance(annotation, ast.Constant):
                start, end = source.start(annotation), source.end(annotation)
                text = edited(source.data, [e for e in edits if start <= e[0] and e[1] <= end], start, end)
                edits.append((start, end, '"' + text.replace('"', "'") + '"'))
        indent = torchs.col_offset if indent is None and torchs is not None else indent or 0
        self.pieces.append(source.statement(ours, edits, indent, comments))
        return self.pieces[-1]

    def _types(self, ours: ast.FunctionDef, torchs: ast.FunctionDef) -> Iterator[tuple[Edit, ast.expr]]:
        """Torch's types for those of the parameters that both have, unless ours takes more; and of the result."""
        source = self.room.source
        types = {one.arg: one.annotation for one in _parameters(torchs) if one.annotation}
        for one in _parameters(ours):
            torchs_type = types.get(one.arg)
            if torchs_type is None or one.annotation is None or one.arg == "self":
                continue
            text = self.theirs.code(torchs_type)
            if not _members(text) < _members(source.code(one.annotation)):
                yield (source.start(one.annotation), source.end(one.annotation), text), one.annotation
        if torchs.returns is not None and ours.returns is not None:
            text = self.theirs.code(torchs.returns)
            yield (source.start(ours.returns), source.end(ours.returns), text), ours.returns


def _parameters(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _members(annotation: str) -> set[str]:
    """Of a union of types, or one of them, as text."""
    return {member.strip() for member in annotation.split("|")}


def _docstring(definition: ast.stmt) -> ast.stmt | None:
    first = definition.body[0]  # type: ignore[attr-defined]
    return first if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) else None


def _annotations(node: ast.stmt, local: bool = False) -> Iterator[ast.expr]:
    """Those that are looked at when the file runs, so not of local variables."""
    if isinstance(node, ast.AnnAssign) and not local:
        yield node.annotation
    if isinstance(node, ast.FunctionDef):
        arguments = [*_parameters(node), *filter(None, (node.args.vararg, node.args.kwarg))]
        yield from filter(None, [node.returns, *(one.annotation for one in arguments)])
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.stmt):
            yield from _annotations(inner, local or isinstance(node, Function))


def _names(block: Sequence[ast.stmt]) -> set[str]:
    return {name for statement in block for name in bound(statement)}


@functools.lru_cache(maxsize=64)  # each patch asks the same files
def _named(source: Source) -> dict[str, ast.stmt]:
    named: dict[str, ast.stmt] = {}
    for statement in (one for block in blocks(source.tree.body) for one in block):
        named |= dict.fromkeys(bound(statement), statement)
        if isinstance(statement, ast.ClassDef):
            members = {f"{statement.name}.{name}": one for one in statement.body for name in bound(one)}
            named |= members
    return named
