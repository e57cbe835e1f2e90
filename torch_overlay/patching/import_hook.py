"""Be told when a module that isn't imported yet has been imported, without importing it.

Knows no torch. Imports little, since `python -m torch_overlay run` loads it in every Python process of a job.
"""

from __future__ import annotations

import _thread
import sys

TYPE_CHECKING = False  # not typing's: importing that would take longer than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any


class AfterImport:
    """A finder in front of ``sys.meta_path`` that calls back when one of the named modules has run to its end.

    A module inside a package that is itself being imported counts as imported when the outermost such package is:
    until then a patch could be copied half, and what the patch imports might find the package half there.
    ``callback(ready)`` gets the names that became ready, in the order in which they ran. It runs in the importing
    thread, and what it raises comes out of that thread's import statement.
    """

    def __init__(self, names: Iterable[str], callback: Callable[[list[str]], None]):
        self.wanted = set(names)
        self.callback = callback
        self._watched = self.wanted | {parent for name in self.wanted for parent in parents(name)}
        self._running: set[str] = set()
        self._done: list[str] = []
        self._searching: set[tuple[int, str]] = set()

    def install(self) -> None:
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def remove(self) -> None:
        """Stop looking; a module whose import is under way ends without a call."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
        self.wanted.clear()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """What the other finders answer, with a loader that tells us at its end; None for modules nobody waits for."""
        # A finder of the same kind asks us in turn: whoever is asked while asking stays silent.
        search = (_thread.get_ident(), name)
        if name not in self._watched or search in self._searching:
            return None
        self._searching.add(search)
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                spec = find(name, path, target) if find is not None and finder is not self else None
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = _TellingLoader(spec.loader, self)
                    return spec
        finally:
            self._searching.discard(search)
        return None

    def started(self, name: str) -> None:
        self._running.add(name)

    def finished(self, name: str) -> None:
        self._running.discard(name)
        if name in self.wanted:
            self._done.append(name)
        ready = [n for n in self._done if not any(parent in self._running for parent in parents(n))]
        self._done = [n for n in self._done if n not in ready]
        ready = [n for n in ready if n in self.wanted]
        if ready:
            self.callback(ready)


class _TellingLoader:
    """Another loader, which it is in everything but telling the finder when a module starts and ends."""

    def __init__(self, loader: Any, finder: AfterImport):
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        # From here on the module and whoever asks it see the loader that they would have seen without us.
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
