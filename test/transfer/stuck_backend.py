"""A backend whose exchanges never end unless the group is aborted, as NCCL's don't where a rank died."""

import threading

import torch.distributed as dist
from torch.distributed import distributed_c10d


class Stuck(dist.ProcessGroup):
    """Gloo, but for its all-to-all: it waits until all ranks have come, without a limit."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
        self._store, self._rank, self._size = dist.PrefixStore("stuck", store).clone(), rank, size
        self._aborted, self._calls, self._name = threading.Event(), 0, ""

    @property
    def group_name(self):
        self._name = distributed_c10d._world.pg_names.get(self, self._name)  # also after it was destroyed
        return self._name

    def getBackendName(self):
        return "stuck"

    def abort(self):
        self._aborted.set()

    def allgather(self, output, given, options):
        return self._gloo.allgather(output, given, options)

    def allreduce(self, tensors, options):
        return self._gloo.allreduce(tensors, options)

    def alltoall_base(self, came, packed, into, out, options):
        self._calls += 1
        return _Exchange(self, came, packed, into, out, options, self._calls)


class _Exchange(dist.Work):
    def __init__(self, group, came, packed, into, out, options, number):
        super().__init__()
        self._group, self._number, self._given = group, number, (came, packed, into, out, options)
        group._store.set(f"{number} {group._rank}", "")

    def wait(self, timeout=None):
        group, number = self._group, self._number
        keys = [f"{number} {rank}" for rank in range(group._size)]
        while not group._store.check(keys):
            if group._aborted.wait(0.02):
                return True  # as NCCL's: what came is nothing, and no error says so
        return group._gloo.alltoall_base(*self._given).wait()


def register():
    """Let `init_process_group("stuck")` find it."""
    if "stuck" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "stuck", lambda store, rank, size, timeout: Stuck(store, rank, size, timeout), devices=["cpu"]
        )
