"""Apply rows: resolve every target, check every target, then set all. Undo in reverse order, by identity.

Start at `prepare` and `apply`. Nothing here knows torch.
"""

import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from .patch import ABSENT, ForeignPatch, Kind, OverlayError, Patch, PatchError, look_up, raw
from .recognise import describe
from .trampoline import trampoline

# Says whether a target is what a row was written for. Called with the row and the raw value of its target (None if the
# module isn't imported); returns None if it is, else what is there instead, in words.
Recognise = Callable[[Patch, Any], "str | None"]


class SetAttribute:
    """Sets an attribute of a module or class. Undoing sets the very object that was there before, or deletes ours."""

    def __init__(self, path: str, owner: Any, name: str, new: Any, old: Any):
        self.path, self.owner, self.name, self.new, self.old = path, owner, name, new, old

    def apply(self) -> None:
        setattr(self.owner, self.name, self.new)

    def undo(self) -> None:
        """Set what was there before, or delete ours if nothing was, whatever is there now."""
        if raw(self.owner, self.name) is self.old:
            return  # a mock that was open over enable() put the original back itself
        # Deleted and not set to None: an attribute of a base class, which ours hid, must show again.
        if self.old is ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.old)

    def foreign(self) -> str | None:
        """Describe what somebody else set over ours; None if ours or the original is there."""
        now = raw(self.owner, self.name)
        return None if now is self.new or now is self.old else f"{self.path} is now {describe(now)}"


class SwapCode(SetAttribute):
    """Gives a function of a module other code. It stays the same object, so every name bound to it calls our code.

    Setting another function in the module would miss modules that ran ``from module import function`` before.
    """

    FIELDS = ("__code__", "__defaults__", "__kwdefaults__")

    def __init__(self, path: str, owner: Any, name: str, code: types.CodeType, body: types.FunctionType):
        function = raw(owner, name)
        super().__init__(path, owner, name, function, function)
        self.theirs = {field: getattr(function, field) for field in self.FIELDS}
        self.ours = {"__code__": code} | {field: getattr(body, field) for field in self.FIELDS[1:]}

    def apply(self) -> None:
        """Give the function our code and defaults."""
        self._set(self.ours)

    def undo(self) -> None:
        """Give the function its own code and defaults back, and bind its name to it again."""
        self._set(self.theirs)
        super().undo()

    def _set(self, values: dict[str, Any]) -> None:
        for field, value in values.items():
            setattr(self.old, field, value)

    def foreign(self) -> str | None:
        """Describe code or a function that somebody else put over ours; None if ours or the original is there."""
        now = self.old.__code__
        if now in (self.ours["__code__"], self.theirs["__code__"]):
            return super().foreign()  # the code is ours; is the function still bound to its name?
        return f"{self.path} now runs the code of {now.co_name} ({now.co_filename}:{now.co_firstlineno})"


class Hook:
    """Calls a function. To undo it, calls another one with what the first returned."""

    def __init__(self, path: str, do: Callable[[], Any], back: Callable[[Any], Any]):
        self.path, self.do, self.back, self.token = path, do, back, None

    def apply(self) -> None:
        """Call the function, and keep what it returns for `undo`."""
        self.token = self.do()

    def undo(self) -> None:
        """Call the other function with what the first one returned."""
        token, self.token = self.token, None
        self.back(token)

    def foreign(self) -> None:
        """Return None: a hook can't tell what somebody else did."""
        return None


Change = SetAttribute | SwapCode | Hook


def import_body(patch: Patch) -> None:
    """Import the modules that hold a row's body and its `undo`, so that the row can be applied. Returns nothing."""
    for module in patch.body_modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise OverlayError(
                f"{patch.target}: the overlay's own {module} can't be imported ({type(error).__name__}: {error})"
            ) from error


def prepare(patches: Iterable[Patch], recognise: Recognise) -> tuple[dict[Patch, Change], dict[Patch, str]]:
    """Resolve and check every row whose module and body are imported; sets nothing. Returns the change of each row that
    may be applied, and for each other row what is there instead of its target."""
    changes: dict[Patch, Change] = {}
    refused: dict[Patch, str] = {}
    seen: set[str] = set()
    for patch in patches:
        if patch.kind is not Kind.HOOK:
            if patch.target in seen:
                raise PatchError(f"{patch.target} is patched by two rows for one release")
            seen.add(patch.target)
        change = _resolve(patch, recognise)
        if isinstance(change, str):
            refused[patch] = change
        else:
            changes[patch] = change
    return changes, refused


