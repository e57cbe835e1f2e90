"""`Status`, what the overlay is doing in this process: a value that prints as plain text."""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .show import screen
from .show.words import counted, fitted, wrapped

if TYPE_CHECKING:
    from .choices import Choices
    from .show.groups import Listing

# Where redistributions are counted, and the programs that run them remembered.
_ANSWERS = "torch_overlay.distributed.tensor._runner.answers"


def redistributions() -> dict[str, object]:
    """Return how the redistributions of this process ran; nothing if their code isn't imported. Imports no torch."""
    answers: Any = sys.modules.get(_ANSWERS)
    if not hasattr(answers, "counted"):  # also while it is being imported
        return {}
    return {
        "redistributions by plan": answers.counted["planned"],
        "plans made": answers.counted["made"],
        "plans in the cache": sum(len(shared.remembered.answers) for shared in list(answers.states)),
        "collectives that more groups would save": collectives_to_save(),
        "redistributions by torch's own code": {
            name.removeprefix("torch: "): n for name, n in sorted(answers.counted.items()) if name.startswith("torch: ")
        },
    }


def collectives_to_save() -> dict[str, int]:
    """Return the calls that would make process groups which plans lacked, with the number of collectives that each
    would have saved so far; the most useful first. Call it if the code of redistributions is imported."""
    from .distributed._mesh.state import states
    from .distributed.tensor._planner.cost import collectives
    from .distributed.tensor._planner.search import flatten_call
    from .distributed.tensor._planner.sizes import shared_plan
    from .distributed.tensor._planner.steps import Collective
    from .distributed.tensor._runner.program import Program

    saved_by_call: collections.Counter[str] = collections.Counter()
    remembered = [answer for shared in list(states) for answer in list(shared.remembered.answers.values())]
    for program in remembered:
        if not isinstance(program, Program) or collectives(program.steps) < 2:
            continue
        # Without `groups`, the planner assumes that every group exists.
        best = shared_plan(program.before, program.after, program.question.dtype.itemsize, cost=program.cost)
        joint = [step.axes for step in best if isinstance(step, Collective) and len(step.axes) > 1]
        missing = dict.fromkeys(axes for axes in joint if axes not in program.at_hand.joint)
        saved = (collectives(program.steps) - collectives(best)) * program.runs
        if saved > 0 and missing:
            saved_by_call[" and ".join(flatten_call(axes, program.question.site.names) for axes in missing)] += saved
    return dict(saved_by_call.most_common())


# Functions without arguments that return {what is counted: how often}, or their paths ``module:function``. A path is
# looked up only if its module is imported: asking for the status must import no torch, and start nothing.
COUNTERS: tuple[str | Callable[[], Mapping[str, object]], ...] = (
    "torch_overlay.distributed._mesh.groups:counters",
    "torch_overlay.report:redistributions",
)


@dataclasses.dataclass(frozen=True)
class RowStatus:
    """The state of one row of the series.

    Attributes:
        state: on, waiting, left out, stands down or off.
        why: the reason for any state but on; empty while the overlay is off.
    """

    target: str
    kind: str
    state: str
    why: str = ""

    @property
    def said(self) -> str:
        """The state in words, with the reason. A row that is on says how it is applied."""
        return (self.kind if self.state == "on" else self.state) + (f": {self.why}" if self.why else "")


