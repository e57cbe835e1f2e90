"""The command line: ``python -m torch_overlay COMMAND``, or ``torch-overlay COMMAND``."""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from . import versions
from .choices import strict_from_environment
from .commands.parser import Mistake, Parser
from .errors import OptionError

# The module of each command NAME: `add_NAME` says what it takes, `NAME` does it. Imported when it is used.
COMMANDS = {
    "run": ("torch_overlay.commands.run", "run a program, and all that it starts, under the overlay"),
    "status": ("torch_overlay.commands.shown", "what enable() does with this torch, patch by patch"),
    "explain": ("torch_overlay.commands.shown", "a redistribution in words, with bytes and time"),
    "draw": ("torch_overlay.commands.shown", "a mesh and its groups, in the terminal or as a picture"),
    "demo": ("torch_overlay.demo.command", "weights, a hang, a wrong value: stock torch beside the overlay"),
}
# Those that do without torch: it may be missing, but if it is there it must be one that is supported.
NO_TORCH = ("run", "draw")


def parser() -> Parser:
    """The whole command line; a command's own arguments come when it is chosen."""
    console = pathlib.Path(sys.argv[0]).stem == "torch-overlay"
    made = Parser(
        title="torch_overlay",
        prog="torch-overlay" if console else "python -m torch_overlay",
        usage="%(prog)s COMMAND [ARGUMENT...]",
        description="A better DeviceMesh and DTensor redistribute for a released PyTorch, in place.",
        epilog="COMMAND --help says what a command takes.",
    )
    commands = made.add_subparsers(title="commands", metavar="COMMAND", dest="command", prog=made.prog)
    for name, (_, what) in COMMANDS.items():
        commands.add_parser(name, help=what, title=f"torch_overlay {name}", fill=_filled(name))
    return made


def _filled(name: str) -> Any:
    return lambda made: getattr(_module(name), f"add_{name}")(made)


def _module(name: str) -> Any:
    return importlib.import_module(COMMANDS[name][0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code, 2 for a command line or a torch that won't do."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    elif words[:1] == ["--"]:
        words = words[1:]
    try:
        arguments = parser().parse_args(words)
        if arguments.command is None:
            parser().ready().print_help(sys.stderr)
            return 2
        refused = _refused(arguments)
    except (Mistake, OptionError) as error:
        print(error, file=sys.stderr)
        return 2
    except SystemExit as done:  # --help or --version has been printed
        return int(done.code or 0)
    if refused:
        print(f"torch_overlay {arguments.command}: {refused}", file=sys.stderr)
        return 2
    return _act(arguments)


def _refused(arguments: argparse.Namespace) -> str:
    """Why this torch won't do, in one line; empty if it does."""
    lenient = getattr(arguments, "no_strict", None)
    if lenient or not strict_from_environment():
        return ""
    refused = versions.refusal(arguments.command not in NO_TORCH)
    return refused if not refused or lenient is None else f"{refused} (--no-strict goes on)"


def _act(arguments: argparse.Namespace) -> int:
    try:
        with warnings.catch_warnings():
            # Torch says so when it is imported without numpy, which nothing here needs.
            warnings.filterwarnings("ignore", "Failed to initialize NumPy")
            code = getattr(_module(arguments.command), arguments.command)(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads has seen enough, as in `explain ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
