"""What the ranks of a meeting ask of the store; one rank runs, and the words of the others are there."""

import collections
import contextlib
import datetime
import hashlib
import json
import os
import socket
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import forks
import torch_overlay
from torch_overlay.rendezvous import blocking, team, watch
from torch_overlay.rendezvous import place as places
from torch_overlay.rendezvous.meeting import Meeting
from torch_overlay.transfers.descriptions import as_data, describe, from_data
from torch_overlay.transfers.pieces import digest
from way import needs_package

pytestmark = needs_package


class Counting(dist.HashStore):
    """Counts the requests of each kind."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def has_extended_api(self):
        return True


for name in ("set", "get", "multi_get", "wait", "check", "add", "compare_set", "delete_key"):

    def counted(self, *given, name=name):
        self.counts[name] += 1
        return getattr(dist.HashStore, name)(self, *given)

    setattr(Counting, name, counted)


def requests(ranks):
    """Of a rank, in a meeting of so many who say two things; and what it hears."""
    store = Counting()
    meeting = Meeting("test", range(ranks), 0, store, datetime.timedelta(seconds=5), "A test")
    for rank in range(1, ranks):
        said = zlib.compress(json.dumps(f"word {rank % 2}").encode())
        store.set(f"test/{hashlib.sha256(said).hexdigest()}", said)
        store.set(f"test/rank {rank}", hashlib.sha256(said).hexdigest())
    store.counts.clear()
    heard = meeting.say("word 0")
    assert heard == {rank: f"word {rank % 2}" for rank in range(ranks)}
    return store.counts


def test_requests_of_a_rank_do_not_grow_with_the_ranks():
    assert requests(8) == requests(4096) and requests(8).total() <= 10


def test_a_mesh_is_described_once():
    """Not once for each tensor: 300 tensors of 8,192 ranks were 7.3 MB."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8192)
    try:
        mesh = DeviceMesh("cpu", torch.arange(8192).reshape(1024, 8), _init_backend=False)
        local = torch.empty(1, 8)
        tensors = [DTensor.from_local(local, mesh, [Shard(0), Shard(1)], run_check=False) for _ in range(300)]
        description = describe(tensors, None, None).description
        said = json.dumps(as_data(description))
        assert len(said) < 100_000
        assert from_data(json.loads(said)) == description
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, (8 << 20) + 3])
def test_a_digest_sees_each_bit_and_its_place(size):
    """Wherever in memory the bytes lie."""
    data = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    seen, bigger = digest(data), torch.zeros(size + 3, dtype=torch.uint8)
    bigger[3:] = data
    assert digest(bigger[3:]) == seen and digest(bigger) != seen
    for place in {0, size // 2, size - 1} if size else ():
        for bit in (1, 128):
            other = data.clone()
            other[place] ^= bit
            assert digest(other) != seen
    if size > 1:
        data[0], data[-1] = 3, 5
        seen = digest(data)
        data[0], data[-1] = 5, 3
        assert digest(data) != seen


@pytest.mark.parametrize(
    ("one", "other", "dtype"),
    [
        ([1.0, -1.0], [-1.0, 1.0], torch.float64),
        ([3.0, -0.5, 7.0, 2.0], [-3.0, 0.5, -7.0, -2.0], torch.float64),
        ([1.0, 2.0, 3.0, 4.0], [-1.0, 2.0, -3.0, 4.0], torch.float32),
        ([3, 0], [0, 1], torch.int64),
        ([2.0, 2, 1, 1, 1, 1, 2, 2], [1.0, 1, 2, 2, 2, 2, 1, 1], torch.float32),
    ],
)
def test_a_digest_is_no_sum_of_products(one, other, dtype):
    """Of which a tensor and its negative have the same."""
    assert digest(torch.tensor(one, dtype=dtype)) != digest(torch.tensor(other, dtype=dtype))


def test_sizes_and_groups_that_differ_are_named_by_all_who_wait():
    """Each waited in a meeting of its own, and read only that the other one didn't come."""
    address = f"tcp://127.0.0.1:{forks.free_port()}"
    with ThreadPoolExecutor(3) as ranks:
        met = [
            ranks.submit(torch_overlay.meet, address, rank=rank, world_size=size, timeout=2)
            for rank, size in enumerate((3, 2))
        ]
        said = [str(rank.exception()) for rank in met]
        assert (
            "ranks 1, 2 didn't come within 2 s (rank 1: it last came to the same address with world_size 2)" in said[0]
        )
        assert "others give world_size 3" in said[1]
        met = [ranks.submit(torch_overlay.meet, address, rank=rank, world_size=3, timeout=2) for rank in range(3)]
        places = [rank.result() for rank in met]
        tensor = [torch.zeros(2)]
        made = [
            ranks.submit(torch_overlay.Transfer, tensor, tensor, group=place, gone=gone)
            for place, gone in zip(places, ((), (2,), ()), strict=True)
        ]
        said = [str(rank.exception()) for rank in made]
        [*ranks.map(lambda place: place.close(), places)]
    for rank in (0, 2):
        assert "rank 1: it last came to a Transfer, of ranks 0, 1 (their number 1)" in said[rank], said
    assert "rank 0: it last came to a Transfer, of ranks 0-2 (their number 3)" in said[1], said


@contextlib.contextmanager
def port_of(listens):
    with socket.socket() as free:
        free.bind(("127.0.0.1", forks.free_port()))
        if listens:
            free.listen()
            yield free.getsockname()[1]
            return
    yield forks.free_port()


def test_another_program_that_listens_there_is_no_rank_0():
    """It takes connections and says nothing; torch's own store would wait for it without a limit."""
    begun = time.monotonic()
    with port_of(listens=True) as port, pytest.raises(RuntimeError, match="didn't answer as rank 0 does, within 1 s"):
        torch_overlay.meet(f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout=1)
    assert time.monotonic() - begun < 10


def connected(port):
    """To who listens there, when that has begun."""
    until = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=20)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_a_stranger_who_talks_at_the_port_keeps_nobody_from_meeting():
    with port_of(listens=False) as port, ThreadPoolExecutor(2) as ranks, contextlib.ExitStack() as strangers:
        how = {"world_size": 2, "timeout": 20, "key": "key"}
        coming = [ranks.submit(torch_overlay.meet, f"tcp://127.0.0.1:{port}", rank=0, **how)]
        for _ in range(5):
            stranger = strangers.enter_context(connected(port))
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 20)
        coming.append(ranks.submit(torch_overlay.meet, f"tcp://127.0.0.1:{port}", rank=1, **how))
        places = [each.result() for each in coming]
        meetings = [place.meeting("A test") for place in places]
        said = [*ranks.map(lambda each: each.say(each.rank), meetings)]
        assert said == [{0: 0, 1: 1}] * 2
        [*ranks.map(lambda place: place.close(), places)]


