"""`python -m torch_overlay demo`: what a user feels, measured on stock torch and under the overlay."""

from __future__ import annotations

import argparse

from ..demo import command
from .parser import Parser


def add_arguments(parser: Parser) -> None:
    """The demo's own, from its own parser: it can be run alone, too."""
    theirs = command._parser()
    parser.usage = "%(prog)s [OPTION...]"
    parser.description = theirs.description
    parser.epilog = theirs.epilog
    for action in theirs._actions:
        if action.dest != "help":
            parser._add_action(action)


def act(arguments: argparse.Namespace) -> int:
    """Run it; its exit code."""
    return command.act(arguments)