def fallen(patches: Iterable[Patch], refused: dict[Patch, str]) -> dict[Patch, str]:
    """The rows of whose unit another row is refused, each with the reason. Half of a unit would be worse than none: a
    mesh with our `__init__` and torch's `__getitem__`, say."""
    first = {patch.unit: patch for patch in reversed(refused) if patch.unit}
    return {
        patch: f"it makes sense only with {first[patch.unit].target}, which is left out"
        for patch in patches
        if patch.unit in first and patch not in refused
    }


def _resolve(patch: Patch, recognise: Recognise) -> Change | str:
    """Return the row's change, or the reason why this torch can't take it."""
    owner, name, old = _target(patch)
    if owner is None:
        return f"{patch.module} has no class {patch.owner}"
    why = recognise(patch, None if old is ABSENT else old)
    if why:
        return why
    if patch.kind is Kind.HOOK:
        return Hook(patch.target, look_up(patch.body)[2], look_up(patch.undo or "")[2])
    body = look_up(patch.body)[2]
    if body is ABSENT:
        raise PatchError(f"{patch.target}: its body {patch.body} isn't there")
    if patch.kind is Kind.ADD and old is not ABSENT:
        return f"{patch.target} is there already, as {describe(old)}"
    if patch.kind is Kind.REPLACE and old is ABSENT:
        return f"{patch.target} isn't there"
    if patch.is_swap:
        # The code of a closure needs its cells, which a body doesn't have; a class or a builtin has no code to swap.
        if not (inspect.isfunction(old) and inspect.isfunction(body)) or old.__code__.co_freevars:
            raise PatchError(f"{patch.target}: only the code of a plain function is swapped, and for a function")
        return SwapCode(patch.target, owner, name, trampoline(body, patch.body, old.__code__.co_flags), body)
    if patch.kind is Kind.REPLACE and _shape(old) is not _shape(body):
        raise PatchError(f"{patch.target} is {describe(old)}, but its body is {describe(body)}: not the same kind")
    return SetAttribute(patch.target, owner, name, body, old)


def _target(patch: Patch) -> tuple[Any, str, Any]:
    """Return (owner, name, raw value) of a row's target in an imported module: owner None without its class, and the
    module itself, without a name, for a hook."""
    if not patch.qualname:
        return sys.modules[patch.module], "", ABSENT
    try:
        return look_up(patch.target)
    except PatchError:
        return None, "", ABSENT


def _shape(value: Any) -> type:
    """How an attribute is looked up, which a patch may not change. A cached function may become a plain one."""
    if isinstance(value, (staticmethod, classmethod, property, type)) or not callable(value):
        return type(value)
    return types.FunctionType


def apply(changes: Iterable[Change]) -> None:
    """Set all. If one can't be set, or an interrupt comes, take back those that were set, and raise."""
    done: list[Change] = []
    try:
        for change in changes:
            done.append(change)  # before it is applied, which may fail half way, as a swap of code and then of defaults
            change.apply()
    except BaseException as error:
        if isinstance(done[-1], Hook):
            done.pop()  # its undo takes what its apply returned, and it returned nothing
        problems = _undo_all(done)
        if isinstance(error, Exception):
            also = f" Taking back the others failed too: {problems}" if problems else ""
            raise OverlayError(f"{change.path} couldn't be patched ({error!r}); nothing was changed.{also}") from error
        raise


def check_ours(changes: Iterable[Change]) -> None:
    """Check that nobody patched a target after us. Their patch may call ours, and would put our body back if they later
    restore what was there (a mode does, and a test's mock)."""
    foreign = [other for other in (change.foreign() for change in changes) if other]
    if foreign:
        raise ForeignPatch(
            "The overlay can't be taken away, since somebody patched torch after it: "
            + "; ".join(foreign)
            + ". Take that back first (leave its context, undo its patch), or call disable(force=True), which puts "
            "torch's own objects there. Nothing was changed."
        )


def undo(changes: list[Change]) -> None:
    """Put back every original, the last first, whatever is there now."""
    problems = _undo_all(changes)
    if problems:
        raise OverlayError("The overlay is off, but not everything went back: " + "; ".join(problems))


def _undo_all(changes: list[Change]) -> list[str]:
    """Undo every change, also if another fails. Returns the failures in words."""
    problems = []
    for change in reversed(changes):
        try:
            change.undo()
        except Exception as error:
            problems.append(f"{change.path}: {error!r}")
    return problems