def test_a_host_whom_nobody_knows():
    """Rank 0 is told at once. The others wait: a cluster may know the name later."""
    how = {"world_size": 2, "timeout": 1}
    with pytest.raises(RuntimeError, match=r"rank 0 can't listen there: the host name 'no\.such\.invalid' can't be"):
        torch_overlay.meet("tcp://no.such.invalid:29600", rank=0, **how)
    with pytest.raises(RuntimeError, match=r"the host name 'no\.such\.invalid' can't be resolved here .* Tried"):
        torch_overlay.meet("tcp://no.such.invalid:29600", rank=1, **how)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no such call")
def test_a_forked_child_keeps_no_port():
    """A data loader's worker, which lives on: rank 0 meets again at its port, and a child can't close its place."""
    with port_of(listens=False) as port:
        how = {"rank": 0, "world_size": 1, "timeout": 10}
        place = torch_overlay.meet(f"tcp://127.0.0.1:{port}", **how)
        (waits, ends), (comes, is_there) = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            place.close()
            os.write(is_there, b"x")
            os.read(waits, 1)
            os._exit(0)
        try:
            os.read(comes, 1)
            assert place.meeting("A test").say(1) == {0: 1}
            place.close()
            del place
            torch_overlay.meet(f"tcp://127.0.0.1:{port}", **how).close()
        finally:
            os.write(ends, b"x")
            os.waitpid(child, 0)


class Silent(dist.Store):
    """Of a host that lost its power: a request waits for its answer without a limit."""

    def clone(self):
        return self

    def set(self, *given):
        threading.Event().wait()

    add = check = set


def test_the_control_group_closes_though_an_abort_fails(monkeypatch):
    """Else a wait in it would end by the timeout of its backend alone."""
    closed = []
    monkeypatch.setattr(team, "_close_gloo", closed.append)
    for _ in range(4):  # whatever the addresses of the groups are
        both = mock.Mock(**{"abort.side_effect": RuntimeError("it can't")}), mock.Mock()
        two = team.Team(both[0], [0, 1], 0, torch.device("cpu"))
        two.use_control_group(both[1], 0)
        with pytest.raises(RuntimeError, match="it can't"):
            two.close_connections()
        assert closed.pop() is both[1]


def test_the_store_stays_until_all_know_who_died():
    """Also where one that knew first has closed its Transfer: of three hosts, one named nobody in one run of ten."""
    store, lost, second = dist.HashStore(), RuntimeError("a connection broke"), datetime.timedelta(seconds=1)
    watches = [watch.Watch(range(3), rank, store, second, 0, int, keeps_store=rank == 0) for rank in range(3)]
    try:
        for each in watches:
            each.begin("the word before the run", waits=True)
        watches[1].settle(lost, is_own=False)
        watches[1].close()
        keeper = blocking.ask_aside(lambda: watches[0].settle(lost, is_own=False))
        with pytest.raises(FutureTimeout):
            keeper.result(0.5)
        assert watches[2].settle(lost, is_own=False) == keeper.result(1)
    finally:
        watches[0].close()
        watches[2].close()
    assert store.num_keys() == 0


def test_a_store_that_does_not_answer_is_given_up(monkeypatch):
    """Where a process forked by rank 0 kept its connections open, a server waited 54 s after its timeout of 5."""
    for name in ("FIRST", "ANSWER", "STORE", "LISTEN"):
        monkeypatch.setattr(watch, name, 0.1)
    begun, closed = time.monotonic(), []
    of_failed = watch.Watch(range(3), 1, Silent(), datetime.timedelta(seconds=0.1), 0, lambda: closed.append(True))
    of_failed.begin("the word before the run", waits=True)
    said = of_failed.settle(RuntimeError("a connection broke"), is_own=False)
    assert said == (
        "run 1, the word before the run: no answer any more from rank 0, which kept the store: it died, or left after "
        "a failure that it named."
    )
    assert closed == [True]
    of_failed.close()
    monkeypatch.setattr(places, "LEAVING", 0.1)
    with port_of(listens=False) as port:
        place = torch_overlay.meet(f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        kept, place._store = place._store, Silent()
        place.close()
    del kept
    assert time.monotonic() - begun < 5
