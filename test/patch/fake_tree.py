"""A small library in a temporary folder, and bodies to patch it with: all that the engine needs, without torch.

`fakelib` has the shapes that torch has: a class with methods, a static method, a property; a function that others
import by name; a package that is imported late.
"""

import importlib
import pathlib
import sys
import textwrap

import pytest

from torch_overlay import series, versions
from torch_overlay.patching import recognise
from torch_overlay.patching.patch import Kind, Patch

FILES = {
    "fakelib/__init__.py": "from . import core, user\n",
    "fakelib/core.py": """
        import functools

        def make(n=1):
            "Its documentation."
            return ("stock", n)

        def count(upto):
            yield "stock"

        def enclosed(free):
            def inner(): return free
            return inner

        enclosed = enclosed(1)

        async def wait():
            pass

        @functools.cache
        def cached(n):
            return ("stock", n)

        class Mesh:
            limit = 3
            def size(self, axis=None):
                return "stock size"  # a comment
            @staticmethod
            def build(n):
                return "stock build"
            @property
            def shape(self):
                return "stock shape"
            @shape.setter
            def shape(self, value):
                self.value = value
            def other(self):
                return "stock other"
        """,
    "fakelib/user.py": "from .core import make\ndef use(): return make()\n",
    "fakelib/late/__init__.py": "from .inner import work\nfrom . import friend\n",
    "fakelib/late/inner.py": "from ..core import make\ndef work(): return ('stock', make())\n",
    "fakelib/late/friend.py": "from .inner import work\n",
    "fakebody.py": """
        from fakelib.core import make as original

        def make(n=1, *, extra=None):
            return ("ours", n)

        def count(upto=2):
            yield from ("ours", upto)

        def work():
            return "our work"

        class Body:
            note = None
            def size(self, axis=None):
                return "our size"
            @staticmethod
            def build(n):
                return "our build"
            @property
            def shape(self):
                return "our shape"
            def other(self):
                return "our other"

        calls = []
        def hook():
            calls.append("on")
            return 7
        def unhook(token):
            calls.append(token)
        def broken():
            raise RuntimeError("a hook that fails")
        """,
}
CORE = "fakelib.core"
MAKE = Patch(f"{CORE}:make", "fakebody:make")
SIZE = Patch(f"{CORE}:Mesh.size", "fakebody:Body.size")
BUILD = Patch(f"{CORE}:Mesh.build", "fakebody:Body.build")
SHAPE = Patch(f"{CORE}:Mesh.shape", "fakebody:Body.shape")
NOTE = Patch(f"{CORE}:Mesh.note", "fakebody:Body.note", Kind.ADD)
HOOK = Patch(f"{CORE}:make", "fakebody:hook", Kind.HOOK, undo="fakebody:unhook")
WORK = Patch("fakelib.late.inner:work", "fakebody:work")
ALL = (MAKE, SIZE, BUILD, SHAPE, NOTE, HOOK, WORK)


class Tree:
    """The library as the overlay's torch: its files, its modules, and the tables that name it."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
        self.folder = folder
        self.monkeypatch = monkeypatch
        for name, text in FILES.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(folder)
        self.running("2.13.0")

    def running(self, text: str) -> None:
        """Have the overlay believe that this release runs."""
        self.monkeypatch.setattr(versions, "running", lambda: versions.parse(text))

    def rows(self, *patches: Patch, fingerprints: bool = True) -> None:
        """Put these rows into the series, with the fingerprints of the files as they are now."""
        self.monkeypatch.setattr(series, "PATCHES", patches)
        table: dict[str, dict[str, str]] = {}
        for patch in patches if fingerprints else ():
            source = recognise.Source(patch.module, str(self.path(patch.module)))
            module = table.setdefault(patch.module, {"file": source.digest or ""})
            if patch.qualname and patch.kind is not Kind.ADD:
                module[patch.qualname] = source.fingerprint(patch.qualname) or "nothing"
        self.monkeypatch.setattr(versions, "fingerprints", lambda: {"2.13.0": table})

    def path(self, module: str) -> pathlib.Path:
        path = self.folder.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def edit(self, module: str, old: str, new: str) -> None:
        """Change the library on disk; before it is imported, or as if it had been built so."""
        text = self.path(module).read_text()
        assert old in text, f"{module} has no {old!r}"
        self.path(module).write_text(text.replace(old, new))

    def get(self, module: str):
        return importlib.import_module(module)

    def snapshot(self) -> dict[tuple[str, str], dict[str, object]]:
        """Every attribute of every module and class of the library that is imported."""
        found = {}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "fakelib":
                found[name, ""] = dict(vars(module))
                classes = [v for v in vars(module).values() if isinstance(v, type)]
                found |= {(name, c.__name__): dict(vars(c)) for c in classes}
        return found


def same(before: dict, after: dict) -> bool:
    """Equal by identity, key by key, in order."""
    return list(before) == list(after) and all(
        list(before[k]) == list(after[k]) and all(before[k][n] is after[k][n] for n in before[k]) for k in before
    )


def forget() -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in ("fakelib", "fakebody")]:
        del sys.modules[name]
