"""Recipes of docs/landings.md on real ranks: a server's model that is written by what its own loader says."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_overlay
from on_device import DEVICE, from_host
from vllm_stand_in import SPARSE, Model

TRAINERS = SERVERS = 4


@from_host
def values(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(model, seed):
    shapes = {name: shape for name, (shape, _) in model.checkpoint().items()}
    return {name: values(shape, seed + number) for number, (name, shape) in enumerate(shapes.items())}


class Scales(Model):
    """Its norms are computed with, as Gemma's: these come whole."""

    def load_weights(self, weights):
        super().load_weights([(name, w + 1 if name.endswith("norm") else w) for name, w in weights])


class LandingCases:
    """Cases for ``EightRanks``; `worlds` and `meet` are those of `PlaceCases`."""

    def _check(self, model, tp, rank, seed):
        wanted = Scales(SPARSE, tp, rank)
        wanted.load_weights([*weights_of(wanted, seed).items()])
        for (name, got), want in zip(model.named_parameters(), wanted.named_parameters(), strict=True):
            self.assertTrue(torch.equal(got, want[1]) and got.any(), name)

    def test_trainer_and_server_in_one_process(self):
        """As TRL's colocate mode: FSDP over eight ranks, two servers of four tensor-parallel ranks, one world."""
        model = Scales(SPARSE, 4, self.rank % 4)
        mesh = DeviceMesh(DEVICE, torch.arange(8))
        trained = {}
        for name, weight in weights_of(model, 0).items():
            cut = [Shard(0)] if weight.ndim > 1 else [Replicate()]
            trained[name] = distribute_tensor(weight, mesh, cut, src_data_rank=None)
        found = torch_overlay.landings(model.load_weights, model, trained)
        self.assertEqual(set(found.whole), {"0.norm", "1.norm"})
        with torch_overlay.Transfer(trained, found.target(), strict=False) as sync:
            for seed in (0, 100):
                for name, weight in weights_of(model, seed).items():
                    new = distribute_tensor(weight, mesh, trained[name].placements, src_data_rank=None)
                    trained[name].copy_(new)
                sync.run()
                found.load_whole()
                self._check(model, 4, self.rank % 4, seed)

    def test_a_loader_of_sglang_meets_the_trainer(self):
        """SGLang calls what `custom_weight_loaders` names with its model and the tensors of the call, here none."""
        with self.worlds(TRAINERS, SERVERS) as (world, rank, address):
            model = Scales(SPARSE, 2, rank % 2)
            if world == 0:
                with self.meet(address, self.rank) as place:
                    trained = weights_of(model, 0)
                    with torch_overlay.Transfer(trained, None, group=place, strict=False) as sync:
                        for seed in (0, 100):
                            for name, weight in weights_of(model, seed).items():
                                trained[name].copy_(weight)
                            sync.run()
                return
            metas = {name: torch.empty(w.shape, device="meta") for name, w in weights_of(model, 0).items()}

            def receive(model, named_tensors):
                if not hasattr(model, "_sync"):
                    model._place = self.meet(address, TRAINERS + dist.get_rank())
                    model._found = torch_overlay.landings(model.load_weights, model, metas)
                    model._sync = torch_overlay.Transfer(None, model._found.target(), group=model._place, strict=False)
                model._sync.run()
                model._found.load_whole()

            for seed in (0, 100):
                receive(model, [])
                self._check(model, 2, rank % 2, seed)
            model._sync.close()
            model._place.close()
