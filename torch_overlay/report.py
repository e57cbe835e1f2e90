"""`Status`: what the overlay is doing in this process, as a value that prints as plain text."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .show.columns import aligned

if TYPE_CHECKING:
    from .distributed._settings import Settings
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
    options: Settings
    counts: tuple[tuple[str, object], ...] = ()
    groups: Listing | None = None

    def __str__(self) -> str:
        """A few lines of plain text, each patch with its state."""
        on = sum(row.state == "on" for row in self.rows)
        state = f"on, {on} of {len(self.rows)} patches in place" if self.enabled else "off"
        lines = [f"torch_overlay is {state} (torch {self.release})", "", "patches"]
        lines += [f"  {line}" for line in aligned([(_short(row.target), row.said) for row in self.rows])]
        lines += ["", "counts"] + [f"  {name}: {_text(value)}" for name, value in self.counts or [("none", "yet")]]
        if self.groups is not None:
            lines += ["", "groups", *(f"  {line}" for line in str(self.groups).splitlines())]
        lines += ["", "options"]
        lines += [f"  {f.name}: {_text(getattr(self.options, f.name))}" for f in dataclasses.fields(self.options)]
        return "\n".join(lines)


def _short(target: str) -> str:
    """``device_mesh.DeviceMesh._flatten``: enough to find it."""
    module, _, qualname = target.partition(":")
    return ".".join(filter(None, (module.rpartition(".")[2], qualname)))


def _text(value: object) -> str:
    """The way the options and counts are written where they're set: on and off, none, a=1, b=2."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items()) or "none"
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
