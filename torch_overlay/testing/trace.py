"""`Trace`, what torch had at each target before the overlay was on, to compare with what it has after."""

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
    """The objects at every target of the series, in the modules that were imported at that time.

    They are compared by identity. A method that equals the former one but is another object is a trace.

    Attributes:
        objects: by the target's path; of a function whose code is swapped, a tuple of it, its code and its defaults.
    """

    objects: Mapping[str, object]

    @classmethod
    def take(cls) -> "Trace":
        """Record the objects now. Call this with the overlay off. Imports nothing."""
        return cls({path: value for patch in _patches() for path, value in _targets(patch)})

    def left(self) -> list[str]:
        """Return what the overlay left behind, a line for each object. Empty if torch is as it was.

        A module that was imported since, under the overlay, is compared with torch's source.
        """
        lines = []
        for patch in _patches():
            for path, now in _targets(patch):
                if path not in self.objects:
                    other = _not_from_source(patch, now)
                    lines += [f"{path} is {other}"] if other else []
                elif not _same_objects(self.objects[path], now):
                    lines.append(f"{path} is {_described(now)}, and it was {_described(self.objects[path])}")
        finders = [finder for finder in sys.meta_path if isinstance(finder, AfterImport)]
        return lines + [f"a finder still waits for {', '.join(sorted(finder.wanted))}" for finder in finders]


def _patches() -> list[Patch]:
    """Return the rows of the series for this torch that have a target with a name."""
    release = versions.running()
    return [patch for patch in series.PATCHES if release.in_range(patch) and patch.qualname]


def _targets(patch: Patch) -> Iterator[tuple[str, object]]:
    """Yield (path, object) of a row's target, if its module is imported."""
    # A module whose import is under way may lack the target still, which would look like a trace later.
    if overlay.ready(patch.module):
        value = look_up(patch.target)[2]
        if patch.is_swap:  # the function stays the same object and gets other code
            value = (value, *(getattr(value, field, None) for field in SwapCode.FIELDS))
        yield patch.target, value


def _same_objects(before: object, now: object) -> bool:
    """True if two recorded values are the same objects. Two tuples are, if their elements are."""
    # A swapped function is recorded with its code, defaults and keyword defaults. Each must be the former object.
    if isinstance(before, tuple) and isinstance(now, tuple):
        return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))
    return before is now


def _not_from_source(patch: Patch, now: object) -> str | None:
    """Describe an object that isn't what torch's source has there, for targets of modules that were imported since."""
    if patch.kind is Kind.ADD:
        return None if now is ABSENT else _described(now)
    value = now[0] if isinstance(now, tuple) else now
    return None if value is ABSENT else recognise.stranger(recognise.source_of(patch.module), patch.qualname, value)


def _described(value: object) -> str:
    return recognise.describe(value[0] if isinstance(value, tuple) else value)


@contextlib.contextmanager
def left_as_found(**options: Any) -> Iterator[Status]:
    """Turn the overlay on inside, as `torch_overlay.enabled`, and look for traces at the end.

    If the overlay was on already (`run`, the pytest plugin), it stays on, and nothing is compared. An error from inside
    is raised as it is, without looking for traces.

    Args:
        options: as `torch_overlay.enabled` takes them.

    Raises:
        AssertionError: at the end, if torch isn't as it was. Lists what the overlay left behind.

    >>> with left_as_found() as status:
    ...     status.enabled
    True
    """
    if torch_overlay.is_enabled():
        with torch_overlay.enabled(**options) as status:
            yield status
        return
    importlib.import_module(series.MESH)  # before the objects are recorded, since enable() would import it
    before = Trace.take()
    with torch_overlay.enabled(**options) as status:
        yield status
    left = before.left()
    if left:
        raise AssertionError("The overlay was on for a test, and torch isn't as it was found:\n  " + "\n  ".join(left))
