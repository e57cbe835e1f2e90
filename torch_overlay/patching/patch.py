"""`Patch`, one row of the series: what is patched, with what, where it applies and what ends it. Knows no torch.

`engine.py` applies rows; `recognise.py` says whether a target is what the row was written for.
"""

import dataclasses
import enum
import importlib
import re
from typing import Any

from .errors import PatchError

BOUND = re.compile(r"(>=|<)(\d+(?:\.\d+){0,2})")


class Kind(enum.Enum):
    """How a row takes effect."""

    REPLACE = "replaced"  # what is there: an attribute of a class is set, a function of a module runs other code
    ADD = "added"  # an attribute that must not be there
    HOOK = "hooked"  # two functions, for what setting an attribute can't say: clearing caches, editing a registry


@dataclasses.dataclass(frozen=True)
class Patch:
    """One row. ``target`` and ``body`` are paths, ``module:name`` or ``module:Class.name``; nothing is imported here.

    The body is taken raw: a static method, class method or property is written as one in the class that carries it,
    and an ADD body may be any value (a class-level default). It runs with the globals of its own module.

    For HOOK, ``body`` is a function of no arguments and ``undo`` one that takes what it returned; ``target`` is what
    they touch: a module, or a path whose fingerprint is then checked like any other.
    """

    target: str
    body: str
    kind: Kind = Kind.REPLACE
    releases: str = ""  # those that it is for, such as ">=2.11,<2.15"; elsewhere it stands down. Empty: all supported
    ends: str | None = None  # the upstream pull request that ends it
    undo: str | None = None  # HOOK only
    unit: str = ""  # rows of one unit make sense together only: without strict, one left out leaves all out

    def __post_init__(self):
        wrong = self._wrong()
        if wrong:
            raise PatchError(f"The row for {self.target!r} {wrong}")

    def _wrong(self) -> str | None:
        if not self.name and self.kind is not Kind.HOOK:
            return "names no attribute: a target is 'module:name' or 'module:Class.name'"
        for path in (self.body, self.undo):
            if path is not None and not all(path.partition(":")):
                return f"has the path {path!r}, which isn't 'module:name'"
        if (self.kind is Kind.HOOK) != (self.undo is not None):
            return "needs undo= exactly if it is a hook, so that disable() can always take it back"
        if self.releases and not all(map(BOUND.fullmatch, self.releases.split(","))):
            return f"is for the releases {self.releases!r}, which aren't bounds such as '>=2.11,<2.15'"
        return None

    def is_for(self, release: tuple[int, ...]) -> bool:
        """Whether a release, by its number of three parts, is among those that the row is for."""
        bounds = [(sign, (*map(int, number.split(".")), 0, 0)[:3]) for sign, number in BOUND.findall(self.releases)]
        return all(release >= number if sign == ">=" else release < number for sign, number in bounds)

    @property
    def is_swap(self) -> bool:
        """Whether a function keeps its identity and runs other code: who bound its name before or after runs that."""
        return self.kind is Kind.REPLACE and not self.owner

    @property
    def module(self) -> str:
        """The module that the target lives in."""
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        """The target inside its module: ``DeviceMesh._flatten``; empty for a hook on a whole module."""
        return self.target.partition(":")[2]

    @property
    def owner(self) -> str:
        """The class path that holds the target; empty if the module does."""
        return self.qualname.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.qualname.rpartition(".")[2]

    @property
    def body_modules(self) -> tuple[str, ...]:
        """What must be imported before the row can be applied."""
        return tuple(path.partition(":")[0] for path in (self.body, self.undo) if path)


ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "nothing"})()


def raw(owner: Any, name: str) -> Any:
    """What `owner` itself holds under this name, descriptors untouched; ABSENT if it holds nothing."""
    return vars(owner).get(name, ABSENT)


def look_up(path: str) -> tuple[Any, str, Any]:
    """(owner, name, raw value) of ``module:Class.name``, the module imported; PatchError names what is no class."""
    module, _, qualname = path.partition(":")
    *classes, name = qualname.split(".")
    owner: Any = importlib.import_module(module)
    for step in classes:
        value = raw(owner, step)
        if not isinstance(value, type):
            raise PatchError(f"{path}: {step} is {value!r}, not a class")
        owner = value
    return owner, name, raw(owner, name)
