"""The demo's four panels: what they measure on stock torch and under the overlay, and the lines that they print."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence
from typing import Any

from ..show.screen import Screen, headed, styled
from ..show.words import aligned, joined, wrapped
from .processes import World

WEIGHTS = 300
ROUNDS = 3  # of a loop and a Transfer
EVERY = 100  # one element in so many changes, where only what changed is sent
TIMEOUT = 4.0  # seconds that the trainer of the second panel waits for a killed server
LONGEST = 16  # elements of the longest vector that is gathered
PATIENCE = 20.0  # seconds until a rank that waits must have said why
STEPS = 2 + 2 * ROUNDS + 1 + 2 + 5 + 2  # of the progress bar, in all panels
NO_GPU = "--device cuda needs a GPU, and torch finds none"


def weights(screen: Screen, device: str = "cpu") -> dict[str, Any]:
    """Measure sending 300 weights from a trainer's mesh to two servers, by hand and by a Transfer, without the
    overlay."""
    screen.now("starting 6 processes, each with its own torch")
    ways = ("loop", "transfer")
    with World("weights", "WeightsRank", 6, overlay=False, device=device) as world:
        release = world.enter()
        screen.advance()
        screen.now("making 300 weights on both sides, and the Transfer")
        planned = max(world.ask("build"))
        screen.advance()
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        sent: dict[str, list[int | None]] = {way: [] for way in ways}
        right = dict.fromkeys(ways, 1 << 30)
        for number in range(ROUNDS):
            # In turns, forth and back: what else the machine does should hit both ways alike.
            for way in ways if number % 2 == 0 else ways[::-1]:
                screen.now(f"bringing them over by {way}, {number + 1} of {ROUNDS}", line=number == 0)
                world.ask("train")
                rank_seconds, bytes_sent = zip(*world.ask("time", way))
                seconds[way].append(max(rank_seconds))
                sent[way].append(None if None in bytes_sent else sum(bytes_sent))
                right[way] = min(right[way], *world.ask("right"))
                screen.advance()
        screen.now("counting collectives")
        calls = {way: max(world.ask("count", way)) for way in ways}
        screen.now("sending only what changed")
        changes = []
        for change in ("train", "train_few"):  # the first time everything is new
            world.ask(change)
            sent_bytes, elements, of_all = map(sum, zip(*world.ask("changed")))
            changes.append({"bytes": sent_bytes, "elements": elements, "of": of_all, "right": min(world.ask("right"))})
        screen.advance()
        world.ask("leave")
    mib = {way: None if total is None else total / (1 << 20) for way, (*_, total) in sent.items()}
    medians = {way: statistics.median(seconds[way]) for way in ways}
    return {
        "torch": release,
        "planned": planned,
        "seconds": medians,
        "calls": calls,
        "mib": mib,
        "right": right,
        "changes": changes,
    }


def show_weights(figures: dict[str, Any], width: int) -> list[str]:
    title = "300 weights, sharded over a 2x2 mesh of 4 ranks, to 2 servers that cut them otherwise."
    rows = [
        (f"time, ms (median of {ROUNDS})", *(1000 * seconds for seconds in figures["seconds"].values()), 0),
        ("collectives of a rank", *figures["calls"].values(), 0),
        ("sent by all ranks, MiB", *figures["mib"].values(), 1),
    ]
    loop, transfer = figures["right"].values()
    right = "all 300" if min(loop, transfer) == 300 else f"{loop} and {transfer} of 300"
    text = (
        f"The loop makes each weight whole and broadcasts it. Both ways {right} weights came bit for bit, each time. "
        f"The Transfer was planned once, in {1000 * figures['planned']:.0f} ms."
    )
    return [
        *_headed("1. Weights from a trainer to its servers", title, width),
        *compared(("loop by hand", "Transfer"), rows, "  "),
        "",
        *wrapped(text, "", width),
        "",
        *wrapped(_only_changes(figures["changes"]), "", width),
    ]


def _only_changes(changes: Sequence[dict[str, int]]) -> str:
    """A sentence on what a Transfer with `changes=True` sent, when all elements were new and when few were."""
    whole, few = changes
    mib = [step["bytes"] / (1 << 20) for step in changes]
    right = "All came right." if min(whole["right"], few["right"]) == WEIGHTS else "Not all came right."
    return (
        f"With changes=True a step that changes {few['elements']:,} of {few['of']:,} elements sends {mib[1]:.2f} MiB "
        f"(sync.sent_bytes), and one that changes all {mib[0]:.1f} MiB. {right}"
    )


def killed(screen: Screen, device: str = "cpu") -> dict[str, Any]:
    """Kill and restart a server between two runs of a trainer, on the CPU: ranks of a place can't share a GPU."""
    screen.now("starting a trainer and two servers")
    with socket.socket() as listens:
        listens.bind(("127.0.0.1", 0))
        port = listens.getsockname()[1]

    def world(kind: str) -> World:
        return World("killed", kind, 1, overlay=False)

    def run(**servers: World) -> dict[str, Any]:
        """A run of the trainer with these servers: its seconds, who came and went, and each server's version."""
        for server in servers.values():
            server.tell("run")
        (said,) = trainer.ask("run")
        return {**said, "versions": {name: server.answers("run")[0] for name, server in servers.items()}}

    with world("TrainerRank") as trainer, world("ServerRank") as one, world("ServerRank") as two:
        trainer.ask("open", port)
        one.ask("come", port, "one")
        two.ask("come", port, "two")
        figures = {"timeout": TIMEOUT, "first": run(one=one, two=two)}
        screen.advance()
        screen.now("killing the server two, and running on")
        two.processes[0].kill()
        figures["killed"] = run(one=one)
        screen.now("starting it again")
        two.close(force=True)
        with world("ServerRank") as again:
            again.ask("come", port, "two")
            figures["back"] = run(one=one, two=again)
        screen.advance()
    return figures


