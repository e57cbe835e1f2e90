"""Ranks that build different meshes, stay away or die, where stock hangs in silence.

A rank that waits long for the groups of its mesh says once who builds what, whatever is set. Where meshes are compared
(`check_mesh`), all ranks raise at once.
"""

import contextlib
import datetime
import logging
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import forks
import torch_overlay
from torch_overlay.distributed import config
from torch_overlay.distributed._mesh import compare as waiting
from torch_overlay.distributed._mesh.rank_map import RankMap
from torch_overlay.distributed.tensor._runner import waiting as redistributions
from torch_overlay.testing.pool import Pool, RankError
from way import needs_overlay, needs_package

pytestmark = needs_overlay
RANKS, WAIT, LIMIT = 4, 0.5, 4  # seconds of waiting, and until a world gives up


def grid(*sizes: int):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])


def one_builds_another(rank: int) -> None:
    grid(*((2, 2) if rank == 0 else (4,)))


def one_stays_away(rank: int) -> None:
    if rank != 3:
        grid(2, 2)


def one_stays_away_from_the_second(rank: int) -> None:
    grid(2, 2)
    one_stays_away(rank)


def one_leaves_a_mesh_out(rank: int) -> None:
    """And the last mesh is the same on all. Rank 3 and it make the first group together, by two names."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))["b", "c"]
    if rank != 2:
        mesh._flatten("skipped")
    mesh._flatten("last")


def one_stays_away_while_meshes_are_compared(rank: int) -> None:
    with torch_overlay.enabled(check_mesh=True):
        one_stays_away(rank)


def all_build_the_same(rank: int) -> None:
    mesh = grid(2, 2)
    mesh.flatten("whole")
    grid(4)
    grid(2, 2)


def all_build_the_same_slowly(rank: int) -> None:
    """One comes to the mesh with the others, and then takes its time."""
    make = distributed_c10d.new_group

    def slowly(*args, **how):
        time.sleep(2 * WAIT if rank == 3 else 0)
        return make(*args, **how)

    with mock.patch.object(distributed_c10d, "new_group", slowly):
        grid(2, 2)


def other_shape(rank: int) -> None:
    grid(*((4, 1) if rank == 2 else (2, 2)))


def other_names(rank: int) -> None:
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "c" if rank in (1, 3) else "b"))


def other_order(rank: int) -> None:
    DeviceMesh("cpu", [0, 1, 3, 2] if rank == 3 else [0, 1, 2, 3])


def other_options(rank: int) -> None:
    if rank == 1:
        torch_overlay.enable(flatten="existing")
    grid(2, 2)


def one_has_other_options(rank: int) -> None:
    """And the same mesh. It makes no group over all axes, for which the others wait."""
    with torch_overlay.enabled(flatten="existing" if rank == 1 else "whole"):
        grid(2, 2)


def other_version(rank: int) -> None:
    with mock.patch.object(config, "versions", config.versions | ({"torch_overlay": "0"} if rank == 0 else {})):
        grid(2, 2)


def one_dies(rank: int) -> None:
    if rank == 3:
        os._exit(0)
    grid(2, 2)


def one_gathers_alone(rank: int) -> None:
    held = distribute_tensor(torch.ones(8, 4), grid(2, 2), [Shard(0), Shard(1)])
    held.redistribute(placements=[Replicate()] * 2)  # which all do, isn't spoken of
    if rank == 1:
        held.redistribute(placements=[Shard(0), Replicate()])


WAITS = [one_builds_another, one_stays_away, one_stays_away_from_the_second, one_leaves_a_mesh_out]
WAITS.append(one_stays_away_while_meshes_are_compared)
SCENES = [*WAITS, all_build_the_same, all_build_the_same_slowly, one_has_other_options]
PLAYED = [(scene, "tcp") for scene in SCENES] + [(scene, "file") for scene in (one_builds_another, all_build_the_same)]
COMPARED = [other_shape, other_names, other_order, other_options, other_version]
PLAYED += [(scene, "tcp") for scene in (*COMPARED, one_gathers_alone, one_dies)]  # the last of its part
PARTS = 4  # as many sets of ranks, each with every fourth scene: most of the time they wait


def noted_keys() -> list[str]:
    """The keys that Python code of this process sets from now on, in any store."""
    keys, put = [], dist.Store.set

    def noting(store, key, value):
        keys.append(key)
        return put(store, key, value)

    dist.Store.set = noting
    return keys


class Player:
    """One rank through scenes, each in a world of its own."""

    def __init__(self, rank: int, port: int, folder: str) -> None:
        self.rank, self.folder = rank, folder
        torch.set_num_threads(1)
        self.logged: list[str] = []
        self.keys = noted_keys()
        noting = logging.Handler()
        noting.emit = lambda record: self.logged.append(record.getMessage())
        torch_overlay.enable()
        for module in (waiting, redistributions):
            module.logger.addHandler(noting)
            module.SECONDS = WAIT
        self.store = dist.TCPStore("127.0.0.1", port, None, False, datetime.timedelta(seconds=60))

    def play(self, number: int) -> tuple[list[str], str, list[str], float, int]:
        """What this rank logged, its error, the keys that it set, its seconds and its threads."""
        if dist.is_initialized():  # of the scene before: nobody's world goes while others wait in it
            dist.destroy_process_group()
        scene, kind = PLAYED[number]
        store = self.store if kind == "tcp" else dist.FileStore(f"{self.folder}/{number}", RANKS)
        world, limit = dist.PrefixStore(f"world/{number}", store), datetime.timedelta(seconds=LIMIT)
        dist.init_process_group("gloo", rank=self.rank, world_size=RANKS, store=world, timeout=limit)
        self.logged.clear()
        self.keys.clear()
        error, start = "", time.monotonic()
        try:
            with torch_overlay.enabled(check_mesh=scene in COMPARED):
                scene(self.rank)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds, timers = time.monotonic() - start, [*map(type, threading.enumerate())].count(threading.Timer)
        return [*self.logged], error, [*self.keys], seconds, timers


@pytest.fixture(scope="module")
def met(tmp_path_factory):
    """(scene, store, rank) to what the rank met: see `play`."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    folder, results = str(tmp_path_factory.mktemp("stores")), {}
    with contextlib.ExitStack() as stack:
        pools = [
            stack.enter_context(Pool(RANKS, Player, store.port, folder, preload=forks.PRELOADED)) for _ in range(PARTS)
        ]

        def play(part: int) -> None:
            for number, (scene, kind) in [*enumerate(PLAYED)][part::PARTS]:
                pools[part].tell("play", number)
                for rank, answer in pools[part].answers("play", grace=60).items():
                    if isinstance(answer, RankError):
                        assert scene is one_dies and rank == 3, answer
                    else:
                        results[scene.__name__, kind, rank] = answer

        with ThreadPoolExecutor(PARTS) as threads:
            for _ in threads.map(play, range(PARTS)):
                pass
    return results


