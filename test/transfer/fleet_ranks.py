"""What the ranks of a fleet do in test_fleet.py: two trainers of one world, and servers that join them."""

import os
import signal
import threading
import time
from unittest import mock

ROWS, KEY, TIMEOUT = 1 << 12, "key", 6


def values(version, rows, few):
    """What the tensors hold in a version. With `few`, each version changes one row in seven."""
    import torch

    if not few:
        return torch.full((rows, 4), float(version or 0))
    row = torch.arange(rows)
    return (version - (version - row) % 7).clamp(min=0).float()[:, None].expand(rows, 4)


class Trainer:
    """One of two ranks of a world, whose tensors are sharded over both."""

    def __init__(self, rank, address, folder, rows):
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        import torch_overlay

        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/world", 2), rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.zeros(rows, 4)
        self.rank, self.rows, self.few = rank, rows, False
        self.source = {name: distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) for name in "ab"}
        self.place = torch_overlay.meet(address, rank=rank, world_size=2, key=KEY, timeout=TIMEOUT, open=True)

    def make(self, changes=False, budget=16, relay=None):
        import torch_overlay

        self.few, budget = changes, budget * self.rows
        more = {"budget": budget, "changes": changes, "relay": relay}
        self.sync = torch_overlay.Transfer(self.source, None, group=self.place, **more)
        return self.sync.joined

    def step(self, version, in_background=False, only=None):
        """Run; in the background, perhaps with a "snapshot", and with other values in the sources as soon as these may
        change. Returns who came and went, the version, and how long it took."""
        import torch.distributed as dist

        for tensor in self.source.values():
            tensor.to_local().copy_(values(version, self.rows, self.few).chunk(2)[self.rank])
        begun = time.monotonic()
        more = {"async_op": bool(in_background), "snapshot": in_background == "snapshot"}
        work = self.sync.run(version=version, only=only and iter(only), **more)
        if work is not None:
            while not work.sent():
                time.sleep(0.001)
            for tensor in self.source.values():
                tensor.to_local().fill_(-1)
            work.wait()
        dist.barrier()  # as a trainer's step has collectives, in which nobody is who still runs
        gone = {name: why for name, _, why in self.sync.gone}
        return sorted(self.sync.joined), gone, self.sync.version, time.monotonic() - begun

    def sent_bytes(self):
        return self.sync.sent_bytes

    def verify(self):
        self.sync.verify()
        return [*self.sync.joined], [name for name, *_ in self.sync.gone]

    def fail_unheard(self):
        """A run in the background fails, and nobody waits for it."""
        self.sync.run(only=["x"], async_op=True)._thread.join()

    def refuse(self, one=None):
        """One rank refuses a run, or none. Returns what that says, or the error of the other rank."""
        if self.rank == one:
            return self.sync.refuse("a test")
        try:
            self.sync.run()
        except ValueError as error:
            return str(error)

    def step_apart(self, version):
        """Rank 0 finds its connections broken when the other ranks have ended the run."""
        from torch_overlay.transfers.exchanges import Exchanges

        def breaks(exchanges, work):
            wait(exchanges, work)
            if self.rank == 0 and exchanges._landed == exchanges.count - 1 and self.sync.version == version - 1:
                time.sleep(4)
                raise RuntimeError("broken")

        wait = Exchanges._wait
        with mock.patch.object(Exchanges, "_wait", breaks):
            return self.step(version)

    def step_without_news(self, version):
        """Rank 0's connections are found broken when the other ranks have heard that a server came."""
        from torch_overlay.transfers.run import RunReport

        def breaks(*given):
            decision = agree(*given)
            if self.rank == 0 and decision.is_news:
                time.sleep(2)
                raise RuntimeError("broken")
            return decision

        agree = RunReport.agree
        with mock.patch.object(RunReport, "agree", breaks):
            return self.step(version)

    def messages(self):
        """How many gathers and meetings a run takes."""
        from torch_overlay.rendezvous.meeting import Meeting
        from torch_overlay.rendezvous.team import Team

        with (
            mock.patch.object(Team, "_gather", autospec=True, side_effect=Team._gather) as gather,
            mock.patch.object(Meeting, "say", autospec=True, side_effect=Meeting.say) as say,
        ):
            self.sync.run()
        return gather.call_count, say.call_count

    def close(self):
        self.sync.close()
        self.place.close()

    def follow(self, count):
        """Run until so many servers have come, each of which leaves. Returns what this rank had after 50, and now:
        bytes of memory, file descriptors, keys in the store."""
        import gc

        joined, had = 0, []
        for upto in (50, count):
            while joined < upto:
                self.sync.run(version=joined)
                joined += len(self.sync.joined)
                time.sleep(0.01)
            gc.collect()
            with open("/proc/self/statm") as file:
                memory = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            had.append((memory, len(os.listdir("/proc/self/fd")), self.place._store.num_keys()))
        return had

    def end(self):
        """Close, and return the names of the threads that stay. Those that wait for what a stopped server doesn't take
        are left behind."""
        self.close()
        time.sleep(1.5)
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if "torch_overlay" in name and name != "torch_overlay waits"]


