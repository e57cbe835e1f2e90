"""Programs in which one rank of a transfer fails: they say what each of the others was told, and when.

A fault happens where `Watch` learns that a step begins, which is where a rank may die, stop or fall asleep.
"""

import os
import queue
import random
import re
import signal
import threading
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import NamedTuple
from unittest import mock

import forks

TIMEOUT = 6.0
ELEMENTS, BUDGET = 1 << 13, 1 << 13
KINDS = "killed", "stopped", "asleep", "raises"
PLACES = "before the word", "packing", "first exchange", "last exchange", "after"


class Job(NamedTuple):
    """One program.

    Attributes:
        kind, place: of the fault.
        victim: the rank that it happens to.
        trainers, servers: how many ranks there are of each.
        is_met: whether they are of different worlds and meet; else of one world.
        backend: of the world.
        relay: whether servers pass elements on; a fault in packing comes when they begin to.
    """

    kind: str
    place: str
    victim: int
    trainers: int = 2
    servers: int = 2
    is_met: bool = False
    backend: str = "gloo"
    relay: bool = False

    @property
    def size(self):
        return self.trainers + self.servers


def random_job(seed):
    """Any of them; nobody can raise before a step of its own."""
    draw = random.Random(seed)
    kind = draw.choice(KINDS)
    place = "packing" if kind == "raises" else draw.choice(PLACES)
    return Job(kind, place, draw.randrange(8), 4, 4, is_met=draw.random() < 0.5, relay=draw.random() < 0.3)


def fault(job):
    """What happens to the victim."""
    if job.kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif job.kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif job.kind == "asleep":
        time.sleep(TIMEOUT + 10)
    else:
        raise MemoryError("no room for a buffer")


def is_time(job, text, exchanges):
    """Whether the fault comes with this step, which is none of a run's if it is empty."""
    if job.place == "packing" and job.relay:
        return text.startswith("part 2 of 2, exchange 1 of ") and text.endswith(", pack")
    if job.place == "packing":
        return text == f"exchange 1 of {exchanges}, pack"
    if job.place == "first exchange":
        return re.fullmatch(r"(part 1 of \d+, )?exchange 1 of \d+, wait", text) is not None
    if job.place != "last exchange":
        return False
    last = r"part (\d+) of \1, exchange (\d+) of \2, wait" if job.relay else r"exchange (\d+) of \1, wait"
    return re.fullmatch(last, text) is not None


def one_rank(job, rank, store_port, port, go, answers):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import nccl_stand_in
    import torch_overlay
    from torch_overlay.rendezvous.watch import Watch

    nccl_stand_in.register()
    is_trainer = rank < job.trainers
    world_size, own = (job.trainers, rank) if job.is_met else (job.size, rank)
    if is_trainer or not job.is_met:
        store, limit = (
            dist.TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False),
            timedelta(seconds=300),
        )
        dist.init_process_group(job.backend, store=store, rank=own, world_size=world_size, timeout=limit)
    group = None
    if job.is_met:
        group = torch_overlay.meet(f"tcp://127.0.0.1:{port}", rank=rank, world_size=job.size, timeout=300)
    source, target = None, [torch.zeros(ELEMENTS)]
    if is_trainer:
        mesh = init_device_mesh("cpu", (world_size,)) if job.is_met else None
        if mesh is None:
            mesh = dist.device_mesh.DeviceMesh("cpu", list(range(job.trainers)))
        given = torch.arange(1.0, ELEMENTS + 1)
        source, target = [distribute_tensor(given, mesh, [Shard(0)], src_data_rank=None)], None
    elif not job.is_met:
        dist.device_mesh.DeviceMesh("cpu", list(range(job.trainers)))
    transfer = torch_overlay.Transfer(source, target, budget=BUDGET, group=group, timeout=TIMEOUT, relay=job.relay)
    assert transfer.exchanges > 2
    answers.put(("ready", rank))
    go.wait(120)
    begun, told = time.monotonic(), []
    asked = []
    if job.kind == "asleep" and rank == (job.victim + 1) % job.size:
        ask = threading.Timer(TIMEOUT - 1, lambda: asked.extend(torch_overlay.status().transfers))
        ask.start()
    with ExitStack() as stack:
        if rank == job.victim:
            enter = Watch.enter

            def enters(watch, text, waits=False):
                enter(watch, text, waits)
                if is_time(job, text, transfer.exchanges):
                    fault(job)

            stack.enter_context(mock.patch.object(Watch, "enter", enters))
        for run in range(2):
            if rank == job.victim and job.place == ("before the word", "after")[run]:
                fault(job)
            try:
                transfer.run()
                told.append(None)
            except RuntimeError as error:
                told.append(str(error))
            if run == 0:
                seconds, value = time.monotonic() - begun, None if target is None else target[0].clone()
    seconds = seconds if told[0] is not None else time.monotonic() - begun
    later = None
    try:
        transfer.run()
    except RuntimeError as error:
        later = str(error)
    time.sleep(0.1 if rank == job.victim else TIMEOUT + 8)  # until the victim is awake again, and has ended
    state = "none"
    if target is not None:
        wrote = torch.equal(target[0], torch.arange(1.0, ELEMENTS + 1))
        state = "old" if not target[0].any() else "new" if wrote else "torn"
        if told[0] is not None and not torch.equal(value, target[0]):
            state = f"changed after the error, from {value} to {target[0]}"
    transfer.close()
    answers.put(("told", rank, seconds, told, later, state, asked))
    if rank == 0:
        time.sleep(1)  # it keeps the store by which the others find out
    answers.close()
    answers.join_thread()
    os._exit(0)