SQUARE = r"(a=2, b=2) on cpu over ranks 0 to 3 as 2:2, 2:1"
SAME = "All ranks of a mesh must build the same meshes in the same order."
LATE = f"So far all meshes are the same: rank 3 may be late, wait elsewhere, or have died{waiting.WITHOUT}."
HALF = "=2) on cpu over ranks 0 to 3 as 2:1"
FLAT = "=4) on cpu over ranks 0 to 3 as 4:1"
SAID = {
    "one_builds_another": f"rank 0 builds {SQUARE}; ranks 1-3 last came to (a{FLAT}. {SAME}",
    "one_stays_away": f"ranks 0-2 build {SQUARE}; rank 3 came to no mesh yet. {LATE}",
    "one_stays_away_from_the_second": f"ranks 0-2 build {SQUARE}; rank 3 last came to {SQUARE}, its 1st mesh of these "
    f"ranks. "
    f"{LATE}",
    "one_leaves_a_mesh_out": f"ranks 0, 1, 3 build (last{HALF}; rank 2 last came to (last{HALF}, its 2nd mesh of "
    f"these ranks. They parted at their 2nd mesh of these ranks: ranks 0, 1, "
    f"3 build (skipped{HALF}; rank 2 builds (last{HALF}. {SAME}",
    "one_stays_away_while_meshes_are_compared": f"ranks 0-2 build {SQUARE}; rank 3 came to no mesh yet. {LATE}",
}


