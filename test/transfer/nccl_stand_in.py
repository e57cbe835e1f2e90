"""A stand-in on the CPU for NCCL and for the streams of a GPU, so that what a GPU decides is tried without one.

`register()` adds the backend "nccl_stand_in". Where our code can tell, it behaves as NCCL does:

- A collective returns when it is launched. It runs later on its group's stream, after what was launched before it.
  `wait()` without a timeout orders the stream of the thread that calls it, and doesn't block the host.
- There are no tags: two ranks' messages are matched by their order. A send ends when it is received.
- The first collective of a group makes its communicator. That blocks the host until all ranks come, and no abort ends
  it, as seen on an H100.
- Nothing has a timeout. With a rank that died or stopped, a collective never ends, unless `abort()` is called. Then it
  ends as if it had gone well, and what it should have brought is undefined.
- Under `one_at_a_time` the device runs one collective at once, of whatever group. Two ranks that launch those of two
  groups in different orders wait for each other for ever.

The bytes go over gloo. Tensors stay on the CPU, where a thread's own operations are its stream: so `wait()` blocks the
thread. Within `streams(transfer)` the runs of one Transfer believe that its tensors are on a device: its copies are
launched on a stream, and the host runs ahead of them.
"""

import contextlib
import os
import queue
import threading
import time
import traceback
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_overlay.transfers import blocks, changes
from torch_overlay.transfers.changes import Sent

NAME = "nccl_stand_in"
POLL = 0.001  # seconds between two looks whether all ranks have come
DELAY = 0.002  # seconds after which a launched collective begins: inputs that change meanwhile come changed
UNDEFINED = 0xA5
LONG = timedelta(hours=1)  # never reached: gloo's own timeout

launched = []  # the collectives of this process: the name of the group, and the kind
synchronised = []  # how often the host waited for a stream: one entry each
_numbers = []  # integers that collectives brought, which the host reads
settings = SimpleNamespace(one_at_a_time=False, abort_hangs=False)


class Event:
    """As torch.Event."""

    def __init__(self):
        self.reached = threading.Event()

    def query(self):
        return self.reached.is_set()

    def synchronize(self):
        synchronised.append("event")
        self.reached.wait()


class Stream:
    """A thread that does one job after the other. As torch.Stream, where our code uses that."""

    def __init__(self, device=None):
        self.device, self._jobs = device, queue.SimpleQueue()
        threading.Thread(target=self._go, name="a stream", daemon=True).start()

    @torch.inference_mode()  # in which runs make their buffers
    def _go(self):
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:  # as after a fault of a kernel, nothing goes on
                traceback.print_exc()
                os._exit(1)
            del job  # it holds tensors

    def launch(self, job):
        self._jobs.put(job)

    def record_event(self):
        event = Event()
        self.launch(event.reached.set)
        return event

    def wait_event(self, event):
        self.launch(event.reached.wait)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        synchronised.append("stream")
        self.record_event().reached.wait()

    def __enter__(self):
        self._before = getattr(_here, "stream", None)
        _here.stream = self

    def __exit__(self, *error):
        _here.stream = self._before


_here = threading.local()
_default = None  # the device's default stream, within `streams`
_device = Stream()  # on which all collectives run under `one_at_a_time`


def current_stream(device=None):
    """The stream of this thread; None where its own operations are its stream."""
    return getattr(_here, "stream", None) or _default


@contextlib.contextmanager
def streams(transfer):
    """Within it the runs of a Transfer believe that its tensors are on a device. Read what they wrote after
    `current_stream().synchronize()`. The host waits for its stream before it reads a value, as `changes` does."""
    global _default
    device, real_copy, real_free = SimpleNamespace(type=NAME), torch._foreach_copy_, blocks.free
    real_tensor = torch.tensor

    def copy(into, out_of):
        stream = current_stream()
        if stream is None:
            real_copy(into, out_of)
        else:
            stream.launch(lambda: real_copy(into, out_of))

    def free(buffer):
        stream = current_stream()
        if stream is None:
            real_free(buffer)
        else:  # as an allocator does, which gives memory to what the same stream launches next
            stream.launch(lambda: real_free(buffer))

    def tensor(*given, device=None, **how):
        return real_tensor(*given, device=None if isinstance(device, SimpleNamespace) else device, **how)

    def reads(owner, name, is_on_device=lambda tensor: True):
        """A function that reads values of the device: it waits for them, and nothing ends that."""
        function = getattr(owner, name)

        def waits(*given, **how):
            stream = current_stream()
            if stream is not None and is_on_device(given[0]):
                stream.synchronize()
            return function(*given, **how)

        return mock.patch.object(owner, name, waits)

    _default = Stream(device)
    state = transfer._state
    with (
        mock.patch.object(state, "device", device),
        mock.patch.object(state.group.team, "device", device),
        mock.patch.object(torch.accelerator, "current_stream", current_stream),
        mock.patch.object(torch, "Stream", Stream),
        mock.patch.object(torch, "_foreach_copy_", copy),
        mock.patch.object(blocks, "free", free),
        mock.patch.object(torch, "tensor", tensor),
        reads(torch.Tensor, "tolist", came_by_a_collective),
        reads(Sent, "changes"),
        reads(Sent, "whole"),
        reads(changes, "land"),
    ):
        try:
            yield
        finally:
            _default = None


