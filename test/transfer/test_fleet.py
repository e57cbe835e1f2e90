"""Servers join trainers, leave them, die and come again: the trainers go on, and each server that is there has all."""

import os
import random
import signal

import pytest

import forks
from fleet_ranks import ROWS, TIMEOUT, Trainer, come_and_go, serve
from torch_overlay.testing.pool import Pool, context
from width import NIGHTLY

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal")


class Fleet:
    """Two trainers, and the servers that a test starts."""

    def __init__(self, folder, rows):
        self.address, self.folder, self.rows = f"tcp://127.0.0.1:{forks.free_port()}", folder, rows
        self.context = context(forks.PRELOADED)
        # A queue for each server: one that is killed while it writes would block all others.
        self.events, self.servers, self.all = {}, {}, []
        self.trainers = Pool(2, Trainer, self.address, str(folder), rows, timeout=60, preload=forks.PRELOADED)

    def start(self, name, size=1, **more):
        """Start a server, and wait until it has joined."""
        self.events[name] = self.context.Queue()
        self.servers[name] = [
            self.context.Process(
                target=serve,
                args=(name, rank, size, self.address, str(self.folder), self.events[name], len(self.all)),
                kwargs={"rows": self.rows, **more},
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
            assert said[3] < max(len(gone), 1) * (TIMEOUT + 5) + 4  # this machine may be busy
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
def fleet(tmp_path, request):
    fleet = Fleet(tmp_path, getattr(request, "param", ROWS))
    yield fleet
    fleet.close()


def test_servers_come_and_go(fleet):
    assert fleet.trainers.ask("make") == [(), ()]
    fleet.step(1, {})
    fleet.start("a")
    fleet.start("b", 2, rebinds_after=2)  # tensors cut otherwise, for which the Transfer is made anew
    fleet.step(2, {"a": 1, "b": 2}, joined="ab")
    fleet.step(3, {"a": 1, "b": 2}, in_background=True)
    # Where nobody came or left a run costs no message more: the reports are gathered, as always, and nobody meets.
    assert {tuple(each) for each in fleet.trainers.ask("messages")} == {(1, 0)}
    for name in "abb":
        fleet.hear(name)
    # Dead between two runs, and back by its name.
    fleet.signal("a", signal.SIGKILL)
    fleet.step(4, {"b": 2}, gone="a")
    fleet.start("a")
    fleet.start("c", fault=("middle", "kill", 1))
    fleet.step(5, {"a": 1, "b": 2, "c": 1}, joined="ac")
    # Dead within a run, of which some exchanges are over: the others have all of it.
    fleet.step(6, {"a": 1, "b": 2}, gone="c")
    # One that hangs is left behind, and raises when it wakes. Nothing lands there any more.
    fleet.signal("a", signal.SIGSTOP)
    fleet.step(7, {"b": 2}, gone="a")
    fleet.signal("a", signal.SIGCONT)
    assert "no answer any more from rank 5" in fleet.hear("a")[2]
    # One whose own run fails is dropped, and says why.
    fleet.start("e", fault=("middle", "raise", 0))
    fleet.step(75, {"b": 2}, joined="e", gone="e")
    assert "no more of that" in fleet.hear("e")[2]
    # One that leaves by close().
    fleet.start("d", leaves_after=8)
    fleet.step(8, {"b": 2, "d": 1}, joined="d")
    assert fleet.hear("d")[2] == "left"
    fleet.step(9, {"b": 2}, gone="d")


def test_steps_of_an_optimizer_meanwhile(fleet):
    """Servers that come, and those that stay when another one dies, have the version's values, though the sources
    change as soon as they may."""
    fleet.trainers.ask("make", False, 64)
    budget = 64 * ROWS
    fleet.start("a", budget=budget)
    fleet.step(1, {"a": 1}, joined="a", in_background="snapshot")
    fleet.start("b", fault=("last", "kill", 1), budget=budget)
    fleet.step(2, {"a": 1, "b": 1}, joined="b", in_background="snapshot")
    fleet.step(3, {"a": 1}, gone="b", in_background=True)
    fleet.start("c", fault=("last", "kill", 1), budget=budget)
    fleet.step(4, {"a": 1, "c": 1}, joined="c", in_background=True)
    fleet.step(5, {"a": 1}, gone="c", in_background="snapshot")
    fleet.step(6, {"a": 1})


def test_names_that_can_be_read_once(fleet):
    """Also in a run that begins again, since a server came."""
    fleet.trainers.ask("make")
    for version, name in enumerate("ab", 1):
        fleet.start(name, only="ab")
        fleet.trainers.ask("step", version, False, "ab")
        for other in "ab"[:version]:
            assert fleet.hear(other) == (other, 0, version, {float(version)})


def test_a_trainer_that_refuses_where_a_server_died(fleet):
    """The other trainer and servers hear it, and the dead one is dropped."""
    fleet.trainers.ask("make")
    fleet.start("a")
    fleet.start("b")
    fleet.step(1, {"a": 1, "b": 1}, joined="ab")
    fleet.signal("a", signal.SIGKILL)
    assert all("rank 1: a test" in said for said in fleet.trainers.ask("refuse", 1))
    assert "rank 1: a test" in fleet.hear("b")[2]
    fleet.step(2, {}, gone="ab")


def test_an_error_that_nobody_waited_for_comes_though_a_server_came(fleet):
    fleet.trainers.ask("make")
    fleet.start("a")
    fleet.step(1, {"a": 1}, joined="a")
    fleet.trainers.ask("fail_unheard")
    assert "only names 'x'" in fleet.hear("a")[2]
    fleet.start("b")
    assert all("rank 1: a test" in said for said in fleet.trainers.ask("refuse", 1))
    assert all("of the last run nobody waited for" in said for said in fleet.trainers.ask("refuse"))


def test_who_does_not_fit_is_refused(fleet):
    """It gets the error itself, and the others go on: at the door, and in a later run."""
    fleet.trainers.ask("make")
    fleet.start("a")
    assert fleet.start("stranger", key="other") == fleet.start("nobody", key=None) == {"joined"}
    fleet.start("odd", rows=8)
    fleet.step(1, {"a": 1}, joined="a", gone=["odd"])
    assert "key" in fleet.hear("stranger")[2]
    assert "it hasn't the key that the trainers have" in fleet.hear("nobody")[2]
    assert "'a' has shape (4096, 4) in the source and (8, 4) in the target" in fleet.hear("odd")[2]
    fleet.start("tight", budget=1)
    fleet.start("c", 2, breaks_after=3)
    # A budget of which all ranks together find that it is too small costs all newcomers of the moment.
    fleet.step(2, {"a": 1}, joined=["tight", "c"], gone=["tight", "c"])
    assert "A budget of 1 bytes is too small" in fleet.hear("tight")[2]
    assert all("A budget of 1 bytes is too small" in fleet.hear("c")[2] for _ in range(2))
    fleet.start("c", 2, breaks_after=3)
    fleet.step(3, {"a": 1, "c": 2}, joined="c")
    fleet.step(4, {"a": 1}, gone="c")
    for _ in range(2):
        assert "goes on without servers that can't run: rank 9: the target 'a' needs " in fleet.hear("c")[2]
    fleet.step(5, {"a": 1})


@pytest.mark.parametrize("fleet", [1 << 16], indirect=True)
def test_newcomers_alone_get_everything_whole(fleet):
    """Also where all of it is cut into more exchanges than before, and large pieces become small ones."""
    sent, size = [], 2 * fleet.rows * 16
    fleet.trainers.ask("make", True)
    fleet.start("a", changes=True)
    for version, servers, joined, gone in (
        (1, {"a": 1}, "a", ""),
        (2, {"a": 1}, "", ""),
        (3, {"a": 1, "b": 2}, "b", ""),
        (4, {"b": 2}, "", "a"),
        (5, {"b": 2, "c": 1}, "c", ""),
    ):
        if joined == "b":
            fleet.start("b", 2, changes=True, spoils_after=4)
        if joined == "c":  # meanwhile b has written into its targets
            fleet.start("c", changes=True)
        if gone:
            fleet.signal("a", signal.SIGKILL)
        fleet.step(version, servers, joined, gone)
        sent.append(sum(fleet.trainers.ask("sent_bytes")))
    assert size <= sent[0] < size + 1000 and 3 * sent[1] < size
    assert abs(sent[2] - sent[1] - size) < 1000
    assert abs(sent[3] - sent[1]) < 1000
    assert abs(sent[4] - 2 * size) < 1000


def test_nobody_verifies_tensors_that_no_run_has_filled(fleet):
    """Those before, which the server has no more, are as they should be."""
    fleet.trainers.ask("make")
    fleet.start("b", 2, rebinds_after=1, verifies_after=1)
    fleet.step(1, {"b": 2}, joined="b")
    fleet.trainers.tell("verify")
    for said in [*map(str, fleet.trainers.answers("verify").values()), *[fleet.hear("b")[2] for _ in range(2)]]:
        assert "ranks 2, 3: verify(): bind() gave it other tensors, and no run has filled them yet" in said


@pytest.mark.parametrize("fleet", [1 << 19], indirect=True)
def test_rounds_of_changes_that_nobody_passes_on(fleet):
    """Where the one server is, a relay has nothing to do, and rounds all the same."""
    fleet.trainers.ask("make", True, 16, True)
    fleet.start("a", changes=True, relay=True)
    fleet.step(1, {"a": 1}, joined="a")
    fleet.step(2, {"a": 1})


def test_trainers_that_are_apart(fleet):
    """One trainer's connections break when the other one has ended the run, and waits for it in the program. Nobody
    gets one trainer's part of a version and another's of the next. Then a server dies in verify(), which goes on with
    the other one, and without who comes meanwhile."""
    fleet.trainers.ask("make")
    fleet.start("a")
    fleet.start("b", verifies_after=4)
    fleet.step(1, {"a": 1, "b": 1}, joined="ab")
    fleet.trainers.tell("step_apart", 2)
    for name in "ab":
        assert fleet.hear(name)[2:] == (2, {2.0})
    fleet.signal("a", signal.SIGKILL)
    said = fleet.trainers.answers("step_apart")
    assert [said[rank][2] for rank in range(2)] == [1, 2], said
    fleet.start("a")
    fleet.step(4, {"a": 1, "b": 1}, joined="a", gone="a")
    fleet.start("c")
    fleet.signal("a", signal.SIGKILL)
    assert fleet.trainers.ask("verify") == [([], ["a"])] * 2
    assert fleet.hear("b")[2] == "verified"
    fleet.step(5, {"b": 1, "c": 1}, joined="c")


def test_a_trainer_that_does_not_hear_who_came(fleet):
    """The others make the Transfer anew, and wait for it there."""
    fleet.trainers.ask("make")
    fleet.start("a")
    fleet.step(1, {"a": 1}, joined="a")
    fleet.start("b")
    assert [said[:3] for said in fleet.trainers.ask("step_without_news", 2)] == [(["b"], {}, 2)] * 2
    for name in "ab":
        assert fleet.hear(name)[2:] == (2, {2.0})


@pytest.mark.skipif(not NIGHTLY, reason="a long search: TORCH_OVERLAY_NIGHTLY=1")
@pytest.mark.parametrize("seed", range(20))
def test_random_fleets(fleet, seed):
    """Ten runs each, before or in which servers are started, killed, stopped, closed or started again; in one of ten
    runs two at once."""
    rng, there, leaving, faults = random.Random(seed), {}, {}, {}
    changes = seed % 2 == 1
    fleet.trainers.ask("make", changes)
    for version in range(1, 11):
        joined, gone = [], sorted(leaving)
        there = {name: size for name, size in there.items() if name not in leaving}
        leaving = {}
        two = rng.sample("abcdef", 2) if rng.random() < 0.1 else ()
        for name in "abcdef":
            what = "kill" if name in two else rng.choice(("nothing", "nothing", "nothing", "start", "kill", "stop"))
            if what == "start" and name not in there:
                if gone == [name]:
                    continue  # its former self is still to be dropped
                size, leaves, in_run = rng.randint(1, 2), rng.random() < 0.2, rng.randint(0, 2)
                phase = rng.choice(("meeting", "planning")) if in_run == 0 and rng.random() < 0.5 else None
                fault = phase or rng.choice(("first", "middle", "last")), rng.choice(("kill", "stop")), in_run
                if leaves or rng.random() < 0.5:
                    fault = None, None, None
                else:
                    faults[name] = version + in_run
                fleet.start(name, size, leaves_after=version if leaves else None, changes=changes, fault=fault)
                joined.append(name)
                there[name] = size
                leaving |= {name: size} if leaves else {}
            elif what in ("kill", "stop") and name in there and name not in joined:
                fleet.signal(name, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
                gone.append(name)
                del there[name]
                faults.pop(name, None)
        for name in [name for name, at in faults.items() if at == version]:
            gone.append(name)
            del there[name], faults[name]
        fleet.step(version, there, joined, gone, in_background=rng.random() < 0.3)
    assert fleet.trainers.ask("end") == [[]] * 2
    for name in there.keys() - leaving.keys():
        for process in fleet.servers[name]:
            process.join(TIMEOUT + 5 + 2)
            assert process.exitcode == 0


@pytest.mark.skipif(not NIGHTLY, reason="minutes: TORCH_OVERLAY_NIGHTLY=1")
def test_nothing_stays_of_servers_that_left(fleet):
    """Of 500 that come and go, after the first 50."""
    fleet.trainers.ask("make")
    fleet.trainers.timeout = 3600
    servers = fleet.context.Process(target=come_and_go, args=(fleet.address, 500))
    fleet.all.append(servers)
    servers.start()
    for first, last in fleet.trainers.ask("follow", 500):
        print(first, last)
        assert last[0] - first[0] < 8 << 20
        assert last[1] <= first[1] + 2
        assert last[2] <= first[2] + 20
