"""Files of `torch_overlay/distributed` as upstream has them.

They are in upstream's form, so all but three things stays as it is. Lines and definitions that end with
``# overlay only`` stay here. ``NAME = 1  # upstream: 2`` is ``NAME = 2`` there. And the seam stays here: where our code
is torch's own, each of its functions would return its first argument, which takes the place of the call.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from dataclasses import dataclass

from .message import ROOT, StackError
from .source import Edit, Import, Source, bound, edited, imports, read

OURS = ROOT / "torch_overlay" / "distributed"
HERE_ONLY = "# overlay only"
_OTHER_VALUE = re.compile(rb"  # upstream: (.*)")
SEAM = "_torch"
# The one function of the seam that doesn't return its argument: after NAME = original(module, "function") torch's
# function goes on under this name.
ORIGINAL = "original"
CARRIERS = {name: f"_{name}" for name in ("DeviceMesh", "DTensorSpec", "Redistribute")}  # torch's: ours with methods


def whole(file: str, ours: pathlib.Path = OURS) -> str:
    return _upstream((ours / file).read_text(encoding="utf-8"), str(ours / file))


@functools.lru_cache(maxsize=256)
def _upstream(text: str, name: str) -> str:
    source = read(text, name)
    functions: set[str] = set()
    edits: list[Edit] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.level and node.module == SEAM:
            functions |= {one.asname or one.name for one in node.names} - {ORIGINAL}
            edits.append((*source.span(node), ""))
        elif isinstance(node, ast.stmt) and source.marked(node, HERE_ONLY):
            edits.append((*source.span(node, headings=True), "\n"))
        elif isinstance(node, ast.Assign) and (other := _OTHER_VALUE.match(source.data, source.end(node))):
            edits.append((source.start(node.value), other.end(), other[1].decode()))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
            first = node.args[0]
            edits.append((source.start(node), source.start(first), ""))
            edits.append((source.end(first), source.end(node), ""))
    return edited(source.data, edits)


@dataclass(frozen=True)
class Room:
    file: str
    source: Source
    imports: tuple[Import, ...]  # of the file, without torch's file itself
    # for each ``NAME = original(module, "function")``, torch's function (a method with its class) to NAME
    kept: dict[str, str]
    # that make its code fit there. It needs no door to its own module, and no ``self: DeviceMesh``
    edits: tuple[Edit, ...]

    @property
    def definitions(self) -> dict[str, ast.stmt]:
        return {name: statement for statement in self.source.tree.body for name in bound(statement)}

    def member(self, owner: str, name: str) -> ast.stmt:
        """What the class of ours that stands for `owner` has under this name."""
        carrier = self.definitions.get(CARRIERS.get(owner, owner))
        for statement in carrier.body if isinstance(carrier, ast.ClassDef) else ():
            if name in bound(statement):
                return statement
        raise StackError(f"torch_overlay/distributed/{self.file}: class {CARRIERS.get(owner, owner)} has no {name}")

    def docstring_of(self, kept: str) -> ast.stmt | None:
        """The string below ``NAME = original(module, "function")``: what the function does that has this name then."""
        body = self.source.tree.body
        below = body[body.index(self.definitions[kept]) + 1]
        return below if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None


@functools.lru_cache(maxsize=64)
def room(file: str, path: pathlib.Path) -> Room:
    """A file of ours that goes into torch's file of this name; an empty one if there is none."""
    source = read(_upstream(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else "", str(path))
    package = package_of(file)
    module = f"{package}.{pathlib.PurePosixPath(file).stem}"
    imported = [*imports(source.tree.body, package)]
    doors = {one.bound for one in imported if f"{one.home}.{one.name}" == module}
    kept = {target: name for one in source.tree.body for target in [_kept(one)] if target for name in bound(one)}
    methods = {name for target, name in kept.items() if "." in target}
    edits: list[Edit] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in doors:
            edits.append((source.start(node), source.end(node), node.attr))
        elif isinstance(node, ast.arg) and node.arg == "self" and node.annotation:
            edits.append((source.start(node), source.end(node), "self"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
            edits.append((source.start(node), source.end(node), "super()"))  # our carrier isn't the class that it names
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in methods:
            call = f"{source.code(node.args[0])}.{kept_method(node.func.id)}("
            edits.append((source.start(node), source.start(node.args[1]), call))
    others = tuple(one for one in imported if one.home != module and one.bound not in doors)
    return Room(file, source, others, kept, tuple(edits))


def kept_method(name: str) -> str:
    """What a kept method is called in its class: ``_equals_by_value`` for ``equals_by_value = original(Class, …)``."""
    return f"_{name.lstrip('_')}"


def _kept(statement: ast.stmt) -> str | None:
    """What ``NAME = original(module, "function")`` keeps; None for another statement."""
    call = statement.value if isinstance(statement, ast.Assign) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != ORIGINAL:
        return None
    home, name = call.args
    assert isinstance(name, ast.Constant), ast.dump(name)
    return f"{home.attr}.{name.value}" if isinstance(home, ast.Attribute) and home.attr[0].isupper() else name.value


def package_of(file: str) -> str:
    """``torch.distributed.tensor`` for ``tensor/_planner/search.py``."""
    return ".".join(["torch", "distributed", *pathlib.PurePosixPath(file).parts[:-1]])
