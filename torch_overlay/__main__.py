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
from .commands import add_version
from .errors import OptionError, UnknownRelease

# The module of each command NAME, imported when the command is used. Its `add_NAME` adds arguments, and `NAME` runs it.
COMMANDS = {
    "run": ("torch_overlay.commands.run", "run a program, and all that it starts, under the overlay"),
    "status": ("torch_overlay.commands.shown", "what enable() does with this torch, patch by patch"),
    "explain": ("torch_overlay.commands.shown", "a redistribution in words, with bytes and time"),
    "draw": ("torch_overlay.commands.shown", "a mesh and its groups, in the terminal or as a picture"),
    "demo": ("torch_overlay.demo.command", "weights, a hang, a wrong value: stock torch beside the overlay"),
}
# Commands that run without torch. If torch is installed, it must be a supported release for them, too.
NO_TORCH = ("run", "draw")


def parser(chosen: str | None = None) -> argparse.ArgumentParser:
    console = pathlib.Path(sys.argv[0]).stem == "torch-overlay"  # so that usage shows what the user typed
    whole = argparse.ArgumentParser(
        prog="torch-overlay" if console else "python -m torch_overlay",
        description="A better DeviceMesh and DTensor redistribute for a released PyTorch, in place.",
        epilog="COMMAND --help says what a command takes.",
        allow_abbrev=False,
    )
    add_version(whole)
    commands = whole.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, (_, what) in COMMANDS.items():
        command = commands.add_parser(
            name, help=what, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add_version(command)
        if name == chosen:
            getattr(_module(name), f"add_{name}")(command)
    return whole


def _module(name: str) -> Any:
    return importlib.import_module(COMMANDS[name][0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code. On POSIX, `run` replaces this process and doesn't return.

    The code is 2 for a wrong command line, a wrong TORCH_OVERLAY_STRICT, and a torch that isn't supported; a command
    that isn't strict doesn't check the last two. Of the other options in the environment `run` checks all: a wrong one
    is 2, too. `status` returns 1 for one, and `draw` and `explain` don't read them. A line on standard error says what
    was wrong.

    The code is 0 after --help and --version, and 1 if the reader of the output of a command stopped reading. Otherwise
    it is what the command returns: `status`, for example, returns 1 if a patch was left out. Other errors of the
    command are passed on.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    elif words[:1] == ["--"]:
        words = words[1:]
    chosen = words[0] if words and words[0] in COMMANDS else None
    try:
        whole = parser(chosen)
        if chosen == "run":  # its words are those of a program, and Python's own flags stand before them
            arguments = _module("run").read(whole, words[1:])
        else:
            arguments = whole.parse_args(words)
        refused = _refused(arguments)
    except (OptionError, UnknownRelease) as error:  # the latter where torch's version has no number
        print(error, file=sys.stderr)
        return 2
    except SystemExit as done:  # argparse printed the help, the version or what is wrong
        return int(done.code or 0)
    if refused:
        print(f"torch_overlay {arguments.command}: {refused}", file=sys.stderr)
        return 2
    return _run_command(arguments)


def _refused(arguments: argparse.Namespace) -> str:
    """Return one line that says why the command can't run with this torch; empty if it can."""
    lenient = getattr(arguments, "no_strict", None)
    if lenient or not strict_from_environment():
        return ""
    refused = versions.refusal(arguments.command not in NO_TORCH)
    return refused if not refused or lenient is None else f"{refused} (--no-strict goes on)"


def _run_command(arguments: argparse.Namespace) -> int:
    """Run a command, and return its exit code; 1 if the reader of its output stopped reading."""
    try:
        with warnings.catch_warnings():
            # Torch warns when it is imported without numpy. Nothing here needs numpy.
            warnings.filterwarnings("ignore", "Failed to initialize NumPy")
            code = getattr(_module(arguments.command), arguments.command)(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader stopped reading, as in `explain ... | head`
        # Python flushes again when it ends, and would print a traceback for the same pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
