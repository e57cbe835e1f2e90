"""All files of the first patches of the stack on one tree, as values."""

from __future__ import annotations

import contextlib
import functools
import gc
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch_overlay.patching.patch import Kind, Patch
from torch_overlay.series import PATCHES as ROWS

from .gather import gather
from .insert import Insertion, read_insertions
from .lay import lay
from .lint import formatted, is_sorted
from .message import PATCHES, ROOT, PatchMessage, StackError
from .names import bound
from .ours import OURS, SEAM, Room, room, whole
from .suites import classes, decorated, joined
from .tree import Tree

CONFIG = "torch.distributed.config"  # the stack's switches go there; the overlay has a module of its own
STAYS = (
    "__init__.py",
    "tensor/__init__.py",
    "config.py",
)
# Torch's files that rows change.
BODIES = {"/".join(m.split(".")[2:]) + ".py" for m in {CONFIG, *(row.module for row in ROWS)}}
BODIES.add("_mesh_layout.py")  # the overlay has classes of its own; what torch's lack goes into them


class Form(NamedTuple):
    """How a function of torch's changes.

    Attributes:
        inserted: lines that go into it.
        laid: whether a body of ours goes over it; what went into it stays where that keeps it under another name.
    """

    inserted: tuple[Insertion, ...] = ()
    laid: bool = False


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Trees of syntax are many small objects, none of them garbage; looking for some took a third of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(frozen=True)
class Prefix:
    """The first patches of the stack on one tree."""

    tree: Tree
    messages: Sequence[PatchMessage]
    ours: pathlib.Path = OURS
    patches: pathlib.Path = PATCHES

    @no_collection()
    def files(self) -> dict[str, str]:
        """Path in the tree: text. Raises StackError with every row that doesn't apply."""
        self._check()
        done: dict[str, str] = {}
        gone = self._removed()
        for file, forms in self._targets().items():
            ours = self._room(file)
            bodies = tuple(name for name, form in forms.items() if form.laid)
            stays = [form for name, form in forms.items() if not form.laid or name in ours.kept()]
            insertions = tuple(one for form in stays for one in form.inserted)
            path = f"torch/distributed/{file}"
            taken = frozenset(qualname for module, qualname in gone if file_of(module) == file)
            done[path] = _laid(self.tree.read(path), ours, bodies, insertions, taken)
        for file in (file for message in self.messages for file in message.files):
            done[f"torch/distributed/{file}"] = whole(file, self.ours)
        done |= self._packages() | self.tests()
        there = {path: self.tree.read(path) for path in done if self.tree.exists(path)}
        sort = {path for path in done if path not in there or is_sorted(there[path])}
        return formatted(done, sort, there)

    def _packages(self) -> dict[str, str]:
        """The ``__init__.py`` of each folder of new files that the tree doesn't have."""
        files = [file for message in self.messages for file in message.files]
        homes = dict.fromkeys(str(pathlib.PurePosixPath(file).with_name("__init__.py")) for file in files)
        absent = [home for home in homes if not self.tree.exists(f"torch/distributed/{home}")]
        return {f"torch/distributed/{home}": (self.ours / home).read_text(encoding="utf-8") for home in absent}

    def tests(self) -> dict[str, str]:
        """The test files after these patches: upstream's with our classes, and new ones."""
        found: dict[str, str] = {}
        for path, text in self._own_tests():
            there = found.get(path) or (self.tree.read(path) if self.tree.exists(path) else None)
            found[path] = _joined(path, there, text)
        for message in self.messages:
            home = self.patches / "insert" / message.name
            for marks in sorted(home.glob("test/**/*.py")):
                path = marks.relative_to(home).as_posix()
                if self.tree.exists(path):
                    found[path] = decorated(path, found.get(path) or self.tree.read(path), marks.read_text("utf-8"))
        return found

    def _own_tests(self) -> list[tuple[str, str]]:
        """Of each of these patches, path in the tree and text; there they import torch's modules in place of ours."""
        found = []
        for message in self.messages:
            for ours, _, theirs in (test.partition("=") for test in message.tests):
                text = (ROOT / "test" / "stack" / ours).read_text(encoding="utf-8")
                text = text.replace("torch_overlay.distributed", "torch.distributed")
                found.append((f"test/distributed/{theirs or ours}", text))
        return found

    def _check(self) -> None:
        """The tree can be read and doesn't have the stack yet, and each file that a patch brings is one of ours."""
        new = new_files(self.ours)
        for message in self.messages:
            for file in message.files:
                if file not in new or not (self.ours / file).is_file():
                    raise StackError(f"{message.name}.md: 'Files:' names {file}, which is no new file of ours")
                if self.tree.exists(f"torch/distributed/{file}"):
                    raise StackError(f"torch/distributed/{file}: the tree has a file of this name already")
        for path, text in self._own_tests():
            if self.tree.exists(path) and classes(text) & classes(self.tree.read(path)):
                raise StackError(
                    f"{self.tree.root} has {path}, so the stack was rendered onto it already. Give a tree as upstream "
                    "has it: check the files out again, or make another copy with --copy."
                )
        for file in sorted(BODIES):
            self.tree.require_python(f"torch/distributed/{file}")

    def _room(self, file: str) -> Room:
        """Our file for a file of torch's, with the helpers of what is inserted."""
        found = room(file, self.ours / file) if file != "config.py" else Room(file, (), ())
        for message in self.messages:
            inserted = read_insertions(message.name, file, self.patches)
            found = inserted.added_to(found) if inserted else found
        return found

    def _targets(self) -> dict[str, dict[str, Form]]:
        """By file, the names that change, and how.

        Those that the tree has already are left to it.
        """
        rows = {row.target: row for row in ROWS if self.tree.release.in_range(row)}
        known = {row.target for row in ROWS}
        refused: list[str] = []
        found: dict[str, dict[str, Form]] = {}
        for target, form in self._forms().items():
            module, _, qualname = target.partition(":")
            if not form.laid and (not qualname or target not in known):  # top level, or a function that we leave alone
                found.setdefault(file_of(module), {})[qualname] = form
                continue
            row = rows.get(target) or (None if target in known else self._added(target))
            if row is None:
                continue  # of another release
            elif why := self.tree.unfit(row):
                refused.append(f"  {target}: {why}")
            elif not self.tree.has_it(row):
                found.setdefault(file_of(module), {})[qualname] = form
        for target in {":".join(one) for one in self._removed()} & {*rows}:
            if why := self.tree.unfit(rows[target]):
                refused.append(f"  {target}: {why}")
        if refused:
            raise StackError("These functions aren't what the stack was written for:\n" + "\n".join(refused))
        return found

    def _added(self, target: str) -> Patch:
        """A row for what the overlay has elsewhere, and torch's file of this name lacks."""
        module, _, qualname = target.partition(":")
        file = file_of(module)
        if not (self.ours / file).is_file() or qualname.partition(".")[0] not in self._room(file).defined:
            raise StackError(f"{target}: the overlay's table has no such row, and its file of this name no definition")
        return Patch(target, target.replace("torch.", "torch_overlay.", 1), Kind.ADD)

    def _removed(self) -> list[tuple[str, str]]:
        """Module and qualified name of what these patches take out of torch's files."""
        return [(t.partition(":")[0], t.partition(":")[2]) for message in self.messages for t in message.removes]

    def _forms(self) -> dict[str, Form]:
        """How each target of these patches changes: by insertions, until a patch lays a body of ours over it."""
        forms: dict[str, Form] = {}
        files = {file_of(module): module for module in (CONFIG, *(row.module for row in ROWS))}
        for message in self.messages:
            here: dict[str, list[Insertion]] = {}
            for file, module in files.items():
                inserted = read_insertions(message.name, file, self.patches)
                for one in inserted.insertions if inserted else ():
                    here.setdefault(f"{module}:{one.target}", []).append(one)
            for target in [target for target in here if target.endswith(":")]:
                forms[target] = Form(_bound_last([*forms.get(target, Form()).inserted, *here.pop(target)]))
            for target in {*here} - {*message.rows}:
                raise StackError(f"{here[target][0].source}: {message.name}.md carries no row for {target}")
            for target in message.rows:
                before = forms.get(target, Form())
                if target in here and before.laid:
                    raise StackError(f"{here[target][0].source}: a patch before lays a body of ours over {target}")
                forms[target] = Form((*before.inserted, *here.get(target, ())), target not in here)
            for target in message.removes:
                forms.pop(target, None)
        return forms


