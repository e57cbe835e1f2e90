"""The command line: ``python -m torch_overlay COMMAND``, or ``torch-overlay COMMAND``."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence

# Each command is ``module:function``, a function from the rest of the arguments to an exit code, imported when used.
COMMANDS = {
    "run": ("torch_overlay.run:main", "run a program, and all it starts, under the overlay"),
    "status": ("torch_overlay.__main__:status", "what enable() does with this torch, patch by patch"),
    "explain": ("torch_overlay.explain:main", "a redistribution in words, with bytes and time"),
    "demo": ("torch_overlay.demo:main", "train a model on stock torch and under the overlay, side by side"),
    "draw": ("torch_overlay.draw:main", "a mesh and its groups as a picture"),
}


def available() -> dict[str, tuple[str, str]]:
    """The commands whose module is there."""
    return {name: row for name, row in COMMANDS.items() if importlib.util.find_spec(row[0].partition(":")[0])}


def usage() -> str:
    rows = "\n".join(f"  {name:8} {what}" for name, (_, what) in available().items())
    return f"usage: python -m torch_overlay COMMAND [ARGUMENT...]\n\n{rows}\n"


def status(argv: Sequence[str]) -> int:
    """Enable as far as the targets are recognised, print the table, and exit 1 if a patch had to be left out."""
    import torch_overlay

    if argv:
        print(f"torch_overlay status takes no arguments, not {' '.join(argv)}", file=sys.stderr)
        return 2
    try:
        now = torch_overlay.enable(strict=False)
    except Exception as error:  # the table says why in a line, where a traceback wouldn't help
        print(f"torch_overlay can't be enabled: {error}", file=sys.stderr)
        return 1
    print(now)
    return int(any(row.state == "left out" for row in now.rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0 if argv else 2
    if argv[0] not in available():
        print(f"torch_overlay has no command {argv[0]!r}\n\n{usage()}", file=sys.stderr, end="")
        return 2
    module, _, function = COMMANDS[argv[0]][0].partition(":")
    return getattr(importlib.import_module(module), function)(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
