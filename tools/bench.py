"""Stock torch and the overlay, measured side by side in one run.

    python tools/bench.py mesh --full            views and meshes of 64 to 1,048,576 ranks
    python tools/bench.py groups                 process groups of real trainers: counts, no times
    python tools/bench.py plans                  collectives and bytes of all pairs of placements: counts, no times
    python tools/bench.py redistribute           1 KB to 64 MB on 8 gloo ranks, every result checked
    python tools/bench.py weights                a trainer's weights into its servers, beside what people write by hand
    python tools/bench.py changes                bytes and time where 0.1 to 100 % of the elements changed
    python tools/bench.py hosts                  between hosts: weights beside a loop by hand, and redistributions
    python tools/bench.py checkpoint             a checkpoint into shards, beside DCP's reader and transformers
    python tools/bench.py full_state             a model's full state dict by an unmodified program, on stock and by run
    python tools/bench.py memory                 peak memory of all pairs of placements on a (2, 2, 2) mesh
    python tools/bench.py overhead               time per redistribute call where nothing moves

Each prints a table with ratios; ``--json FILE`` keeps it. With ``--strict`` the exit status is 1
if a target is missed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[level]) for level in (0, 1)]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the ranks share the cores

from benchmarks import report, table  # noqa: E402

BENCHES = ("mesh", "groups", "plans", "redistribute", "weights", "changes", "hosts", "checkpoint")
BENCHES += ("full_state", "memory", "overhead")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_subparsers(dest="bench", required=True)
    for name in BENCHES:
        module = importlib.import_module(f"benchmarks.{name}")
        summary, _, more = (module.__doc__ or "").partition("\n")
        sub = chosen.add_parser(name, help=summary, description=summary + more)
        module.add_arguments(sub)
        sub.add_argument("--json", metavar="FILE", help="write what was measured")
        sub.add_argument("--strict", action="store_true", help="exit 1 if a target is missed")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    shown = {k: v for k, v in vars(arguments).items() if k not in ("bench", "json", "strict")}
    results = report.Report(arguments.bench, importlib.metadata.version("torch"), arguments=shown)
    importlib.import_module(f"benchmarks.{arguments.bench}").run(arguments, results)
    table.print_report(results)
    if arguments.json:
        results.write(arguments.json)
    return 1 if arguments.strict and not all(target.met for target in results.targets) else 0


if __name__ == "__main__":
    sys.exit(main())
