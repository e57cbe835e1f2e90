"""Run the tests and keep what ran, on which torch, Python and backend, for docs/results.md.

    python tools/compatibility.py -n 2                 all tests
    python tools/compatibility.py test/mesh -n 2       these, with pytest's own flags

The record goes to docs/compatibility.json, in place of an older one of the same torch, Python, system and tests, and
the table of the page is written anew. Commit both. The exit status is pytest's.
"""

from __future__ import annotations

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import make_pages  # noqa: E402
from made import compatibility  # noqa: E402


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return 0
    code = compatibility.record(arguments)
    for path, text in make_pages.stale().items():
        path.write_text(text, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
