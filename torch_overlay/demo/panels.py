"""The demo's three panels: what its user would feel, each measured on stock torch and under the overlay."""

from __future__ import annotations

import statistics
import time
from typing import Any

from torch_overlay.demo import table
from torch_overlay.demo.screen import Screen
from torch_overlay.demo.worlds import World
from torch_overlay.show.words import joined, wrapped

_RANKS = "torch_overlay.demo.panel_ranks"
WEIGHTS = 300
ROUNDS = 3  # of a loop and a Transfer
LONGEST = 16  # elements of a vector that is gathered
PATIENCE = 20.0  # seconds for a rank that waits to say why
_TIMEOUT = 60.0  # of the groups of ranks that disagree, which are ended before
STEPS = 2 + 2 * ROUNDS + 5 + 2  # of progress, in all panels


def weights(screen: Screen, device: str = "cpu") -> dict[str, Any]:
    """300 weights from a trainer's mesh to two servers: by hand, and by a Transfer. Neither needs the overlay."""
    screen.now("starting 6 processes, each with its own torch")
    ways = ("loop", "transfer")
    with World("weights", f"{_RANKS}:WeightsRank", 6, overlay=False, device=device) as world:
        release = world.enter()
        screen.advance()
        screen.now("making 300 weights on both sides, and the Transfer")
        planned = max(world.ask("build"))
        screen.advance()
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        sent: dict[str, list[int | None]] = {way: [] for way in ways}
        right = dict.fromkeys(ways, 1 << 30)
        for number in range(ROUNDS):
            for way in ways if number % 2 == 0 else ways[::-1]:
                screen.now(f"bringing them over by {way}, {number + 1} of {ROUNDS}", line=number == 0)
                world.ask("train")
                took, bytes_sent = zip(*world.ask("time", way))
                seconds[way].append(max(took))
                sent[way].append(None if None in bytes_sent else sum(bytes_sent))
                right[way] = min(right[way], *world.ask("right"))
                screen.advance()
        screen.now("counting collectives")
        calls = {way: max(world.ask("count", way)) for way in ways}
        world.ask("leave")
    mib = {way: None if total is None else total / (1 << 20) for way, (*_, total) in sent.items()}
    medians = {way: statistics.median(seconds[way]) for way in ways}
    return {"torch": release, "planned": planned, "seconds": medians, "calls": calls, "mib": mib, "right": right}


def show_weights(found: dict[str, Any], screen: Screen) -> None:
    _title(screen, "1. Weights from a trainer to its servers")
    _words(screen, "300 weights, sharded over a 2x2 mesh of 4 ranks, to 2 servers that cut them otherwise.")
    screen.say()
    rows = [
        (f"time, ms (median of {ROUNDS})", *(1000 * seconds for seconds in found["seconds"].values()), 0),
        ("collectives of a rank", *found["calls"].values(), 0),
        ("sent by all ranks, MiB", *found["mib"].values(), 1),
    ]
    lines = table.compared(("loop by hand", "Transfer"), rows)
    screen.say_all((f"  {line}", "" if number else "bold") for number, line in enumerate(lines))
    screen.say()
    loop, transfer = found["right"].values()
    right = "all 300" if min(loop, transfer) == 300 else f"{loop} and {transfer} of 300"
    _words(
        screen,
        f"The loop makes each weight whole and broadcasts it. Both ways {right} weights came bit for bit, each time. "
        f"The Transfer was planned once, in {1000 * found['planned']:.0f} ms.",
    )


def meshes(screen: Screen, device: str = "cpu") -> dict[str, Any]:
    """Ranks that build different meshes: what a rank that waits says on stock, under the overlay, with check_mesh."""
    screen.now("starting 3 x 4 processes that build different meshes")
    make = f"{_RANKS}:MeshRank"
    with (
        World("stock", make, 4, overlay=False, device=device) as stock,
        World("overlay", make, 4, overlay=True, device=device) as overlay,
        World("check_mesh", make, 4, overlay=True, check_mesh=True, device=device) as check,
    ):
        for world in (stock, overlay, check):
            world.enter()
            screen.advance()
        before = len(stock.log(0)), len(overlay.log(0))
        start = time.perf_counter()
        for world in (stock, overlay):
            world.tell("build", ranks=range(4))
        screen.now("with check_mesh")
        errors = check.ask("build")
        screen.advance()
        screen.now("waiting, as a job does that hangs")
        while "has waited" not in overlay.log(0) and time.perf_counter() < start + PATIENCE:
            time.sleep(0.1)
        waited = time.perf_counter() - start
        time.sleep(1)
        found = {
            "waited": time.perf_counter() - start,
            "stock_waits": not stock.answered(0),
            "stock_said": stock.log(0)[before[0] :].strip(),
            "overlay_waited": waited,
            "overlay_said": overlay.log(0)[before[1] :].strip(),
            "errors": errors,
        }
        for world in (stock, overlay):
            world.close(force=True)  # they would wait for a minute
        screen.advance()
    return found


