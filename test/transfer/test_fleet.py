"""Servers join trainers, leave them, die and come again: the trainers go on, and each server that is there has all."""

import os
import random
import signal

import pytest

import forks
from fleet_ranks import TIMEOUT, Trainer, serve
from torch_overlay.testing.pool import Pool, context
from width import NIGHTLY

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal")


class Fleet:
    """Two trainers, and the servers that a test starts."""

    def __init__(self, folder):
        self.address, self.folder = f"tcp://127.0.0.1:{forks.free_port()}", folder
        self.context = context(forks.PRELOADED)
        # A queue for each server: one that is killed while it writes would block all others.
        self.events, self.servers, self.all = {}, {}, []
        self.trainers = Pool(2, Trainer, self.address, str(folder), timeout=60, preload=forks.PRELOADED)

    def start(self, name, size=1, **more):
        """Start a server, and wait until it has joined."""
        self.events[name] = self.context.Queue()
        self.servers[name] = [
            self.context.Process(
                target=serve,
                args=(name, rank, size, self.address, str(self.folder), self.events[name], len(self.all)),
                kwargs=more,
            )
            for rank in range(size)
        ]
        self.all += self.servers[name]
        for process in self.servers[name]:
            process.start()
        return {self.hear(name)[2] for _ in range(size)}

    def hear(self, name):
        """The next event of some server."""
        return self.events[name].get(timeout=40)

    def step(self, version, servers, joined=(), gone=(), in_background=False):
        """Run, and check that just these servers, each with so many ranks, have this version's values."""
        for said in self.trainers.ask("step", version, in_background):
            assert (said[0], sorted(said[1]), said[2]) == (sorted(joined), sorted(gone), version), said
            assert said[3] < TIMEOUT + 5 + 2
        for name, size in servers.items():
            heard = sorted([self.hear(name) for _ in range(size)])
            assert heard == [(name, rank, version, {float(version)}) for rank in range(size)]

    def signal(self, name, number):
        for process in self.servers[name]:
            os.kill(process.pid, number)

    def close(self):
        self.trainers.close()
        for process in self.all:
            if process.is_alive():
                process.kill()
            process.join(10)


@pytest.fixture
def fleet(tmp_path):
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def test_servers_come_and_go(fleet):
    assert fleet.trainers.ask("make") == [(), ()]
    fleet.step(1, {})
    fleet.start("a")
    fleet.start("b", 2)
    fleet.step(2, {"a": 1, "b": 2}, joined="ab")
    fleet.step(3, {"a": 1, "b": 2}, in_background=True)
    # What nobody has changed costs no message more.
    assert {each[1] for each in fleet.trainers.ask("messages")} == {0}
    for name in "abb":
        fleet.hear(name)
    # Dead between two runs, and back by its name.
    fleet.signal("a", signal.SIGKILL)
    fleet.step(4, {"b": 2}, gone="a")
    fleet.start("a")
    fleet.start("c", dies_at=3)
    fleet.step(5, {"a": 1, "b": 2, "c": 1}, joined="ac")
    # Dead within a run, of which some exchanges are over: the others have all of it.
    fleet.step(6, {"a": 1, "b": 2}, gone="c")
    # One that hangs is left behind, and raises when it wakes. Nothing lands there any more.
    fleet.signal("a", signal.SIGSTOP)
    fleet.step(7, {"b": 2}, gone="a")
    fleet.signal("a", signal.SIGCONT)
    assert "no answer any more from rank 5" in fleet.hear("a")[2]
    # One whose own run fails is dropped, and says why.
    fleet.start("e", raises_at=2)
    fleet.step(75, {"b": 2}, joined="e", gone="e")
    assert "no more of that" in fleet.hear("e")[2]
    # One that leaves by close().
    fleet.start("d", leaves_after=8)
    fleet.step(8, {"b": 2, "d": 1}, joined="d")
    assert fleet.hear("d")[2] == "left"
    fleet.step(9, {"b": 2}, gone="d")


def test_who_does_not_fit_is_refused(fleet):
    fleet.trainers.ask("make")
    fleet.start("a")
    (said,) = fleet.start("stranger", key="other")
    assert said == "joined"
    (said,) = fleet.start("nobody", key=None)
    fleet.start("odd", shape=(8, 4))
    for said in fleet.trainers.ask("step", 1):
        assert (said[0], said[2]) == (["a"], 1)
    assert fleet.hear("a")[2:] == (1, {1.0})
    assert "key" in fleet.hear("stranger")[2]
    assert "it hasn't the key that the trainers have" in fleet.hear("nobody")[2]
    assert "'a' has shape (4096, 4) in the source and (8, 4) in the target" in fleet.hear("odd")[2]
    fleet.step(2, {"a": 1})


def test_trainers_that_are_apart(fleet):
    """Nobody gets one trainer's part of a version and another's of the next."""
    fleet.trainers.ask("make")
    fleet.start("a")
    fleet.step(1, {"a": 1}, joined="a")
    fleet.trainers.ask("step_apart", 3)
    assert fleet.hear("a")[2:] == (None, {3.0})
    fleet.step(4, {"a": 1})


@pytest.mark.skipif(not NIGHTLY, reason="a long search: TORCH_OVERLAY_NIGHTLY=1")
@pytest.mark.parametrize("seed", range(20))
def test_random_fleets(fleet, seed):
    """Ten runs each, before which servers are started, killed, stopped, closed or started again."""
    rng, there, leaving = random.Random(seed), {}, {}
    fleet.trainers.ask("make")
    for version in range(1, 11):
        joined, gone = [], sorted(leaving)
        there = {name: size for name, size in there.items() if name not in leaving}
        leaving = {}
        for name in "abcd":
            what = rng.choice(("nothing", "nothing", "start", "kill", "stop"))
            if what == "start" and name not in there:
                if gone == [name]:
                    continue  # its former self is still to be dropped
                size, leaves = rng.randint(1, 2), rng.random() < 0.2
                fleet.start(name, size, leaves_after=version if leaves else None)
                joined.append(name)
                there[name] = size
                leaving |= {name: size} if leaves else {}
            elif what in ("kill", "stop") and name in there and name not in joined:
                fleet.signal(name, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
                gone.append(name)
                del there[name]
        fleet.step(version, there, joined, gone, in_background=rng.random() < 0.3)
