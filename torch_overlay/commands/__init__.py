"""The commands of ``python -m torch_overlay``, and the arguments that several of them share.

None imports torch before it has read its arguments, so that a mistake is reported at once.
"""

from __future__ import annotations

import argparse
import platform

from .. import versions
from ..version import __version__


def version() -> str:
    """The versions of torch_overlay, torch and Python, in one line. Doesn't import torch."""
    release = versions.installed()
    torch = f"torch {release.text}" if release else "no torch"
    return f"torch_overlay {__version__}, {torch}, Python {platform.python_version()}"


def add_version(parser: argparse.ArgumentParser) -> None:
    what = "print the versions of torch_overlay, torch and Python"
    parser.add_argument("--version", action="version", version=version(), help=what)


def add_no_strict(parser: argparse.ArgumentParser) -> None:
    """Add `--no-strict`, with which a command runs on a torch that isn't supported."""
    parser.add_argument(
        "--no-strict",
        action="store_true",
        help="go on with a torch release that isn't supported, as far as its functions are recognised",
    )