@pytest.mark.parametrize("scene, kind", [(scene.__name__, kind) for scene, kind in PLAYED if scene in WAITS])
def test_who_waits_says_once_who_builds_what(met, scene, kind):
    """And what stock does stays: it waits, and raises at the timeout."""
    who_wait = {"one_builds_another": [0], "one_leaves_a_mesh_out": [3]}.get(scene, [0, 1, 2])
    for rank in range(RANKS):
        logged, error, *_ = met[scene, kind, rank]
        assert bool(error) == (rank in who_wait), (rank, error)
        assert f"within {LIMIT} s. {SAID[scene]}" in error or rank == 3 or "compared" not in scene, error
        assert len(logged) == (rank in who_wait), (rank, logged)
        assert all(f"torch_overlay: Rank {rank} has waited 0.5 s for other ranks to " in line for line in logged), (
            logged
        )
        assert all(SAID[scene] in line for line in logged), logged
        advice = "TORCH_OVERLAY_CHECK_MESH=1, a mesh that differs is an error at once"
        assert all((advice in line) != ("compared" in scene) for line in logged), logged
        if rank in who_wait and "compared" not in scene:
            assert f"While it waited: {SAID[scene]}" in error, error


@pytest.mark.parametrize(
    "scene, who",
    [
        ("other_shape", "rank 2 builds"),
        ("other_names", "ranks 1, 3 build"),
        ("other_order", "rank 3 builds"),
        pytest.param("other_options", "rank 1 runs torch='", marks=needs_package),
        pytest.param(
            "other_options", ", share_groups='names', create='members', flatten='existing', ", marks=needs_package
        ),
        pytest.param("other_version", "rank 0 runs torch='", marks=needs_package),
    ],
)
def test_where_meshes_are_compared_every_rank_is_told_at_once_who_builds_another(met, scene, who):
    """Or runs another release, version of the package or option."""
    for rank in range(RANKS):
        _, error, _, seconds, _ = met[scene, "tcp", rank]
        assert error.startswith("RuntimeError") and who in error, error
        assert seconds < LIMIT, seconds


def test_who_redistributes_alone_says_once_which_call_waits_for_whom(met):
    logged, error, *_ = met["one_gathers_alone", "tcp", 1]
    (line,) = logged
    assert re.fullmatch(
        r"torch_overlay: Rank 1 has waited \d+ s for rank 0 in a redistribution of torch.float32 of shape \(8, 4\) "
        r"from S\(0\), S\(1\) -> S\(0\), R on DeviceMesh\(\(a=2, b=2\), .*\), called at .*test_mesh_waits.py:\d+, in "
        r"one_gathers_alone\. All of these ranks must call it: see whether .*",
        line,
    )
    assert error and not any(met["one_gathers_alone", "tcp", rank][0] for rank in (0, 2, 3))


@needs_package
def test_who_has_other_options_is_named_where_meshes_are_not_compared(met):
    """Nothing was said: all build the same mesh."""
    other = f"{SQUARE} with flatten='existing'"
    for rank in (0, 2, 3):
        logged, *_ = met["one_has_other_options", "tcp", rank]
        assert len(logged) == 1 and f"ranks 0, 2, 3 build {SQUARE}; rank 1 last came to {other}." in logged[0], logged


