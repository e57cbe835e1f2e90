"""What several commands take: `--version`, and going on with a torch that isn't supported."""

from __future__ import annotations

import argparse
import platform

from .. import versions
from ..version import __version__


def version() -> str:
    """One line: what is installed."""
    release = versions.found()
    torch = f"torch {release.text}" if release else "no torch"
    return f"torch_overlay {__version__}, {torch}, Python {platform.python_version()}"


def add_version(parser: argparse.ArgumentParser) -> None:
    """`--version`."""
    what = "print the versions of torch_overlay, torch and Python"
    parser.add_argument("--version", action="version", version=version(), help=what)


def add_no_strict(parser: argparse.ArgumentParser) -> None:
    """The option that goes on with a torch that isn't supported."""
    parser.add_argument(
        "--no-strict",
        action="store_true",
        help="go on with a torch release that isn't supported, as far as its functions are recognised",
    )