def _bound_last(insertions: Sequence[Insertion]) -> tuple[Insertion, ...]:
    """A statement whose names a later one binds makes way for that one, which goes nowhere else."""
    last = {name: line for one in insertions for line in one.lines for name in bound(line)}
    left: list[Insertion] = []
    placed: set[str] = set()
    for one in insertions:
        lines = [last[min(names)] if (names := bound(line)) else line for line in one.lines if not bound(line) & placed]
        placed |= {name for line in lines for name in bound(line)}
        left.append(replace(one, lines=tuple(lines)))
    return tuple(left)


@functools.lru_cache(maxsize=64)  # a prefix has most of them as the one before
def _laid(
    text: str, ours: Room, qualnames: tuple[str, ...], insertions: tuple[Insertion, ...], gone: frozenset[str]
) -> str:
    """Torch's file with these bodies and insertions."""
    return lay(text, ours, gather(text, ours, qualnames, insertions, gone))


_joined = functools.lru_cache(maxsize=1024)(joined)  # all are asked in turn, so fewer than there are would keep none


def file_of(module: str) -> str:
    """``tensor/_planner/search.py`` for ``torch.distributed.tensor._planner.search``."""
    return "/".join(module.split(".")[2:]) + ".py"


def new_files(ours: pathlib.Path = OURS) -> set[str]:
    """All files of ours that are new upstream."""
    found = {path.relative_to(ours).as_posix() for path in ours.rglob("*.py")}
    return found - {*BODIES, *STAYS, f"{SEAM}.py"}


def missing_files(messages: Iterable[PatchMessage], ours: pathlib.Path = OURS) -> set[str]:
    """The new files that no patch brings."""
    return new_files(ours) - {file for message in messages for file in message.files}
