"""Who waits or works for long says so once: for what, for which ranks, how long. Ranks are threads of this process."""

import contextlib
import datetime
import json
import logging
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import forks
import torch_overlay
import torch_overlay.transfers.making  # which takes a second, in which nobody waits
from torch_overlay.rendezvous import connections, long_waits, watch
from torch_overlay.transfers import checkpoint
from way import needs_package

pytestmark = needs_package

LONG, LATE = 0.2, 1.2  # seconds until a rank says something, and by which the other one comes late


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    watch.end_threads()  # of watches that an earlier test left behind: they look less often
    monkeypatch.setattr(long_waits, "LONG", LONG)
    for name, seconds in (("TICK", 0.02), ("LISTEN", 0.1)):
        monkeypatch.setattr(watch, name, seconds)


@contextlib.contextmanager
def two_ranks(caplog, late=0.0):
    """A place for each of two ranks, a thread for rank 1; and the lines that were logged since."""
    address = f"tcp://127.0.0.1:{forks.free_port()}"
    with ThreadPoolExecutor(1) as other, caplog.at_level(logging.WARNING):
        met = other.submit(after, late, torch_overlay.meet, address, rank=1, world_size=2, timeout=30)
        with torch_overlay.meet(address, rank=0, world_size=2, timeout=30) as place, met.result() as others:
            caplog.clear()  # a loaded machine may have waited here, too
            yield place, others, other


def after(seconds, call, *given, **named):
    time.sleep(seconds)
    return call(*given, **named)


def said(caplog):
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("torch_overlay")]
    caplog.clear()
    return lines


@pytest.mark.parametrize("late", [0, 1])
def test_in_meet(caplog, late):
    address = f"tcp://127.0.0.1:{forks.free_port()}"
    with ThreadPoolExecutor(2) as ranks:
        met = [
            ranks.submit(after, LATE * (rank == late), torch_overlay.meet, address, rank=rank, world_size=2, timeout=30)
            for rank in range(2)
        ]
        places = [rank.result() for rank in met]
        [*ranks.map(lambda place: place.close(), places)]
    (line,) = said(caplog)
    assert line.startswith(f"torch_overlay: Rank {1 - late} has waited 0 s for rank {late}"), line
    assert f"in a meeting of 2 at {address}" in line and line.endswith(". It waits up to 30 s."), line


def test_in_making_a_transfer_and_in_a_run(caplog):
    source, target = torch.ones(4), torch.zeros(4)
    with two_ranks(caplog) as (place, others, other):
        making = other.submit(after, LATE, torch_overlay.Transfer, None, [target], group=others)
        with torch_overlay.Transfer([source], None, group=place) as sync, making.result() as its:
            (line,) = said(caplog)
            assert line.startswith(
                "torch_overlay: Rank 0 has waited 0 s for rank 1 (rank 1: it last came to a meeting of 2 at "
            ), line
            assert ", in a Transfer, of ranks 0, 1. It waits up to 30 s." in line, line
            for run in (1, 2):
                running = other.submit(after, LATE, its.run)
                sync.run()
                running.result()
                # On a loaded machine packing may take as long.
                (line,) = [line for line in said(caplog) if " has worked " not in line]
                assert line.startswith("torch_overlay: Rank 0 has waited "), line
                assert " s for rank 1 (rank 1: it is not in a run, for " in line, line
                assert f", in run {run} of a Transfer over ranks 0, 1, the reports before the run. " in line, line
            running = other.submit(its.run)
            sync.run()
            running.result()
    assert said(caplog) == [] and torch.equal(source, target)


