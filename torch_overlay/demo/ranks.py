"""The ranks of the demo. Each is a process that executes the parent's orders, one after the other."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

import torch_overlay

from .panels import EVERY, NO_GPU, TIMEOUT, WEIGHTS

LOOPBACK = "127.0.0.1"
SHAPE = (128, 64)
# Every collective calls one of these operators, whether c10d, a functional collective, DTensor or FSDP2 runs it.
_PREFIX = "c10d::"
_KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}
_MESSAGES = "send", "recv"  # between two ranks, as those in which a Transfer's ranks say that they have come


class Rank:
    """The orders that every rank understands. They open a world and close it, and all ranks get each of them.

    Args:
        ranks: how many ranks there are.
        overlay: turn the overlay on, with these options.
        device: "cpu" or "cuda". New tensors are made there by default.
        options: of the overlay.

    Raises:
        RuntimeError: there is no GPU for "cuda"; or the overlay is on and shouldn't be. Or as `torch_overlay.enable`.
    """

    def __init__(self, rank: int, ranks: int, overlay: bool, device: str = "cpu", **options: Any) -> None:
        self.rank, self.ranks, self.device, self.timeout = rank, ranks, device, timedelta(seconds=120)
        torch.set_num_threads(1)
        self.backend = "gloo" if device == "cpu" else self._use_gpus()
        if overlay:
            torch_overlay.enable(**options)
        elif torch_overlay.is_enabled():
            raise RuntimeError("the stock run needs stock torch, but the overlay is on: start the demo without `run`")
        self.store: dist.TCPStore | None = None

    def _use_gpus(self) -> str:
        """Choose this rank's GPU. Returns NCCL, which needs a GPU for each rank, or else gloo."""
        count = torch.cuda.device_count()
        if not count:
            raise RuntimeError(NO_GPU)
        torch.cuda.set_device(self.rank % count)
        torch.set_default_device(f"cuda:{self.rank % count}")
        # NCCL refuses two ranks on one GPU.
        return "nccl" if count >= self.ranks else "gloo"

    def ready(self) -> str:
        """Answers with torch's version, once torch is imported and the overlay is on or off."""
        return torch_overlay.status().release

    def listen(self) -> int:
        """Make the store, on rank 0, and return its port. The system picks the port, so two worlds never meet."""
        self.store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=self.timeout)
        return self.store.port

    def join(self, port: int) -> None:
        """Enter the world. Collective over all ranks."""
        store = self.store or dist.TCPStore(LOOPBACK, port, is_master=False, timeout=self.timeout)
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.ranks, timeout=self.timeout)
        dist.barrier()

    def leave(self) -> None:
        """Leave the world together with all other ranks."""
        dist.barrier()
        dist.destroy_process_group()


def timed(call: Any) -> float:
    """The seconds that a call takes. All ranks begin it together, so all must call this."""
    dist.barrier()
    start = time.perf_counter()
    call()
    # A call returns when its kernels are launched, before they are done.
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


class WeightsRank(Rank):
    """A trainer on ranks 0 to 3, two servers on ranks 4 and 5, and two ways to bring the weights over."""

    def build(self) -> float:
        """Make the weights of both sides, and two Transfers. Returns the seconds that the first took to plan."""
        trainer = DeviceMesh(self.device, [[0, 1], [2, 3]], mesh_dim_names=("fsdp", "tp"))
        server = DeviceMesh(self.device, [4, 5])
        self.trains, self.step, self.late = self.rank < 4, 0, 0.0
        cuts = ([Shard(0), Shard(1)], [Shard(0), Replicate()], [Shard(0), Shard(0)])
        names = [f"w{number}" for number in range(WEIGHTS)]
        mesh = trainer if self.trains else server
        # The trainer cuts every third weight in another way, and servers cut rows and columns in turns.
        self.dims = {name: number % 2 for number, name in enumerate(names)}  # the dim along which servers cut
        self.state = {
            name: distribute_tensor(
                torch.zeros(SHAPE), mesh, cuts[number % 3] if self.trains else [Shard(number % 2)], src_data_rank=None
            )
            for number, name in enumerate(names)
        }
        sides = (self.state, None) if self.trains else (None, self.state)
        start = time.perf_counter()
        self.sync = torch_overlay.Transfer(*sides)
        planned = time.perf_counter() - start
        self.changes = torch_overlay.Transfer(*sides, changes=True)
        return planned

    def train(self) -> None:
        """Count a step, and set weights that differ for each element, weight and step, so a mix-up would be seen."""
        self.step, self.late = self.step + 1, 0.0
        self._set()

    def train_few(self) -> None:
        """Change one element in a hundred of each of the trainer's weights."""
        self.late = 0.5  # exact in float32 beside all of these values
        self._set()

    def _set(self) -> None:
        if self.trains:
            for number, (name, weight) in enumerate(self.state.items()):
                new = distribute_tensor(self._whole(number), weight.device_mesh, weight.placements, src_data_rank=None)
                self.state[name].to_local().copy_(new.to_local())

    def _whole(self, number: int) -> torch.Tensor:
        values = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32) + 10_000 * number + self.step
        values[::EVERY] += self.late
        return values.view(SHAPE)

    def loop(self) -> None:
        """Send the weights by hand: gather each weight, broadcast it, and let each server cut its part."""
        for name, weight in self.state.items():
            whole = weight.full_tensor() if self.trains else torch.empty(SHAPE)
            dist.broadcast(whole, src=0)
            if not self.trains:
                weight.to_local().copy_(whole.chunk(2, dim=self.dims[name])[self.rank - 4])

    def transfer(self) -> None:
        self.sync.run()

    def changed(self) -> tuple[int, int, int]:
        """Send what changed. Returns the bytes and elements that this rank sent, and of how many elements."""
        self.changes.run()
        return self.changes.sent_bytes, *self.changes.changed

    def time(self, way: str) -> tuple[float, int | None]:
        """Send the weights in one way. Returns the seconds, and the bytes that this rank wrote, None if not counted."""
        # What the kernel counts, and not what either way says of itself.
        before = written()
        seconds = timed(getattr(self, way))
        after = written()
        return seconds, None if before is None or after is None else after - before

    def count(self, way: str) -> int:
        """Send the weights in one way. Returns how many collectives this rank ran."""
        return sum(count_collectives(getattr(self, way))[1].values())

    def right(self) -> int:
        """How many of a server's weights equal the trainer's of this step, to the bit. All of them on the trainer."""
        if self.trains:
            return WEIGHTS
        # Made anew here, and not sent: nothing that is compared came over the way that is tested.
        wholes = (self._whole(number).chunk(2, dim=number % 2)[self.rank - 4] for number in range(WEIGHTS))
        return sum(torch.equal(weight.to_local(), part) for weight, part in zip(self.state.values(), wholes))


