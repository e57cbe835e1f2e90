"""argparse as all commands use it: ``--help`` and ``--version`` everywhere, a mistake told in one line.

A parser of a command gets its arguments when it is first used, so that naming a command imports no other.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from ..hints import did_you_mean, instead
from ..show import screen

Reader = Callable[["Parser", list[str]], argparse.Namespace]
_NUMBER = re.compile(r"-\.?\d")


class Mistake(ValueError):
    """A command line that can't be read; its text is one line."""


class Parser(argparse.ArgumentParser):
    """Of the whole command line, or of one command.

    Args:
        title: what a mistake's line begins with.
        fill: adds the arguments, when they are first needed.
    """

    # Reads the words in argparse's place, for a command that hands most of them on.
    reader: Reader | None = None

    def __init__(self, *, title: str, fill: Callable[[Parser], object] | None = None, **given: Any) -> None:
        super().__init__(**given, formatter_class=_Help, allow_abbrev=False, add_help=False)
        self.title = title
        self._fill = fill

    def ready(self) -> Parser:
        """This, with all its arguments."""
        if "-h" not in self._option_string_actions:
            if self._fill is not None:
                self._fill(self)
            home = self if self._subparsers is None else self.add_argument_group("options")  # below the commands
            home.add_argument("-h", "--help", action="help", help="print this")
            home.add_argument(
                "--version", action=_Version, help="print the versions of torch_overlay, torch and Python"
            )
        return self

    def options(self) -> list[str]:
        """Every spelling of an option."""
        return list(self._option_string_actions)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's, but nothing stays unknown; a lone ``--`` that ends the options is no argument. The words
        themselves are in the answer too, as `words`."""
        self.ready()
        words = list(sys.argv[1:] if args is None else args)
        if self.reader is not None:
            return self.reader(self, words), []
        self._check_options(words)
        found, extra = super().parse_known_args(words, namespace)
        extra = [word for word in extra if word != "--"]
        if extra:
            self.error(f"there is no place for {' '.join(map(repr, extra))}")
        found.words = words
        return found, []

    def _check_options(self, words: Iterable[str]) -> None:
        """An unknown option is the mistake to tell of, rather than what argparse then misses."""
        for word in words:
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                break
            if word.startswith("-") and word != "-" and not _NUMBER.match(word):
                self.check_option(word.partition("=")[0])

    def check_option(self, name: str, otherwise: str = "; --help lists them") -> None:
        """Refuse an option that there isn't."""
        if name not in self._option_string_actions:
            known = self.options()
            self.error(f"there is no option {name!r}{did_you_mean(name, known) or otherwise}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = f"{action.option_strings[-1]}: there is no" if action.option_strings else "there is no command"
            known = list(map(str, action.choices))
            there = f"there are {', '.join(known)}"
            self.error(f"{what} {value!r}{instead(str(value), known, there)}")

    def error(self, message: str) -> NoReturn:
        """Raise a `Mistake`, where argparse would print its usage and end the process."""
        raise Mistake(f"{self.title}: {message.removeprefix('argument ')}")


def whole(text: str) -> int:
    """A whole number, for `add_argument(type=)`."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"needs a whole number, got {text!r}") from None


def add_no_strict(parser: argparse.ArgumentParser) -> None:
    """The option that goes on with a torch that isn't supported."""
    parser.add_argument(
        "--no-strict",
        action="store_true",
        help="go on with a torch release that isn't supported, as far as its functions are recognised",
    )


def version() -> str:
    """One line: what is installed."""
    import platform

    from .. import versions
    from ..version import __version__

    release = versions.found()
    torch = f"torch {release.text}" if release else "no torch"
    return f"torch_overlay {__version__}, {torch}, Python {platform.python_version()}"


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(version())
        parser.exit()


class _Help(argparse.HelpFormatter):
    """As wide as the terminal allows; paragraphs are wrapped, and lines that are indented stay as they are."""

    def __init__(self, prog: str, **given: Any) -> None:
        super().__init__(prog, max_help_position=28, width=screen.width(), **given)

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):  # its commands, without a line of its own
            return "".join(map(self._format_action, action._get_subactions()))
        return super()._format_action(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = []
        for part in text.strip().split("\n\n"):
            raw = any(line.startswith(" ") for line in part.splitlines())
            parts.append(part if raw else textwrap.fill(" ".join(part.split()), width))
        return "\n\n".join(parts)
