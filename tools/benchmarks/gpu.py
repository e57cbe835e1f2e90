"""For a host with several GPUs: groups, moves, overlap, trees and the fuzz on NCCL, in one file to share.

Runs on the largest of 8, 4 or 2 GPUs that the host has. Without them it says so and ends with status 2.
`docs/developers/gpu.md` says how to read what it writes. `--backend gloo --device cpu` runs the same code where there
is no GPU; its numbers say nothing about GPUs, and the file says on what it ran.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from . import clock, gpu_ranks, process
from .report import Report, Row, Target
from .sides import OVERLAY, SIDES, STOCK

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
RANKS = (8, 4, 2)
FILE = "torch_overlay_gpu.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="BYTES", help="of whole tensors")
    parser.add_argument("--tree-bytes", type=int, default=1 << 20, metavar="BYTES", help="of a parameter of a tree")
    parser.add_argument("--pairs", type=int, default=None, metavar="N", help="only the first N moves")
    parser.add_argument("--repeats", type=int, default=3, help="worlds a side for the groups, rounds for the rest")
    parser.add_argument("--fuzz", type=int, default=500, metavar="N", help="random cases; 0 leaves them out")
    parser.add_argument("--fuzz-seconds", type=float, default=600, help="at most so long")
    parser.add_argument("--ranks", type=int, choices=RANKS, help="in place of as many as there are GPUs")
    parser.add_argument("--ranks-per-gpu", type=int, default=1, metavar="N", help="that share a device")
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.set_defaults(json=FILE)


def run(arguments: argparse.Namespace, report: Report) -> None:
    world = {"backend": arguments.backend, "device": arguments.device, "share": arguments.ranks_per_gpu}
    ranks = _ranks(arguments, report)
    report.facts["ran on"] |= {"backend": arguments.backend, "device": arguments.device, "ranks": ranks}
    report.facts["ran on"]["ranks per GPU"] = arguments.ranks_per_gpu
    for bound in (False, True)[: 1 + (arguments.device == "cuda")]:
        found = process.ranks("gpu_ranks:groups", ranks, **world, repeats=arguments.repeats, bound=bound)
        _groups(found, bound, report)
    which = dict(sizes=arguments.sizes, count=arguments.pairs)
    _moves(process.ranks("gpu_ranks:moves", ranks, **world, **which), arguments.sizes, report)
    if ranks >= 4:
        most = max(arguments.sizes)
        found = process.ranks("gpu_ranks:overlap", ranks, **world, nbytes=most, repeats=arguments.repeats)
        _overlap(found, most, report)
    else:
        report.notes.append("overlap isn't measured: two axes beside a third need 4 ranks")
    found = process.ranks("gpu_trees:trees", ranks, **world, nbytes=arguments.tree_bytes, repeats=arguments.repeats)
    _trees(found, arguments.tree_bytes, report)
    if arguments.fuzz:
        _fuzz(ranks, arguments, report)
    report.notes.append(f"to share: {arguments.json}; docs/developers/gpu.md says how to read it")


def _ranks(arguments: argparse.Namespace, report: Report) -> int:
    """How many ranks; the facts of the devices. Ends the program with status 2 where they aren't there."""
    found = process.fresh("gpu_ranks:devices")
    report.facts["ran on"] = found
    if arguments.device == "cpu":
        report.notes.append("on the CPU: this shows that the code runs, and says nothing about GPUs")
        return arguments.ranks or 4
    places = len(found["devices"]) * arguments.ranks_per_gpu
    most = next((ranks for ranks in RANKS if ranks <= places), 0)
    if not most or (arguments.ranks or 0) > most:
        needed = -(-(arguments.ranks or 2) // arguments.ranks_per_gpu)
        print(
            f"bench gpu: needs {needed} GPUs on this host, and torch {found['torch']} finds {len(found['devices'])}",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return arguments.ranks or most


def _groups(found: dict[str, dict[str, list[float]]], bound: bool, report: Report) -> None:
    """Seconds and memory of a mesh with views, to the first collectives on every group."""
    where = {"part": "groups", "world": "bound to its device" if bound else "not bound"}
    for name, unit in (("groups", ""), ("seconds", "s"), ("memory", "B")):
        values = [clock.median(found[side][name]) for side in SIDES]
        title = {"groups": "groups", "seconds": "made and used once", "memory": "memory of this rank for them"}[name]
        report.rows.append(Row(title, unit, *values, where))
    if all(min(found[side]["groups"]) for side in SIDES):  # two ranks have no group but the world's
        each = [clock.median(found[side]["memory"]) / clock.median(found[side]["groups"]) for side in SIDES]
        report.rows.append(Row("memory for each group", "B", *each, where))
    report.facts.setdefault("groups", {})[where["world"]] = found


def _moves(found: list[dict[str, Any]], sizes: list[int], report: Report) -> None:
    """The geometric mean of all pairs at each size, the slowest of them, and what was wrong."""
    for size in sizes:
        some = [one for one in found if one["bytes"] == size]
        where = {"part": "moves", "bytes": size}
        means = (clock.geometric_mean(one["seconds"][side] for one in some) for side in SIDES)
        report.rows.append(Row(f"mean of {len(some)} moves and reductions", "s", *means, where))
        worst = max(some, key=lambda one: one["seconds"][OVERLAY] / one["seconds"][STOCK])
        report.rows.append(Row(f"worst: {worst['pair']}", "s", *(worst["seconds"][side] for side in SIDES), where))
    wrong = [sum(one["wrong"][side] for one in found) for side in SIDES]
    report.rows.append(Row(f"wrong results of {len(found)}", "", *wrong, {"part": "moves"}))
    report.targets.append(Target("wrong results, overlay", wrong[1], 0))
    report.facts["moves"] = found


def _overlap(found: dict[str, dict[str, list[float]]], size: int, report: Report) -> None:
    """Both collectives at once, by who shares a group; stock shares none."""
    for share in (gpu_ranks.NAMES, gpu_ranks.SHARED):
        where = {"part": "overlap", "bytes": size, "share_groups": share}
        for name in gpu_ranks.BOTH_WAYS:
            values = (clock.median(found[side][name]) for side in (STOCK, share))
            report.rows.append(Row(name, "s", *values, where))
    report.facts["overlap"] = found


def _trees(found: dict[str, dict[str, float]], size: int, report: Report) -> None:
    """Many tensors in one call, peaks, and what is compiled or captured."""
    for name, both in found.items():
        unit = "B" if name.endswith("peak") else "s"
        report.rows.append(Row(name, unit, *(both[side] for side in SIDES), {"part": "trees", "bytes": size}))
    report.facts["trees"] = found


def _fuzz(ranks: int, arguments: argparse.Namespace, report: Report) -> None:
    """The random search on the same backend, on both sides, in a process of its own."""
    tool = process.TOOLS / "fuzz_redistribute.py"
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "fuzz.json")
        words = ["--ranks", ranks, "--cases", arguments.fuzz, "--seconds", arguments.fuzz_seconds, "--stock"]
        words += [
            "--backend",
            arguments.backend,
            "--device",
            arguments.device,
            "--ranks-per-gpu",
            arguments.ranks_per_gpu,
            "--alone",
            "--limit",
            60,
            "--json",
            file,
        ]
        done = subprocess.run([sys.executable, str(tool), *map(str, words)], capture_output=True, text=True)
        if not file.exists():
            raise process.ChildFailed(f"the fuzz ended with {done.returncode}:\n{done.stderr[-3000:]}")
        found = json.loads(file.read_text())
    counts = ([found[side].get(outcome, 0) for side in SIDES] for outcome in ("wrong", "hung", "raised"))
    for outcome, both in zip(("wrong", "hung", "raised"), counts):
        report.rows.append(Row(f"{outcome} of {found['cases']} random cases", "", *both, {"part": "fuzz"}))
    for outcome in ("wrong", "hung"):
        report.targets.append(Target(f"fuzz: {outcome} cases, overlay", found[OVERLAY].get(outcome, 0), 0))
    report.facts["fuzz"] = found | {"first failures": done.stdout.splitlines()[:40] if found["failures"] else []}
