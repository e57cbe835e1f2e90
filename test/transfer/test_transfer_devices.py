"""What ranks tell one another lies where their tensors lie, whatever accelerator the host has."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_overlay
from mesh_harness import fake_world
from torch_overlay.rendezvous.team import Team, timeout_of
from torch_overlay.torch_patches import full_state
from torch_overlay.transfers.background import Running
from way import needs_package

pytestmark = needs_package


def test_a_tree_of_cpu_tensors_asks_for_no_accelerator(monkeypatch):
    """A world of both, "cpu:gloo,cuda:nccl", isn't called gloo; its CPU tensors need no GPU, and the default device is
    the user's."""
    said = []
    real = dist.all_gather
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **how: torch.device("meta"))
    monkeypatch.setattr(dist, "all_gather", lambda to, own, **how: said.append(own.device) or real(to, own, **how))
    with fake_world(1, 4), torch_overlay.enabled():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
        tree = {name: DTensor.from_local(torch.ones(64, 32), mesh, [Shard(0)]) for name in "ab"}
        with torch.device("meta"):
            torch_overlay.redistribute(tree, placements=Replicate(), budget=40_000)
    assert said == [torch.device("cpu")]


def test_a_run_in_the_background_of_a_gpu_has_a_stream_of_its_own(monkeypatch):
    """It begins after what the program's stream has, and this one goes on after it; the sources are read as long as
    the stream isn't that far, whatever the thread does."""
    said, reached, here = [], set(), threading.local()

    class Stream:
        def __init__(self, device, name="own"):
            self.device, self.name = device, name

        def wait_stream(self, other):
            said.append(f"{self.name} after {other.name}")

        def wait_event(self, event):
            said.append(f"{self.name} after {event.name}")

        def record_event(self):
            name = f"{self.name} {len(said)}"
            said.append(name)
            return SimpleNamespace(name=name, query=lambda: name in reached)

        def __enter__(self):
            here.stream = self.name

        def __exit__(self, *error):
            here.stream = None

    program = Stream(torch.device("cuda:1"), "program")
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: program)

    def job(sent):
        said.append(f"runs on {here.stream}")
        sent()

    work = Running(job, lambda: said.append("ended"), torch.device("cuda:1"))
    work.wait()
    events = ["own 2", "own 3", "ended", "program after own 3"]
    assert said == ["own after program", "runs on own", *events]
    for event, state in ((None, (False, False)), ("own 2", (True, False)), ("own 3", (True, True))):
        reached.add(event)
        assert (work.sent(), work.is_completed()) == state
    work.precede()
    assert said[-1] == "program after own 3"
    copied = Running(job, lambda: None, torch.device("cuda:1"), is_sent=True)
    assert copied.sent() and not copied.is_completed()
    copied.wait()
    assert copied.sent()


def test_the_timeout_is_that_of_the_devices_that_a_group_has(monkeypatch):
    """A group for GPUs alone is asked for these, and not for what the host has, or doesn't show yet."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **how: None)
    asked = []

    def backend(device):
        asked.append(device.type)
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=7)))

    for kinds, first in ((["cuda"], "cuda"), (["cuda", "cpu"], "cpu")):
        group = SimpleNamespace(_device_types=[torch.device(kind) for kind in kinds], _get_backend=backend)
        assert timeout_of(group) == timedelta(seconds=7) and asked.pop() == first


def test_a_batch_of_whole_tensors_is_offloaded_with_one_wait(monkeypatch):
    """From a GPU, for which tensors of the host stand here: through pinned memory, not blocking, and nothing that is
    returned lies in it, or is read before the wait."""
    events, real, make = [], torch.Tensor.copy_, torch.empty
    monkeypatch.setattr(full_state, "_is_on_host", lambda tensor: False)

    def copied(to, given, non_blocking=False):
        events.append(("copy", non_blocking))
        return real(to, given)

    def empty(*size, pin_memory=False, **how):
        events.append(("buffer", pin_memory))
        return make(*size, **how)

    def stream(device):
        return SimpleNamespace(synchronize=lambda: events.append(("wait", device.type)))

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.Tensor, "clone", lambda one, real=torch.Tensor.clone: events.append("read") or real(one))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.accelerator, "current_stream", stream)
    wholes = [torch.arange(6.0).reshape(2, 3), torch.tensor(3, dtype=torch.int16), make(0), torch.tensor([True] * 5)]
    found = full_state._offloaded(wholes)
    assert all(torch.equal(one, whole) and one.dtype == whole.dtype for one, whole in zip(found, wholes, strict=True))
    assert events == [("buffer", True), *[("copy", True)] * 3, ("wait", "cpu"), *["read"] * 3]
    assert [one.untyped_storage().nbytes() for one in found] == [24, 2, 0, 5]


@pytest.mark.parametrize(("budget", "waits"), [(1 << 20, 0), (20_000, 1)])
def test_the_host_waits_at_most_once_in_a_redistribution(monkeypatch, budget, waits):
    """On a GPU each value that the host reads waits for all that was launched. Where everything fits the budget ranks
    needn't ask one another; else they ask once for all, forward and backward, whatever is remembered, reduced before,
    or how many ranks answer."""
    said, reads = [], []
    for name in ("all_gather", "all_reduce"):

        def noted(to, *given, real=getattr(dist, name), **how):
            said.extend(each.untyped_storage().data_ptr() for each in (to if isinstance(to, list) else [to]))
            return real(to, *given, **how)

        monkeypatch.setattr(dist, name, noted)
    for name in ("tolist", "item", "__int__", "__bool__", "__float__", "__index__", "numpy", "cpu"):

        def read(self, *given, real=getattr(torch.Tensor, name), name=name):
            if self.untyped_storage().data_ptr() in said:
                reads.append(name)
            return real(self, *given)

        monkeypatch.setattr(torch.Tensor, name, read)

    def waited(what):
        said.clear(), reads.clear()
        found = what()
        assert len(reads) == waits, reads
        return found

    with fake_world(1, 4), torch_overlay.enabled():
        mesh, other = (
            init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)]) for sizes in ((4,), (2, 2))
        )
        local = torch.ones(64, 32, requires_grad=True)
        tree = [DTensor.from_local(local, mesh, [placement]) for placement in (Shard(0), Shard(0), Partial())]
        waited(lambda: torch_overlay.redistribute(tree[:2], placements=Replicate(), budget=budget))
        waited(lambda: torch_overlay.redistribute(tree, placements=[Shard(1)], budget=budget))
        for _ in range(2):
            found = waited(lambda: torch_overlay.redistribute(tree, other, [Replicate(), Shard(1)], budget=budget))
            waited(torch.stack([each.to_local().sum() for each in found]).sum().backward)
        said.clear(), reads.clear()
        assert Team.of(dist.group.WORLD, torch.device("cpu")).gather_data("words") == dict.fromkeys(range(4), "words")
        assert len(reads) == 2  # how long they are, and what they are
