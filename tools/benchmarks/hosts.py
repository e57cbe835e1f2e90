"""A trainer's weights into replicas on other hosts, and redistributions across hosts, behind links of a given rate.

Hosts are network namespaces on this machine (root, ip and tc), of two ranks each. Trainers are the first host's ranks;
all others serve. The limit is what one link carries by one socket. Every result is checked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torch_overlay.testing.hosts import Hosts, lacking

from .report import Report, Row, Target

if TYPE_CHECKING:
    from typing import Any

PER_HOST = 2
PROGRAM = Path(__file__).with_name("hosts_program.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, default=4, metavar="N")
    parser.add_argument("--rate", type=int, default=400, metavar="MBIT", help="of each link")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks of a replica")
    parser.add_argument("--moves", type=int, default=40, metavar="N", help="random redistributions of 4 MB")


def run(arguments: argparse.Namespace, report: Report) -> None:
    why = lacking()
    if why:
        raise SystemExit(f"bench hosts: {why}.")
    print(f"hosts: {arguments.hosts} of {PER_HOST} ranks, {arguments.rate} Mbit/s each", file=sys.stderr)
    with Hosts(arguments.hosts, arguments.rate) as hosts:
        found = _ranks(hosts, arguments, "weights", arguments.tp)
        least = _limit(hosts, found["size"])
        stock, overlay = (_ranks(hosts, arguments, "moves", on, arguments.moves) for on in (0, 1))
    for way, seconds in found["seconds"].items():
        report.rows.append(Row(way, "s", found["seconds"]["by hand"], seconds))
    report.rows.append(Row(f"{arguments.moves} redistributions", "s", sum(stock["seconds"]), sum(overlay["seconds"])))
    report.facts["hosts"] = {**found, "limit": least, "stock": stock["seconds"], "overlay": overlay["seconds"]}
    report.notes.append(f"stock is the loop by hand; one link carries {found['size']} bytes in {least:.2f} s")
    report.targets.append(Target("wrong results", found["wrong"] + overlay["wrong"], 0))
    report.targets.append(Target("Transfer, of the limit", found["seconds"]["Transfer"] / least, 1.25))


def _ranks(hosts: Hosts, arguments: argparse.Namespace, job: str, *given: object) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said.json"
        size = arguments.hosts * PER_HOST
        ranks = []
        for rank in range(size):
            words = [sys.executable, str(PROGRAM), job, str(said), str(rank), str(size), *map(str, given)]
            ranks.append(hosts.start(rank // PER_HOST, words))
        for process in ranks:
            if process.wait(600):
                raise RuntimeError(f"a rank of bench hosts ended with {process.returncode}")
        return json.loads(said.read_text())


def _limit(hosts: Hosts, size: int) -> float:
    at = f"('{hosts.address(0)}', 29778)"
    gives = f"import socket; s, _ = socket.create_server({at}).accept(); s.sendall(bytes({size}))"
    takes = (
        f"import socket, time\ns = socket.create_connection({at})\nbegun = time.time()\n"
        "while s.recv(1 << 20): pass\nprint(time.time() - begun)"
    )
    server = hosts.start(0, [sys.executable, "-c", gives])
    time.sleep(0.5)
    client = hosts.start(1, [sys.executable, "-c", takes], stdout=subprocess.PIPE)
    seconds = float(client.communicate(timeout=120)[0])
    server.wait(10)
    return seconds
