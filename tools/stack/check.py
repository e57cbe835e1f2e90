"""Does a torch that carries the stack behave like the overlay? Our suites on a patched copy, results side by side."""

from __future__ import annotations

import ast
import functools
import importlib.util
import pathlib
import py_compile
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .copied import copy_torch, installed_torch
from .message import PATCHES, ROOT, PatchMessage, StackError
from .reach import uses_of
from .record import CHECKED, Record
from .record import program as digest
from .render import Prefix
from .room import OURS
from .runs import Results, compare, environment, ran, random_moves, results
from .tree import Tree, write

NEEDED = ("pytest", "pytest_timeout", "hypothesis", "expecttest", "numpy")
MESH, REDISTRIBUTE, PURE = SUITES = ("test/mesh", "test/redistribute", "test/pure")
# From this patch on a suite ends as under the overlay, before it as on torch as it is. The tests turn on what is still
# off by default then (test/way.py).
ON = {MESH: "shared-by-default", REDISTRIBUTE: "planned-by-default"}
# Whose patches change what a suite sees, by the tag of their titles.
TAGS = {MESH: ("[DeviceMesh]", "[c10d]"), REDISTRIBUTE: ("[DTensor]",)}
CELLS = (*SUITES, "its tests", "random moves wrong", "at")
HEAD = ("after", *CELLS)
UNCHANGED = "as before"


def check(
    messages: Sequence[PatchMessage],
    counts: Sequence[int],
    suites: Sequence[str] = SUITES,
    checked: pathlib.Path = CHECKED,
) -> int:
    """Render each prefix onto a copy, import it, run what must hold there, a line each; 1 if something differs.

    The whole stack runs the suites, and each test must end as it does under the overlay. Of a shorter one, the tests of
    meshes run after each [DeviceMesh] patch and those of redistributions after each [DTensor] patch: as on torch as it
    is, until what they ask for is on by default. Where no file changes that torch's own import, nothing can end
    otherwise, and only tests of the files that do run. Pure tests run where the files are there that they import. Each
    prefix runs the tests that its patches bring, and the random moves. A prefix in which nothing differed with all
    suites is kept in ``checked``, with the commit at which it ran, and doesn't run again as long as it is that program.
    """
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise StackError(f"--check runs the suites, which need {', '.join(missing)}: pip install -e '.[test,dev]'")
    plain = functools.cache(lambda suite, way: results([suite], way))
    release = Tree.at(installed_torch().parent).release.name
    record = Record(release, CELLS, [message.name for message in messages], checked)
    whole, wrong = {*suites} == {*SUITES}, 0
    _print_row(HEAD)
    _print_row(["---"] * len(HEAD))
    _print_row(["torch as it is", *[""] * 4, random_moves(None), ""])
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            name, program = messages[count - 1].name, _program(tuple(messages), count)
            cells, differing = record.found(name, program) if whole else None, []
            if cells is None:
                prefix = patched(tuple(messages), count, pathlib.Path(folder))
                cells, differing = _ended(prefix, suites, plain)
                if whole and not differing:
                    record.keep(name, program, cells)
            _print_row([f"{count} `{name}`", *cells])
            print("".join(f"  {line}\n" for line in differing), end="", flush=True)
            wrong += bool(differing)
    return 1 if wrong else 0


def _ended(prefix: Patched, suites: Sequence[str], plain) -> tuple[list[str], list[str]]:  # type: ignore[no-untyped-def]
    """The cells of a prefix, and what ended otherwise than it should."""
    cells, differing = [], []
    for suite in dict.fromkeys((*SUITES, *suites)):
        ended, lines = _suite(prefix, suite, plain) if suite in suites else ({}, [])
        cells.append(_said(ended, lines))
        differing += lines
    ended = results([f"test/{test}" for test in prefix.tests], "patched", prefix.folder) if prefix.tests else {}
    lines = [f"{name}: {outcome}, and its patch is in" for name, outcome in ended.items() if outcome != "passed"]
    moved = random_moves(prefix.folder) if prefix.changed else UNCHANGED
    return [*cells, _said(ended, lines), moved, _commit()], differing + lines


