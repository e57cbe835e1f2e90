"""All files of one prefix of the stack, as values: what each holds after the first `count` patches."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import libcst as cst

from torch_overlay.patching.patch import Kind, Patch
from torch_overlay.series import PATCHES as ROWS

from .gather import gather
from .insert import InsertFile, Insertion, read_insertions
from .lay import lay
from .lint import formatted, is_sorted
from .message import PATCHES, ROOT, PatchMessage, StackError
from .names import Import, bound, code_of, import_lines, used
from .reach import Reach, attributes, uses_of
from .room import OURS, Room, absent_names, identities, read_room, without_absent
from .suites import classes, decorated, joined
from .tree import Tree

CONFIG = "torch.distributed.config"  # the stack's switches go there; the overlay has options
LAYOUTS = "torch.distributed._mesh_layout"  # the overlay has its own; what torch's classes lack of it goes into them
BODIES = {"/".join(m.split(".")[2:]) + ".py" for m in {CONFIG, LAYOUTS, *(row.module for row in ROWS)}}  # torch's files


@dataclass
class Prefix:
    """The first patches of the stack on one tree.

    Attributes:
        messages: the patches that are in.
        later: the names of those that aren't, the next one first.
        probes: package and text of what else looks into files of ours that are there.
    """

    tree: Tree
    messages: Sequence[PatchMessage]
    later: Sequence[str]
    ours: pathlib.Path = OURS
    patches: pathlib.Path = PATCHES
    probes: Sequence[tuple[str, str]] = ()
    rooms: dict[str, Room] = field(default_factory=dict)

    def files(self) -> dict[str, str]:
        """Path in the tree: text. Raises StackError with every row that doesn't apply."""
        self._check_forms()
        self._check_tree()
        targets = self._targets()
        done: dict[str, str] = {}
        reach = Reach(self.room, self._room_file)
        for file, forms in targets.items():
            whole_bodies = tuple(name for name, inserted in forms.items() if not inserted)
            insertions = tuple(one for inserted in forms.values() for one in inserted)
            path = f"torch/distributed/{file}"
            gone = frozenset(qualname for module, qualname in self._removed() if file_of(module) == file)
            done[path], bodies = _laid(self.tree.read(path), self.room(file), whole_bodies, insertions, gone)
            reach.add_bodies(self.room(file), bodies)
        for file in self._named_files():
            reach.add_file(file, *self._used_anywhere)
        for text in self._own_tests().values():
            reach.add(uses_of(text, "torch.distributed"))
        for package, text in self.probes:
            reach.add_known(uses_of(text, package))
        new = reach.rooms()
        for file, room in new.items():
            path = f"torch/distributed/{file}"
            if self.tree.exists(path):
                raise StackError(f"{path}: the tree has a file of this name, which the stack would bring")
            done[path] = whole(room)
        done |= self._packages(new) | self.tests()
        there = {path: self.tree.read(path) for path in done if self.tree.exists(path)}
        sort = {path for path in done if path not in there or is_sorted(there[path])}
        return formatted(done, sort, there)

    def _named_files(self) -> list[str]:
        """What the patches bring whoever imports it."""
        for message in self.messages:
            for file in (*message.files, *message.parts):
                if file in BODIES or not (self.ours / file).is_file():
                    head = "Files" if file in message.files else "Parts"
                    raise StackError(f"{message.name}.md: '{head}:' names {file}, which is no new file of ours")
        return [file for message in self.messages for file in message.files]

    def _packages(self, files: Iterable[str]) -> dict[str, str]:
        """The ``__init__.py`` of each folder of these files that the tree doesn't have."""
        homes = dict.fromkeys(str(pathlib.PurePosixPath(file).with_name("__init__.py")) for file in files)
        absent = [home for home in homes if not self.tree.exists(f"torch/distributed/{home}")]
        return {f"torch/distributed/{home}": (self.ours / home).read_text(encoding="utf-8") for home in absent}

    def _own_tests(self) -> dict[tuple[str, str], str]:
        """The tests of these patches, by ``theirs, ours``; there they import torch's modules in place of ours."""
        found = {}
        for ours, _, theirs in (test.partition("=") for message in self.messages for test in message.tests):
            text = (ROOT / "test" / ours).read_text(encoding="utf-8")
            found[f"test/{theirs}", ours] = text.replace("torch_overlay.distributed", "torch.distributed")
        return found

    def tests(self) -> dict[str, str]:
        """The test files after these patches: upstream's with our classes, and new ones."""
        found: dict[str, str] = {}
        for (path, _), text in self._own_tests().items():
            there = found.get(path) or (self.tree.read(path) if self.tree.exists(path) else None)
            found[path] = _joined(path, there, text)
        for path, marks in self._marked_tests():
            found[path] = decorated(path, found.get(path) or self.tree.read(path), marks)
        return found

    def _marked_tests(self) -> list[tuple[str, str]]:
        """Upstream's test files that the tree has, and what these patches put on the tests in them."""
        homes = [self.patches / "insert" / message.name for message in self.messages]
        marks = [
            (path.relative_to(home).as_posix(), path) for home in homes for path in sorted(home.glob("test/**/*.py"))
        ]
        return [(file, path.read_text(encoding="utf-8")) for file, path in marks if self.tree.exists(file)]

    def room(self, file: str) -> Room:
        if file not in self.rooms:
            room = read_room(file, self._waiting, self.ours, self.patches, self._lacking)
            for message in self._inserting:
                inserted = self._inserted(message, file)
                room = inserted.added_to(room) if inserted else room
            self.rooms[file] = without_absent(room, self._absent, self._identities)
        return self.rooms[file]

    @functools.cached_property
    def _waiting(self) -> list[str]:
        """Those of the later patches for which there are forms."""
        homes = {path.name for path in (*self.patches.glob("until/*"), *self.patches.glob("lacking/*/until/*"))}
        return [name for name in self.later if name in homes]

    @functools.cached_property
    def _inserting(self) -> list[PatchMessage]:
        """Those of these patches that put lines into torch's files."""
        return [message for message in self.messages if (self.patches / "insert" / message.name).is_dir()]

    @functools.cached_property
    def _identities(self) -> frozenset[tuple[str, str]]:
        return identities(self.patches, self._lacking)

    @functools.cached_property
    def _lacking(self) -> list[str]:
        """The folders of forms for what the tree's torch lacks."""
        return [path.name for path in sorted((self.patches / "lacking").glob("*")) if self.tree.lacks(path.name)]

    @functools.cached_property
    def _absent(self) -> frozenset[tuple[str, str]]:
        return absent_names(self._waiting, self.patches)

    def _inserted(self, message: PatchMessage, file: str) -> InsertFile | None:
        return read_insertions(message.name, file, self.patches)

    def _check_forms(self) -> None:
        """What waits for a later patch belongs to a patch of the series and to a file of ours; so do insertions."""
        names = {message.name for message in self.messages} | set(self.later)
        for path in (self.patches / "insert").rglob("*.py"):
            patch, *file = path.relative_to(self.patches / "insert").parts
            if patch not in names or ("/".join(file) not in BODIES and file[0] != "test"):
                raise StackError(f"{path.relative_to(self.patches)} is for no patch, or for no file of torch's")
        for path in (self.patches / "until").rglob("*.py"):
            patch, *file = path.relative_to(self.patches / "until").parts
            if patch not in names or not self.ours.joinpath(*file).is_file():
                raise StackError(f"{path.relative_to(self.patches)} is for no patch, or for no file, that there is")

    def _check_tree(self) -> None:
        """The tree doesn't have the stack yet, and can be read."""
        for (path, _), text in self._own_tests().items():
            if self.tree.exists(path) and classes(text) & classes(self.tree.read(path)):
                raise StackError(
                    f"{self.tree.root} has {path}, so the stack was rendered onto it already. Give a tree as upstream "
                    "has it: check the files out again, or make another copy with --copy."
                )
        for file in sorted(BODIES):
            self.tree.require_python(f"torch/distributed/{file}")

    def _targets(self) -> dict[str, dict[str, list[Insertion]]]:
        """By file, the names that change, and what goes into each; a body of ours goes over those without.

        Those that the tree has already are left to it.
        """
        added = [_added(target) for message in self.messages for target in message.rows if target.startswith(LAYOUTS)]
        rows = {row.target: row for row in (*ROWS, *added) if self.tree.release.in_range(row)}
        refused: list[str] = []
        found: dict[str, dict[str, list[Insertion]]] = {}
        for target, insertions in self._forms().items():
            module, _, qualname = target.partition(":")
            if not qualname:
                found.setdefault(file_of(module), {})[qualname] = insertions
                continue
            if target not in {row.target for row in (*ROWS, *added)} and not insertions:
                raise StackError(f"{target}: the overlay's table has no such row")
            if insertions and target not in {row.target for row in ROWS}:  # a function that the overlay leaves alone
                found.setdefault(file_of(module), {})[qualname] = insertions
                continue
            if target not in rows:
                continue
            why = self.tree.unfit(rows[target])
            if why is not None:
                refused.append(f"  {target}: {why}")
            elif not self.tree.has_it(rows[target]):
                found.setdefault(file_of(module), {})[qualname] = insertions
        for target in {":".join(one) for one in self._removed()} & {*rows}:
            if why := self.tree.unfit(rows[target]):
                refused.append(f"  {target}: {why}")
        if refused:
            raise StackError("These functions aren't what the stack was written for:\n" + "\n".join(refused))
        return found

    def _removed(self) -> list[tuple[str, str]]:
        """Module and qualified name of what these patches take out of torch's files."""
        return [(t.partition(":")[0], t.partition(":")[2]) for message in self.messages for t in message.removes]

    def _forms(self) -> dict[str, list[Insertion]]:
        """What each target of these patches has: insertions, until a patch lays a body of ours over it."""
        forms: dict[str, list[Insertion]] = {}
        for message in self.messages:
            files = {file_of(module): module for module in (CONFIG, *(row.module for row in ROWS))}
            read = {file: inserted for file in files if (inserted := self._inserted(message, file))}
            here: dict[str, list[Insertion]] = {}
            for file, inserted in read.items():
                for one in inserted.insertions:
                    here.setdefault(f"{files[file]}:{one.target}", []).append(one)
            for target in [target for target in here if target.endswith(":")]:
                forms[target] = _bound_last([*forms.get(target, []), *here.pop(target)])
            for target in {*here} - {*message.rows}:
                raise StackError(f"{here[target][0].source}: {message.name}.md carries no row for {target}")
            for target in message.rows:
                before = forms.get(target)
                if target in here and before == []:
                    raise StackError(f"{here[target][0].source}: a patch before lays a body of ours over {target}")
                forms[target] = [*(before or []), *here[target]] if target in here else []
            for target in message.removes:
                forms.pop(target, None)
        return forms

    def _room_file(self, found: Import) -> tuple[str, bool] | None:
        """The room that an import names: ``from room import x``, or the whole of it, ``from . import room``."""
        for module, whole in ((found.module, found.name is None), (f"{found.module}.{found.name}", True)):
            file = file_of(module)
            if file in BODIES:
                return None  # torch's own file
            if module.startswith("torch.distributed.") and (self.ours / file).is_file():
                return file, whole
        return None

    @functools.cached_property
    def _used_anywhere(self) -> tuple[set[str], set[str]]:
        """Every name that the stack, all of it, looks up somewhere: as a name, and as an attribute."""
        files = [path.relative_to(self.ours).as_posix() for path in self.ours.rglob("*.py")]
        bodies = [statement for file in files for statement in self.room(file).body]
        rooms = [self.room(file) for file in files]
        taken = {i.name for room in rooms for i in room.used_by(list(room.body)) if i.name}
        for text in self._own_tests().values():
            taken |= {i.name for i in uses_of(text, "torch.distributed").imports if i.name}
        return taken.union(*(used(s) - bound(s) for s in bodies)), set().union(*map(attributes, bodies))


