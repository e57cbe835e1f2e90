"""All files of the stack on one tree: before the first patch, and after each."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterable, Sequence

from torch_overlay.patching.patch import Kind, Patch
from torch_overlay.series import PATCHES as ROWS

from .insert import insertions
from .lay import Laid
from .lint import Format
from .message import PATCHES, ROOT, PatchMessage, StackError
from .ours import OURS, SEAM, room, whole
from .suites import classes, decorated, joined
from .tree import Tree

State = dict[str, "str | None"]  # path in the tree: text, None where the file isn't there
CONFIG = "torch.distributed.config"  # the stack's switches go there; the overlay has a module of its own
STAYS = ("__init__.py", "tensor/__init__.py", "config.py")


def file_of(module: str) -> str:
    """``tensor/_planner/search.py`` for ``torch.distributed.tensor._planner.search``."""
    return "/".join(module.split(".")[2:]) + ".py"


# Torch's files that patches change: those with rows, the configuration, and the layouts, of which the overlay has
# classes of its own; what torch's lack goes into them.
CHANGED = {file_of(module) for module in (CONFIG, *(row.module for row in ROWS))} | {"_mesh_layout.py"}


def states(tree: Tree, messages: Sequence[PatchMessage]) -> list[State]:
    _check(tree, messages)
    torchs = functools.cache(lambda path: tree.read(path) if tree.exists(path) else None)
    upstream = Format(torchs)
    now: dict[str, str] = {}
    after = [now]
    for message in messages:
        new: dict[str, str] = {}
        for file in sorted(CHANGED):
            path = f"torch/distributed/{file}"
            text = now.get(path) or torchs(path)
            if text is not None and (changed := _changed(tree, message, file, text, torchs(path) or "")) != text:
                new[path] = changed
        new |= {f"torch/distributed/{file}": whole(file) for file in message.files}
        new |= {path: text for path, text in _packages(message).items() if torchs(path) is None and path not in now}
        new |= _tests(message, now, torchs)
        now = {**now, **upstream(new)}
        after.append(now)
    paths = sorted(now)
    return [{path: files.get(path, torchs(path)) for path in paths} for files in after]


def _changed(tree: Tree, message: PatchMessage, file: str, text: str, original: str) -> str:
    name = f"torch/distributed/{file}"
    rows = [target for target in message.rows if file_of(target.partition(":")[0]) == file]
    gone = [target.partition(":")[2] for target in message.removes if file_of(target.partition(":")[0]) == file]
    inserted = insertions(message.name, file)
    for one in inserted:
        text = one.apply(text, name)
    known = {row.target for row in ROWS}
    unlaid = {one.target for one in inserted}
    if lacking := unlaid - {"", *(target.partition(":")[2] for target in rows)}:
        raise StackError(f"{message.name}.md carries no row for {', '.join(sorted(lacking))} of {name}")
    here = {row.target: row for row in ROWS if tree.release.in_range(row)}
    laid = [
        target.partition(":")[2]
        for target in rows
        if target.partition(":")[2] not in unlaid
        and (target in here or target not in known)
        and not (target in here and tree.has_it(here[target]))
    ]
    if not (laid or gone or inserted):
        return text
    ours = room(file, OURS / file if file != "config.py" else pathlib.Path())
    return Laid(text, original, ours, laid, gone, inserted).text()


def _packages(message: PatchMessage) -> dict[str, str]:
    """The ``__init__.py`` of each folder of the patch's new files."""
    homes = dict.fromkeys(str(pathlib.PurePosixPath(file).with_name("__init__.py")) for file in message.files)
    return {f"torch/distributed/{home}": (OURS / home).read_text(encoding="utf-8") for home in homes}


def own_tests(message: PatchMessage) -> Iterable[tuple[str, str]]:
    """Path in the tree and text of each test file of a patch. There they import torch's modules in place of ours."""
    for ours, _, theirs in (test.partition("=") for test in message.tests):
        text = (ROOT / "test" / "stack" / ours).read_text(encoding="utf-8")
        yield f"test/distributed/{theirs or ours}", text.replace("torch_overlay.distributed", "torch.distributed")


def _tests(message: PatchMessage, now: dict[str, str], torchs: Callable[[str], str | None]) -> dict[str, str]:
    files: dict[str, str] = {}
    for path, text in own_tests(message):
        files[path] = joined(path, files.get(path) or now.get(path) or torchs(path), text)
    home = PATCHES / "insert" / message.name
    for marks in sorted(home.glob("test/**/*.py")):
        path = marks.relative_to(home).as_posix()
        if text := torchs(path):  # a copy of an installed torch has none
            files[path] = decorated(path, files.get(path) or now.get(path) or text, marks.read_text("utf-8"))
    return files


def _check(tree: Tree, messages: Sequence[PatchMessage]) -> None:
    """The tree doesn't have the stack yet, each new file is one of ours, and torch's functions are recognised."""
    new = new_files()
    refused = []
    for message in messages:
        refused += [f"{message.name}.md names {file}, which is no new file of ours" for file in {*message.files} - new]
        refused += [
            f"torch/distributed/{file}: the tree has a file of this name already"
            for file in message.files
            if tree.exists(f"torch/distributed/{file}")
        ]
        for path, text in own_tests(message):
            if tree.exists(path) and classes(text) & classes(tree.read(path)):
                refused.append(f"{path} has our tests, so the stack was rendered onto it already")
    here = {row.target: row for row in ROWS if tree.release.in_range(row)}
    known = {row.target for row in ROWS}
    for target in dict.fromkeys(target for message in messages for target in (*message.rows, *message.removes)):
        row = here.get(target) or (None if target in known else _added(target))
        if row is not None and (why := tree.unfit(row)):
            refused.append(f"{target}: {why}")
    if refused:
        lines = "".join(f"\n  {line}" for line in refused)
        raise StackError(f"{tree.root} isn't what the stack was written for:{lines}")


def _added(target: str) -> Patch | None:
    """A row for what the overlay has elsewhere, and torch's file of this name lacks."""
    module, _, qualname = target.partition(":")
    file = file_of(module)
    ours = room(file, OURS / file)
    if qualname.partition(".")[0] not in ours.definitions:
        return None  # a method that goes, or a function into which lines go
    return Patch(target, target.replace("torch.", "torch_overlay.", 1), Kind.ADD)


def new_files(ours: pathlib.Path = OURS) -> set[str]:
    files = {path.relative_to(ours).as_posix() for path in ours.rglob("*.py")}
    return files - {*CHANGED, *STAYS, f"{SEAM}.py"}


def missing_files(messages: Iterable[PatchMessage]) -> set[str]:
    return new_files() - {file for message in messages for file in message.files}