def test_in_reading_a_checkpoint_and_what_one_process_does(caplog, tmp_path, monkeypatch):
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    data = struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1, 2)
    (tmp_path / "model.safetensors").write_bytes(data)
    fill = checkpoint.Rounds._fill
    target = torch.zeros(2)
    with torch_overlay.meet(f"tcp://127.0.0.1:{forks.free_port()}", rank=0, world_size=1) as place:
        with torch_overlay.Transfer(torch_overlay.checkpoint(tmp_path), {"w": target}, group=place) as sync:
            sync.run()
            assert said(caplog) == []
            monkeypatch.setattr(checkpoint.Rounds, "_fill", lambda *given: after(2 * LONG, fill, *given))
            sync.run()
    assert target.tolist() == [1, 2]
    assert said(caplog) == [
        "torch_overlay: This process has worked 0 s, and waits for no rank: reading a checkpoint, in 1 round."
    ]
    with two_ranks(caplog) as (place, others, other):
        making = other.submit(torch_overlay.Transfer, None, {"w": target}, group=others)
        with (
            torch_overlay.Transfer(torch_overlay.checkpoint(tmp_path), None, group=place) as sync,
            making.result() as its,
        ):
            running = other.submit(its.run)
            sync.run()
            running.result()
    lines = said(caplog)
    (work,) = [line for line in lines if "worked" in line]
    assert work.startswith("torch_overlay: Rank 0 has worked 0 s, and waits for no rank: round 1 of 1, reading the "), (
        work
    )
    assert all("Rank 1 has waited" in line for line in lines if line != work), lines


@pytest.mark.parametrize("by", ["enter", "came"])
def test_a_wait_is_no_work(caplog, by):
    with contextlib.closing(watch.Watch(range(2), 0, dist.HashStore(), datetime.timedelta(seconds=30), 0, int)) as of:
        of.begin("an exchange", waits=True)
        time.sleep(2 * LONG)
        begun = time.monotonic()
        of.came() if by == "came" else of.enter("unpack")
        time.sleep(LONG / 2)
        lines = [line for line in said(caplog) if " has worked " in line]
        assert not lines or time.monotonic() - begun > LONG  # a busy machine may take as long
        time.sleep(LONG)
        (line,) = lines + [line for line in said(caplog) if " has worked " in line]
        assert line.startswith("torch_overlay: Rank 0 has worked 0 s"), line


def test_a_block_that_is_done_in_time_says_nothing(caplog):
    threads = threading.active_count()
    with long_waits.said_if_long("asking"):
        pass
    time.sleep(2 * LONG)
    assert said(caplog) == [] and threading.active_count() <= threads


def test_no_wait_ends_while_bytes_come():
    """Over a slow link: on rank 1 bytes come; rank 2 waits in the same step, and rank 0 for both in the next one. Once
    nothing moves, all of them end within the timeout."""
    store, closed, timeout = dist.HashStore(), [], 1.5
    carried = {1: time.monotonic}  # of rank 1 they grow
    watches = []
    for rank in range(3):
        close, count = (lambda rank=rank: closed.append(rank)), (lambda rank=rank: carried.get(rank, int)())
        watches.append(watch.Watch(range(3), rank, store, datetime.timedelta(seconds=timeout), 0, close, count))
        watches[rank].begin("the report", waits=True)
        watches[rank].enter("an exchange", waits=True)
    watches[0].enter("the end", waits=True)
    try:
        time.sleep(4 * timeout)
        assert not closed
        del carried[1]
        until = time.monotonic() + 20 * timeout
        while not closed and time.monotonic() < until:
            time.sleep(0.01)
        assert closed
    finally:
        for each in watches:
            each.close()


def test_connections_count_what_they_carry():
    """Not those to where this process listened or was connected before, and none at all if one is too many."""
    with contextlib.ExitStack() as stack:
        keeps = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connect(server):
            return [
                stack.enter_context(each)
                for each in (socket.create_connection(server.getsockname()), server.accept()[0])
            ]

        connect(keeps)
        known, too_many = connections.Connections(), connections.Connections()
        with known.opening(2), too_many.opening(1):
            listens = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            client, server = connect(listens)
            asks = connect(keeps)
        for one, other in ((client, server), asks):
            one.sendall(bytes(1000))
            other.recv(1000, socket.MSG_WAITALL)
        assert 2000 <= known.carried < 2010  # opening counts as a byte
        assert too_many.carried == 0
    assert known.carried == 0
