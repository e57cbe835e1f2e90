"""The full state dict of a model with FSDP2 and TP, gathered by an unmodified program: on stock, and by `run`.

`get_model_state_dict(full_state_dict=True)` on 8 gloo ranks, a (4, 2) mesh, with and without `cpu_offload`:
collectives, peak memory by the allocator's events and seconds, each side in processes of its own; every result is
compared with `full_tensor()`, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from .report import Report, Row, Target

PROGRAM = pathlib.Path(__file__).with_name("full_state_program.py")
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8", str(PROGRAM))
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=512, help="of the model; it has 64 MiB at 512")


def run(arguments: argparse.Namespace, report: Report) -> None:
    print("full_state: the program on stock, then under run", file=sys.stderr)
    stock, overlay = (_found(how, arguments.width) for how in ((), ("-m", "torch_overlay", "run")))
    for kind in ("on every rank", "offload"):
        one, other, where = stock[kind], overlay[kind], {"bytes": stock["bytes"]}
        report.rows.append(Row(f"{kind}: collectives", "", one["collectives"], other["collectives"], where))
        for rank in (0, 3):
            report.rows.append(
                Row(f"{kind}: peak of rank {rank}", "B", one["peaks"][rank], other["peaks"][rank], where)
            )
        report.rows.append(Row(f"{kind}: time", "s", one["seconds"], other["seconds"], where))
        report.targets.append(Target(f"{kind}: wrong results", other["wrong"], 0))
        report.targets.append(Target(f"{kind}: collectives", other["collectives"], 3))
        # The offloaded tensors are on the CPU as they were, so a peak is what a rank gathers.
        gain = min([old / new for old, new in zip(one["peaks"], other["peaks"]) if new])
        report.targets.append(Target(f"{kind}: peak, times less on the rank where it is least so", gain, 1, gain=True))
    report.facts = {"stock": stock, "overlay": overlay}
    report.notes.append("time: of one call, from barrier to barrier on rank 0, the best of three")


def _found(how: tuple[str, ...], width: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = pathlib.Path(folder) / "found.json"
        environ = {**os.environ, **QUIET, "FOUND": str(answer)}
        done = subprocess.run([sys.executable, *how, *LAUNCH, str(width)], env=environ, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the program ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return json.loads(answer.read_text())  # type: ignore[no-any-return]
