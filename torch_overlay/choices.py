"""The options that a user may choose: which values each takes, and how they're read from a call or the environment.

The bodies read switches in ``distributed/config.py``, by the names that these have upstream.
"""

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .errors import OptionError
from .hints import did_you_mean

# The switch of the bodies for each option that they read.
SWITCHES = {
    "share_groups": "mesh_share_groups",
    "create": "mesh_create_groups",
    "flatten": "mesh_joint_groups",
    "check_mesh": "mesh_check",
}


@dataclasses.dataclass(frozen=True)
class Choices:
    """What a user may choose about groups and redistribution, and which parts to do without.

    Attributes:
        leave_out: the units of the series that aren't applied.
    """

    share_groups: str = "names"
    create: str = "members"
    flatten: str = "whole"
    check_mesh: bool = False
    leave_out: tuple[str, ...] = ()


DEFAULT = Choices()
PREFIX = "TORCH_OVERLAY_"
# Names under the prefix that aren't options of the value: how `enable` checks, and the switch of `run`.
OTHERS = ("STRICT", "RUN", "MEET_KEY")
SWITCH = {"on": True, "1": True, "true": True, "yes": True, "off": False, "0": False, "false": False, "no": False}


def switch(name: str, value: object) -> bool:
    """True and False, or a word for them.

    >>> switch("check_mesh", "on")
    True
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in SWITCH:
        return SWITCH[value.lower()]
    raise OptionError(f"{name} is on or off (True or False), not {value!r}")


def one_of(*words: str, formerly: Mapping[str, str] | None = None) -> Callable[[str, object], str]:
    """A reader for an option that takes one of these words; ``formerly`` says what an old spelling is called now."""

    def read(name: str, value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        now = (formerly or {}).get(str(value).lower())
        hint = f". What was {value!r} is {now!r} now" if now else did_you_mean(str(value), words)
        raise OptionError(f"{name} is one of {', '.join(map(repr, words))}, not {value!r}{hint}")

    return read


# Before groups were told apart by universe and name, `share_groups` was a switch.
SHARING = {text: "off" for text, on in SWITCH.items() if not on}


# What a program can do without: units of the series, each by itself.
OPTIONAL = ("cross_mesh", "full_state_dict", "clip_grad_norm")


def some_of(*words: str) -> Callable[[str, object], tuple[str, ...]]:
    """A reader for an option that takes any number of these words, as a sequence or as text with commas; the answer is
    in their order.

    >>> some_of("a", "b", "c")("leave_out", "c,a")
    ('a', 'c')
    """

    def read(name: str, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            value = [word.strip() for word in value.split(",")] if value.lower() not in ("", "none") else ()
        if not isinstance(value, Iterable):
            raise OptionError(f"{name} takes some of {', '.join(map(repr, words))}, not {value!r}")
        given = list(value)
        for word in given:
            if word not in words:
                hint = did_you_mean(str(word), words)
                raise OptionError(f"{name} takes some of {', '.join(map(repr, words))}, not {word!r}{hint}")
        return tuple(word for word in words if word in given)

    return read


# Options of earlier versions. Whoever still sets one, in the environment too, hears that nothing reads it.
GONE = ("cost", "topology")

READERS: dict[str, Callable] = {
    "share_groups": one_of("names", "ranks", "off", formerly=SHARING),
    "create": one_of("members", "world"),
    "flatten": one_of("whole", "existing", formerly={"any": "whole"}),
    "check_mesh": switch,
    "leave_out": some_of(*OPTIONAL),
}


def switches(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What the switches are set to for these options."""
    return {SWITCHES[name]: value for name, value in chosen.items() if name in SWITCHES}


def choose(base: Choices, chosen: Mapping[str, object]) -> Choices:
    """`base` with these options changed, each read and checked; OptionError names the option and what it takes."""
    for name in chosen:
        if name not in READERS:
            hint = " any more." if name in GONE else did_you_mean(name, READERS) or "."  # a sentence's end either way
            raise OptionError(f"There is no option {name!r}{hint} Options: {', '.join(READERS)}")
    return dataclasses.replace(base, **{name: READERS[name](name, value) for name, value in chosen.items()})


def from_environment(environ: Mapping[str, str] | None = None) -> Choices:
    """The defaults, changed by every ``TORCH_OVERLAY_<NAME>`` of the environment.

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
            # Not an error: the variable may be another tool's. Not silent: it may be a slip of the pen.
            known = [PREFIX + each.upper() for each in READERS]
            hint = did_you_mean(variable, known) or f". Known: {', '.join(known)}"
            warnings.warn(f"{variable} is no option of torch_overlay and changes nothing{hint}", stacklevel=2)
    try:
        return choose(DEFAULT, chosen)
    except OptionError as error:
        raise OptionError(f"{error} (from the environment, {PREFIX}...)") from None


def strict_from_environment(environ: Mapping[str, str] | None = None) -> bool:
    """Whether an unrecognised target refuses the whole overlay: yes, unless TORCH_OVERLAY_STRICT is off."""
    return switch(PREFIX + "STRICT", (os.environ if environ is None else environ).get(PREFIX + "STRICT", "on"))