def _commit() -> str:
    """Where the checkout is; with a plus if it has changes."""
    said = [
        subprocess.run(["git", *asked], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for asked in (
            ("rev-parse", "--short", "HEAD"),
            ("status", "--porcelain", "-uno", "--", ".", ":!patches/checked.csv"),
        )
    ]
    return f"{said[0]}+" if said[1] else said[0]


def _program(messages: tuple[PatchMessage, ...], count: int) -> str:
    """Of the last patch and all below it: what torch's files and the patches' tests do before it and after. How many
    patches there are doesn't count."""
    states = {"before": _files(messages, count - 1), "after": _files(messages, count)}
    texts = {f"{when}/{path}": text for when, files in states.items() for path, text in files.items()}
    return digest({path: text for path, text in texts.items() if path.endswith(".py")})


def _print_row(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def _said(ended: Results, differing: Sequence[str]) -> str:
    if not ran(ended) and not differing:
        return UNCHANGED
    return f"{ran(ended)}, {len(differing)} differ" if differing else f"{ran(ended)}"


@dataclass(frozen=True)
class Patched:
    """A copy of the installed torch with some patches.

    Attributes:
        messages: of all patches, of which the first ``count`` are in.
        changed: the files that the last of these changed, of torch's own and what they import.
        idle: the files that it brought or changed and that nothing of torch's imports.
    """

    messages: Sequence[PatchMessage]
    count: int
    folder: pathlib.Path
    changed: frozenset[str]
    idle: frozenset[str]

    @property
    def message(self) -> PatchMessage:
        return self.messages[self.count - 1]

    @property
    def is_whole(self) -> bool:
        return self.count == len(self.messages)

    @property
    def tests(self) -> list[str]:
        """The tests that its patches bring: all, or those of the last patch and of idle files if none else differ."""
        found = {test.partition("=")[0]: message for message in self.messages[: self.count] for test in message.tests}
        asking = {test for test in found if _asked_files(ROOT / "test" / test) & self.idle}
        return [test for test, message in found.items() if self.changed or message is self.message or test in asking]

    @property
    def later(self) -> set[str]:
        """The names of members that patches after these bring, or tell the compiler."""
        after = self.messages[self.count :]
        inserted = [path for message in after for path in (PATCHES / "insert" / message.name).glob("*.py")]
        brought = {row.rpartition(".")[2] for message in after for row in message.rows}
        return brought.union(*map(_new_keys, inserted))

    def has(self, patch: str) -> bool:
        return patch in [message.name for message in self.messages[: self.count]]

    def pure_tests(self) -> list[str]:
        """The files of pure tests that ask for something of this patch, and for nothing that isn't there."""
        found = []
        for path in sorted((ROOT / PURE).glob("test_*.py")):
            asked = _asked_files(path)
            there = {file for file in asked if (self.folder / file).is_file()}
            if there == asked and (self.is_whole or asked & (self.changed | self.idle)):
                found.append(f"{PURE}/{path.name}")
        return found


def _new_keys(path: pathlib.Path) -> set[str]:
    """The keys that a patch puts into dictionaries of torch's, such as the members of a mesh that dynamo may use."""
    found = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Dict)]
    pairs = [pair for node in found for pair in zip(node.keys, node.values, strict=True)]
    return {ast.literal_eval(key) for key, value in pairs if key is not None and ast.unparse(value) != "..."}


def _suite(prefix: Patched, suite: str, plain) -> tuple[Results, list[str]]:  # type: ignore[no-untyped-def]
    """How a suite ends, and what it shouldn't: nothing of both where nothing can end otherwise than before."""
    if suite == PURE and not prefix.is_whole:
        files = prefix.pure_tests()
        ended = results(files, "patched", prefix.folder) if files else {}
        return ended, [f"{name}: {how}" for name, how in ended.items() if how.startswith("failed")]
    if not prefix.is_whole and not (prefix.changed and prefix.message.title.startswith(TAGS.get(suite, "["))):
        return {}, []
    on = prefix.is_whole or prefix.has(ON.get(suite, ""))
    ended = results([suite], "patched" if on else "stock", prefix.folder)
    return ended, compare(plain(suite, "overlay" if on else "stock"), ended, prefix.later)


