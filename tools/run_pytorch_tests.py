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
import json
import pathlib
import runpy
import signal
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[level]) for level in (0, 1)]

from pytorch_tests import difference, runner, sets, show, side  # noqa: E402

from torch_overlay import versions  # noqa: E402

EXPECTED = pathlib.Path(__file__).resolve().parents[1] / "test" / "upstream" / "expected.py"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"test files, or sets: {', '.join(sets.SETS)}")
    parser.add_argument(
        "--pytorch", metavar="PATH", help="a checkout of PyTorch, whose test/ folder sets name files in"
    )
    parser.add_argument("--mode", default="overlay", metavar="MODE", help="the other side: overlay, or patched=FOLDER")
    parser.add_argument("--select", action="append", default=[], metavar="PATTERN", help="-k, or a glob on file::case")
    parser.add_argument("--jobs", type=int, default=runner.JOBS, help="files at a time (here: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="for one case (%(default)s)")
    parser.add_argument("--logs", default="out/pytorch_tests", metavar="DIR", help="what files print (%(default)s)")
    parser.add_argument("--fork", action="store_true", help="fork the ranks instead of spawning them: much faster")
    parser.add_argument("--expected", default=str(EXPECTED), metavar="FILE", help="differences that are meant")
    parser.add_argument("--json", metavar="FILE", help="write the verdict of each case")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        files, missing = sets.resolve(options.files, options.pytorch)
        stock, other = side.STOCK, side.of(options.mode)
        expected = [entry for entry in load(options.expected) if entry.in_force(other.name, versions.running().number)]
    except (ValueError, OSError) as error:
        print(f"run_pytorch_tests: {error}")
        return 2
    for path in missing:
        print(f"not in this checkout: {path}")
    plan = runner.Plan(pathlib.Path(options.logs), options.timeout, tuple(options.select), options.fork)
    results = runner.run_all(plan, [(one, file) for file in files for one in (stock, other)], options.jobs)
    cases = [
        case
        for file in files
        for case in difference.compare(file.name, results[stock.name, file.name], results[other.name, file.name])
    ]
    if not cases:
        print("no test case was found")
        return 2
    judgement = difference.judge(cases, expected, [] if options.select else [file.name for file in files])
    print("", *show.table(cases, results, other.name), *show.differences(cases, judgement), sep="\n")
    if options.json:
        write(options.json, cases, judgement)
    print("", *show.verdict(judgement), sep="\n")
    unread = [one.name.partition("::")[0] for one in cases if one.name.endswith("::(collection)") and not one.differs]
    for name in unread:
        print(f"{name} can't be collected on either side: is it of another release?")
    return 0 if judgement.passed and not unread else 1


def load(path: str) -> list[difference.Expected]:
    return list(runpy.run_path(path)["EXPECTED"])


def write(path: str, cases: list[difference.Difference], judgement: difference.Judgement) -> None:
    rows = [
        {
            "case": one.name,
            "verdict": one.verdict.value,
            "outcomes": [case.outcome if case else None for case in (one.stock, one.other)],
            "expected": judgement.explained[one.name].reason if one.name in judgement.explained else None,
        }
        for one in cases
    ]
    stale = [{"pattern": entry.pattern, "why": why} for entry, why in judgement.stale]
    text = json.dumps({"passed": judgement.passed, "cases": rows, "stale": stale}, indent=1)
    pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends this ends the ranks, too
    sys.exit(main())
