"""What other people's programs gain, in short: from docs/clients.json, the record of `nox -s clients`."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from . import marks

FILE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "clients.json"
RECIPE = ("transformers_moe",)  # the client of the recipe
NONE = "No run is recorded yet: `nox -s clients` makes one."


def parts() -> dict[str, str]:
    """The tables by the names of their parts."""
    record = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"clients": {}}
    return {"clients-transformers": table(record, RECIPE)}


def table(record: dict[str, Any], names: tuple[str, ...]) -> str:
    """Calls of `new_group`, and the collectives of each call that takes another number under the overlay."""
    ran = [record["clients"][name] for name in names if "overlay" in record["clients"].get(name, {})]
    rows = []
    for client in ran:
        title = client["title"]
        for what, stock, overlay in _counts(client):
            if stock != overlay:
                better = f"{stock / overlay:.1f}x" if overlay else ""
                rows.append([title, what, f"{stock:,}", f"{overlay:,}", better])
                title = ""
    return marks.table(["program", "what", "stock", "overlay", "better"], rows) if rows else NONE


def _counts(client: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    stock, overlay = client["stock"], client["overlay"]
    for name, phase in stock["phases"].items():
        both = [one["collectives"] // one["calls"] for one in (phase, overlay["phases"][name])]
        yield f"collectives: {name}", both[0], both[1]
    yield "calls of `new_group`", stock["new_group"], overlay["new_group"]
