"""Ctrl-C, or a handler of SIGTERM that exits, on one rank: it ends each wait at once, and the others are told.

Two ranks of a place are two threads of this process: rank 0 is the main thread, in which Python handles signals.
"""

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

import forks
import torch_overlay
from torch_overlay.rendezvous import blocking
from torch_overlay.rendezvous.blocking import interruptibly
from torch_overlay.transfers.run import RunReport
from way import needs_package

pytestmark = [needs_package, pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no such signal")]
TIMEOUT = 20  # of the waits, all of which end long before


@contextlib.contextmanager
def interrupted(kind=KeyboardInterrupt, seconds=0.3):
    """Ctrl-C comes some time after the block has begun, which then ends soon."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begun = time.monotonic()
    with pytest.raises(kind):
        yield
    timer.join()
    assert time.monotonic() - begun < seconds + 3


@contextlib.contextmanager
def two_that_meet():
    address = f"tcp://127.0.0.1:{forks.free_port()}"
    with ThreadPoolExecutor(1) as other:
        met = other.submit(torch_overlay.meet, address, rank=1, world_size=2, timeout=TIMEOUT)
        with torch_overlay.meet(address, rank=0, world_size=2, timeout=TIMEOUT) as place, met.result() as others:
            yield place, others, other


def test_a_meeting():
    address = f"tcp://127.0.0.1:{forks.free_port()}"
    for rank in range(2):
        with interrupted():
            torch_overlay.meet(address, rank=rank, world_size=2, timeout=TIMEOUT)
    with torch_overlay.meet(address, rank=0, world_size=1):  # the port is free again
        pass


def test_making_a_transfer_and_a_run():
    weights, served = torch.ones(8), torch.zeros(8)
    with two_that_meet() as (place, others, other):
        with interrupted():
            torch_overlay.Transfer([weights], None, group=place)
        told = other.submit(torch_overlay.Transfer, None, [served], group=others).exception()
        assert str(told).startswith("A Transfer needs ranks 0, 1, and rank 0 was interrupted in it. ")
        late = other.submit(torch_overlay.Transfer, None, [served], group=others)
        with torch_overlay.Transfer([weights], None, group=place) as sync, late.result() as its:
            waiting = other.submit(its.run)
            sync.run()
            waiting.result()
            assert torch.equal(served, weights)
            with interrupted():
                sync.run()
            begun = time.monotonic()
            told = other.submit(its.run).exception()
            assert time.monotonic() - begun < 5
            assert "run 2, the reports before the run: rank 0 failed: it was interrupted (KeyboardInterrupt)." in str(
                told
            )
            with pytest.raises(
                torch_overlay.errors.TransferFailed, match="failed before, and can't run again: run 2, "
            ):
                sync.run()


@pytest.mark.parametrize("method", ["RunReport.agree", "checked_names"])
def test_who_waits_in_the_run_is_told_at_once(method):
    """Also where this rank hasn't begun to talk to others."""
    where = RunReport if "." in method else __import__("torch_overlay.transfers.run", fromlist=["run"])
    with two_that_meet() as (place, others, other):
        late = other.submit(torch_overlay.Transfer, None, [torch.zeros(8)], group=others)
        with torch_overlay.Transfer([torch.ones(8)], None, group=place) as sync, late.result() as its:
            told = other.submit(its.run)
            time.sleep(0.2)
            begun = time.monotonic()
            main, real = threading.main_thread(), getattr(where, method.rpartition(".")[2])

            def exits(*given):
                if threading.current_thread() is main:
                    raise SystemExit(7)
                return real(*given)

            with mock.patch.object(where, method.rpartition(".")[2], exits), pytest.raises(SystemExit):
                sync.run()
            assert "rank 0 failed: it was interrupted (SystemExit 7)." in str(told.exception())
            assert time.monotonic() - begun < 5


def test_a_handler_that_goes_on_ends_no_wait():
    """As one that counts, or runs something of the same kind."""
    calls, before = [], threading.active_count()
    handler = signal.signal(signal.SIGUSR1, lambda *_: calls.append(interruptibly(lambda: "within")))
    try:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        assert interruptibly(lambda: time.sleep(0.3) or "after") == "after" and calls == ["within"]
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(ZeroDivisionError):
        interruptibly(lambda: 1 // 0)
    blocking.end()
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before
