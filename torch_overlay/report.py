"""`Status`: what the overlay is doing in this process, as a value that prints as plain text."""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .show import screen
from .show.words import counted, fitted, wrapped

if TYPE_CHECKING:
    from .choices import Choices
    from .show.groups import Listing

# Functions of no arguments that return {what was counted: how often}, asked where their module is imported.
# An entry is ``module:function`` or the function itself.
COUNTERS: tuple[str | Callable[[], Mapping[str, object]], ...] = (
    "torch_overlay.distributed._mesh.groups:counters",
    "torch_overlay.distributed.tensor._runner.answers:counters",
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
        """Six lines of plain text."""
        return "\n".join(self.lines())

    def lines(self, width: int = screen.NARROW) -> list[str]:
        """The same for a terminal of this many columns, where a long one goes on below."""
        title, *others = self.summary()
        found = [screen.Styled(title, "title"), *_all_fitted(others, width)]
        left_out = [row for row in self.rows if row.state == "left out"]
        found += [
            screen.Styled(line, "trouble") for line in _all_fitted([_first_left_out(left_out)], width) if left_out
        ]
        return found

    def summary(self) -> list[str]:
        """On or off; what was planned; which groups were made, and what a missing one cost; the options; what to do."""
        if not self.enabled:
            return [f"torch_overlay is off (torch {self.release}): enable() turns it on"]
        states = collections.Counter(row.state for row in self.rows)
        waiting = f", {states['waiting']} waiting" if states["waiting"] else ""
        counts = dict(self.counts)
        return [
            f"torch_overlay is on (torch {self.release}): {states['on']} patches in place{waiting}",
            _redistributed(counts),
            _groups(counts, self.groups),
            _missing(counts),
            f"options: {_changed(self.options)}",
            "more: status().all(), or `python -m torch_overlay status --all`",
        ]

    def all(self) -> str:
        """Plain text: each patch with its state, each count, each group and each option."""
        return "\n".join(self.all_lines())

    def all_lines(self, width: int = screen.NARROW) -> list[str]:
        """The same for a terminal of this many columns."""
        found = [
            screen.Styled(self.summary()[0], "title"),
            "",
            screen.Styled("patches", "head"),
            *self._patches(width),
        ]
        counts = [line for name, value in self.counts or [("none", "yet")] for line in _counted(name, value, width)]
        found += ["", screen.Styled("counts", "head"), *_all_fitted(counts, width)]
        if self.groups is not None:
            listed = [f"  {line}" for line in str(self.groups).splitlines()]
            found += ["", screen.Styled("groups", "head"), *_all_fitted(listed, width)]
        values = [(field.name, _text(getattr(self.options, field.name))) for field in dataclasses.fields(self.options)]
        options = [f"  {name}: {value}" for name, value in values]
        return [*found, "", screen.Styled("options", "head"), *_all_fitted(options, width)]

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
                found += [screen.Styled(name + first, style)]
                found += screen.styled([" " * start + line for line in others], style)
        return found


_WHOLE = "(the module)"
_MADE, _SHARED = "process groups made for meshes", "requests served by a shared group"


def _first_left_out(rows: list[RowStatus]) -> str:
    if not rows:
        return ""
    others = f"; and {len(rows) - 1} more" if len(rows) > 1 else ""
    return f"left out: {rows[0].target}: {rows[0].why}{others}"


def _redistributed(counts: Mapping[str, object]) -> str:
    planned, reasons = counts.get("redistributions by plan", 0), counts.get("redistributions by torch's own code")
    if not isinstance(reasons, Mapping) or not reasons:
        return f"redistributions: {planned} by plan, none by torch's own code"
    often = max(reasons, key=lambda reason: reasons[reason])
    others = f"; {counted(len(reasons) - 1, 'more reason')}" if len(reasons) > 1 else ""
    total = sum(reasons.values())
    return f"redistributions: {planned} by plan, {total} by torch's own code: {often} ({reasons[often]}{others})"


def _groups(counts: Mapping[str, object], listed: Listing | None) -> str:
    """What was made, and what wider sharing would save of it."""
    made, shared = (counts.get(name, 0) for name in (_MADE, _SHARED))
    saved = sum(row.saved for row in listed.universes) if listed else 0
    more = f'; share_groups="ranks" would save {saved}' if saved else ""
    return f"groups: {made} made, {shared} shared{more}"


def _missing(counts: Mapping[str, object]) -> str:
    """The call that would save most."""
    calls = counts.get("collectives that more groups would save")
    if not isinstance(calls, Mapping) or not calls:
        return "missing groups: none cost anything"
    best = max(calls, key=lambda call: calls[call])
    others = ", and others more" if len(calls) > 1 else ""
    return f"missing groups: {best} would have saved {counted(calls[best], 'collective')}{others}"


def _changed(options: Choices) -> str:
    """Those that aren't as they are by default."""
    said = [
        f"{field.name}={_text(getattr(options, field.name))}"
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != field.default
    ]
    return ", ".join(said) or "as by default"


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
    if "torch_overlay.distributed._mesh.universe" not in sys.modules:
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