@functools.cache
def _asked_files(path: pathlib.Path) -> set[str]:
    """The files of torch that a test, and what stands beside it, import in place of ours."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            beside = ROOT / "test" / f"{module.partition('.')[0]}.py"
            found |= _asked_files(beside) if beside.is_file() else _file_of(module)
    return found


def _file_of(module: str) -> set[str]:
    """``torch/distributed/_rank_map.py`` for ``torch_overlay.distributed._rank_map``, or for a name in it."""
    parts = module.split(".")
    if parts[:2] != ["torch_overlay", "distributed"]:
        return set()
    for end in (len(parts), len(parts) - 1):
        file = pathlib.PurePosixPath(*parts[2:end]).with_suffix(".py") if parts[2:end] else None
        if file is not None and (OURS / file).is_file():
            return {f"torch/distributed/{file}"}
    return set()


@functools.cache
def _probes() -> list[tuple[str, str]]:
    """What our suites look into, which users of torch don't."""
    found = []
    for path in sorted((ROOT / "test").rglob("*.py")):
        text = path.read_text(encoding="utf-8").replace("torch_overlay.distributed", "torch.distributed")
        found.append((".".join(["torch", *path.relative_to(ROOT / "test").parts[:-1]]), text))
    return found


@functools.cache
def _files(messages: tuple[PatchMessage, ...], count: int) -> Mapping[str, str]:
    later = [message.name for message in messages[count:]]
    tree = Tree.at(installed_torch().parent)
    return Prefix(tree, messages[:count], later, probes=_probes()).files() if count else {}


def patched(messages: tuple[PatchMessage, ...], count: int, folder: pathlib.Path) -> Patched:
    """A copy of the installed torch with the first ``count`` patches, imported once; it may have others before."""
    tree = Tree.at(installed_torch().parent)
    if not (folder / "torch").exists():
        copy_torch(installed_torch(), folder)
    before, after = ({p: t for p, t in _files(messages, n).items() if p[:5] != "test/"} for n in (count - 1, count))
    differing = {path for path in after if after[path] != (before.get(path) or _text(tree, path))}
    running = _running(after, {path for path in after if tree.exists(path)})
    _make(folder, {path: after.get(path) or _text(tree, path) for path in {*_files(messages, len(messages)), *after}})
    code = f"import torch.distributed.tensor, sys; sys.exit(not torch.__file__.startswith({str(folder)!r}))"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment("patched", folder), capture_output=True, text=True
    )
    if ended.returncode:
        raise StackError(f"The copy with {count} patches can't be imported:\n{ended.stderr.strip()}")
    return Patched(messages, count, folder, frozenset(differing & running), frozenset(differing - running))


def _running(files: Mapping[str, str], own: Collection[str]) -> set[str]:
    """Torch's ``own`` of these files, and those that they import, directly or not."""
    found, waiting = set(own), list(own)
    while waiting:
        path = waiting.pop()
        package = ".".join(pathlib.PurePosixPath(path).parts[:-1])
        for one in uses_of(files[path], package).imports:
            modules = (one.module, f"{one.module}.{one.name}")
            new = {f"{module.replace('.', '/')}.py" for module in modules} & {*files} - found
            found |= new
            waiting += new
    return found


def _text(tree: Tree, path: str) -> str | None:
    return tree.read(path) if tree.exists(path) else None


def _make(folder: pathlib.Path, files: Mapping[str, str | None]) -> None:
    """Put the files there that differ, and what Python makes of them, which many processes will import."""
    there = Tree(folder)
    differing = {path: text for path, text in files.items() if text != _text(there, path)}
    write(folder, differing)
    for path, text in differing.items():
        compiled = pathlib.Path(importlib.util.cache_from_source(str(folder / path)))
        compiled.unlink(missing_ok=True)
        if text is not None:
            py_compile.compile(str(folder / path), doraise=True)
