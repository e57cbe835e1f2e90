"""Recipes of docs/transfer.md for a trainer and servers that were started apart, and for what goes on meanwhile."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import torch_overlay
from mesh_ranks import make_root
from on_device import from_host
from rank_background import held
from rank_recipes import VOCABULARY, new_model, with_fsdp

STEPS = 3


@from_host
def tokens(seed):
    return torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))


def step_of(model, optimizer, seed):
    """A training step; each rank has tokens of its own."""
    model(tokens(seed)).log_softmax(-1)[..., 0].mean().neg().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.reshard()


class WorldRecipeCases:
    """Cases for ``EightRanks``; `worlds` and `meet` are those of `PlaceCases`."""

    def test_a_server_that_starts_late(self):
        """Trainers meet on a thread and train on; when all four have met, they make the Transfer."""
        weight, target = torch.zeros(4), torch.full((4,), -1.0)
        with self.worlds(4, 4) as (world, _, address):
            if world:
                if self.rank == 7:
                    self._store.wait([f"{self.id()} late"])
                with self.meet(address, self.rank) as place:
                    with torch_overlay.Transfer(None, {"w": target}, group=place) as sync:
                        sync.run()
                self.assertTrue(sync.version >= STEPS)
                self.assertEqual(target, torch.full((4,), float(sync.version)))
                return
            sync, step = None, 0
            with ThreadPoolExecutor(1) as pool:
                coming = pool.submit(self.meet, address, self.rank)
                while sync is None:
                    step += 1
                    weight.add_(1.0)  # trains
                    if step == STEPS:
                        self.assertFalse(coming.done())
                        self._store.set(f"{self.id()} late", "")
                    all_met = torch.tensor(int(coming.done()))
                    dist.all_reduce(all_met, dist.ReduceOp.MIN)  # the same answer on all trainers
                    if all_met:
                        sync = torch_overlay.Transfer({"w": weight}, None, group=coming.result())
            sync.run(version=step)
            sync.close()
            coming.result().close()

    def test_a_trainer_that_restarts_is_met_again(self):
        """It fails in its fifth step, begins again with the third, of its checkpoint, and servers go on from there."""
        target, seen = torch.zeros(4), []
        with self.worlds(4, 4) as (world, _, address):
            if world:
                while not seen or seen[-1] != 6:
                    with self.meet(address, self.rank) as place:
                        try:
                            with torch_overlay.Transfer(None, {"w": target}, group=place) as sync:
                                while sync.version != 6:
                                    sync.run()
                                    seen.append(sync.version)
                                    self.assertEqual(target, torch.full((4,), float(sync.version)))
                        except RuntimeError as error:
                            self.assertIn("failed, and no target was written", str(error))
                self.assertEqual(seen, [1, 2, 3, 4, 3, 4, 5, 6])
                return
            for first, last in ((1, 4), (3, 6)):
                weight = torch.full((4,), first - 1.0)  # of the checkpoint
                with self.meet(address, self.rank) as place:
                    with torch_overlay.Transfer({"w": weight}, None, group=place) as sync:
                        for step in range(first, last + 1):
                            weight.add_(1.0)
                            sync.run(version=step)

    def test_a_step_with_the_sync_behind_it(self):
        """FSDP2 and AdamW on four ranks: servers get the values of each step bit by bit, while the next one runs."""
        mesh, serve = make_root(range(4), (4,), ("dp",)), make_root(range(4, 8), (4,), ("tp",))
        trainer = target = None
        if self.rank < 4:
            trainer = with_fsdp(new_model(), mesh)
            optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
            source = dict(trainer.named_parameters())
        else:
            target = {
                name: distribute_tensor(torch.zeros_like(tensor), serve, [Shard(0)], src_data_rank=None)
                for name, tensor in new_model().named_parameters()
            }
        with torch_overlay.Transfer(source if trainer else None, target) as sync:
            for step in range(STEPS):
                stepped = threading.Event()
                with held(stepped):  # so that the step is always the faster one
                    work = sync.run(version=step if trainer else None, async_op=True, snapshot=True)
                    before = self.wholes(source) if trainer else []
                    if trainer:
                        step_of(trainer, optimizer, 10 * step + self.rank)
                    stepped.set()
                    work.wait()
                self.assertEqual(sync.version, step)
                self.check_came(before, target, step)
                self.assertFalse(trainer and all(map(torch.equal, before, self.wholes(source))))

    def wholes(self, tensors):
        return [tensor.full_tensor().clone() for tensor in tensors.values()]

    def check_came(self, before, target, step):
        """What the trainer had when the run began, and what the servers have."""
        for number, tensor in enumerate(target.values() if target else before):
            whole = torch.empty(tensor.shape) if target else tensor
            with torch.no_grad():
                dist.broadcast(whole, 0)
                if target:
                    self.assertTrue(torch.equal(tensor.full_tensor(), whole), f"step {step}, tensor {number}")
