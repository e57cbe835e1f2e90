"""Unmodified clients on stock torch and under the overlay, and the page that says in what they differ.

    python tools/run_clients.py                      all that are installed, for as long as they take (about 10 minutes)
    python tools/run_clients.py torch_dcp torch_muon only these
    python tools/run_clients.py --write              and write docs/clients.json and the pages
    python tools/run_clients.py --earlier --write    on torch before 2.13, with libraries of that time: a record beside
    python tools/run_clients.py --page               only the page, from the records as they are

Each client is a script of its own in tools/clients/scripts, started by torchrun: plainly, and behind `python -m
torch_overlay run`. A client whose package isn't installed is skipped, and the record says so. Exit status 1 if a client
failed on one side only, 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import pathlib
import platform
import sys
from typing import Any

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[level]) for level in (0, 1)]

from benchmarks.sides import TURNS  # noqa: E402
from clients import compare, launch, page  # noqa: E402
from clients.catalogue import CLIENTS, OF_THEIR_TIME, Client, Missing  # noqa: E402


def main() -> int:
    arguments = parse()
    if arguments.page:
        page.write()
        return 0
    all_of_them = OF_THEIR_TIME if arguments.earlier else CLIENTS
    chosen = [client for client in all_of_them if not arguments.clients or client.name in arguments.clients]
    found = {client.name: measured(client, arguments.rounds, arguments.timeout) for client in chosen}
    record = about() | {"clients": found}
    print(page.full(record))
    if arguments.write:
        (write_earlier if arguments.earlier else write)(record)
    return int(any(len(one.get("failed", ())) == 1 for one in found.values()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(client.name for client in (*CLIENTS, *OF_THEIR_TIME)))
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(names)}")
    parser.add_argument("--write", action="store_true", help="write the record and the page; others' entries stay")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page from the record")
    parser.add_argument(
        "--earlier", action="store_true", help="of the time before torch 2.13, into a record of their own"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of stock, overlay, overlay, stock; 0: each side once")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.clients if name not in names]
    if unknown:
        parser.error(f"there is no client {', '.join(unknown)}; there are {', '.join(names)}")
    return arguments


def about() -> dict[str, Any]:
    """Where it ran."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = f"gloo, one machine of {cores} cores, one thread a rank"
    return {"torch": torch.__version__.partition("+")[0], "python": platform.python_version(), "machine": machine}


def measured(client: Client, rounds: int, timeout: float) -> dict[str, Any]:
    """The entry of one client, skipped or run in turns."""
    says = ast.get_docstring(ast.parse(client.script.read_text(encoding="utf-8"))) or ""
    entry = {"title": client.title, "says": says.split("\n\n")[0], "script": client.script.name, "ranks": client.ranks}
    try:
        entry["packages"] = client.versions()
    except Missing as reason:
        print(f"{client.name}: skipped, {reason}", file=sys.stderr)
        return entry | {"packages": {}, "skipped": str(reason)}
    outcomes: dict[str, list[launch.Outcome]] = {}
    for turn, side in enumerate(TURNS * rounds or TURNS[:2]):
        if turn == 2 and not any(launch.timed(run) for some in outcomes.values() for run in some):
            break  # the counts are the same in every run
        print(f"{client.name}: on {side}", file=sys.stderr, flush=True)
        outcomes.setdefault(side, []).append(launch.run(client, side, timeout))
        if outcomes[side][-1].failed:
            print(f"{client.name}: failed on {side}: {outcomes[side][-1].failed}", file=sys.stderr)
    return entry | compare.entry(outcomes)


def write(record: dict[str, Any]) -> None:
    """The record, with the entries of clients that didn't run now as they were, if torch is the same; then the page."""
    before = json.loads(page.RECORD.read_text()) if page.RECORD.exists() else {"torch": None}
    if before["torch"] == record["torch"]:
        together = before["clients"] | record["clients"]
        record["clients"] = {client.name: together[client.name] for client in CLIENTS if client.name in together}
    page.RECORD.write_text(json.dumps(record, indent=1) + "\n")
    page.write()


def write_earlier(record: dict[str, Any]) -> None:
    """What ran now, in place of what was recorded of the same libraries on the same torch; then the page."""
    found = page.read(page.EARLIER)
    for client in record["clients"].values():
        if client["packages"]:  # else it was skipped
            one = {"torch": record["torch"], "python": record["python"], **client}
            found = [other for other in found if _kind(other) != _kind(one)] + [one]
    page.EARLIER.write_text(json.dumps(sorted(found, key=_kind), indent=1) + "\n", encoding="utf-8")
    page.write()


def _kind(entry: dict[str, Any]) -> tuple[Any, ...]:
    """What tells two entries apart, and puts them in order."""
    release = [int(part) for part in entry["torch"].split(".")]
    return (release, entry["title"], entry["script"], *entry["packages"].values())


if __name__ == "__main__":
    sys.exit(main())
