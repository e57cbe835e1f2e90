"""What a benchmark found, as a value: rows with both sides, the targets that they are held to, and notes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import platform
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing measured on both sides, so that less is better; None if a side has no number. ``where`` says where it
    was measured (``{"ranks": 64}``)."""

    name: str
    unit: str
    stock: float | None
    overlay: float | None
    where: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def gain(self) -> float | None:
        return self.stock / self.overlay if self.stock is not None and self.overlay else None


@dataclasses.dataclass(frozen=True)
class Target:
    """Met if ``value``, in the unit that ``name`` says, is at most ``bound``; with ``gain``, how many times less the
    overlay needs, if it is at least ``bound``."""

    name: str
    value: float
    bound: float
    gain: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.gain else self.value <= self.bound


@dataclasses.dataclass
class Report:
    """One run of one benchmark. ``notes`` are sentences that a reader of the numbers must know."""

    bench: str
    torch: str
    rows: list[Row] = dataclasses.field(default_factory=list)
    targets: list[Target] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def row(self, name: str, **where: Any) -> Row:
        """The row of that name, measured there. Raises KeyError if there is none."""
        for row in self.rows:
            if row.name == name and where.items() <= row.where.items():
                return row
        raise KeyError(f"{self.bench} has no row {name!r} at {where}")

    def as_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "rows": [{**dataclasses.asdict(row), "gain": row.gain} for row in self.rows],
            "targets": [{**dataclasses.asdict(target), "met": target.met} for target in self.targets],
            "python": platform.python_version(),
        }

    def write(self, path: str) -> None:
        pathlib.Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n")