def test_the_others_hear_of_a_rank_that_died(met):
    """Without the check: the axis and its ranks are named, and nobody waits longer than the timeouts of two groups."""
    for rank in range(3):
        _, error, _, seconds, _ = met["one_dies", "tcp", rank]
        # where a store waits in vain, torch has an error of its own
        assert error.startswith(("RuntimeError", "DistStoreError")) and ("axis 'a'" in error or "axis 'b'" in error)
        assert "If some of them were out of reach" in error and seconds <= 2 * LIMIT + 2, (error, seconds)


@pytest.mark.parametrize("scene, kind", [(scene.__name__, kind) for scene, kind in PLAYED if "same" in scene.__name__])
def test_ranks_that_build_the_same_are_told_nothing(met, scene, kind):
    assert all(met[scene, kind, rank][:2] == ([], "") for rank in range(RANKS))


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_mesh_takes_one_set_under_one_key(met, kind):
    """Three meshes, one flattened view."""
    for rank in range(RANKS):
        assert met["all_build_the_same", kind, rank][2] == 4 * [f"mesh_line/{rank}"]


def test_no_thread_is_left(met):
    assert not any(threads for *_, threads in met.values())


class Asked:
    """A store that notes what it is asked."""

    def __init__(self, store) -> None:
        self.store, self.asked = store, []

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self.store, name)


@pytest.mark.parametrize("missing, most", [([], 3), ([700], 24), ([0, 999], 46)])
def test_lines_are_read_without_waiting_and_by_few_requests(missing, most):
    """Of a thousand ranks: one request asks whether all are there, and halves say who isn't."""
    store = dist.HashStore()
    for rank in {*range(1000)} - {*missing}:
        store.set(f"mesh_line/{rank}", "\n0-999 1 (a=1000)")
    asked, start = Asked(store), time.monotonic()
    said = waiting.who_builds(asked, range(1000))
    assert said.pop(None, []) == missing
    assert list(said) == ["\n0-999 1 (a=1000)"] and len(said["\n0-999 1 (a=1000)"]) == 1000 - len(missing)
    assert len(asked.asked) <= most, asked.asked
    assert time.monotonic() - start < 10  # a HashStore waits 300 s for what isn't there


@pytest.fixture
def pair(monkeypatch):
    """A world of two on a store that tests give, in which this rank waits."""

    def waits(store, ranks=(0, 1)) -> list[str]:
        world = mock.Mock(**{"size.return_value": 2, "rank.return_value": 0})
        logged: list[str] = []
        monkeypatch.setattr(distributed_c10d, "_get_default_group", lambda: world)
        monkeypatch.setattr(distributed_c10d, "get_backend", lambda group: "gloo")
        monkeypatch.setitem(distributed_c10d._world.pg_map, world, ("gloo", store))
        monkeypatch.setattr(waiting, "SECONDS", 0.05)
        monkeypatch.setattr(waiting.logger, "warning", logged.append)
        waiting.leave_line(lambda: "(a=2)", RankMap(range(2)))
        with waiting.explained(lambda: ("come", ranks)):
            time.sleep(0.5)
        return logged

    return waits


def test_in_a_large_world_few_are_asked_those_first_that_are_waited_for(pair, monkeypatch):
    monkeypatch.setattr(waiting, "MOST", 3)
    (said,) = pair(dist.HashStore(), [8, 9, *range(10_000)])
    assert "rank 0 builds (a=2); ranks 8, 9 came to no mesh yet" in said


@pytest.mark.parametrize("refuses", ["set", "clone", "check", "multi_get"])
def test_a_store_that_refuses_changes_nothing(pair, refuses):
    store = dist.HashStore()
    store.set("mesh_line/1", "\n0-1 1 (b=2)")
    broken = mock.Mock(wraps=store, **{f"{refuses}.side_effect": RuntimeError("no such thing")})
    if refuses != "clone":
        broken.clone.side_effect = lambda: broken
    said = pair(broken)
    assert len(said) == (refuses == "set"), "without its own line it says what it would have left"


