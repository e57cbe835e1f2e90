"""A rank that is really killed: the others are told which one, in time, and what was written."""

import os
import signal
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest

import forks

RANKS, DEAD, TIMEOUT = 4, 2, 6
pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal")


def sides(mesh):
    """The source and the target; of many exchanges, within a small budget."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return [
        [distribute_tensor(value, mesh, placements, src_data_rank=None)]
        for value, placements in ((torch.ones(1 << 14), [Shard(0)]), (torch.zeros(1 << 14), [Replicate()]))
    ]


def killed_at(cls, name, is_time=lambda *given: True):
    """This process ends where it calls a method, when it is time."""
    method = getattr(cls, name)

    def dies(*given):
        if is_time(*given):
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*given)

    return mock.patch.object(cls, name, dies)


def one_rank(rank, folder, ready, go, answers):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import torch_overlay
    from torch_overlay.transfers.exchanges import Exchanges

    torch_overlay.enable()
    store, timeout = dist.FileStore(f"{folder}/store", RANKS), timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    transfer = torch_overlay.Transfer(*sides(init_device_mesh("cpu", (RANKS,))), budget=1 << 15)
    assert transfer.exchanges > 3
    ready.put(rank)
    go.wait(60)
    with killed_at(Exchanges, "_start", lambda _, number, *given: rank == DEAD and number == 2):
        begun = time.monotonic()
        try:
            transfer.run()
        except RuntimeError as error:
            answers.put((rank, time.monotonic() - begun, str(error)))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """All jobs, which wait for their dead at the same time: processes and answers of the one world, and of places. They
    begin when all have started, so that timeouts count no start."""
    context, folder, places = forks.context(), str(tmp_path_factory.mktemp("dead")), {}
    ready, answers, told = (context.Queue() for _ in range(3))
    go = context.Event()
    world = [
        context.Process(target=one_rank, args=(rank, folder, ready, go, answers), daemon=True) for rank in range(RANKS)
    ]
    for process in world:
        process.start()
    for _ in world:
        ready.get(timeout=60)
    for where, dead in JOBS:
        port = forks.free_port()
        for rank in range(3):
            given = rank, where, dead, folder, port, ready, go, told
            places[where, dead, rank] = context.Process(target=one_that_meets, args=given, daemon=True)
    for process in places.values():
        process.start()
    for _ in places:
        ready.get(timeout=60)
    go.set()
    yield world, answers, places, told
    for process in (*world, *places.values()):
        process.kill()


def test_the_living_name_the_dead(jobs):
    processes, answers, _, _ = jobs
    heard = [answers.get(timeout=60) for _ in range(RANKS - 1)]
    for process in processes:
        process.join(30)
    assert processes[DEAD].exitcode == -signal.SIGKILL
    assert sorted(rank for rank, _, _ in heard) == [rank for rank in range(RANKS) if rank != DEAD]
    for _, seconds, said in heard:
        assert seconds < TIMEOUT + 5 + 2
        assert "some targets are new and others not" in said
        assert f"no answer any more from rank {DEAD}" in said


# Two trainers with a world of their own and a server in none meet. Where one dies, and what the other two are told.
PLACES = {
    "in meet": r"A meeting of 3 .* and rank {} didn't come within 6 s",
    "before it says what it has": r"A Transfer needs ranks 0-2, and rank {} didn't come within 6 s",
    "in making the group": r"A Transfer over ranks 0-2 can't be made: .*: no answer any more from rank {}[.,]",
    "in a run": r"A Transfer over ranks 0-2 failed, and .*: no answer any more from rank {}[.,]",
    "in the background": r"A Transfer over ranks 0-2 failed, and .*: no answer any more from rank {}[.,]",
}
# Rank 0, which keeps the store, takes it with it.
STORES = {
    "in meet": r"A meeting of 3 .*: rank {} that keeps the store of these ranks left, or died|nobody listened there",
    "in a run": PLACES["in a run"],
}
TRAINERS, SERVER = 2, 2
JOBS = [*[(where, dead) for where in PLACES for dead in (TRAINERS - 1, SERVER)], *[(where, 0) for where in STORES]]


def killed_in(where):
    from torch_overlay.rendezvous.meeting import Meeting
    from torch_overlay.rendezvous.place import Place
    from torch_overlay.transfers.exchanges import Exchanges

    if where == "in meet":
        return killed_at(Meeting, "say")
    if where == "before it says what it has":
        return killed_at(Meeting, "say", lambda meeting, *_: meeting.purpose == "A Transfer")
    if where == "in making the group":
        return killed_at(Place, "team")
    return killed_at(Exchanges, "_start", lambda _, number, *given: number == 2)


def one_that_meets(rank, where, dead, folder, port, ready, go, answers):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import torch_overlay

    source, target = None, [torch_overlay.piece(torch.zeros(1 << 14), (1 << 14,), (0,))]
    if rank < TRAINERS:
        store = dist.FileStore(f"{folder}/store {where} {dead}", TRAINERS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=TRAINERS)
        mesh = init_device_mesh("cpu", (TRAINERS,))
        (source, _), target = sides(mesh), None
    ready.put(rank)
    go.wait(60)
    begun, says = time.monotonic(), "no error"
    with ExitStack() as stack:
        try:
            if rank == dead:
                stack.enter_context(killed_in(where))
            place = torch_overlay.meet(f"tcp://127.0.0.1:{port}", rank=rank, world_size=3, timeout=TIMEOUT)
            transfer = torch_overlay.Transfer(source, target, budget=1 << 14, group=place)
            work = transfer.run(async_op=where == "in the background")
            if work is not None:
                work.wait()
        except RuntimeError as error:
            says = str(error)
    answers.put((where, dead, rank, time.monotonic() - begun, says))
    time.sleep(0 if rank else TIMEOUT + 6)  # rank 0 keeps the store by which the others find out


def test_who_dies_at_a_place_is_named(jobs):
    """A trainer or the server, at each point."""
    _, _, processes, answers = jobs
    heard = [answers.get(timeout=90) for _ in range(2 * len(JOBS))]
    for (_, dead, rank), process in processes.items():
        if rank == dead:
            process.join(5)
            assert process.exitcode == -signal.SIGKILL, [told for told in heard if told[2] == told[1]]
    assert len({told[:3] for told in heard}) == len(heard)
    for where, dead, rank, seconds, said in heard:
        assert rank != dead and seconds < 2 * TIMEOUT + 5 + 2, (where, dead, rank, seconds)
        with pytest.raises(RuntimeError, match=(PLACES if dead else STORES)[where].format(dead)):
            raise RuntimeError(said)


def test_a_wait_that_goes_on_after_connections_were_closed_is_given_up():
    """As gloo's in a rank that was stopped and woke. The group is never freed then: that would wait, too."""
    import torch

    from torch_overlay.rendezvous.blocking import GivenUp
    from torch_overlay.rendezvous.team import Team
    from torch_overlay.transfers._planner.schedule import Schedule
    from torch_overlay.transfers.exchanges import Exchanges, InFlight

    team, ended = Team(None, [0, 1], 0, torch.device("cpu")), threading.Event()
    team.is_on_gloo, team.gives_up = True, lambda: is_cut
    exchanges = Exchanges(Schedule({}, {}, []), 1, team)
    exchanges._watch = mock.Mock()
    running = InFlight(SimpleNamespace(wait=ended.wait), torch.empty(0), torch.empty(0), lambda: None)
    for is_cut in (False, True):
        with mock.patch.object(team, "never_free") as never_free:
            if is_cut:
                with pytest.raises(GivenUp, match="connections were closed"):
                    exchanges._await_exchange(0, running, lambda: None)
            else:
                threading.Timer(0.5, ended.set).start()
                exchanges._await_exchange(0, running, lambda: None)
            assert never_free.called == is_cut
        ended.clear()
    ended.set()