def came_by_a_collective(tensor):
    return any(tensor.data_ptr() == number.data_ptr() for number in _numbers)


class _Work(dist.Work):
    def __init__(self, ended, tensors):
        super().__init__()
        self._ended, self._tensors = ended, tensors

    def is_completed(self):
        return self._ended.is_set()

    def result(self):
        return self._tensors

    def wait(self, timeout=None):
        stream = current_stream()
        if timeout is None and stream is not None:
            stream.launch(self._ended.wait)
        elif not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise dist.DistBackendError(f"a collective didn't end within {timeout}")
        return True

    synchronize = wait


class NcclStandIn(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._store, self._rank, self._size = dist.PrefixStore(NAME, store), rank, size
        self._gloo, self._stream = None, Stream()
        self._aborted, self._lock, self._calls, self._name = threading.Event(), threading.Lock(), {}, ""

    @property
    def group_name(self):
        self._name = distributed_c10d._world.pg_names.get(self, self._name)  # also after it was destroyed
        return self._name

    def getBackendName(self):
        return NAME

    def abort(self):
        if settings.abort_hangs:
            threading.Event().wait()
        self._aborted.set()

    def shutdown(self):
        self.abort()
        self._stream.launch(None)

    def _connect(self):
        """Make the communicator, in the first collective."""
        with self._lock:
            if self._gloo is None:
                self._meet("communicator", range(self._size), until=lambda: False)
                self._gloo = dist.ProcessGroupGloo(
                    dist.PrefixStore("gloo", self._store), self._rank, self._size, timeout=LONG
                )

    def _meet(self, what, ranks, until):
        """Wait until all these ranks are here, or `until` is true. Returns whether they are."""
        keys = [f"{what} {rank}" for rank in ranks]
        self._store.set(f"{what} {self._rank}", "")
        while not self._store.check(keys):
            if until():
                return False
            time.sleep(POLL)
        return True

    def _launch(self, kind, outputs, run, between=None):
        """Launch a collective, or a message between two ranks. `run` gives the work of gloo that carries its bytes."""
        self._connect()
        launched.append((self.group_name, kind))
        ranks = range(self._size) if between is None else between
        pair = "all" if between is None else "{} to {}".format(*between)
        number = self._calls[pair] = self._calls.get(pair, 0) + 1
        _numbers.extend(output for output in outputs if output.dtype == torch.int64)
        caller, ended = current_stream(), threading.Event()
        after = None if caller is None else caller.record_event()

        def job():
            try:
                self._run(f"{pair} {number}", ranks, after, outputs, run)
            finally:
                ended.set()

        (_device if settings.one_at_a_time else self._stream).launch(job)
        return _Work(ended, outputs)

    def _run(self, what, ranks, after, outputs, run):
        """Run on the device: returns when it has ended, or was aborted."""
        aborted = self._aborted
        while after is not None and not after.reached.wait(POLL):
            if aborted.is_set():
                return
        for output in outputs:
            output.view(torch.uint8).fill_(UNDEFINED)
        time.sleep(DELAY)
        try:
            if self._meet(what, ranks, aborted.is_set):
                work = run(self._gloo)
                # gloo's messages between two ranks are never completed unless somebody waits for them.
                while len(ranks) == self._size and not work.is_completed():
                    if aborted.is_set():
                        return
                    time.sleep(POLL / 4)
                work.wait()
        except RuntimeError:  # a peer or the store is gone
            aborted.wait()

    def allreduce(self, tensors, options=None):
        return self._launch("all_reduce", [], lambda gloo: gloo.allreduce(tensors, options))

    def broadcast(self, tensors, options):
        return self._launch("broadcast", [], lambda gloo: gloo.broadcast(tensors, options))

    def barrier(self, options=None, *, opts=None):
        self._launch("barrier", [], lambda gloo: gloo.barrier())._ended.wait()  # it blocks the host, on NCCL, too

    def allgather(self, outputs, inputs, options=None):
        (into,) = outputs
        return self._launch("all_gather", into, lambda gloo: gloo.allgather(outputs, inputs))

    def all_to_all_single(self, output, given, into, out, options=None):
        options = options or dist.AllToAllOptions()
        return self._launch("all_to_all", [output], lambda gloo: gloo.alltoall_base(output, given, into, out, options))

    alltoall_base = all_to_all_single  # its name before torch 2.13

    def send(self, tensors, peer, tag):
        return self._launch("send", [], lambda gloo: gloo.send(tensors, peer, 0), (self._rank, peer))

    def recv(self, tensors, peer, tag):
        return self._launch("recv", tensors, lambda gloo: gloo.recv(tensors, peer, 0), (peer, self._rank))


def register():
    """Let `init_process_group("nccl_stand_in")` find it."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            NAME, lambda store, rank, size, timeout: NcclStandIn(store, rank, size, timeout), devices=["cpu"]
        )