ROOT, LAST = "flatten='whole'\n0-7 1 (pp=2, dp=4)", "0-7 2 (all=8)"
STAGES = [f"{ROOT}\n0-3 1 (dp=4)\n{LAST}", f"{ROOT}\n4-7 1 (dp=4, tp=1)\n4-7 2 (tp=4)\n{LAST}"]


@pytest.mark.parametrize(
    "others, said",
    [
        ({STAGES[1]: [4, 5]}, ""),  # each stage has meshes of its own
        (
            {ROOT: [4]},
            "ranks 0, 1 build (all=8); rank 4 last came to (pp=2, dp=4). So far all meshes are the same: rank 4",
        ),
        (
            {f"{ROOT}\n4-7 1 (dp=4)": [4]},
            "rank 4 last came to (dp=4). So far all meshes are the same: rank 4 may be late",
        ),
        ({f"{STAGES[1]}\n4-7 3 (x=4)": [4]}, "ranks 0, 1 build (all=8); rank 4 went on to (x=4)."),
        (
            {f"{ROOT}\n0-7 2 (one=8)\n0-7 3 (all=8)": [4]},
            "their 2nd mesh of these ranks: ranks 0, 1 build (all=8); rank 4",
        ),
        (
            {"flatten='whole'\n0-7 7 (w=8)\n0-7 8 (all=8)": [4]},  # more than it left
            "rank 4 last came to (all=8), its 8th mesh of these ranks.",
        ),
        ({STAGES[0].replace("whole", "existing"): [4]}, "rank 4 last came to (all=8) with flatten='existing'."),
    ],
)
def test_meshes_over_the_same_ranks_are_compared(others, said):
    line = waiting._who_builds_what(STAGES[0], {STAGES[0]: [0, 1], **others})
    assert said in line and bool(line) == bool(said), line


def test_a_rank_leaves_its_last_meshes_numbered_by_their_ranks(monkeypatch):
    from mesh_harness import fake_world

    store = dist.HashStore()
    with fake_world(1, 8):
        world = distributed_c10d._get_default_group()
        monkeypatch.setattr(waiting, "_can_wait", lambda group: True)
        monkeypatch.setitem(distributed_c10d._world.pg_map, world, ("gloo", store))
        for number in range(6):
            for ranks in (range(8), [3, 2, 1, 0], [1, 6]):
                waiting.leave_line(lambda number=number: f"(a{number})", RankMap(ranks))
    lines = store.get("mesh_line/1").decode().split("\n")
    assert len(lines) == 1 + waiting.KEPT and "share_groups='names', " in lines[0]
    assert [line.split(" ")[:2] for line in lines[-3:-1]] == [["0-7", "6"], ["0-3", "6"]]
    assert lines[-1].endswith(" 6 (a5)") and "-" not in lines[-1].split(" ")[0]


def test_who_waits_briefly_starts_no_reading(monkeypatch):
    """And on the fake backend, or alone, there is no thread at all."""
    started = mock.Mock()
    monkeypatch.setattr(threading, "Timer", started)
    from mesh_harness import fake_world

    with fake_world():
        grid(2, 4)
    assert not started.called


class NeverAborted:
    """A group whose abort waits for what never comes, as NCCL's may where a rank died."""

    group_name = "stuck"

    def __init__(self):
        self.is_over = threading.Event()

    def abort(self):
        self.is_over.wait(60)


def test_an_abort_that_never_ends_is_given_up(monkeypatch):
    from torch_overlay.distributed._mesh import groups

    monkeypatch.setattr(groups, "ABORT_LIMIT", 0.2)
    group, begun = NeverAborted(), time.monotonic()
    (error,) = groups._abort_together([group])
    assert time.monotonic() - begun < 30
    assert "stuck didn't end within 0.2 s" in str(error)
    group.is_over.set()
