"""Transfers in the background, from one world to another, and into the model of a worker of vLLM."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import torch

from . import Check, Found, Run, asked
from .transfers import _same, _whole

SECONDS = 30


def worlds(run: Run, backend: str = "gloo") -> Iterator[Found]:
    """By gloo with tensors of the device, then by NCCL. The last check of each world ends it."""
    for name in dict.fromkeys((backend, run.best)):
        runs = [Check(in_the_background, words) for words in ((), ("snapshot",), ("snapshot", "beside other groups"))]
        checks = [*runs, Check(a_worker_of_vllm), Check(two_worlds)]
        yield from asked(run, checks, name)


# --- on every rank


def _sides(mesh: Any, rank: int) -> tuple[Any, Any]:
    """A weight on ranks 0 and 1, cut along its rows, and plain ones on ranks 2 and 3."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    device, whole = mesh.device_type, _whole((2048, 256), "float32")
    train = DeviceMesh(device, [0, 1], mesh_dim_names=("train",))
    if rank < 2:
        return {"w": distribute_tensor(whole.to(device), train, [Shard(0)], src_data_rank=None)}, None
    return None, {"w": torch.full(whole.shape, -1.0, dtype=torch.bfloat16, device=device)}


def in_the_background(mesh: Any, rank: int, snapshot: str = "", beside: str = "") -> str | None:
    """Some runs, each of other values, which are overwritten as soon as they may be; what came is used at once."""
    import torch.distributed as dist

    from torch_overlay import Transfer

    source, target = _sides(mesh, rank)
    wrong = []
    with Transfer(source, target, budget=64 << 20) as sync:
        for turn in range(4):
            whole = _whole((2048, 256), "float32", turn)
            if source:
                source["w"].to_local().copy_(whole.chunk(2)[rank])
            work: Any = sync.run(version=turn if source else None, async_op=True, snapshot=bool(snapshot))
            if beside:
                dist.all_reduce(torch.ones(1 << 16, device=mesh.device_type), group=mesh.get_group(1))
            until = time.monotonic() + SECONDS
            while source and not work.sent() and time.monotonic() < until:
                time.sleep(0.001)
            if source:
                source["w"].to_local().zero_()
            work.wait()
            if target:
                came = target["w"].clone()
                target["w"].zero_()
                wrong += [f"turn {turn}"] * (not _same(came, whole.bfloat16()) or sync.version != turn)
    return "; ".join(wrong) or None


def _address(key: str) -> str:
    """The same on all ranks of the world."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            store.set(key, str(free.getsockname()[1]))
    return f"tcp://127.0.0.1:{store.get(key).decode()}"


def two_worlds(mesh: Any, rank: int) -> str | None:
    """Each of two ranks; ranks of the place are numbered the other way round. The one world of all ends before."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from torch_overlay import Transfer, meet

    address, device = _address("two worlds"), mesh.device_type
    store, backend = dist.distributed_c10d._get_default_store(), dist.get_backend()
    dist.barrier()
    dist.destroy_process_group()
    own = dist.PrefixStore(f"world {rank // 2}", store)
    dist.init_process_group(backend, store=own, rank=rank % 2, world_size=2)
    whole = _whole((96, 40), "float32")
    world = DeviceMesh(device, [0, 1], mesh_dim_names=("w",))
    given = whole.to(device) if rank < 2 else torch.zeros(96, 40, device=device)
    tensor = distribute_tensor(given, world, [Shard(rank // 2)], src_data_rank=None)
    with meet(address, rank=3 - rank, world_size=4, key="key", timeout=SECONDS) as place:
        sides = ([tensor], None) if rank < 2 else (None, [tensor])
        with Transfer(*sides, group=place) as sync:
            for version in (1, 2):
                sync.run(version=version if rank < 2 else None)
            if sync.version != 2:
                return f"version {sync.version}"
    wanted = whole.chunk(2, rank // 2)[rank % 2]
    return None if _same(tensor.to_local(), wanted) else "another tensor came"


class _Source:
    def __init__(self, wholes: dict[str, torch.Tensor]) -> None:
        from vllm.distributed.weight_transfer.base import ParamMeta

        self.wholes = wholes
        self.metadata = [ParamMeta(name, whole.dtype, tuple(whole.shape)) for name, whole in wholes.items()]

    def implements_iter_local(self) -> bool:
        return True

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.wholes.items()


def a_worker_of_vllm(mesh: Any, rank: int) -> str | None:
    """Two trainers, two workers, of vLLM's classes or stand-ins: the models get what their own loaders put there."""
    import types

    from torch.distributed import distributed_c10d

    from rank_vllm import Client, serve
    from vllm_stand_in import SPARSE, Model, installed

    store, device = distributed_c10d._get_default_store(), torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    calls = torch.distributed.PrefixStore("vllm", store)
    address = _address("vllm")
    model, wanted = (Model(SPARSE, 2, rank % 2).to(device, torch.bfloat16) for _ in range(2))
    wholes = {
        name: _whole(tuple(shape), "float32", number).to(device)
        for number, (name, (shape, _)) in enumerate(model.checkpoint().items())
    }
    with installed([]):
        from torch_overlay.integrations import vllm as door
        from torch_overlay.integrations.vllm.trainer import TrainerEngine, TrainerInfo
        from torch_overlay.integrations.vllm.worker import WorkerEngine

        door.register()
        if rank < 2:
            info = TrainerInfo(rank=rank, address=address, trainers=2, workers=2, timeout=SECONDS)
            trainer = TrainerEngine.trainer_init(info, client=Client(calls, 2), source=_Source(wholes))
            trainer.send_weights()
            trainer.shutdown()
            return None
        parallel = types.SimpleNamespace(data_parallel_index=0, world_size=2, rank=rank % 2)
        config = types.SimpleNamespace(parallel_config=parallel, model_config=types.SimpleNamespace(quantization=None))
        worker = WorkerEngine(None, config, device, model)
        serve(worker, calls, rank % 2, 4)
        came_whole = [*worker._found.whole]
        worker.shutdown()
    wanted.load_weights(wholes.items())
    wrong = [
        name
        for (name, got), want in zip(model.named_parameters(), wanted.parameters())
        if not _same(got.data, want.data)
    ]
    return "; ".join([*wrong, *[f"{name} came whole" for name in came_whole]]) or None