def written() -> int | None:
    """The bytes that this process has written so far, to files and sockets. None if the kernel doesn't count them."""
    try:
        with open("/proc/self/io") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("wchar"))
    except (OSError, StopIteration):
        return None


class TrainerRank(Rank):
    """A trainer whose servers come and go. It has no torch.distributed world."""

    def open(self, port: int) -> None:
        """Open a place, and make the Transfer into whoever comes there."""
        self.weights, self.version = {"w": torch.zeros(SHAPE)}, 0
        self.place = torch_overlay.meet(f"tcp://{LOOPBACK}:{port}", rank=0, world_size=1, timeout=TIMEOUT, open=True)
        self.sync = torch_overlay.Transfer(self.weights, None, group=self.place)

    def run(self) -> dict[str, Any]:
        """Bring the next version over. Returns the seconds, and who came and went."""
        self.version += 1
        self.weights["w"].fill_(self.version)
        start = time.perf_counter()
        self.sync.run(version=self.version)
        gone = [gone.name for gone in self.sync.gone]
        return {"seconds": time.perf_counter() - start, "joined": [*self.sync.joined], "gone": gone}


class ServerRank(Rank):
    """A server that joins a trainer."""

    def come(self, port: int, name: str) -> None:
        """Join, so that the trainer's next run waits for this server."""
        self.weights: dict[str, torch.Tensor] = {"w": torch.zeros(SHAPE)}
        self.place = torch_overlay.join(f"tcp://{LOOPBACK}:{port}", name=name, timeout=60)
        self.place.fleet.knock()  # type: ignore[union-attr]
        self.sync: torch_overlay.Transfer | None = None

    def run(self) -> int | None:
        """Take the next version. Returns it; None if a weight isn't of this version."""
        if self.sync is None:
            self.sync = torch_overlay.Transfer(None, self.weights, group=self.place)
        self.sync.run()
        return self.sync.version if (self.weights["w"] == self.sync.version).all() else None


class MeshRank(Rank):
    """Ranks that build different meshes: rank 0 (dp=2, tp=2), the others (dp=4)."""

    def build(self) -> tuple[float, str]:
        """Build the mesh. Returns the seconds, and the error; empty if there was none."""
        sizes, names = ((2, 2), ("dp", "tp")) if self.rank == 0 else ((4,), ("dp",))
        start, message = time.perf_counter(), ""
        try:
            init_device_mesh(self.device, sizes, mesh_dim_names=names)
        except RuntimeError as error:
            message = str(error)
        return time.perf_counter() - start, message


class GatherRank(Rank):
    """Cuts vectors of many lengths over both axes of a mesh with a flattened view, and gathers them."""

    def gather(self, longest: int) -> dict[int, list[int] | str]:
        """By length from 1 to `longest`, what this rank has of a vector that was cut and gathered, or the error."""
        mesh = init_device_mesh(self.device, (2, 2), mesh_dim_names=("dp", "tp"))
        mesh._flatten("dp_tp")  # with this view stock merges two gathers to one, and that is wrong for uneven shards
        return {length: self._gathered(mesh, length) for length in range(1, longest + 1)}

    def _gathered(self, mesh: Any, length: int) -> list[int] | str:
        """A vector of this length after it was cut and gathered, or the first line of the error."""
        cut = distribute_tensor(torch.arange(length), mesh, [Shard(0), Shard(0)], src_data_rank=None)
        try:
            return cut.full_tensor().tolist()
        except RuntimeError as error:
            return str(error).splitlines()[0]


def count_collectives(call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """Run `call`. Returns its result, and how many collectives of each kind this rank ran."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        result = call()
    # `recorded.events()` would take far longer, since it builds the tree of calls.
    names = [event.name() for event in recorded.profiler.kineto_results.events()]
    kinds = Counter(_kind(name.removeprefix(_PREFIX)) for name in names if name.startswith(_PREFIX))
    return result, {kind: count for kind, count in kinds.items() if kind not in _MESSAGES}


def _kind(operator: str) -> str:
    """The kind of collective that an operator of c10d is; its own name if it is none of those that the demo counts."""
    bare = operator.strip("_")
    return next((kind for start, kind in _KINDS.items() if bare.startswith(start)), bare)
