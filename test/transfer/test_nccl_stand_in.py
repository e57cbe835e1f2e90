"""Transfers through a stand-in for NCCL (`nccl_stand_in.py`): values, launches, waits of the host, and ranks that fail.

The first half of the ranks trains, with rows of each weight. The others serve, with whole tensors.
"""

import contextlib
import os
import re
import signal
import time
from datetime import timedelta

import pytest

import forks
from torch_overlay.testing.pool import Pool, RankError

RANKS, TIMEOUT = 4, 2.0
TRAINER, SERVER = 0, 1  # of the worlds in which one of two ranks fails
SLACK = 4  # seconds that a loaded machine may take longer
# Gloo would send pieces of the first tensor directly, which on NCCL would deadlock.
SHAPES = {"large": (1024, 256), "a": (64, 48), "b": (32, 40), "c": (128,)}
BUDGET = 400_000
pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no such signal")


class Rank:
    """One rank of a world of the stand-in."""

    def __init__(self, rank, port, size=RANKS):
        import torch
        import torch.distributed as dist

        import nccl_stand_in
        import torch_overlay

        torch.set_num_threads(1)
        nccl_stand_in.register()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group(nccl_stand_in.NAME, store=store, rank=rank, world_size=size)
        self.rank, self.trainers = rank, size // 2
        self.torch, self.dist = torch, dist
        self.overlay, self.nccl = torch_overlay, nccl_stand_in

    def wholes(self, turn):
        generator = self.torch.Generator().manual_seed(turn)
        return {name: self.torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    def sides(self, kind="float32"):
        """What this rank gives: shards of zeros, or whole tensors of zeros."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard, distribute_tensor

        train = DeviceMesh("cpu", [*range(self.trainers)])
        if self.rank >= self.trainers:
            return None, {
                name: self.torch.zeros(shape, dtype=getattr(self.torch, kind)) for name, shape in SHAPES.items()
            }
        zeros = {name: self.torch.zeros(shape) for name, shape in SHAPES.items()}
        return {
            name: distribute_tensor(zero, train, [Shard(0)], src_data_rank=None) for name, zero in zeros.items()
        }, None

    def set(self, source, wholes):
        for name, tensor in (source or {}).items():
            tensor.to_local().copy_(wholes[name].chunk(self.trainers)[self.rank])

    def wrong(self, target, wholes):
        return [
            name for name, came in (target or {}).items() if not self.torch.equal(came, wholes[name].to(came.dtype))
        ]

    def launches(self, transfer):
        """What this rank launched in the group of a Transfer since the last call."""
        name = transfer._state.group.team.group.group_name
        kinds = [kind for group, kind in self.nccl.launched if group == name]
        self.nccl.launched.clear()
        return kinds

    # --- What goes well ---

    def runs(self, on_streams, options):
        """Three runs, each of other values. Gives what is wrong, and what each run launched and waited for."""
        source, target = self.sides("bfloat16")
        options = {"budget": BUDGET, **options}
        wrong, counts = [], []
        given = target
        if options.pop("staged", False) and target is not None:
            given = {name: each.to("meta") for name, each in target.items()}
            options["stages"] = [
                (names, lambda came: self.torch._foreach_copy_([target[name] for name in came], [*came.values()]))
                for names in (["large"], ["a", "b"], ["c"])
            ]
        with self.overlay.Transfer(source, given, timeout=200, **options) as transfer:
            self.nccl.launched.clear()
            with self.nccl.streams(transfer) if on_streams else contextlib.nullcontext():
                for turn in range(3):
                    wholes = self.wholes(turn if turn != 1 or not options.get("changes") else 0)
                    self.set(source, wholes)
                    self.nccl.synchronised.clear()
                    transfer.run()
                    waits = len(self.nccl.synchronised)
                    if on_streams:
                        self.nccl.current_stream().synchronize()
                    wrong += [f"{name}, run {turn}" for name in self.wrong(target, wholes)]
                    counts.append((self.launches(transfer), waits))
            if not on_streams:
                transfer.verify()
                if self.launches(transfer):
                    wrong.append("verify() launched something")
            return wrong, transfer.exchanges, counts

    def verifies(self):
        source, target = self.sides()
        with self.overlay.Transfer(source, target, timeout=200) as transfer:
            self.set(source, self.wholes(0))
            transfer.run()
            transfer.verify()
            if self.rank == 3:
                target["a"][5, 7] += 1
            try:
                transfer.verify()
            except ValueError as error:
                return str(error)
        return "no error"

    def loads(self, folder):
        """Load a checkpoint, which each rank reads a part of, as bfloat16 shards. Gives what is wrong."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (RANKS,))

        def cut(whole):
            return distribute_tensor(whole.bfloat16(), mesh, [Shard(0)], src_data_rank=None)

        target = {name: cut(self.torch.zeros(shape)) for name, shape in SHAPES.items()}
        with self.overlay.Transfer(self.overlay.checkpoint(folder), target, timeout=200) as transfer:
            self.nccl.launched.clear()
            transfer.run()
            assert self.launches(transfer) == ["all_to_all"] * transfer.exchanges != []
        wholes = self.wholes(7)
        return [
            name for name, came in target.items() if not self.torch.equal(came.to_local(), cut(wholes[name]).to_local())
        ]

    def trains_meanwhile(self, on_streams):
        """Runs in the background, while the program's own group is in use; sources change as soon as they may."""
        torch, dist = self.torch, self.dist
        source, target = self.sides()
        wrong = []
        with self.overlay.Transfer(source, target, timeout=200, budget=BUDGET) as transfer:
            with self.nccl.streams(transfer) if on_streams else contextlib.nullcontext():
                for turn in range(3):
                    wholes, total = self.wholes(turn), torch.full((5,), float(self.rank))
                    self.set(source, wholes)
                    work = transfer.run(async_op=True)
                    for _ in range(3):
                        sums = total.clone()
                        reduced = dist.all_reduce(sums, async_op=True)
                        reduced.wait(timedelta(seconds=200))
                        if sums.tolist() != [6.0] * 5:
                            wrong.append(f"{sums.tolist()} is the sum in turn {turn}")
                    while source and not work.sent():
                        time.sleep(0.001)
                    self.set(source, self.wholes(99))
                    work.wait()
                    if on_streams:
                        self.nccl.current_stream().synchronize()
                    wrong += [f"{name}, turn {turn}" for name in self.wrong(target, wholes)]
        return wrong

    def in_another_order(self):
        """Where a device runs one collective at once: two runs, and a sum by the program's own group beside each. First
        it comes after the run on both ranks, then before it on the last rank alone."""
        torch, dist = self.torch, self.dist
        source, target = self.sides()
        said = []
        self.nccl.settings.one_at_a_time = True
        transfer = self.overlay.Transfer(source, target, timeout=200)
        self.set(source, self.wholes(0))
        for is_first in (False, self.rank == 1):
            dist.barrier()
            self.shorten_timeout(transfer._state.group.watch)
            total = torch.ones(1)
            work = dist.all_reduce(total, async_op=True) if is_first else None
            said.append((*self.told(transfer.run), self.wrong(target, self.wholes(0))))
            (work or dist.all_reduce(total, async_op=True)).wait()
            said.append(total.item())
        return said

    # --- A rank that fails ---

    def prepare(self, on_streams, abort_hangs, changes):
        """Make a Transfer and run it once. Its next run fails."""
        from torch_overlay.rendezvous import team

        self.nccl.settings.abort_hangs = abort_hangs
        team.ABORT = 1.0
        source, target = self.sides()
        self.transfer = self.overlay.Transfer(source, target, timeout=200, budget=BUDGET, changes=changes)
        if on_streams:
            self.streams = self.nccl.streams(self.transfer)  # if it is collected, it ends
            self.streams.__enter__()
        self.set(source, self.wholes(0))
        self.transfer.run()
        if changes:
            for tensor in (source or {}).values():
                tensor.to_local()[0] += 1
        else:
            self.set(source, self.wholes(1))

    def fails(self, victim, kind, place):
        """The victim is killed, or stopped, when it comes to a step."""
        from torch_overlay.rendezvous.watch import Watch

        enter = Watch.enter

        def enters(watch, text, waits=False):
            enter(watch, text, waits)
            if self.rank == victim and re.fullmatch(place, text):
                os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)

        Watch.enter = enters
        self.shorten_timeout(self.transfer._state.group.watch)
        return self.told(self.transfer.run)

    def fails_to_connect(self):
        """The victim is killed before its first collective in the group."""
        from torch_overlay.rendezvous import watch
        from torch_overlay.rendezvous.team import Team

        if self.rank == SERVER:
            self.nccl.NcclStandIn._connect = lambda group: os.kill(os.getpid(), signal.SIGKILL)
        connect = Team.connect

        def connects(team):
            (its_watch,) = watch._threads.watches
            self.shorten_timeout(its_watch)
            watch.CONNECT = its_watch.timeout
            connect(team)

        Team.connect = connects
        return self.told(lambda: self.overlay.Transfer(*self.sides(), timeout=200))

    def shorten_timeout(self, watch):
        """Only now: on a loaded machine ranks take longer to start than the test should wait for one that is gone."""
        watch.timeout = timedelta(seconds=TIMEOUT)

    def told(self, do):
        """In how many seconds a call ended, with which error, and which ranks were gone."""
        begun = time.monotonic()
        try:
            do()
        except RuntimeError as error:
            return time.monotonic() - begun, str(error), getattr(error, "gone", None)
        return time.monotonic() - begun, "", None

    def closes(self):
        """How long it takes to close the Transfer that failed."""
        begun = time.monotonic()
        self.transfer.close()
        return time.monotonic() - begun