class Programs:
    """Jobs that run at the same time. As with torchrun, their stores are in a process that none of them ends."""

    def __init__(self, jobs):
        import torch.distributed as dist

        context = forks.context()
        self.jobs, self.go = jobs, context.Event()
        self.answers = [context.Queue() for _ in jobs]
        self.processes, self.stores = [], []
        for number, job in enumerate(jobs):
            self.stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            port = forks.free_port()
            self.processes.append(
                [
                    context.Process(
                        target=one_rank,
                        args=(job, rank, self.stores[-1].port, port, self.go, self.answers[number]),
                        daemon=True,
                    )
                    for rank in range(job.size)
                ]
            )
            for process in self.processes[-1]:
                process.start()
        for job, answers in zip(jobs, self.answers):
            for ready in range(job.size):
                try:
                    answers.get(timeout=120)
                except queue.Empty:
                    raise AssertionError(f"{ready} of {job.size} ranks of {job} are ready") from None
        self.go.set()
        self.begun = time.monotonic()

    def told(self, number):
        """By rank, what each rank of a job was told; of those that were killed nothing."""
        job, found = self.jobs[number], {}
        while len(found) < job.size - (job.kind == "killed"):
            if job.kind == "stopped" and time.monotonic() - self.begun > TIMEOUT + 9:
                with suppress(ProcessLookupError):
                    os.kill(self.processes[number][job.victim].pid, signal.SIGCONT)
            try:
                _, rank, *rest = self.answers[number].get(timeout=1)
            except Exception:
                assert time.monotonic() - self.begun < 120, (job, found)
                continue
            found[rank] = rest
        return found

    def kill(self):
        for processes in self.processes:
            for process in processes:
                process.kill()


def check(job, found, slack):
    """Everybody who is there was told in time who isn't, and nothing landed after that."""
    others = {rank: what for rank, what in found.items() if rank != job.victim}
    assert len(others) == job.size - 1
    said = set()
    for rank, (seconds, told, later, state, asked) in others.items():
        failed = [text for text in told if text is not None]
        assert failed, (job, rank, "returned normally twice")
        assert seconds < TIMEOUT + 5 + slack, (job, rank, seconds, told)
        assert later is not None and "failed before" in later, (job, rank, later)
        said.add(failed[0].partition(" failed, and ")[2].partition(": ")[2] or failed[0].partition("again: ")[2])
        if told[0] is not None and "no target was written" in told[0]:
            assert state in ("old", "none"), (job, rank, state, told)
        assert "changed" not in state, (job, rank, state)
        if job.kind == "asleep" and rank == (job.victim + 1) % job.size:
            assert len(asked) == 1 and f"waits for rank {job.victim}" in asked[0], (job, asked)
    texts = {text.partition(" Close it, and")[0].removesuffix(".") for text in said}
    if job.is_met and job.victim == 0 and job.kind in ("killed", "stopped"):  # it has the store of all
        assert all("no answer any more from rank 0" in text for text in texts), (job, texts)
        return
    assert len(texts) == 1, (job, texts)
    (text,) = texts
    if job.kind == "raises":
        assert f"rank {job.victim} failed: " in text and "no room for a buffer" in text, (job, text)
    elif job.kind == "asleep":
        assert f"rank {job.victim} didn't come: it is " in text and text.count("didn't come") == 1, (job, text)
        assert "no answer" not in text, (job, text)
    else:
        assert f"no answer any more from rank {job.victim}" in text and "didn't come" not in text, (job, text)
    if job.kind != "killed":  # it woke up, and was told, too
        _, told, later, state, _ = found[job.victim]
        assert any(text is not None for text in told) and later is not None, (job, told)
        assert "changed" not in state, (job, state)
