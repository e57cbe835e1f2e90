"""`Trace`, what torch held before the overlay came, against what it holds after the overlay went."""

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch_overlay

from .. import overlay, series, versions
from ..patching import recognise
from ..patching.engine import SwapCode
from ..patching.import_hook import AfterImport
from ..patching.patch import ABSENT, Kind, Patch, look_up
from ..report import Status


@dataclasses.dataclass(frozen=True)
class Trace:
    """The objects at every target of the series, in the modules that were imported then.

    Compared by identity: a method that is equal to the one before, but another object, is a trace.
    """

    found: Mapping[str, object]

    @classmethod
    def take(cls) -> "Trace":
        """Of this moment. Imports nothing; the overlay is off, or what is taken is the overlay's."""
        return cls({path: value for patch in _patches() for path, value in _held(patch)})

    def left(self) -> list[str]:
        """What the overlay left behind, one line each; empty if torch is as it was found.

        What has been imported since is compared with torch's source instead: that module was never seen without us.
        """
        lines = []
        for patch in _patches():
            for path, now in _held(patch):
                if path not in self.found:
                    why = _strange(patch, path, now)
                    lines += [f"{path} is {why}"] if why else []
                elif not _same(self.found[path], now):
                    lines.append(f"{path} is {_described(now)}, and it was {_described(self.found[path])}")
        finders = [finder for finder in sys.meta_path if isinstance(finder, AfterImport)]
        return lines + [f"a finder still waits for {', '.join(sorted(finder.wanted))}" for finder in finders]


def _patches() -> list[Patch]:
    release = versions.running()
    return [patch for patch in series.PATCHES if release.in_range(patch) and patch.qualname]


def _held(patch: Patch) -> Iterator[tuple[str, object]]:
    """(path, what is there) of a row's target, where its module is imported to the end."""
    if overlay.ready(patch.module):
        value = look_up(patch.target)[2]
        if patch.is_swap:  # the function stays and runs other code
            value = (value, *(getattr(value, field, None) for field in SwapCode.FIELDS))
        yield patch.target, value


def _same(before: object, now: object) -> bool:
    if isinstance(before, tuple) and isinstance(now, tuple):
        return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))
    return before is now


def _strange(patch: Patch, path: str, now: object) -> str | None:
    """What stands where torch's source has something else, in words; None if nothing does."""
    if patch.kind is Kind.ADD:
        return None if now is ABSENT else _described(now)
    value = now[0] if isinstance(now, tuple) else now
    return None if value is ABSENT else recognise.stranger(recognise.find(patch.module), patch.qualname, value)


def _described(value: object) -> str:
    return recognise.describe(value[0] if isinstance(value, tuple) else value)


@contextlib.contextmanager
def left_as_found(**options: Any) -> Iterator[Status]:
    """The overlay on inside, as `torch_overlay.enabled`; AssertionError at the end if it left anything behind in torch.

    Where the overlay was on already (`run`, the pytest plugin) it stays on, and who turned it on looks for traces. An
    error from inside comes out as it is: what a failed test leaves is no news.

    >>> with left_as_found() as status:
    ...     status.enabled
    True
    """
    if torch_overlay.is_enabled():
        with torch_overlay.enabled(**options) as status:
            yield status
        return
    importlib.import_module(series.MESH)  # or the first enable() would import it, unseen
    before = Trace.take()
    with torch_overlay.enabled(**options) as status:
        yield status
    left = before.left()
    if left:
        raise AssertionError("The overlay was on for a test, and torch isn't as it was found:\n  " + "\n  ".join(left))
