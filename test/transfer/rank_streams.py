"""What ranks tell one another where `wait()` orders a stream and doesn't block the host, as on NCCL."""

import threading
import warnings
from datetime import timedelta
from queue import Queue
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.futures import Future

import torch_overlay
from mesh_ranks import SHUFFLED, WORLD, make_root
from on_device import DEVICE
from torch_overlay.rendezvous import team

LONGEST = timedelta(seconds=6)


class Later(dist.ProcessGroup):
    """Collectives run one after the other on a thread, by gloo. `wait()` returns at once; what reads a result waits for
    all of them, and a rank whose peers don't come is ended there, as NCCL's watchdog ends its process."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout=LONGEST)
        self.todo, self.results, self.begun = Queue(), [], []
        threading.Thread(target=self.go, daemon=True).start()

    def getBackendName(self):
        return "later"

    @property
    def group_name(self):
        return distributed_c10d._world.pg_names[self]

    def go(self):
        while True:
            job, ended = self.todo.get()
            try:
                job()
                ended.set_result(None)
            except RuntimeError as error:
                ended.set_exception(error)

    def put(self, name, outputs, job):
        ended, at_once = Future(), Future()
        self.begun.append(name)
        self.results.append((ended, outputs))
        self.todo.put((job, ended))
        at_once.set_result(outputs)
        return _create_work_from_future(at_once)

    def read(self):
        """Wait for all that was begun, as reading from a device does."""
        results, self.results = self.results, []
        for ended, _ in results:
            try:
                ended.wait()
            except RuntimeError as error:
                raise KeyboardInterrupt("the watchdog ended this process") from error

    def allgather(self, outputs, inputs, options=None):
        return self.put("all_gather", outputs, lambda: self.gloo.allgather(outputs, inputs).wait())

    def allreduce(self, tensors, options):
        return self.put("all_reduce", tensors, lambda: self.gloo.allreduce(tensors, options).wait())

    def alltoall_base(self, output, given, outputs, inputs, options=None):
        return self.put("all_to_all", [output], lambda: None)


class StreamCases:
    """Cases for ``EightRanks``."""

    def later_mesh(self):
        if not hasattr(dist.Backend, "LATER"):
            dist.Backend.register_backend("later", Later, devices=["cpu"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return init_device_mesh(DEVICE, (WORLD,), mesh_dim_names=("a",), backend_override={"a": "later"})

    def test_what_is_wrong_on_a_rank_is_said_before_anything_is_sent(self):
        """Where ranks ask one another anyway, since not all fits the budget: at once, on all of them, on one mesh and
        from one to another; no rank is left with an exchange that never ends."""
        mesh = self.later_mesh()
        group, other = mesh.get_group(), make_root(SHUFFLED, (8,), ("b",))
        team._kept[distributed_c10d._get_default_group()] = {tuple(range(WORLD)): group}
        rows = 9 if self.rank == 5 else 8
        local = torch.ones(rows, 32)
        tree = {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(64, 32), stride=(32, 1))}
        said = r"Nothing was redistributed: 'w' has shape \(9, 32\) on rank 5"
        known = "torch_overlay.distributed.tensor._runner.at_hand.has_known_backends"

        def reads(method):
            return mock.patch.object(
                torch.Tensor, method, lambda each, real=getattr(torch.Tensor, method): group.read() or real(each)
            )

        with mock.patch(known, lambda mesh: True), reads("tolist"), reads("item"):
            for target in ((None, Replicate()), (other, Shard(1))):
                with self.assertRaisesRegex(ValueError if self.rank == 5 else RuntimeError, said):
                    torch_overlay.redistribute(tree, *target, budget=4000)
        self.assertNotIn("all_to_all", group.begun)
        self.assertEqual(group.begun.count("all_gather"), 4)  # each first compares what ranks ask for