def _added(target: str) -> Patch:
    """A row for a member that torch's class lacks, and that the overlay has in a class of its own."""
    return Patch(target, target.replace("torch.", "torch_overlay.", 1), Kind.ADD)


def _bound_last(insertions: Sequence[Insertion]) -> list[Insertion]:
    """A statement whose names a later one binds makes way for that one, which goes nowhere else."""
    last = {name: line for one in insertions for line in one.lines for name in bound(line)}
    left: list[Insertion] = []
    placed: set[str] = set()
    for one in insertions:
        lines = [last[min(names)] if (names := bound(line)) else line for line in one.lines if not bound(line) & placed]
        placed |= {name for line in lines for name in bound(line)}
        left.append(replace(one, lines=tuple(lines)))
    return left


@functools.lru_cache(maxsize=64)  # a prefix has most of them as the one before
def _laid(
    text: str, room: Room, qualnames: tuple[str, ...], insertions: tuple[Insertion, ...], gone: frozenset[str]
) -> tuple[str, tuple[cst.BaseStatement, ...]]:
    """Torch's file with these bodies and insertions, and all that went into it."""
    laid = gather(text, room, qualnames, insertions, gone)
    return lay(text, room, laid), tuple(laid.bodies)


_joined = functools.lru_cache(maxsize=1024)(joined)  # all are asked in turn, so fewer than there are would keep none


def file_of(module: str) -> str:
    """``tensor/_planner/plan.py`` for ``torch.distributed.tensor._planner.plan``."""
    return "/".join(module.split(".")[2:]) + ".py"


def whole(room: Room) -> str:
    """A new file."""
    typed = [f"    {line}" for line in import_lines([i for i in room.imports if i.typed])]
    checking = Import("TYPE_CHECKING", "typing", "TYPE_CHECKING")
    plain = import_lines([*dict.fromkeys([*(i for i in room.imports if not i.typed), *([checking] if typed else [])])])
    head = [f'"""{room.docstring}"""', "", "from __future__ import annotations", "", *plain]
    if typed:
        head += ["", "if TYPE_CHECKING:", *typed]
    return "\n".join(head) + "\n\n" + code_of(room.body)