def pool(name, size=RANKS):
    """The store is in this process, as torchrun's is in one that no rank's end takes along."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = Pool(size, Rank, store.port, size, name=name, timeout=240, preload=forks.PRELOADED)
    made.store = store
    return made


# Who fails, in which way, and in which step. Whether the host runs ahead, whether no abort ends, and `changes`.
# `test_transfer_silence.py` has one that is killed where `wait()` blocks the host.
FAULTS = {
    "stopped, and the host ran ahead": (SERVER, "stopped", "exchange 2 of .*, pack", True, False, False),
    "killed, and no abort ends": (SERVER, "killed", "exchange 2 of .*, send", True, True, False),
    "killed before it says what changed": (SERVER, "killed", "exchange 1 of .*, say what changed", False, False, True),
    "killed after it said what changed": (TRAINER, "killed", r"exchange (\d+) of \1, send", True, False, True),
    "killed before it says, and no abort ends": (
        SERVER,
        "killed",
        "exchange 1 of .*, say what changed",
        True,
        True,
        True,
    ),
}
CONNECTS, ORDER = "killed as it connects", "another order"


@pytest.fixture(scope="module")
def faults():
    """All of them at once, before the others, so that their timeouts cost no time."""
    pools = {name: pool(name, 2) for name in (*FAULTS, CONNECTS, ORDER)}
    try:
        pools[CONNECTS].tell("fails_to_connect")
        pools[ORDER].tell("in_another_order")
        for name in FAULTS:
            pools[name].tell("prepare", *FAULTS[name][3:])
        for name in FAULTS:
            assert {*pools[name].answers("prepare").values()} == {None}
            pools[name].tell("fails", *FAULTS[name][:3])
        yield pools
    finally:
        for each in pools.values():
            each.close(force=True)


@pytest.fixture(scope="module")
def ranks(faults):
    with pool("stand-in") as made:
        yield made


OPTIONS = {
    "plain": {},
    "keep": {"keep": True},
    "relay": {"relay": True},
    "keep and relay": {"keep": True, "relay": True},
    "changes": {"changes": True},
    "changes in the host's memory": {"changes": "cpu"},
    "stages": {"staged": True},
    "stages and changes": {"staged": True, "changes": True},
}


@pytest.mark.parametrize("on_streams", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_what_was_sent_came_and_launched_no_more_than_its_exchanges(ranks, name, on_streams):
    """One collective for each exchange, two with `changes`; on a device the host waits once for each."""
    for wrong, exchanges, counts in ranks.ask("runs", on_streams, OPTIONS[name]):
        assert not wrong
        assert exchanges > 1
        per_exchange = 2 if "changes" in OPTIONS[name] else 1
        for launches, waits in counts:
            assert launches == ["all_to_all"] * exchanges * per_exchange
            if "changes" not in OPTIONS[name]:
                assert waits == (exchanges if on_streams else 0)


def test_verify_names_what_differs(ranks):
    for said in ranks.ask("verifies"):
        assert "the target 'a' of rank 3 differs" in said


def test_a_checkpoint_is_loaded(ranks, tmp_path):
    import torch

    from rank_checkpoint import write_folder

    generator = torch.Generator().manual_seed(7)
    write_folder(tmp_path, {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}, files=2)
    assert ranks.ask("loads", str(tmp_path)) == [[]] * RANKS


@pytest.mark.parametrize("on_streams", [False, True])
def test_the_program_uses_its_group_while_a_run_is_in_the_background(ranks, on_streams):
    assert ranks.ask("trains_meanwhile", on_streams) == [[]] * RANKS


def test_a_deadlock_of_two_groups_ends_in_time_and_spares_the_program(faults):
    for (_, error, _, wrong), first, (seconds, said, gone, _), second in faults[ORDER].answers(ORDER).values():
        assert (error, wrong, first) == ("", [], 2)
        assert "waited for longer than 2 s: all ranks answer" in said and gone == ()
        assert seconds < TIMEOUT + 5 + SLACK
        assert second == 2


@pytest.mark.parametrize("name", [*FAULTS, CONNECTS])
def test_who_failed_is_named_in_time(faults, name):
    victim = FAULTS[name][0] if name in FAULTS else SERVER
    (answer,) = faults[name].answers(name, ranks=[1 - victim], timeout=60).values()
    assert not isinstance(answer, RankError), answer
    seconds, said, gone = answer
    assert f"no answer any more from rank {victim}" in said and gone == (victim,)
    assert seconds < TIMEOUT + 5 + SLACK, said
    if name in FAULTS:
        (seconds,) = faults[name].ask("closes", ranks=[1 - victim])
        assert seconds < 5 + SLACK
