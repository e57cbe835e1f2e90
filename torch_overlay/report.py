"""`Status`: what the overlay is doing in this process, as a value that prints as plain text."""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .show import screen
from .show.columns import fitted, wrapped

if TYPE_CHECKING:
    from .choices import Choices
    from .show.groups import Listing

# Functions of no arguments that return {what was counted: how often}, asked where their module is imported.
# An entry is ``module:function`` or the function itself.
COUNTERS: tuple[str | Callable[[], Mapping[str, object]], ...] = (
    "torch_overlay.distributed._process_groups:counters",
    "torch_overlay.distributed.tensor._answers:counters",
)


@dataclasses.dataclass(frozen=True)
class RowStatus:
    """One row of the series: ``state`` is on, waiting, left out, stands down or off; ``why`` is for all but on."""

    target: str
    kind: str
    state: str
    why: str = ""

    @property
    def said(self) -> str:
        """The state in words: of a row that is on, how."""
        return (self.kind if self.state == "on" else self.state) + (f": {self.why}" if self.why else "")


@dataclasses.dataclass(frozen=True)
class Status:
    """The overlay in this process. ``counts`` is what was made and shared since torch was imported, ``groups`` the
    process groups of meshes in the world of now, None if there is none."""

    enabled: bool
    release: str
    rows: tuple[RowStatus, ...]
    options: Choices
    counts: tuple[tuple[str, object], ...] = ()
    groups: Listing | None = None

    def __str__(self) -> str:
        """Plain text, each patch with its state."""
        return "\n".join(self.lines())

    def lines(self, width: int = screen.NARROW) -> list[str]:
        """The same for a terminal of this many columns."""
        found = screen.styled(self.summary(), "title")
        found += ["", screen.Line("patches", "head"), *self._patches(width)]
        counts = [line for name, value in self.counts or [("none", "yet")] for line in _counted(name, value, width)]
        found += ["", screen.Line("counts", "head"), *_all_fitted(counts, width)]
        if self.groups is not None:
            listed = [f"  {line}" for line in str(self.groups).splitlines()]
            found += ["", screen.Line("groups", "head"), *_all_fitted(listed, width)]
        values = [(field.name, _text(getattr(self.options, field.name))) for field in dataclasses.fields(self.options)]
        options = [f"  {name}: {value}" for name, value in values]
        return [*found, "", screen.Line("options", "head"), *_all_fitted(options, width)]

    def summary(self) -> list[str]:
        """On or off, and how many patches are in which state."""
        if not self.enabled:
            return [f"torch_overlay is off (torch {self.release})"]
        states = collections.Counter(row.state for row in self.rows)
        on = f"on, {states.pop('on', 0)} of {len(self.rows)} patches in place"
        others = ", ".join(f"{count} {state}" for state, count in states.items())
        return [f"torch_overlay is {on} (torch {self.release})", *([others] if others else [])]

    def _patches(self, width: int) -> list[str]:
        """Each module of torch, and under it what of it is patched and how."""
        by_module: dict[str, list[RowStatus]] = {}
        for row in self.rows:
            by_module.setdefault(row.target.partition(":")[0], []).append(row)
        names = [row.target.partition(":")[2] or _WHOLE for rows in by_module.values() for row in rows]
        start = max(map(len, names), default=0) + 6
        found: list[str] = []
        for module, rows in by_module.items():
            found.append(f"  {module}")
            for row in rows:
                name = f"    {row.target.partition(':')[2] or _WHOLE}".ljust(start)
                first, *others = wrapped(row.said, "", width - start)
                style = {"on": "", "left out": "trouble"}.get(row.state, "why")
                found += [screen.Line(name + first, style)]
                found += screen.styled([" " * start + line for line in others], style)
        return found


_WHOLE = "(the module)"


def _counted(name: str, value: object, width: int) -> list[str]:
    """What was counted, in one line if it fits, else with a line for each part."""
    line = f"  {name}: {_text(value)}"
    if len(line) <= width or not isinstance(value, Mapping):
        return [line]
    return [f"  {name}:", *(f"    {part}: {_text(count)}" for part, count in value.items())]


def _all_fitted(lines: list[str], width: int) -> list[str]:
    return [part for line in lines for part in fitted(line, width)]


def _text(value: object) -> str:
    """The way the options and counts are written where they're set: on and off, none, a=1, b=2."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items()) or "none"
    if isinstance(value, tuple) and all(isinstance(part, str) for part in value):
        return ", ".join(value) or "none"
    if isinstance(value, tuple):
        return ", ".join(f"{axis}={bandwidth:g}:{latency:g}" for axis, bandwidth, latency in value)
    return str(value)


def groups() -> Listing | None:
    """The process groups of meshes, if there can be any yet; imports nothing."""
    if "torch_overlay.distributed._universe" not in sys.modules:
        return None
    from .show.groups import listing

    return listing()


def count() -> tuple[tuple[str, object], ...]:
    """Every counter's answer, in order; imports nothing."""
    found: list[tuple[str, object]] = []
    for counter in COUNTERS:
        if isinstance(counter, str):
            module, _, name = counter.partition(":")
            function = getattr(sys.modules.get(module), name, None)
        else:
            function = counter
        if function is not None:
            found.extend(function().items())
    return tuple(found)
