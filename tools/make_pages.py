"""Write the tables of the pages that come from the code and from records of runs.

    python tools/make_pages.py            write them
    python tools/make_pages.py --check    write nothing; exit status 1 if a page isn't up to date, and name it

A table stands in a page between two comments, the first of which names it.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from made import clients, compatibility, figures, marks, retired  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def parts() -> dict[str, str]:
    """Every part by its name."""
    alone = {"retired": retired.part(), "compatibility": compatibility.part()}
    return {**alone, **figures.parts(), **clients.parts()}


def stale() -> dict[pathlib.Path, str]:
    """The pages that aren't up to date, with the text that they should have."""
    made = parts()
    pages = {path: path.read_text(encoding="utf-8") for path in PAGES}
    filled = {path: marks.fill(text, made) for path, text in pages.items()}
    return {path: text for path, text in filled.items() if text != pages[path]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page isn't up to date")
    check = parser.parse_args().check
    found = stale()
    for path, text in found.items():
        print(f"{path.relative_to(ROOT)} {'is not up to date' if check else 'written'}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