def show_meshes(found: dict[str, Any], screen: Screen) -> None:
    _title(screen, "2. Ranks that build different meshes")
    _words(screen, "Rank 0 of 4 builds (dp=2, tp=2), the others build (dp=4).")
    screen.say()
    if found["stock_waits"]:
        said = f"and said: {found['stock_said']}" if found["stock_said"] else "and said nothing"
        _words(screen, f"stock: rank 0 waited {found['waited']:.1f} s, {said}; it was ended then.", "  ", "yellow")
    else:
        _words(screen, "stock: rank 0 went on; this torch doesn't hang here.", "  ")
    if found["overlay_said"]:
        _words(screen, f"overlay: after {found['overlay_waited']:.1f} s its log says:", "  ")
        _words(screen, found["overlay_said"], "    ", "green")
    else:
        _words(screen, f"overlay: rank 0 said nothing in {found['overlay_waited']:.1f} s.", "  ", "yellow")
    raised = [(seconds, error) for seconds, error in found["errors"] if error]
    if raised:
        latest = max(seconds for seconds, _ in raised)
        _words(screen, f"overlay with check_mesh: after {latest:.2f} s an error on {len(raised)} of 4 ranks:", "  ")
        _words(screen, raised[0][1], "    ", "green")


def gathers(screen: Screen, device: str = "cpu") -> dict[str, Any]:
    """Vectors of each length, cut over a mesh with a flattened view and gathered: what comes, by side and length."""
    found: dict[str, Any] = {}
    for name, on in {"stock": False, "overlay": True}.items():
        screen.now(f"{name}: gathering vectors of 1 to {LONGEST} elements")
        with World(name, f"{_RANKS}:GatherRank", 4, overlay=on, device=device) as world:
            world.enter()
            found[name] = world.ask("gather", LONGEST)[0]
            world.ask("leave")
        screen.advance()
    return found


def wrong(gathered: dict[int, Any]) -> list[int]:
    """The lengths that came back as something else."""
    return [length for length, values in gathered.items() if values != list(range(length))]


def show_gathers(found: dict[str, Any], screen: Screen) -> None:
    _title(screen, "3. A redistribution that stock gets wrong")
    _words(
        screen,
        "The numbers 0, 1, 2... cut over both axes of a 2x2 mesh with a flattened view, made whole by full_tensor().",
    )
    screen.say()
    bad = {side: wrong(gathered) for side, gathered in found.items()}
    if not bad["stock"]:
        _words(screen, f"This torch gets all lengths from 1 to {LONGEST} right: what was wrong has been mended.", "  ")
    else:
        shown = next((length for length in bad["stock"] if length > 4), bad["stock"][0])
        for side, gathered in found.items():
            values = gathered[shown]
            row = " ".join(map(str, values)) if isinstance(values, list) else values
            _words(screen, f"{side:8} {row}", "  ", "yellow" if shown in bad[side] else "green")
        screen.say()
    for side, lengths in bad.items():
        if lengths:
            _words(
                screen, f"{side}: wrong for {len(lengths)} of {LONGEST} lengths: {joined([*map(str, lengths)])}.", "  "
            )
        elif bad["stock"]:
            _words(screen, f"{side}: right for all {LONGEST} lengths.", "  ")


def _title(screen: Screen, text: str) -> None:
    screen.say()
    screen.say(text, "bold cyan")


def _words(screen: Screen, text: str, indent: str = "", style: str = "") -> None:
    screen.say_all((line, style) for line in wrapped(text, indent, screen.width))
