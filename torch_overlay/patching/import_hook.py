"""Call back when a module has been imported that isn't imported yet, without importing it.

Nothing here knows torch. This file imports little, since `python -m torch_overlay run` loads it in every Python process
of a job.
"""

from __future__ import annotations

import _thread
import sys

TYPE_CHECKING = False  # not typing's: importing that would take longer than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any


class AfterImport:
    """A finder in front of ``sys.meta_path`` that calls back when one of the named modules has been executed.

    A module of a package that is still being imported counts as imported when the outermost such package is. Before
    that, other modules may copy names that aren't patched yet, and what a patch imports may find the package half done.
    ``callback(ready)`` gets the names that became ready, in the order in which they were executed. It runs in the
    importing thread, and what it raises is raised by that thread's import statement.
    """

    def __init__(self, names: Iterable[str], callback: Callable[[list[str]], None]):
        self.wanted = set(names)
        self.callback = callback
        # Parents are watched, too: their end is when a module inside of them counts as imported.
        self._watched = self.wanted | {parent for name in self.wanted for parent in parents(name)}
        self._running: set[str] = set()
        self._done: list[str] = []
        self._searching: set[tuple[int, str]] = set()

    def install(self) -> None:
        """Put this finder in front of ``sys.meta_path``. Modules that are imported already don't count."""
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def remove(self) -> None:
        """Stop watching. For a module whose import is under way there is no call."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
        self.wanted.clear()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of the other finders, with a loader that reports to us, for modules that somebody waits for."""
        # Another AfterImport asks us while we ask it. The one that is asked during its own search returns None.
        search = (_thread.get_ident(), name)
        if name not in self._watched or search in self._searching:
            return None
        self._searching.add(search)
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                spec = find(name, path, target) if find is not None and finder is not self else None
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):  # that of a namespace package may have none
                        spec.loader = _TellingLoader(spec.loader, self)
                    return spec
        finally:
            self._searching.discard(search)
        return None

    def started(self, name: str) -> None:
        """Note that a module begins to run."""
        self._running.add(name)

    def finished(self, name: str) -> None:
        """Note that a module was executed, and call back for those that are ready; passes errors on."""
        self._running.discard(name)
        if name in self.wanted:
            self._done.append(name)
        ready = [n for n in self._done if not any(parent in self._running for parent in parents(n))]
        self._done = [n for n in self._done if n not in ready]
        ready = [n for n in ready if n in self.wanted]  # `remove` may have been called meanwhile
        if ready:
            self.callback(ready)


class _TellingLoader:
    """Stands for another loader, and tells the finder when the module begins and ends to run."""

    def __init__(self, loader: Any, finder: AfterImport):
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        """What the other loader returns."""
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Give the module its own loader back, and run it, telling the finder before, and after if it didn't raise."""
        # From here on the module has the loader that it would have without us.
        name = module.__spec__.name
        module.__spec__.loader = module.__loader__ = self._loader
        self._finder.started(name)
        self._loader.exec_module(module)  # if it fails, a later try ends what this one started
        self._finder.finished(name)


def parents(name: str) -> list[str]:
    """The packages that a module lies in, outermost first.

    >>> parents("torch.distributed.tensor")
    ['torch', 'torch.distributed']
    """
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]