def show_killed(figures: dict[str, Any], width: int) -> list[str]:
    title = "A trainer and the servers one and two, at an open place. Two is killed, and then started again."
    lines = _headed("2. A server that is killed, and comes back", title, width)
    for step, text in {"killed": "two was killed", "back": "two joined again"}.items():
        said = figures[step]
        changed = f"joined: {', '.join(said['joined']) or 'none'}; gone: {', '.join(said['gone']) or 'none'}"
        has = ", ".join(f"{name} has version {version}" for name, version in said["versions"].items())
        lines += styled(wrapped(f"{text}: run() took {said['seconds']:.1f} s. {changed}. {has}.", "  ", width), "good")
    return lines


def meshes(screen: Screen, device: str = "cpu") -> dict[str, Any]:
    """Let ranks build different meshes, on stock, under the overlay and with check_mesh, and see what they say."""
    screen.now("starting 3 x 4 processes that build different meshes")
    with (
        World("stock", "MeshRank", 4, overlay=False, device=device) as stock,
        World("overlay", "MeshRank", 4, overlay=True, device=device) as overlay,
        World("check_mesh", "MeshRank", 4, overlay=True, check_mesh=True, device=device) as check,
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
        time.sleep(1)  # so that stock has waited longer than the overlay, and still says nothing
        figures = {
            "waited": time.perf_counter() - start,
            "stock_waits": not stock.answered(0),
            "stock_said": stock.log(0)[before[0] :].strip(),
            "overlay_waited": waited,
            "overlay_said": overlay.log(0)[before[1] :].strip(),
            "errors": errors,
        }
        for world in (stock, overlay):
            world.close(force=True)  # else they wait for a minute
        screen.advance()
    return figures


def show_meshes(figures: dict[str, Any], width: int) -> list[str]:
    title = "Rank 0 of 4 builds (dp=2, tp=2), the others build (dp=4)."
    lines = _headed("3. Ranks that build different meshes", title, width)
    if figures["stock_waits"]:
        said = f"and said: {figures['stock_said']}" if figures["stock_said"] else "and said nothing"
        text = f"stock: rank 0 waited {figures['waited']:.1f} s, {said}; it was ended then."
        lines += styled(wrapped(text, "  ", width), "yellow")
    else:
        lines += wrapped("stock: rank 0 went on; this torch doesn't hang here.", "  ", width)
    if figures["overlay_said"]:
        lines += wrapped(f"overlay: after {figures['overlay_waited']:.1f} s its log says:", "  ", width)
        lines += styled(wrapped(figures["overlay_said"], "    ", width), "good")
    else:
        text = f"overlay: rank 0 said nothing in {figures['overlay_waited']:.1f} s."
        lines += styled(wrapped(text, "  ", width), "yellow")
    raised = [(seconds, error) for seconds, error in figures["errors"] if error]
    if raised:
        after = max(seconds for seconds, _ in raised)
        text = f"overlay with check_mesh: after {after:.2f} s an error on {len(raised)} of 4 ranks:"
        lines += [*wrapped(text, "  ", width), *styled(wrapped(raised[0][1], "    ", width), "good")]
    return lines


def gathers(screen: Screen, device: str = "cpu") -> dict[str, Any]:
    """Gather vectors of each length that are cut over a mesh with a flattened view; the results, by side and length."""
    gathered: dict[str, Any] = {}
    for name, on in {"stock": False, "overlay": True}.items():
        screen.now(f"{name}: gathering vectors of 1 to {LONGEST} elements")
        with World(name, "GatherRank", 4, overlay=on, device=device) as world:
            world.enter()
            gathered[name] = world.ask("gather", LONGEST)[0]
            world.ask("leave")
        screen.advance()
    return gathered


def wrong(gathered: dict[int, Any]) -> list[int]:
    """The lengths of the vectors that came back wrong."""
    return [length for length, values in gathered.items() if values != list(range(length))]


def show_gathers(figures: dict[str, Any], width: int) -> list[str]:
    title = (
        "The numbers 0, 1, 2... cut over both axes of a 2x2 mesh with a flattened view, made whole by full_tensor()."
    )
    lines = _headed("4. A redistribution that stock gets wrong", title, width)
    bad = {side: wrong(gathered) for side, gathered in figures.items()}
    if not bad["stock"]:
        text = f"This torch gets all lengths from 1 to {LONGEST} right: what was wrong has been mended."
        return [*lines, *wrapped(text, "  ", width), *_wrong_lengths(bad, width)]
    # Above 4, so that each rank has elements; the shortest of these is easiest to read.
    shown = next((length for length in bad["stock"] if length > 4), bad["stock"][0])
    for side, gathered in figures.items():
        values = gathered[shown]
        row = " ".join(map(str, values)) if isinstance(values, list) else values
        lines += styled(wrapped(f"{side:8} {row}", "  ", width), "yellow" if shown in bad[side] else "good")
    return [*lines, "", *_wrong_lengths(bad, width)]


def _wrong_lengths(bad: dict[str, list[int]], width: int) -> list[str]:
    sentences = []
    for side, lengths in bad.items():
        if lengths:
            sentences.append(f"{side}: wrong for {len(lengths)} of {LONGEST} lengths: {joined([*map(str, lengths)])}.")
        elif bad["stock"]:
            sentences.append(f"{side}: right for all {LONGEST} lengths.")
    return [line for sentence in sentences for line in wrapped(sentence, "  ", width)]


def _headed(title: str, text: str, width: int) -> list[str]:
    return ["", *styled([title], "side"), *wrapped(text, "", width), ""]


def compared(
    heads: tuple[str, str], rows: Sequence[tuple[str, float | None, float | None, int]], indent: str = ""
) -> list[str]:
    """A table of two ways, and how many times better the second is. A row with None isn't printed.

    >>> print(*compared(("loop", "Transfer"), [("calls", 900, 1, 0), ("bytes", None, None, 0)]), sep="\\n")
           loop  Transfer  better
    calls   900         1    900x
    """
    cells = [
        (label, f"{first:,.{decimals}f}", f"{second:,.{decimals}f}", times_better(first, second))
        for label, first, second, decimals in rows
        if first is not None and second is not None
    ]
    return headed([indent + line for line in aligned([("", *heads, "better"), *cells], right=(1, 2, 3))])


def times_better(cost: float, other: float) -> str:
    """How many times less the second costs, as text; "-" if one of them costs nothing.

    >>> times_better(33, 11), times_better(44, 42), times_better(48, 48), times_better(36, 39), times_better(600, 3)
    ('3x', '1.05x', 'same', '0.92x', '200x')
    """
    if cost == other:
        return "same"
    if not cost or not other:
        return "-"
    gain = cost / other
    text = f"{gain:.2f}" if gain < 2 else f"{gain:.1f}" if gain < 10 else f"{gain:,.0f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}x"
