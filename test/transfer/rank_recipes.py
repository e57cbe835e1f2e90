"""The recipes of docs/transfer.md for whole models, on real ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_overlay
from mesh_ranks import WORLD, make_root

STEPS, VOCABULARY, WIDTH = 3, 64, 32
PLAN = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate_proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64, bias=False)
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down_proj(self.gate_proj(y).relu() * self.up_proj(y))


class Small(nn.Module):
    """Stands for a transformer."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Layer(), Layer()])
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def new_model():
    torch.manual_seed(0)
    return Small()


def with_tp(model, mesh):
    """Rows and columns of the projections over a mesh of one axis."""
    styles = ColwiseParallel, RowwiseParallel
    for module in list(model.modules()):
        plan = {part: styles[kind]() for part, kind in PLAN.items() if hasattr(module, part)}
        if plan:
            parallelize_module(module, mesh, plan)
    return model


def with_fsdp(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def served_parts(model, mesh):
    """What a server is given: its own memory. A plain parameter is the same on all of its ranks."""
    return {
        name: tensor
        if isinstance(tensor, DTensor)
        else DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
        for name, tensor in model.state_dict().items()
    }


class RecipeCases:
    """Cases for ``EightRanks``."""

    def test_a_training_mesh_feeds_an_inference_mesh(self):
        """FSDP2 x TP on ranks 0 to 3, TP on 4 to 7: after each step the server answers like the trainer's model."""
        torch.manual_seed(1)
        batch = torch.randint(VOCABULARY, (STEPS, 2, 8))
        mesh, serve = make_root(range(4), (2, 2), ("dp", "tp")), make_root(range(4, 8), (4,), ("tp",))
        trainer = server = None
        if self.rank < 4:
            trainer = with_fsdp(with_tp(new_model(), mesh["tp"]), mesh["dp"])
            optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
        else:
            server = with_tp(new_model(), serve).requires_grad_(False)
        source, target = trainer and trainer.state_dict(), server and served_parts(server, serve)
        with torch_overlay.Transfer(source, target) as sync:
            for step in range(STEPS):
                if trainer:
                    trainer(batch[step]).log_softmax(-1)[..., 0].mean().neg().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    trainer.reshard()
                with torch.no_grad(), CommDebugMode() as comm:
                    sync.run()
                self.assertEqual(comm.get_total_counts(), 1)  # the word before it is no collective
                self.check_answers(trainer, server, serve, batch[step])

    def test_a_tensor_on_several_meshes(self):
        """As FSDP2 x TP leaves a norm's weight: sharded on one mesh for each TP rank. The meshes are replicas of one
        another, which each run shows; nothing is sent where they differ."""
        mesh, whole = make_root(range(WORLD), (4, 2), ("dp", "tp")), torch.arange(10.0)
        tp, zeros = self.rank % 2, torch.zeros(10)
        for options in ({}, {"keep": True}, {"changes": True}, {"relay": True}, {"timeout": 60.0}):
            source = {
                name: distribute_tensor(whole + n, mesh["dp"], [Shard(0)], src_data_rank=None)
                for n, name in enumerate("ab")
            }
            target = {name: distribute_tensor(zeros, mesh["tp"], [Shard(0)], src_data_rank=None) for name in "ab"}
            with torch_overlay.Transfer(source, target, **options) as sync:
                sync.run()
                for n, name in enumerate("ab"):
                    self.assertEqual(target[name].to_local(), (whole + n).chunk(2)[tp])
                self.assertEqual({name: t.placements for name, t in source.items()}, dict.fromkeys("ab", (Shard(0),)))
                with torch.no_grad():
                    source["a"].to_local().add_(100 * tp)
                part = r"its part of shape \(3,\) that starts at \(3,\) has one value on rank 2, another on rank 3"
                for name in ("", "a"):
                    with self.assertRaisesRegex(ValueError, rf"nothing was sent: the source 'a' lies on.*{part}: give"):
                        sync.run(only=[name] if name else None)
                with torch.no_grad():
                    source["b"].to_local().add_(7)
                sync.run(only=["b"])
                self.assertEqual(target["a"].to_local(), whole.chunk(2)[tp])
                self.assertEqual(target["b"].to_local(), (whole + 8).chunk(2)[tp])
                with torch.no_grad():
                    source["a"].to_local().sub_(100 * tp)
                sync.run(check=True)
        target = torch_overlay.piece(zeros[: self.rank + 1].clone(), (10,), (0,))
        with torch_overlay.Transfer([source["b"]], [target]) as sync:
            sync.run()
            self.assertEqual(target._local_tensor, (whole + 8)[: self.rank + 1])
            with torch.no_grad():
                source["b"].to_local().mul_(1 + tp)
            with self.assertRaisesRegex(ValueError, "the source '0' lies on several meshes"):
                sync.run()
            with torch.no_grad():
                source["b"].to_local().div_(1 + tp)
        uneven = distribute_tensor(whole, mesh["tp"] if self.rank > 5 else mesh["dp"], [Shard(0)], src_data_rank=None)
        with self.assertRaisesRegex(ValueError, r"sizes .4,. over ranks 0-6 by 2 on .* sizes .2,. over ranks 6, 7 on"):
            torch_overlay.Transfer([uneven], [torch.zeros(10)])
        given = None if self.rank == 7 else distribute_tensor(whole, mesh["dp"], [Shard(0)], src_data_rank=None)
        with self.assertRaisesRegex(ValueError, "and rank 7 doesn't have it"):
            torch_overlay.Transfer([given], [torch.zeros(10)])

    def check_answers(self, trainer, server, mesh, batch):
        whole = [new_model()]
        state = {}
        for name, tensor in trainer.state_dict().items() if trainer else ():
            state[name] = tensor.full_tensor()
        sent = [{name: tensor.cpu().numpy() for name, tensor in state.items()}]
        dist.broadcast_object_list(sent, 0)
        whole[0].load_state_dict({name: torch.from_numpy(array) for name, array in sent[0].items()})
        if server:
            with torch.no_grad():
                self.assertEqual(server(batch), whole[0](batch), rtol=1e-5, atol=1e-5)
                for name, tensor in served_parts(server, mesh).items():
                    self.assertTrue(torch.equal(tensor.full_tensor(), whole[0].state_dict()[name]), name)

    def test_two_of_eight_ranks_leave(self):
        """The six that stay make what they have whole; what only the others had is named, on all of them."""
        mesh, rest = make_root(range(WORLD), (4, 2), ("dp", "tp")), make_root(range(6), (3, 2), ("dp", "tp"))
        whole = torch.arange(96.0).reshape(24, 4)

        def on(mesh, *placements):
            return distribute_tensor(whole, mesh, placements, src_data_rank=None)

        source = {"a": on(mesh, Replicate(), Shard(0)), "b": on(mesh, Replicate(), Replicate())}
        if self.rank > 5:
            return
        target = {name: on(rest, Shard(0), Shard(1)) for name in source}
        for tensor in target.values():
            tensor.to_local().zero_()
        with torch_overlay.Transfer(source, target, gone=(6, 7)) as transfer:
            transfer.run()
        for tensor in target.values():
            self.assertTrue(torch.equal(tensor.to_local(), on(rest, Shard(0), Shard(1)).to_local()))
        source["lost"], target["lost"] = on(mesh, Shard(0), Replicate()), on(rest, Shard(0), Shard(1))
        with self.assertRaisesRegex(
            ValueError, "Ranks 6, 7 left \\(gone=\\), and nobody else has some parts of 'lost'"
        ):
            torch_overlay.Transfer(source, target, gone=(6, 7))
        with self.assertRaisesRegex(ValueError, "the targets 'a', 'b' are there, too"):
            some = {name: source[name] for name in "ab"}
            torch_overlay.Transfer(some, some, gone=(6, 7))
