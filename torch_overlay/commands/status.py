"""`python -m torch_overlay status`: what enable() does with this torch, patch by patch."""

from __future__ import annotations

import argparse
import sys

from ..show import screen
from .parser import Parser, add_no_strict


def add_arguments(parser: Parser) -> None:
    """`--all` and `--no-strict`."""
    parser.usage = "%(prog)s [OPTION...]"
    parser.description = (
        "Turn the overlay on in a process of its own and print in six lines what it did. Ends with 1 if a patch had to "
        "be left out."
    )
    parser.epilog = "A job asks in its own processes: print(torch_overlay.status()), or `run --report`."
    parser.add_argument("--all", action="store_true", help="print each patch, each count and each option")
    add_no_strict(parser)


def act(arguments: argparse.Namespace) -> int:
    """Enable as far as the targets are recognised, print the table, and return 1 if a patch had to be left out."""
    import torch_overlay

    try:
        now = torch_overlay.enable(strict=False)
    except Exception as error:  # the table says why in a line, where a traceback wouldn't help
        print(f"torch_overlay can't be enabled: {error}", file=sys.stderr)
        return 1
    screen.show((now.all_lines if arguments.all else now.lines)(screen.width()))
    return int(any(row.state == "left out" for row in now.rows))
