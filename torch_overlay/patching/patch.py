"""`Patch`, one row of the series: what is patched, with what, where it applies and what ends it; and what can go wrong.

`engine.py` applies rows, and `recognise.py` says whether a target is what the row was written for. Nothing here knows
torch.
"""

import dataclasses
import enum
import importlib
import re
from typing import Any

BOUND = re.compile(r"(>=|<)(\d+(?:\.\d+){0,2})")


class OverlayError(RuntimeError):
    """Base of every error that the overlay raises about itself. torch is as it was before the call that raised it."""


class ChangedTarget(OverlayError):
    """A target isn't what its fingerprint says. It is from another build of torch, or somebody patched it."""


class ForeignPatch(OverlayError):
    """Somebody patched a target after the overlay did. Taking the overlay away would break their patch."""


class PatchError(OverlayError, ValueError):
    """A row of the series contradicts itself or its body: a bug of the overlay, found before torch is touched."""


class Kind(enum.Enum):
    """How a row takes effect."""

    REPLACE = "replaced"  # what is there: an attribute of a class is set, a function of a module runs other code
    ADD = "added"  # an attribute that must not be there
    HOOK = "hooked"  # two functions, for what setting an attribute can't say: clearing caches, editing a registry


@dataclasses.dataclass(frozen=True)
class Patch:
    """One row. ``target`` and ``body`` are paths, ``module:name`` or ``module:Class.name``. Nothing is imported here.

    The body is set as its class holds it, so a static method, class method or property is written as such there. An ADD
    body may be any value, such as the default of an attribute. A body runs with the globals of its own module.

    For HOOK, ``body`` is a function without arguments, and ``undo`` gets what it returned. ``target`` is the module
    that they change, or a path, whose fingerprint is then checked like any other.
    """

    target: str
    body: str
    kind: Kind = Kind.REPLACE
    releases: str = ""  # such as ">=2.11,<2.15"; on other releases the row isn't applied. Empty: all supported ones
    ends: str | None = None  # the upstream pull request after which the row isn't needed
    undo: str | None = None  # HOOK only
    unit: str = ""  # rows of one unit need each other: if one is left out (strict=False), all are

    def __post_init__(self):
        problem = self._problem()
        if problem:
            raise PatchError(f"The row for {self.target!r} {problem}")

    def _problem(self) -> str | None:
        """What contradicts itself in this row, as the end of a sentence; None if nothing does."""
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
        """True if a release, given as three numbers, is within all bounds of `releases`."""
        bounds = [(sign, (*map(int, number.split(".")), 0, 0)[:3]) for sign, number in BOUND.findall(self.releases)]
        return all(release >= number if sign == ">=" else release < number for sign, number in bounds)

    @property
    def is_swap(self) -> bool:
        """True if a function gets other code and stays the same object, for those who imported it before, too."""
        return self.kind is Kind.REPLACE and not self.owner

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        """The target's name inside its module, ``DeviceMesh._flatten``. Empty for a hook on a whole module."""
        return self.target.partition(":")[2]

    @property
    def owner(self) -> str:
        """The class path that holds the target; empty if the module does."""
        return self.qualname.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The target's own name, the last part of `qualname`. Empty for a hook on a whole module."""
        return self.qualname.rpartition(".")[2]

    @property
    def body_modules(self) -> tuple[str, ...]:
        """The modules that must be imported before the row can be applied."""
        return tuple(path.partition(":")[0] for path in (self.body, self.undo) if path)


ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "nothing"})()


def raw(owner: Any, name: str) -> Any:
    """The attribute as `owner` itself stores it, ABSENT if it doesn't. getattr would give a bound method for a class
    method, and a base class's attribute as the class's own; setting these back would change the class."""
    return vars(owner).get(name, ABSENT)


def look_up(path: str) -> tuple[Any, str, Any]:
    """Import the module of ``module:Class.name``, and return (owner, name, raw value), ABSENT if not the owner's
    own."""
    module, _, qualname = path.partition(":")
    *classes, name = qualname.split(".")
    owner: Any = importlib.import_module(module)
    for step in classes:
        value = raw(owner, step)
        if not isinstance(value, type):
            raise PatchError(f"{path}: {step} is {value!r}, not a class")
        owner = value
    return owner, name, raw(owner, name)
