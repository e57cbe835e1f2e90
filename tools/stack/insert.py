"""Lines that a patch puts into a function of torch's, before a statement that stands there already.

`patches/insert/PATCH/FILE` names the place by definitions inside each other, classes and functions, nested as torch's
file nests them. The innermost ends with the anchor, ``name = ...``: what stands above it goes before the only statement
of torch's function or class that binds the name; with ``if condition: ...``, before the only one that asks this. Among
the lines, ``del NAME, ...`` takes out what they make superfluous: torch's statements that bind these names, each ``if``
that asks them, and a ``with`` that is empty then. ``NAME(..., keyword=value)`` gives the keyword to torch's calls of
NAME that lack it. Parameters with a default are added to those of torch's function. ``{"key": ..., "new": value}`` puts
the new entries at the end of torch's dict that has the key, ``[first, new]`` at the end of its list that has the first.

A file that itself ends with an anchor goes to the top level of torch's file. If an earlier patch binds a name there
already, the statement takes the place of that one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from .message import PATCHES, StackError
from .ours import package_of
from .source import Edit, Function, Import, Source, bound, edited, find, imports, inside, is_import, read, used


@dataclass(frozen=True)
class Insertion:
    path: str  # the file of ours
    source: Source
    place: tuple[str, ...]  # the names of the definitions around it, the outermost first
    node: ast.FunctionDef | ast.ClassDef | ast.Module  # the innermost of them in our file, or the file's tree
    imports: tuple[Import, ...]  # of our file

    @property
    def target(self) -> str:
        """The function or method that a row names, which is the place or lies around it; "" for a class or a file."""
        outer = self.place[:2] if self.place and self.place[0][0].isupper() else self.place[:1]
        return "" if isinstance(self.node, (ast.ClassDef, ast.Module)) else ".".join(outer)

    @property
    def lines(self) -> list[ast.stmt]:
        """What goes before the anchor. Imports at top level are those that the lines need."""
        body = self.node.body[:-1]
        documented = body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        return [one for one in body[bool(documented) :] if self.place or not is_import(one)]

    def apply(self, text: str, name: str) -> str:
        theirs = read(text, name)
        node = find(theirs.tree, self.place)
        if node is None:
            raise self._refused(name, "isn't there")
        edits = [*self._parameters(theirs, node)]
        if anchor_name := _anchor(self.node.body[-1]):
            anchors = [
                (block, one) for block in inside(node) for one in block if anchor_name in {*bound(one), _asked(one)}
            ]
            if len(anchors) != 1:
                raise self._refused(name, f"binds {anchor_name} {len(anchors)} times, and the lines go before the one")
            ((block, anchor),) = anchors
            before = block.index(anchor)
            at = theirs.span(block[before - 1])[1] if before else theirs.span(anchor)[0]
            for line in self.lines:
                edits += self._edits(line, theirs, node, name, at, anchor.col_offset)
        return edited(theirs.data, edits)

    def _parameters(self, theirs: Source, node: ast.AST) -> Iterator[Edit]:
        """The parameters with a default that the function takes from then on."""
        if isinstance(self.node, ast.FunctionDef) and (defaults := self.node.args.defaults):
            new = zip(self.node.args.args[-len(defaults) :], defaults, strict=True)
            last = node.args.defaults[-1] if node.args.defaults else node.args.args[-1]  # type: ignore[attr-defined]
            at = theirs.end(last)
            yield at, at, "".join(f", {self.source.code(arg)} = {self.source.code(default)}" for arg, default in new)

    def _edits(self, line: ast.stmt, theirs: Source, node: ast.AST, name: str, at: int, indent: int) -> Iterator[Edit]:
        """What one of our lines changes in torch's definition; a statement goes to ``at``."""
        value = line.value if isinstance(line, ast.Expr) else None
        statements = [one for block in inside(node) for one in block]
        edits: list[Edit] = []
        if isinstance(line, ast.Delete):
            gone = {target.id for target in line.targets if isinstance(target, ast.Name)}
            if left := gone.difference(*map(bound, statements)):
                raise self._refused(name, f"binds no {', '.join(sorted(left))}")
            edits = [(*theirs.span(one), "") for one in statements if _goes(one, gone)]
        elif isinstance(value, ast.Call) and value.args and ast.unparse(value.args[0]) == "...":
            keywords = "".join(f", {self.source.code(one)}" for one in value.keywords)
            for call in (one for statement in statements for one in ast.walk(statement) if isinstance(one, ast.Call)):
                given = {one.arg for one in call.keywords} & {one.arg for one in value.keywords}
                if ast.unparse(call.func) == ast.unparse(value.func) and not given:
                    last = max(map(theirs.end, [*call.args, *(one.value for one in call.keywords)]))
                    edits.append((last, last, keywords))
            edits = [*dict.fromkeys(edits)]  # a call in a block inside a block is met twice
        elif isinstance(value, (ast.Dict, ast.List)):
            (known, _), *new = _entries(value)
            for there in (one for one in ast.walk(node) if isinstance(one, (ast.Dict, ast.List))):
                keys = {key for key, _ in _entries(there)}
                if known in keys:
                    new = [entry for entry in new if entry[0] not in keys]  # a later release may have some of them
                    last = max(map(theirs.end, [entry for _, entry in _entries(there)]))
                    edits.append((last, last, "".join(f", {self._entry(value, entry)}" for _, entry in new)))
        else:
            there = [one for one in theirs.tree.body if not self.place and bound(one) & bound(line)]
            start, end = theirs.span(there[0]) if there else (at, at)
            edits.append((start, end, self.source.statement(line, indent=indent)))
        if not edits:
            raise self._refused(name, f"has nothing that {self.source.code(line)!r} changes")
        yield from edits

    def _entry(self, shown: ast.Dict | ast.List, entry: ast.expr) -> str:
        key = shown.keys[shown.values.index(entry)] if isinstance(shown, ast.Dict) else None
        return self.source.code(entry) if key is None else f"{self.source.code(key)}: {self.source.code(entry)}"

    def _refused(self, name: str, why: str) -> StackError:
        return StackError(f"{name}: {'.'.join(self.place) or 'its top level'} {why} ({self.path})")


