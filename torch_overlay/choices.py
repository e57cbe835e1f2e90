"""The options of `enable`: their values, and how they are read from a call or the environment.

An option is what users of this package set. The code in ``distributed/`` goes upstream, so it doesn't know these: it
reads settings, the entries of ``distributed/config.py``, under the names that they have in torch.distributed.config.
"""

import dataclasses
import difflib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .errors import OptionError

# For each option, the setting of ``distributed/config.py`` that it sets. `leave_out` has none: it chooses patches.
SETTINGS = {
    "share_groups": "mesh_share_groups",
    "create": "mesh_create_groups",
    "flatten": "mesh_joint_groups",
    "check_mesh": "mesh_check",
}


@dataclasses.dataclass(frozen=True)
class Choices:
    """The value of each option.

    Attributes:
        leave_out: the units of patches (sections of the table in `series`) that aren't applied.
    """

    share_groups: str = "names"
    create: str = "members"
    flatten: str = "whole"
    check_mesh: bool = False
    leave_out: tuple[str, ...] = ()


DEFAULT = Choices()
PREFIX = "TORCH_OVERLAY_"
# Variables with the prefix that aren't fields of `Choices`: read by `enable`, by `run` and by `meet`.
OTHERS = ("STRICT", "RUN", "MEET_KEY")
WORDS = {"on": True, "1": True, "true": True, "yes": True, "off": False, "0": False, "false": False, "no": False}


def read_bool(name: str, value: object) -> bool:
    """Read a bool, or a word for one: on, 1, true or yes, off, 0, false or no, in any case.

    >>> read_bool("check_mesh", "on")
    True
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in WORDS:
        return WORDS[value.lower()]
    raise OptionError(f"{name} is on or off (True or False), not {value!r}")


def one_of(*words: str) -> Callable[[str, object], str]:
    """Return a function that validates an option, by name and value, which takes one of these words."""

    def read(name: str, value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        hint = did_you_mean(str(value), words)
        raise OptionError(f"{name} is one of {', '.join(map(repr, words))}, not {value!r}{hint}")

    return read


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint for an error message: the known word closest to a mistyped one. Empty if none is close.

    >>> did_you_mean("flaten", ["flatten", "cost"])
    "; did you mean 'flatten'?"
    """
    spellings = {name.lower().lstrip("-"): name for name in known}  # case and dashes don't count
    close = difflib.get_close_matches(word.lower().lstrip("-"), spellings, n=1)
    return f"; did you mean {spellings[close[0]]!r}?" if close else ""


# The units that `leave_out` may name. The others, "mesh", "redistribute" and "tracing", are what the overlay is.
OPTIONAL = ("cross_mesh", "full_state_dict", "clip_grad_norm")


def some_of(*words: str) -> Callable[[str, object], tuple[str, ...]]:
    """Return a function that validates an option which takes any number of these words, as a sequence or as text with
    commas. Its result is in the order of ``words``, so that equal options are equal values.

    >>> some_of("a", "b", "c")("leave_out", "c,a")
    ('a', 'c')
    """

    def read(name: str, value: object) -> tuple[str, ...]:
        """Return the words in `value`, in the order of `words`; () for "none" or an empty text."""
        if isinstance(value, str):
            value = [word.strip() for word in value.split(",")] if value.lower() not in ("", "none") else ()
        if not isinstance(value, Iterable):
            raise OptionError(f"{name} takes some of {', '.join(map(repr, words))}, not {value!r}")
        wanted = list(value)
        for word in wanted:
            if word not in words:
                hint = did_you_mean(str(word), words)
                raise OptionError(f"{name} takes some of {', '.join(map(repr, words))}, not {word!r}{hint}")
        return tuple(word for word in words if word in wanted)

    return read


READERS: dict[str, Callable] = {
    "share_groups": one_of("names", "ranks", "off"),
    "create": one_of("members", "world"),
    "flatten": one_of("whole", "existing"),
    "check_mesh": read_bool,
    "leave_out": some_of(*OPTIONAL),
}


def settings(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``distributed/config.py`` that these options set, by their names there."""
    return {SETTINGS[name]: value for name, value in chosen.items() if name in SETTINGS}


def choose(base: Choices, chosen: Mapping[str, object]) -> Choices:
    for name in chosen:
        if name not in READERS:
            hint = did_you_mean(name, READERS) or "."
            raise OptionError(f"There is no option {name!r}{hint} Options: {', '.join(READERS)}")
    return dataclasses.replace(base, **{name: READERS[name](name, value) for name, value in chosen.items()})


def from_environment(environ: Mapping[str, str] | None = None) -> Choices:
    """Return the default options, changed by each variable ``TORCH_OVERLAY_<NAME>``. Warns of a variable with this
    prefix that names no option; those in `OTHERS` are skipped.

    >>> from_environment({"TORCH_OVERLAY_FLATTEN": "existing"}).flatten
    'existing'
    """
    environ = os.environ if environ is None else environ
    chosen = DEFAULT
    for variable, text in environ.items():
        name = variable.removeprefix(PREFIX)
        if not variable.startswith(PREFIX) or name in OTHERS:
            continue
        if name.lower() in READERS:
            try:
                chosen = choose(chosen, {name.lower(): text})
            except OptionError as error:
                raise OptionError(f"{error} (from the environment, {variable}={text!r})") from None
            continue
        known = [PREFIX + option.upper() for option in (*READERS, *OTHERS)]
        close = difflib.get_close_matches(name.upper(), [option.removeprefix(PREFIX) for option in known], n=1)
        if close:
            raise OptionError(f"The variable {variable} is no option; did you mean {PREFIX}{close[0]}?")
        # A warning and no error: the variable may be another tool's.
        warnings.warn(
            f"{variable} is no option of torch_overlay and changes nothing. Known: {', '.join(known)}", stacklevel=2
        )
    return chosen


def strict_from_environment(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether one unrecognised target makes enable() raise: unless TORCH_OVERLAY_STRICT is off."""
    return read_bool(PREFIX + "STRICT", (os.environ if environ is None else environ).get(PREFIX + "STRICT", "on"))
