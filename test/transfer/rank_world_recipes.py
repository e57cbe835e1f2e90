"""Recipes of docs/transfer.md for a trainer and servers that were started apart, and for what goes on meanwhile."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_overlay
from mesh_ranks import WORLD, make_root
from on_device import DEVICE, from_host
from rank_background import held
from rank_recipes import VOCABULARY, logits, new_model, with_fsdp
from torch_overlay.transfers import meeting

STEPS, HEADS, HEAD = 3, 8, 4


@from_host
def tokens(seed):
    return torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))


def step_of(model, optimizer, seed):
    """A training step; each rank has tokens of its own."""
    logits(model, tokens(seed)).float().log_softmax(-1)[..., 0].mean().neg().backward()
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
        with self.worlds(4, 4) as (world, _, address), mock.patch.object(meeting, "LONGEST", 1):
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

    def test_a_torchtitan_state_for_transformers(self):
        """Other names, and rows of q and k in another order: one rotates neighbours, the other one halves of a head."""
        mesh = DeviceMesh(DEVICE, torch.arange(WORLD).reshape(4, 2))
        width, whole = HEADS * HEAD, {}
        for number, part in enumerate(("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1")):
            whole[f"layers.0.{part}.weight"] = torch.arange(float(width * width)).reshape(width, width) + number
        whole["tok_embeddings.weight"] = torch.arange(float(5 * width)).reshape(5, width)
        ours = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"
        names = {theirs: f"model.layers.0.{name}.weight" for theirs, name in zip(whole, ours)}
        names["tok_embeddings.weight"] = ("model.embed_tokens.weight", "lm_head.weight")
        source = {
            name: distribute_tensor(tensor, mesh, [Shard(0), Shard(0)], src_data_rank=None)
            for name, tensor in whole.items()
        }
        target = None
        if self.rank == 5:
            shapes = {our: whole[name].shape for name, some in names.items() for our in self.several(some)}
            found = {our: torch.zeros(shape) for our, shape in shapes.items()}
            target = dict(found)
        for name in ("layers.0.attention.wq.weight", "layers.0.attention.wk.weight"):
            source[name] = source[name].view(HEADS, HEAD // 2, 2, width)
            if target:
                target[names[name]] = target[names[name]].view(HEADS, 2, HEAD // 2, width).transpose(1, 2)
        with torch_overlay.Transfer(source, target, names=names) as sync:
            sync.run()
            self.assertEqual(sync.exchanges, 1)
        for name, some in names.items() if target else ():
            for our in self.several(some):
                wanted = whole[name]
                if "self_attn.q" in our or "self_attn.k" in our:  # as torchtitan's adapter has it
                    wanted = wanted.view(HEADS, HEAD // 2, 2, width).transpose(1, 2).reshape(width, width)
                self.assertTrue(torch.equal(found[our], wanted), our)

    def several(self, names):
        return names if isinstance(names, tuple) else (names,)
