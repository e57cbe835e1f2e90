"""What the ranks of a fleet do in test_fleet.py: two trainers of one world, and servers that join them."""

import os
import signal
import time
from unittest import mock

ROWS, KEY, TIMEOUT = 1 << 12, "key", 6


class Trainer:
    """One of two ranks of a world, whose tensors are sharded over both."""

    def __init__(self, rank, address, folder):
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        import torch_overlay

        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/world", 2), rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        self.rank, self.source = (
            rank,
            {name: distribute_tensor(torch.zeros(ROWS, 4), mesh, [Shard(0)], src_data_rank=None) for name in "ab"},
        )
        self.place = torch_overlay.meet(address, rank=rank, world_size=2, key=KEY, timeout=TIMEOUT, open=True)

    def make(self, **more):
        import torch_overlay

        self.sync = torch_overlay.Transfer(self.source, None, group=self.place, budget=1 << 16, **more)
        return self.sync.joined

    def step(self, version, in_background=False):
        """Run. Returns who came and went, the version, and how long it took."""
        for tensor in self.source.values():
            tensor.to_local().fill_(version or 0)
        begun = time.monotonic()
        work = self.sync.run(version=version, async_op=in_background)
        if work is not None:
            work.wait()
        gone = {name: why for name, _, why in self.sync.gone}
        return sorted(self.sync.joined), gone, self.sync.version, time.monotonic() - begun

    def step_apart(self, version):
        """Rank 1 has ended a run in which a server was lost, and its sources are those of the next one already."""
        if self.rank == 0:
            self.step(None)
            for tensor in self.source.values():
                tensor.to_local().fill_(version)
            self.sync.run()
            return
        self.sync._runs += 1
        for tensor in self.source.values():
            tensor.to_local().fill_(version)
        self.sync.run()

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


def serve(
    name,
    rank,
    size,
    address,
    folder,
    events,
    number,
    key=KEY,
    shape=(ROWS, 4),
    dies_at=None,
    raises_at=None,
    leaves_after=None,
):
    """Join, and take what comes. Tells of everything by `events`: the name, the rank and what happened."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import torch_overlay
    from torch_overlay.transfers.exchanges import Exchanges

    torch.set_num_threads(1)
    target = {tensor: torch.zeros(shape) for tensor in "ab"}
    if size > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{folder}/{name} {number}", size), rank=rank, world_size=size
        )
        mesh = init_device_mesh("cpu", (size,))
        target = {n: distribute_tensor(t, mesh, [Shard(1)], src_data_rank=None) for n, t in target.items()}
    try:
        place = torch_overlay.join(address, name=name, rank=rank, world_size=size, key=key, timeout=60)
        events.put((name, rank, "joined"))
        sync = torch_overlay.Transfer(None, target, group=place, budget=1 << 16)
        start = Exchanges._start

        def dies(exchanges, number, *given):
            if sync.version is not None and number == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if number == raises_at:
                raise RuntimeError("no more of that")
            return start(exchanges, number, *given)

        with mock.patch.object(Exchanges, "_start", dies):
            while True:
                sync.run()
                held = {float(v) for t in target.values() for v in (t if size == 1 else t.to_local()).unique()}
                events.put((name, rank, sync.version, held))
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
