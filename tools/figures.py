"""Count the figures of the pages again, those that take seconds, and say which differ from docs/figures.json.

    python tools/figures.py               count all that have a recipe (half a minute)
    python tools/figures.py pairs         count one recipe
    python tools/figures.py --write       also put what was counted into docs/figures.json and into the pages
    python tools/figures.py --list        every figure with the command that measures it

Exit status 1 if a figure differs. Times and memory aren't counted: their commands measure them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import make_pages  # noqa: E402
from made import figures  # noqa: E402
from made.recipes import RECIPES  # noqa: E402


def differences(recipe: str) -> dict[str, tuple[int, int]]:
    """The figures of a recipe that aren't what it counts, with what it counts; KeyError if it doesn't count one."""
    counted = RECIPES[recipe]()
    quoted = [figure for figure in figures.read().values() if figure.recipe == recipe]
    return {one.name: counted[one.name] for one in quoted if counted[one.name] != (one.stock, one.overlay)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"which: {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--write", action="store_true", help="put what was counted into docs/figures.json")
    parser.add_argument("--list", action="store_true", help="every figure with the command that measures it")
    given = parser.parse_args()
    unknown = [recipe for recipe in given.recipes if recipe not in RECIPES]
    if unknown:
        parser.error(f"there is no recipe {unknown[0]!r}; there are {', '.join(RECIPES)}")
    quoted = figures.read()
    if given.list:
        print("\n".join(f"{one.name}: {one.what}\n    python {one.command}" for one in quoted.values()))
        return 0
    found = {name: values for recipe in given.recipes or RECIPES for name, values in differences(recipe).items()}
    for name, (stock, overlay) in found.items():
        print(f"{name}: stock {quoted[name].stock} -> {stock}, overlay {quoted[name].overlay} -> {overlay}")
    print(f"{len(found)} figures differ" if found else "every figure is what was counted")
    if given.write:
        _write(found)
    return 1 if found and not given.write else 0


def _write(found: dict[str, tuple[int, int]]) -> None:
    text = figures.FILE.read_text(encoding="utf-8")
    for name, (stock, overlay) in found.items():
        line = next(line for line in text.splitlines() if f'"name": "{name}"' in line)
        entry = {**json.loads(line.strip().rstrip(",")), "stock": stock, "overlay": overlay}
        text = text.replace(line, f"    {json.dumps(entry, ensure_ascii=False)}{',' if line.endswith(',') else ''}")
    figures.FILE.write_text(text, encoding="utf-8")
    for path, filled in make_pages.stale().items():
        path.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
