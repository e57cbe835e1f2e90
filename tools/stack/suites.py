"""Our tests in upstream's test files: classes at their end, with the imports and helpers that these need.

What upstream has in the file stays as it is, and nothing of it is kept in this repository. On a tree without the file,
such as a copy of an installed torch, the same classes make a file by themselves.

A test of upstream's that holds torch to what a patch changes gets a decorator: `patches/insert/PATCH/test/FILE` names
it inside its class, with the decorator on top and ``...`` for what it does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from .message import StackError
from .source import Edit, Import, Source, bound, edited, find, import_edits, imports, is_import, read


def classes(text: str) -> set[str]:
    return {one.name for one in ast.parse(text).body if isinstance(one, ast.ClassDef)}


def joined(path: str, there: str | None, added: str) -> str:
    """The file with our tests before what runs it as a program. If it isn't ``there``, it comes with what is added."""
    if there is None:
        return added
    theirs, ours = read(there, path), read(added, path)
    body = theirs.tree.body
    defined = {name: one for one in body for name in bound(one)}
    imported = {_key(one): one for one in imports(body, "")}
    at = next((theirs.span(one)[0] for one in body if _runs(one)), len(theirs.data))
    edits = [*_import_edits(path, theirs, ours, imported, defined)]
    for statement in ours.tree.body:
        taken = sorted(bound(statement) & {*defined, *imported})
        docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if docstring or is_import(statement) or _runs(statement):
            continue
        if not taken:
            edits.append((at, at, f"{ours.statement(statement)}\n\n"))
        elif ast.dump(defined.get(taken[0], ast.Pass())) != ast.dump(statement):
            end, text = _more_tests(path, theirs, defined.get(taken[0]), ours, statement)
            edits.append((end, end, text))
    return edited(theirs.data, edits)


def _more_tests(path: str, theirs: Source, there: ast.stmt | None, ours: Source, more: ast.stmt) -> tuple[int, str]:
    """The tests that a class of an earlier patch lacks, and where they go. StackError if it isn't the same class."""
    if isinstance(there, ast.ClassDef) and isinstance(more, ast.ClassDef):
        known = {name: one for one in there.body for name in bound(one)}
        both = [(known[name], one) for one in more.body for name in bound(one) & {*known}]
        heads = [[ast.dump(one) for one in (*c.bases, *c.keywords, *c.decorator_list)] for c in (there, more)]
        if heads[0] == heads[1] and all(ast.dump(one) == ast.dump(other) for one, other in both):
            new = [one for one in more.body if bound(one) - {*known}]
            return theirs.span(there)[1], "".join(f"\n{ours.statement(one, indent=4)}" for one in new)
    raise StackError(f"{path} has a {', '.join(sorted(bound(more)))} of its own, so our tests need another name")


def decorated(path: str, there: str, marks: str) -> str:
    """Upstream's file with the decorators of ours on its tests, and the imports that these need."""
    theirs, ours = read(there, path), read(marks, path)
    defined = {name: one for one in theirs.tree.body for name in bound(one)}
    edits = [*_import_edits(path, theirs, ours, {_key(one): one for one in imports(theirs.tree.body, "")}, defined)]
    for owner in (one for one in ours.tree.body if isinstance(one, ast.ClassDef)):
        for test in (one for one in owner.body if isinstance(one, ast.FunctionDef)):
            theirs_test = find(theirs.tree, (owner.name, test.name))
            if not isinstance(theirs_test, ast.FunctionDef):
                raise StackError(f"{path} has no test {owner.name}.{test.name}, which a patch decorates")
            at = theirs.span(theirs_test, comments=False)[0]
            edits.append((at, at, "".join(f"    @{ours.code(one)}\n" for one in test.decorator_list)))
    return edited(theirs.data, edits)


def _import_edits(
    path: str, theirs: Source, ours: Source, imported: Mapping[str, Import], defined: Mapping[str, ast.stmt]
) -> Iterator[Edit]:
    """Edits that import what the file lacks. One name from two modules, as torch re-exports many, is one thing."""
    new: list[Import] = []
    for one in imports(ours.tree.body, ""):
        if one.home.startswith("test_") and one.bound in defined:
            continue
        other = imported.get(_key(one))
        if one.bound in defined or (other is not None and other.name != one.name):
            raise StackError(f"{path} calls something else {one.bound} than {one.home} does")
        new += [] if other is not None else [one]
    yield from import_edits(theirs, theirs.tree.body, new, "TYPE_CHECKING" in imported)


def _runs(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test).startswith("__name__ ==")


def _key(one: Import) -> str:
    """The name in the file; the module for ``import a.b``, which binds ``a`` and loads more than ``import a``."""
    return one.home if one.name is None and one.bound == one.home.partition(".")[0] else one.bound
