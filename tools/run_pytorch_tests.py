"""PyTorch's own test files, unmodified: on stock torch, then under the overlay, then what differs.

    python tools/run_pytorch_tests.py --fork --pytorch ~/pytorch mesh redistribute
    python tools/run_pytorch_tests.py --pytorch ~/pytorch test/distributed/tensor/test_dtensor.py --select TestDTensor
    python tools/run_pytorch_tests.py test_device_mesh.py test_serialization.py

Files are sets by name, paths in the checkout, or files by themselves; with a checkout and no files, all sets. The
checkout must be of the installed torch's release. The exit status is 1 if a case is worse than on stock and no entry of
test/upstream/expected.py says why, if an entry no longer holds, or if a file can't be collected; 2 if nothing was run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import re
import runpy
import signal
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[level]) for level in (0, 1)]

from pytorch_tests import difference, runner, sets, show, side  # noqa: E402
from rich.console import Console  # noqa: E402

EXPECTED = pathlib.Path(__file__).resolve().parents[1] / "test" / "upstream" / "expected.py"
MOST_ALONE = 40  # more differences than this are no accident


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"test files, or sets: {', '.join(sets.SETS)}")
    parser.add_argument(
        "--pytorch", metavar="PATH", help="a checkout of PyTorch, whose test/ folder sets name files in"
    )
    parser.add_argument("--mode", default="overlay", metavar="MODE", help="the other side: overlay, or patched=FOLDER")
    parser.add_argument("--select", action="append", default=[], metavar="PATTERN", help="-k, or a glob on file::case")
    parser.add_argument("--jobs", type=int, default=runner.default_jobs(), help="files at a time (here: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="for one case (%(default)s)")
    parser.add_argument("--state", default="out/pytorch_tests", metavar="DIR", help="keeps what finished (%(default)s)")
    parser.add_argument("--fork", action="store_true", help="fork the ranks instead of spawning them: much faster")
    parser.add_argument("--no-reruns", action="store_true", help="don't run what differs again, alone, on both sides")
    parser.add_argument("--expected", default=str(EXPECTED), metavar="FILE", help="differences that are meant")
    parser.add_argument("--json", metavar="FILE", help="write the verdict of each case")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options, console = parse(argv), Console()
    try:
        files, missing = sets.resolve(options.files, options.pytorch)
        sides = [side.STOCK, side.of(options.mode)]
        expected = [one for one in load(options.expected) if one.in_force(sides[1].name, release())]
    except (ValueError, OSError) as error:
        console.print(f"run_pytorch_tests: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    for path in missing:
        console.print(f"not in this checkout: {path}", highlight=False)
    plan = runner.Plan(pathlib.Path(options.state), options.timeout, tuple(options.select), options.fork)
    found, results = run(options, plan, files, sides, console)
    whole = [] if options.select else [file.name for file in files]
    judgement = difference.judge(found, expected, whole)
    console.print(show.table(found, results, sides[1].name))
    show.differences(found, judgement, console)
    if options.json:
        write(options.json, found, judgement)
    if not found:
        console.print("no test case was found")
        return 2
    show.verdict_of(judgement, console)
    unread = [one.name.partition("::")[0] for one in found if one.name.endswith("::(collection)") and not one.differs]
    for name in unread:
        console.print(f"{name} can't be collected on either side: is it of another release?", highlight=False)
    return 0 if judgement.passed and not unread else 1


def run(
    options: argparse.Namespace, plan: runner.Plan, files: list[sets.File], sides: list[side.Side], console: Console
) -> tuple[list[difference.Difference], dict]:
    """Every file on both sides, then what differs alone on both sides; all cases, and the results by side and file."""
    bars = show.Bars(console)
    with bars.progress:
        work = [(one, file, "") for file in files for one in sides]
        done = runner.run_all(plan, work, options.jobs, bars)
        results = {(where, file): result for (where, file, _), result in done.items()}
        first, second = (one.name for one in sides)
        found = [
            case
            for file in files
            for case in difference.compare(file.name, results[first, file.name], results[second, file.name])
        ]
        doubtful = {one.name: one for one in found if one.differs}
        if options.no_reruns or len(doubtful) > MOST_ALONE:
            return found, results
        cases = {name: split(name, files) for name in doubtful if is_case(name)}
        alone = [(one, file, case) for file, case in cases.values() for one in sides]
        done = runner.run_all(plan, alone, options.jobs, bars)
    settled = {
        name: difference.again(doubtful[name], done[first, file.name, case], done[second, file.name, case])
        for name, (file, case) in cases.items()
    }
    return [settled.get(one.name, one) for one in found], results


def split(name: str, files: list[sets.File]) -> tuple[sets.File, str]:
    """The file and the case of a full name."""
    home, _, case = name.partition("::")
    return next(file for file in files if file.name == home), case


def is_case(name: str) -> bool:
    """Whether this is a test, and not what happened around the tests: the collection, the exit."""
    return not name.partition("::")[2].startswith("(")


def load(path: str) -> list[difference.Expected]:
    """The entries of a file of expectations: its EXPECTED."""
    return list(runpy.run_path(path)["EXPECTED"])


def release() -> tuple[int, ...]:
    """The installed torch's."""
    match = re.match(r"\d+(\.\d+)*", importlib.metadata.version("torch"))
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def write(path: str, found: list[difference.Difference], judgement: difference.Judgement) -> None:
    rows = [
        {
            "case": one.name,
            "verdict": one.verdict.value,
            "outcomes": [case.outcome if case else None for case in (one.stock, one.other)],
            "expected": judgement.explained[one.name].reason if one.name in judgement.explained else None,
        }
        for one in found
    ]
    stale = [{"pattern": entry.pattern, "why": why} for entry, why in judgement.stale]
    text = json.dumps({"passed": judgement.passed, "cases": rows, "stale": stale}, indent=1)
    pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends this ends the ranks, too
    sys.exit(main())
