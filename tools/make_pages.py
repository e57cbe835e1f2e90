"""Write into the pages the tables of docs/figures.json, and from the code what upstream retires and the release.

    python tools/make_pages.py            write them
    python tools/make_pages.py --check    write nothing; exit status 1 if a page isn't up to date, and name it

A table stands in a page between two comments, the first of which names it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch_overlay  # noqa: E402
from torch_overlay import errors  # noqa: E402
from torch_overlay.patching.patch import Kind, Patch  # noqa: E402
from torch_overlay.series import PATCHES  # noqa: E402
from torch_overlay.version import RELEASED, __version__  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILE = ROOT / "docs" / "figures.json"
# The README's two tables, of three rows each: weights, then meshes.
WEIGHTS = ("weights.model", "weights.collectives", "hosts.weights")
MESHES = ("wrong.random", "gpu.gather", "calls.torchtitan")
# The page of results.
MAIN = (
    *WEIGHTS,
    "weights.full",
    "wrong.random",
    "gpu.wrong",
    "gpu.gather",
    "gpu.slowest",
    "groups.torchtitan",
    "calls.torchtitan",
    "moves.collectives",
)
PART = re.compile(r"(<!-- made by tools/make_pages\.py: (?P<name>[\w-]+) -->\n).*?(<!-- made: end -->)", re.DOTALL)


def fill(page: str, parts: dict[str, str]) -> str:
    """The page with these parts written anew; KeyError names a part that nobody makes.

    >>> page = "before\\n<!-- made by tools/make_pages.py: x -->\\nold\\n<!-- made: end -->\\nafter"
    >>> fill(page, {"x": "new"}).splitlines()[2:5]
    ['', 'new', '']
    """
    return PART.sub(lambda match: f"{match[1]}\n{parts[match['name']]}\n\n{match[3]}", page)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# --- figures ---


@dataclasses.dataclass(frozen=True)
class Figure:
    """One quoted figure: stock's and the overlay's value, or how many times better the overlay is."""

    name: str  # unique; its first word is the subject
    what: str  # in words, with the conditions
    # what measures it, in a clone: the arguments of Python, or a program of the shell. "" if that program isn't in
    # this repository
    command: str
    machine: str  # on which ranks and processors it was measured, or that it was counted
    stock: int | str | None = None  # a count, or text with a unit; of a `Transfer`, what a loop over the tensors takes
    overlay: int | str | None = None  # the same of the overlay
    # how many times better, where only that is quoted; two numbers are a range
    ratio: float | list[float] | None = None
    note: str = ""  # what the overlay's value consists of

    @property
    def better(self) -> str:
        """How many times better, "" where that isn't quoted: text has no ratio, and more groups are no gain.

        >>> Figure("x", "", "", "", stock=1020, overlay=630).better, Figure("y", "", "", "", ratio=[2.9, 4.8]).better
        ('1.6x', '2.9x to 4.8x')
        """
        if self.ratio is not None:
            return " to ".join(f"{part:g}x" for part in (self.ratio if isinstance(self.ratio, list) else [self.ratio]))
        if not isinstance(self.stock, int) or not isinstance(self.overlay, int):
            return ""
        if not 0 < self.overlay < self.stock:
            return ""
        return f"{_digits(self.stock / self.overlay)}x"


def _digits(ratio: float) -> str:
    """Two digits of a small ratio; all of a large one, which is a count.

    >>> _digits(1.619), _digits(41.8), _digits(8192.0)
    ('1.6', '42', '8,192')
    """
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:,.0f}"


def read() -> dict[str, Figure]:
    figures = [Figure(**entry) for entry in json.loads(FILE.read_text(encoding="utf-8"))["figures"]]
    assert len({figure.name for figure in figures}) == len(figures), "a figure's name stands twice in docs/figures.json"
    return {figure.name: figure for figure in figures}


def parts() -> dict[str, str]:
    figures = read()
    return {
        "figures": _all(figures),
        "figures-main": _front([figures[name] for name in MAIN], "stock, or by hand", "overlay, or `Transfer`"),
        "figures-weights": _front([figures[name] for name in WEIGHTS], "by hand", "`Transfer`"),
        "figures-meshes": _front([figures[name] for name in MESHES], "stock", "overlay"),
        "retired": retired(),
        "release": f"## {__version__}, {RELEASED}",
        "api": api(),
    }


def _all(figures: dict[str, Figure]) -> str:
    rows = [
        [one.what, _said(one.stock), _overlay(one), one.better, one.machine, f"`{one.command}`" if one.command else ""]
        for one in figures.values()
    ]
    return table(["what", "stock", "overlay", "better", "machine", "measured by"], rows)


def _front(figures: Sequence[Figure], stock: str, ours: str) -> str:
    rows = [[one.what, _said(one.stock), _overlay(one), one.machine] for one in figures]
    return table(["what", stock, ours, "measured on"], rows)


def _overlay(figure: Figure) -> str:
    return _said(figure.overlay) + (f" ({figure.note})" if figure.note else "")


def _said(value: int | str | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else value


# --- what upstream retires ---

# What each upstream change brings, as far as it ends our rows. A test demands an entry for each that the series names.
BRINGS = {
    "pytorch/pytorch#175571": "all views of a root mesh share one state: rank map, groups, flattened views",
    "pytorch/pytorch#194457": "collectives over a flattened mesh are merged only where the shards are even",
    "pytorch/pytorch#190431": "names of groups agree on all ranks, whoever made which groups before",
    "pytorch/pytorch#187380": "a redistribution costs less CPU time",
    "pytorch/pytorch#188215": "a group can be an input of a graph that is compiled on one rank (in torch from 2.14 on)",
    "pytorch/pytorch#173815": "a mesh can be aborted (`DeviceMesh.abort`, in torch from 2.15 on)",
}


def link(ends: str) -> str:
    """A pull request or an issue as a Markdown link; the address of a pull request leads to an issue, too."""
    repository, _, number = ends.partition("#")
    return f"[#{number}](https://github.com/{repository}/pull/{number})"


def retired() -> str:
    """The rows by the change that ends them and by their kind, in the order of the series."""
    rows, before = [], ""
    for (change, kind), patches in groupby(sorted(PATCHES, key=_order), key=lambda patch: (patch.ends, patch.kind)):
        ended = link(change) if change else "-"
        brings = BRINGS.get(change or "", _HOOKS) if ended != before else ""
        rows.append([ended, kind.value, ", ".join(map(said, patches)), brings])
        before = ended
    return table(["ended by", "how", "rows of `series.py`", "when upstream has this"], rows)


_HOOKS = "nobody has a pull request for it; hooks clear caches and edit registries for the other rows, and go with them"


def _order(patch: Patch) -> tuple[int, int]:
    """By the change that ends a row, where it first does, then by kind; rows that none ends come last."""
    changes = [other.ends for other in PATCHES]
    first = changes.index(patch.ends) if patch.ends else len(changes)
    return first, [*Kind].index(patch.kind)


def said(patch: Patch) -> str:
    """A row in a cell: the name of its target, and the releases that it is limited to."""
    module = patch.module.rpartition(".")[2]
    name = patch.qualname or module
    return f"`{name}`" + (f" (torch {patch.releases})" if patch.releases else "")


# --- the public names ---

# Classes with the members that people use; None for all.
CLASSES: dict[str, tuple[str, ...] | None] = {
    "transfer.Transfer": None,
    "loading.landings.Landings": ("target", "load_whole", "stale", "again", "as_data"),
    "rendezvous.place.Place": ("close",),
}


def api() -> str:
    """Tables of all public names, each with its arguments and the first sentence of its docstring."""
    public = {name: getattr(torch_overlay, name) for name in sorted(torch_overlay.__all__, key=str.lower)}
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    sections = [("", functions)]
    for path, shown in CLASSES.items():
        module, _, name = path.rpartition(".")
        owner = getattr(importlib.import_module(f"torch_overlay.{module}"), name)
        documented = [key for key, value in vars(owner).items() if key[0] != "_" and inspect.getdoc(value)]
        members = {key: vars(owner)[key] for key in shown or documented}
        sections.append((name, members if shown else {name: owner, **members}))
    dims = public["parallel_dims"]
    sections.append(("parallel_dims", {name: getattr(dims, name) for name in dims.__all__}))
    sections.append(("errors", {name: getattr(errors, name) for name in errors.__all__}))
    texts = []
    for title, entries in sections:
        rows = [[f"`{name}{_arguments(value)}`", _sentence(value)] for name, value in entries.items()]
        texts += [f"## {title}"] * bool(title) + [table(["name", "what it is for"], rows)]
    return "\n\n".join(texts)


def _arguments(value: object) -> str:
    """The names of a function's arguments in brackets; "" for a class of errors and for what isn't called.

    >>> _arguments(table), _arguments(torch_overlay.enable), _arguments(errors.OptionError)
    ('(head, rows)', '(*, strict, **options)', '')
    """
    if not (inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, Exception))):
        return ""
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty)
        for name, parameter in inspect.signature(value).parameters.items()
        if name != "self" and name[0] != "_"
    ]
    return str(inspect.Signature(plain))


def _sentence(value: object) -> str:
    first, _, _ = (inspect.getdoc(value) or "").partition("\n\n")
    first = re.sub(r":\w+:`([^`]+)`", r"`\1`", " ".join(first.split())).replace("``", "`").replace("|", "\\|")
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", first)[0]


# --- pages ---


def stale() -> dict[pathlib.Path, str]:
    made = parts()
    pages = {path: path.read_text(encoding="utf-8") for path in PAGES}
    filled = {path: fill(text, made) for path, text in pages.items()}
    return {path: text for path, text in filled.items() if text != pages[path]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page isn't up to date")
    given = parser.parse_args()
    pages = stale()
    for path, text in pages.items():
        print(f"{path.relative_to(ROOT)} {'is not up to date' if given.check else 'written'}")
        if not given.check:
            path.write_text(text, encoding="utf-8")
    return 1 if given.check and pages else 0


if __name__ == "__main__":
    sys.exit(main())