@dataclasses.dataclass(frozen=True)
class Status:
    """The overlay in this process.

    Attributes:
        counts: of groups and redistributions, since torch was imported.
        groups: the process groups of meshes in the present world; None without a world.
        transfers: for each `Transfer` that is in a run, the step that it is in and the ranks that it waits for.
    """

    enabled: bool
    release: str
    rows: tuple[RowStatus, ...]
    options: Choices
    counts: tuple[tuple[str, object], ...] = ()
    groups: Listing | None = None
    transfers: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Six lines of plain text."""
        return "\n".join(self.lines())

    def lines(self, width: int = screen.NARROW) -> list[str]:
        """Return the lines of `summary`, folded to this many columns.

        Below these come a line on the rows that were left out, if any, and a line for each transfer that is in a run.
        """
        title, *others = self.summary()
        lines = [screen.Styled(title, "title"), *_all_fitted(others, width)]
        # Said in the short form, too: after enable(strict=False) nobody would look for it elsewhere.
        left_out = [row for row in self.rows if row.state == "left out"]
        if left_out:
            more = f"; and {len(left_out) - 1} more" if len(left_out) > 1 else ""
            line = f"left out: {left_out[0].target}: {left_out[0].why}{more}"
            lines += screen.styled(_all_fitted([line], width), "trouble")
        return lines + screen.styled(_all_fitted([*self.transfers], width), "")

    def summary(self) -> list[str]:
        """Six sentences: on or off, redistributions, groups, missing groups, options, and where to find more."""
        if not self.enabled:
            return [f"torch_overlay is off (torch {self.release}): enable() turns it on"]
        states = collections.Counter(row.state for row in self.rows)
        waiting = f", {states['waiting']} waiting" if states["waiting"] else ""
        counts = dict(self.counts)
        return [
            f"torch_overlay is on (torch {self.release}): {states['on']} patches in place{waiting}",
            _redistributions(counts),
            _groups(counts, self.groups),
            _missing_groups(counts),
            f"options: {_changed_options(self.options)}",
            "more: status().all(), or `python -m torch_overlay status --all`",
        ]

    def all(self) -> str:
        """Each patch with its state, each count, each group and each option, as plain text."""
        return "\n".join(self.all_lines())

    def all_lines(self, width: int = screen.NARROW) -> list[str]:
        """Return the lines of `all`, folded to this many columns."""
        lines = [screen.Styled(self.summary()[0], "title"), "", screen.Styled("patches", "head"), *self._patches(width)]
        counts = [line for name, value in self.counts or [("none", "yet")] for line in _counted(name, value, width)]
        lines += ["", screen.Styled("counts", "head"), *_all_fitted(counts, width)]
        if self.groups is not None:
            groups = [f"  {line}" for line in str(self.groups).splitlines()]
            lines += ["", screen.Styled("groups", "head"), *_all_fitted(groups, width)]
        if self.transfers:
            running = [f"  {line}" for line in self.transfers]
            lines += ["", screen.Styled("transfers", "head"), *_all_fitted(running, width)]
        values = [(field.name, _text(getattr(self.options, field.name))) for field in dataclasses.fields(self.options)]
        options = [f"  {name}: {value}" for name, value in values]
        return [*lines, "", screen.Styled("options", "head"), *_all_fitted(options, width)]

    def _patches(self, width: int) -> list[str]:
        """Return a line for each patched module of torch, and below it its targets with their states."""
        by_module: dict[str, list[RowStatus]] = {}
        for row in self.rows:
            by_module.setdefault(row.target.partition(":")[0], []).append(row)
        names = [row.target.partition(":")[2] or _WHOLE for rows in by_module.values() for row in rows]
        start = max(map(len, names), default=0) + 6
        lines: list[str] = []
        for module, rows in by_module.items():
            lines.append(f"  {module}")
            for row in rows:
                name = f"    {row.target.partition(':')[2] or _WHOLE}".ljust(start)
                first, *others = wrapped(row.said, "", width - start)
                style = {"on": "", "left out": "trouble"}.get(row.state, "why")
                lines += screen.styled([name + first, *(" " * start + line for line in others)], style)
        return lines


_WHOLE = "(the module)"
_MADE, _SHARED = "process groups made for meshes", "requests served by a shared group"


def _redistributions(counts: Mapping[str, object]) -> str:
    """How many redistributions were planned and left to torch, with the most frequent reason, as a sentence."""
    planned, reasons = counts.get("redistributions by plan", 0), counts.get("redistributions by torch's own code")
    if not isinstance(reasons, Mapping) or not reasons:
        return f"redistributions: {planned} by plan, none by torch's own code"
    often = max(reasons, key=lambda reason: reasons[reason])
    others = f"; {counted(len(reasons) - 1, 'more reason')}" if len(reasons) > 1 else ""
    total = sum(reasons.values())
    return f"redistributions: {planned} by plan, {total} by torch's own code: {often} ({reasons[often]}{others})"


def _groups(counts: Mapping[str, object], groups: Listing | None) -> str:
    """How many groups were made and shared, and how many share_groups="ranks" would save, as a sentence."""
    created, shared = (counts.get(name, 0) for name in (_MADE, _SHARED))
    saved = sum(row.saved for row in groups.universes) if groups else 0
    more = f'; share_groups="ranks" would save {saved}' if saved else ""
    return f"groups: {created} made, {shared} shared{more}"


def _missing_groups(counts: Mapping[str, object]) -> str:
    """Say which call would make the most useful missing group, and how many collectives that would have saved."""
    calls = counts.get("collectives that more groups would save")
    if not isinstance(calls, Mapping) or not calls:
        return "missing groups: none cost anything"
    best = max(calls, key=lambda call: calls[call])
    others = ", and others more" if len(calls) > 1 else ""
    return f"missing groups: {best} would have saved {counted(calls[best], 'collective')}{others}"


def _changed_options(options: Choices) -> str:
    """The options that differ from the defaults, as text."""
    changed = [
        f"{field.name}={_text(getattr(options, field.name))}"
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != field.default
    ]
    return ", ".join(changed) or "as by default"


def _counted(name: str, value: object, width: int) -> list[str]:
    """A count in one line, if that fits, or one with a line for each part."""
    line = f"  {name}: {_text(value)}"
    if len(line) <= width or not isinstance(value, Mapping):
        return [line]
    return [f"  {name}:", *(f"    {part}: {_text(count)}" for part, count in value.items())]


def _all_fitted(lines: list[str], width: int) -> list[str]:
    return [part for line in lines for part in fitted(line, width)]


def _text(value: object) -> str:
    """The value of an option or a count as text."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items()) or "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def groups() -> Listing | None:
    """Return the process groups that the overlay's meshes have on this rank, as `show.groups.listing` does. None if
    the overlay's mesh code isn't imported, or if there is no world. May import `show.groups`, never torch."""
    if "torch_overlay.distributed._mesh.universe" not in sys.modules:
        return None
    from .show.groups import listing

    return listing()


def count() -> tuple[tuple[str, object], ...]:
    """Return all counts, in the order of `COUNTERS`. Counters whose modules aren't imported are left out. Imports
    nothing."""
    counts: list[tuple[str, object]] = []
    for counter in COUNTERS:
        if isinstance(counter, str):
            module, _, name = counter.partition(":")
            function = getattr(sys.modules.get(module), name, None)  # None also while the module is being imported
        else:
            function = counter
        if function is not None:
            counts.extend(function().items())
    return tuple(counts)
