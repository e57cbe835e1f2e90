"""The options of `enable`: their values, and how they are read from a call or the environment.

The code in ``distributed/`` goes upstream, so it doesn't know these options. It reads the switches of
``distributed/config.py``, under the names that they have there.
"""

import dataclasses
import difflib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .errors import OptionError

# For each option, the switch of ``distributed/config.py`` that it sets. `leave_out` has none: it chooses patches.
SWITCHES = {
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
SWITCH = {"on": True, "1": True, "true": True, "yes": True, "off": False, "0": False, "false": False, "no": False}


def read_switch(name: str, value: object) -> bool:
    """Read a bool, or a word for one: on, 1, true or yes, off, 0, false or no, in any case.

    >>> read_switch("check_mesh", "on")
    True
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in SWITCH:
        return SWITCH[value.lower()]
    raise OptionError(f"{name} is on or off (True or False), not {value!r}")


def one_of(*words: str, formerly: Mapping[str, str] | None = None) -> Callable[[str, object], str]:
    """Return a function that validates an option which takes one of these words. It takes the option's name and a
    value."""

    def read(name: str, value: object) -> str:
        """Return `value` if it is one of the words."""
        if isinstance(value, str) and value in words:
            return value
        now = (formerly or {}).get(str(value).lower())
        hint = f". What was {value!r} is {now!r} now" if now else did_you_mean(str(value), words)
        raise OptionError(f"{name} is one of {', '.join(map(repr, words))}, not {value!r}{hint}")

    return read


# `share_groups` was on or off before it took words.
SHARING = {text: "off" for text, on in SWITCH.items() if not on}


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
    commas. Its result is in the order of ``words``, so that equal choices are equal values.

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


# Options of earlier versions. Setting one is an error, also in the environment, since nothing reads it any more.
GONE = ("cost", "topology")

READERS: dict[str, Callable] = {
    "share_groups": one_of("names", "ranks", "off", formerly=SHARING),
    "create": one_of("members", "world"),
    "flatten": one_of("whole", "existing", formerly={"any": "whole"}),
    "check_mesh": read_switch,
    "leave_out": some_of(*OPTIONAL),
}


def switches(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the switches of ``distributed/config.py`` that these options set, by the names that they have there.
    Options without a switch are left out."""
    return {SWITCHES[name]: value for name, value in chosen.items() if name in SWITCHES}


def choose(base: Choices, chosen: Mapping[str, object]) -> Choices:
    """Return `base` with these options changed."""
    for name in chosen:
        if name not in READERS:
            hint = " any more." if name in GONE else did_you_mean(name, READERS) or "."
            raise OptionError(f"There is no option {name!r}{hint} Options: {', '.join(READERS)}")
    return dataclasses.replace(base, **{name: READERS[name](name, value) for name, value in chosen.items()})


def from_environment(environ: Mapping[str, str] | None = None) -> Choices:
    """Return the default options, changed by each variable ``TORCH_OVERLAY_<NAME>``. Warns of a variable with this
    prefix that names no option; those in `OTHERS` are skipped.

    >>> from_environment({"TORCH_OVERLAY_FLATTEN": "existing"}).flatten
    'existing'
    """
    environ = os.environ if environ is None else environ
    chosen: dict[str, object] = {}
    for variable, text in environ.items():
        name = variable.removeprefix(PREFIX)
        if not variable.startswith(PREFIX) or name in OTHERS:
            continue
        if name.lower() in READERS or name.lower() in GONE:
            chosen[name.lower()] = text
        else:
            # A warning and no error: the variable may be another tool's, or a mistyped name of ours.
            known = [PREFIX + option.upper() for option in READERS]
            hint = did_you_mean(variable, known) or f". Known: {', '.join(known)}"
            warnings.warn(f"{variable} is no option of torch_overlay and changes nothing{hint}", stacklevel=2)
    try:
        return choose(DEFAULT, chosen)
    except OptionError as error:
        raise OptionError(f"{error} (from the environment, {PREFIX}...)") from None


def strict_from_environment(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether one unrecognised target makes enable() raise: unless TORCH_OVERLAY_STRICT is off."""
    return read_switch(PREFIX + "STRICT", (os.environ if environ is None else environ).get(PREFIX + "STRICT", "on"))