def serve(
    name,
    rank,
    size,
    address,
    folder,
    events,
    number,
    key=KEY,
    rows=ROWS,
    fault=(None, None, None),
    leaves_after=None,
    spoils_after=-1,
    rebinds_after=-1,
    breaks_after=-1,
    verifies_after=-1,
    changes=False,
    budget=None,
    only=None,
    relay=None,
):
    """Join, and take what comes. Tells of everything by `events`: the name, the rank and what happened.

    A fault is a phase ("meeting", "planning", or the "first", "middle" or "last" exchange), what happens to rank 0 in
    it ("kill", "stop" or "raise"), and in the how manieth run, from 0.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import torch_overlay
    from torch_overlay.rendezvous.meeting import Meeting
    from torch_overlay.transfers.changes import ChangesOnly
    from torch_overlay.transfers.exchanges import Exchanges
    from torch_overlay.transfers.transfer_plan import Plans

    torch.set_num_threads(1)
    target = {tensor: torch.zeros(rows, 4) for tensor in "ab"}
    if size > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{folder}/{name} {number}", size), rank=rank, world_size=size
        )
        mesh = init_device_mesh("cpu", (size,))
        target = {n: distribute_tensor(t, mesh, [Shard(1)], src_data_rank=None) for n, t in target.items()}

    def locals_of(tree):
        return [t if size == 1 else t.to_local() for t in tree.values()]

    locals_, runs = locals_of(target), 0

    phase, what, in_run = fault

    def faulty(kind, name, is_now):
        """A patch under which the fault comes before this function."""
        function = getattr(kind, name)

        def wrapped(*given):
            if rank == 0 and runs == in_run and is_now(*given):
                if what == "raise":
                    raise RuntimeError("no more of that")
                os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)
            return function(*given)

        return mock.patch.object(kind, name, wrapped)

    def is_exchange(exchanges, number, *_):
        return number == {"first": 0, "middle": exchanges.count // 2, "last": exchanges.count - 1}.get(phase)

    try:
        place = torch_overlay.join(address, name=name, rank=rank, world_size=size, key=key, timeout=60)
        # Trainers wait for a server from now on, and not before: it may have to load its model first.
        place.fleet.knock()
        events.put((name, rank, "joined"))
        time.sleep(0.2)  # so that it is heard
        with (
            faulty(Meeting, "say", lambda *_: phase == "meeting"),
            faulty(Plans, "add", lambda *_: phase == "planning"),
            faulty(ChangesOnly if changes else Exchanges, "_start", is_exchange),
        ):
            more = {"budget": budget or 16 * rows, "changes": changes, "relay": relay}
            sync = torch_overlay.Transfer(None, target, group=place, **more)
            while True:
                sync.run(only=only and iter(only))
                runs += 1
                if changes:
                    wanted = values(sync.version, rows, True).chunk(size, 1)[rank]
                    held = {float(sync.version) if torch.equal(t, wanted) else t.unique() for t in locals_}
                else:
                    held = {float(v) for t in locals_ for v in t.unique()}
                events.put((name, rank, sync.version, held))
                if sync.version == rebinds_after:
                    target = {n: t.redistribute(mesh, [Shard(0)]) for n, t in target.items()}
                    locals_ = locals_of(target)
                    sync.bind(target=target)
                if sync.version == breaks_after and rank == 0:
                    locals_[0].untyped_storage().resize_(0)
                if sync.version == verifies_after:
                    sync.verify()
                    events.put((name, rank, "verified"))
                if sync.version == spoils_after:
                    locals_[0].zero_()
                if leaves_after is not None and sync.version == leaves_after:
                    break
        sync.close()  # which leaves the place
        events.put((name, rank, "left"))
    except Exception as error:
        events.put((name, rank, f"{type(error).__name__}: {error}"))
    finally:
        events.close()
        events.join_thread()
        os._exit(0)


def come_and_go(address, count):
    """Join, take a version, and leave, so many times. Nothing that was closed waits to be found as a cycle."""
    import gc

    import torch

    import torch_overlay

    gc.disable()
    torch.set_num_threads(1)
    for _ in range(count):
        with torch_overlay.join(address, key=KEY, timeout=60) as place:
            target = {tensor: torch.zeros(ROWS, 4) for tensor in "ab"}
            with torch_overlay.Transfer(None, target, group=place, budget=16 * ROWS) as sync:
                sync.run()