def _goes(statement: ast.stmt, gone: set[str]) -> bool:
    """True for a statement that binds these names alone, an ``if`` that asks them, and a ``with`` around such."""
    if isinstance(statement, ast.With):
        return all(_goes(one, gone) for one in statement.body)
    names = bound(statement)
    return (bool(names) and names <= gone) or (isinstance(statement, ast.If) and bool(used(statement.test) & gone))


def _entries(shown: ast.Dict | ast.List) -> list[tuple[str, ast.expr]]:
    """By what an entry is known, and what it is: the key of a dict, the element of a list itself."""
    if isinstance(shown, ast.List):
        return [(ast.unparse(one), one) for one in shown.elts]
    return [(ast.unparse(key), value) for key, value in zip(shown.keys, shown.values) if key is not None]


def _anchor(statement: ast.stmt) -> str:
    """The name of ``name = ...``, the head of ``if condition: ...``; "" for another statement."""
    if isinstance(statement, ast.If) and ast.unparse(statement.body[0]) == "...":
        return _asked(statement)
    is_anchor = isinstance(statement, ast.Assign) and ast.unparse(statement.value) == "..."
    return next(iter(bound(statement))) if is_anchor else ""


def _asked(statement: ast.stmt) -> str:
    return f"if {ast.unparse(statement.test)}" if isinstance(statement, ast.If) else ""


def insertions(patch: str, file: str) -> list[Insertion]:
    """What the patch puts into the file. Raises StackError for a file that names no place."""
    path = PATCHES / "insert" / patch / file
    if not path.exists():
        return []
    name = f"patches/insert/{patch}/{file}"
    source = read(path.read_text(encoding="utf-8"), name)
    needed = tuple(imports(source.tree.body, package_of(file)))

    def under(node: ast.stmt | ast.Module, place: tuple[str, ...]) -> Iterator[Insertion]:
        if isinstance(node, (*Function, ast.ClassDef, ast.Module)):
            if _anchor(node.body[-1]) or (isinstance(node, ast.FunctionDef) and node.args.defaults):
                yield Insertion(name, source, place, node, needed)  # type: ignore[arg-type]
            for inner in node.body:
                yield from under(inner, (*place, *sorted(bound(inner))))

    listed = [*under(source.tree, ())]
    if not listed:
        raise StackError(f"{name} has no definition that ends with 'name = ...', so nothing says where its lines go")
    return listed
