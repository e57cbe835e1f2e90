"""Our tests in upstream's test files: classes at their end, with the imports and helpers that these need.

What upstream has in the file stays as it is, and nothing of it is kept in this repository. On a tree without the file,
such as a copy of an installed torch, the same classes make a file by themselves.

A test of upstream's that holds torch to what a patch changes gets a decorator: `patches/insert/PATCH/test/FILE` names
it inside its class, with the decorator on top and ``...`` for what it does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import libcst as cst
from libcst import matchers

from .lay import with_imports
from .message import StackError
from .names import Import, bound, code_of, imports_of, is_import

_MAIN = matchers.If(test=matchers.Comparison(left=matchers.Name("__name__")))


def classes(text: str) -> set[str]:
    """The names of the classes at the top of a file."""
    return {s.name.value for s in cst.parse_module(text).body if isinstance(s, cst.ClassDef)}


def joined(path: str, there: str | None, ours: str) -> str:
    """The file with our tests before what runs it as a program.

    Args:
        path: of the file, which is ``there`` or, if that is None, comes with ``ours``.

    Raises:
        StackError: a name that stands for something else in the file.
    """
    if there is None:
        return ours
    theirs, added = _parsed(there), _parsed(ours)
    imported = {_key(found): found for s in theirs.body for found in imports_of(s, "")}
    defined = {name: s for s in theirs.body for name in bound(s)}
    body: list[cst.BaseStatement] = []
    imports: list[Import] = []
    grown: dict[str, cst.ClassDef] = {}
    for statement in added.body[1:] if added.get_docstring() is not None else added.body:
        imports += _lacking(path, imports_of(statement, ""), imported, defined)
        taken = sorted(bound(statement) & {*defined, *imported})
        if taken and (both := _with_more_tests(defined.get(taken[0]), statement)):
            grown[taken[0]] = both
        elif taken and not (taken[0] in defined and _same(defined[taken[0]], statement)):
            raise StackError(f"{path} has a {', '.join(taken)} of its own, so our tests need another name")
        if not (taken or is_import(statement) or matchers.matches(statement, _MAIN)):
            body.append(statement)  # type: ignore[arg-type]
    at = next((i for i, s in enumerate(theirs.body) if matchers.matches(s, _MAIN)), len(theirs.body))
    checks = "TYPE_CHECKING" in imported
    kept = [grown.get(s.name.value, s) if isinstance(s, cst.ClassDef) else s for s in theirs.body]
    after = theirs.with_changes(
        body=with_imports([*kept[:at], *body, *kept[at:]], imports, checks)  # type: ignore[list-item]
    )
    text = after.with_changes(body=()).code + code_of(after.body) if not after.footer else after.code
    _MADE[text] = after
    return text


_MADE: dict[str, cst.Module] = {}  # the next patch adds to what this one made


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> cst.Module:
    return _MADE.pop(text, None) or cst.parse_module(text)


def decorated(path: str, there: str, ours: str) -> str:
    """Upstream's file with the decorators of ours on its tests, and the imports that these need.

    Raises:
        StackError: a test that isn't there, or a name that stands for something else in the file.
    """
    theirs, marks = cst.parse_module(there), cst.parse_module(ours)
    found = {
        (owner.name.value, test.name.value): test.decorators
        for owner in marks.body
        if isinstance(owner, cst.ClassDef)
        for test in owner.body.body
        if isinstance(test, cst.FunctionDef)
    }
    decorate = _Decorate(found)
    after = theirs.visit(decorate)
    if left := [".".join(names) for names in found if names not in decorate.done]:
        raise StackError(f"{path} has no test {', '.join(left)}, which a patch decorates")
    imported = {_key(one): one for s in theirs.body for one in imports_of(s, "")}
    defined = {name: s for s in theirs.body for name in bound(s)}
    imports = [one for s in marks.body for one in _lacking(path, imports_of(s, ""), imported, defined)]
    return after.with_changes(body=with_imports([*after.body], imports, "TYPE_CHECKING" in imported)).code


class _Decorate(cst.CSTTransformer):
    def __init__(self, decorators: Mapping[tuple[str, str], Sequence[cst.Decorator]]) -> None:
        super().__init__()
        self.decorators = decorators
        self.done: set[tuple[str, str]] = set()

    def leave_ClassDef(self, original: cst.ClassDef, updated: cst.ClassDef) -> cst.ClassDef:
        body = [self._with_its_own(original.name.value, statement) for statement in updated.body.body]
        return updated.with_changes(body=updated.body.with_changes(body=body))

    def _with_its_own(self, owner: str, statement):  # type: ignore[no-untyped-def]
        if not isinstance(statement, cst.FunctionDef) or (owner, statement.name.value) not in self.decorators:
            return statement
        self.done.add((owner, statement.name.value))
        new = self.decorators[owner, statement.name.value]
        return statement.with_changes(decorators=[*new, *statement.decorators])


def _key(one: Import) -> str:
    """The name in the file; the module for ``import a.b``, which binds ``a`` and loads more than ``import a``."""
    return one.module if one.line() == f"import {one.module}" else one.bound


def _lacking(path: str, wanted, imported, defined) -> list[Import]:  # type: ignore[no-untyped-def]
    """What the file doesn't import yet; one name taken from two modules, as torch re-exports many, is one thing. What
    another test file of ours has may have landed in this file before."""
    found: list[Import] = []
    for one in wanted:
        if one.module.startswith("test_") and one.bound in defined:
            continue
        other = imported.get(_key(one))
        if one.bound in defined or (other is not None and other.name != one.name):
            raise StackError(f"{path} calls something else {one.bound} than {one.line()}")
        found += [] if other is not None else [one]
    return found


def _with_more_tests(there: cst.BaseStatement | None, ours: cst.BaseStatement) -> cst.ClassDef | None:
    """A class of an earlier patch with the tests that a later one adds; None if it isn't the same class."""
    if not (isinstance(there, cst.ClassDef) and isinstance(ours, cst.ClassDef)):
        return None
    known = {name: s for s in there.body.body for name in bound(s)}
    new = [s for s in ours.body.body if bound(s) - {*known}]
    both = [(known[name], s) for s in ours.body.body for name in bound(s) & {*known}]
    heads = [s.with_changes(body=cst.SimpleStatementSuite(())) for s in (there, ours)]
    if not all(_same(*pair) for pair in (heads, *both)):
        return None
    return there.with_changes(body=there.body.with_changes(body=[*there.body.body, *new]))


def _same(one: cst.BaseStatement, other: cst.BaseStatement) -> bool:
    """Two files of ours may bring one helper; what stands before it doesn't count."""
    bare = [s.with_changes(leading_lines=()) for s in (one, other)]  # type: ignore[call-arg]
    return bare[0].deep_equals(bare[1])
