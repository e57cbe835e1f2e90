"""The record of a run as tables of the pages, between their markers."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from benchmarks.sides import OVERLAY, STOCK

from .compare import gain

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "clients.json"
PAGES = ROOT / "docs" / "results.md", ROOT / "docs" / "developers" / "clients.md"
EARLIER = ROOT / "docs" / "clients_earlier.json"  # on torch before 2.13: a list of entries
COLLECTIVES = "collectives: "
MARKED = re.compile(r"(<!-- (clients: \w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read(path: pathlib.Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write() -> None:
    """The pages, from the records."""
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), read(RECORD), read(EARLIER)), encoding="utf-8")


def filled(text: str, record: dict[str, Any], before: list[dict[str, Any]]) -> str:
    """The page with what the records say between ``<!-- clients: NAME -->`` and ``<!-- end -->``."""
    tables = {"short": short(record), "earlier": earlier(before), "full": full(record), "setup": setup(record)}
    return MARKED.sub(lambda found: f"{found[1]}{tables[found[2].removeprefix('clients: ')]}\n{found[3]}", text)


def setup(record: dict[str, Any]) -> str:
    """What ran, in one sentence."""
    packages = {name: version for client in record["clients"].values() for name, version in client["packages"].items()}
    named = ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))
    return f"Measured with torch {record['torch']}, {named}, on Python {record['python']}: {record['machine']}."


def short(record: dict[str, Any]) -> str:
    """The front page's table: a row for each client that ran, stock's counts before the overlay's."""
    lines = ["| client | calls of `new_group` | collectives | lines of warnings | tensors that differ |"]
    lines.append("| --- | ---: | --- | ---: | --- |")
    return "\n".join([*lines, *(_row(one, one["title"]) for one in record["clients"].values() if OVERLAY in one)])


def earlier(entries: list[dict[str, Any]]) -> str:
    """The same for torch before 2.13, by its release; what fails says so in the place of the counts."""
    lines = ["| torch | client | calls of `new_group` | collectives | lines of warnings | tensors that differ |"]
    lines.append("| --- | --- | ---: | --- | ---: | --- |")
    for one in entries:
        version = ", ".join(one["packages"].values())
        failed = "; ".join(f"{side}: `{line}`" for side, line in one.get("failed", {}).items())
        title = f"{one['torch']} | {one['title']} ({version})"
        lines.append(f"| {title} | {failed} | | | |" if failed else _row(one, title))
    return "\n".join(lines)


def _row(client: dict[str, Any], title: str) -> str:
    (_, *calls), _, (_, *warnings), *phases = _counts(client)
    cells = (title, _both(*calls), _most(phases), _both(*warnings), _differing(client))
    return f"| {' | '.join(cells)} |"


def _both(stock: int, overlay: int) -> str:
    return f"{stock:,} → {overlay:,}" if stock != overlay else f"{stock:,}"


def _most(phases: list[tuple[str, int, int]]) -> str:
    """The two phases that save most."""
    saving = sorted((phase for phase in phases if phase[1] != phase[2]), key=lambda phase: phase[2] - phase[1])
    return "; ".join(f"{name.removeprefix(COLLECTIVES)} {_both(*both)}" for name, *both in saving[:2])


def _differing(client: dict[str, Any]) -> str:
    """Which sets of tensors aren't equal to the bit, and by how much at most."""
    found = {name: one for name, one in client["results"].items() if one["equal"] < one["tensors"]}
    return "; ".join(f"{name}, by {one['largest difference']:.0e}" for name, one in found.items()) or "none"


def full(record: dict[str, Any]) -> str:
    """A heading and a table for each client, with times and results; or why there is none."""
    noise = scatter(record)
    return "\n\n".join("\n".join(_section(client, noise)) for client in record["clients"].values())


def scatter(record: dict[str, Any]) -> float:
    """The largest ratio of times of calls that run as many collectives on both sides: what a ratio must exceed."""
    found = [1.0]
    for client in record["clients"].values():
        for name, phase in client.get(STOCK, {"phases": {}})["phases"].items():
            other = client[OVERLAY]["phases"][name]
            ratio = gain(phase["seconds"], other["seconds"])
            if ratio and phase["collectives"] == other["collectives"]:
                found.append(max(ratio, 1 / ratio))
    return max(found)


def _section(client: dict[str, Any], noise: float) -> Iterator[str]:
    yield f"### {client['title']}\n"
    yield f"{client['says']} {client['ranks']} ranks: `tools/clients/scripts/{client['script']}`.\n"
    if "skipped" in client:
        yield f"Not run: {client['skipped']}."
        return
    if "failed" in client:
        yield from (f"* on {side}: `{line}`" for side, line in client["failed"].items())
        return
    yield "| what | stock | overlay | times less |"
    yield "| --- | ---: | ---: | ---: |"
    for what, stock, overlay in _counts(client):
        yield f"| {what} | {stock:,} | {overlay:,} | {_times(stock, overlay)} |"
    for name, phase in client[STOCK]["phases"].items():
        if all(phase["seconds"]):
            ratio = gain(phase["seconds"], client[OVERLAY]["phases"][name]["seconds"])
            clear = ratio is not None and max(ratio, 1 / ratio) > noise
            yield f"| processor time: {name} | | | {f'{ratio:.2f}' if clear else 'noise'} |"
    for name, value in client[STOCK]["numbers"].items():
        yield f"| {name} | {value:.1e} | {client[OVERLAY]['numbers'][name]:.1e} | |"
    yield ""
    yield from _results(client)


def _counts(client: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(what, stock, overlay): groups, calls, warnings, collectives of each phase that has some."""
    stock, overlay = client[STOCK], client[OVERLAY]
    yield "calls of `new_group`", stock["new_group"], overlay["new_group"]
    yield "groups of several ranks, the world's among them", stock["groups"], overlay["groups"]
    yield "lines of warnings, all ranks", stock["warnings"], overlay["warnings"]
    for name, phase in stock["phases"].items():
        other = overlay["phases"][name]
        if phase["collectives"] or other["collectives"]:
            yield f"{COLLECTIVES}{name}", *(one["collectives"] // one["calls"] for one in (phase, other))


def _results(client: dict[str, Any]) -> Iterator[str]:
    """One line for the losses, one for each set of tensors, one for each warning that a side gives more often."""
    found = client["losses"]
    if found["all"]:
        worst = f"; the worst differs by {found['largest difference']:.1e} of itself"
        much = "" if found["equal"] == found["all"] else worst
        yield f"* losses and norms: {found['equal']} of {found['all']} equal to the bit{much}"
    for name, one in client["results"].items():
        much = "" if one["equal"] == one["tensors"] else f"; the largest difference is {one['largest difference']:.1e}"
        yield f"* {name}: {one['equal']} of {one['tensors']} tensors equal to the bit{much}"
    for text, (stock, overlay) in client["warnings that differ"].items():
        yield f"* warned in {stock} lines on stock, {overlay} under the overlay: `{text.replace('`', '')}`"


def _times(stock: int, overlay: int) -> str:
    return "" if stock == overlay or not overlay else f"{stock / overlay:.1f}"
