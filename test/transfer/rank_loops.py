"""What torch does one tensor after the other, done together under the overlay, for programs that don't know of it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mesh_ranks import WORLD, make_root
from on_device import DEVICE
from torch_overlay.torch_patches import full_state


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def sharded_model(mesh, layers=3):
    """FSDP2 x TP, some weights uneven; equal on all ranks before it is cut."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(layers)])
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


class LoopCases:
    """Cases for ``EightRanks``."""

    def test_full_state_dicts_go_in_exchanges(self):
        """One exchange over both axes, one for each mesh along the one axis of parameters that TP doesn't cut, unless
        nobody there wants them."""
        model = sharded_model(make_root(range(WORLD), (4, 2), ("dp", "tp")))
        parts = model.state_dict()
        wanted = {name: tensor.full_tensor() for name, tensor in parts.items()}
        for offload in (False, True):
            with CommDebugMode() as comm:
                options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
                found = get_model_state_dict(model, options=options)
            self.assertEqual(comm.get_total_counts(), 1 if offload and self.rank % 2 else 3)
            if offload and self.rank:
                self.assertEqual(found, {})
                continue
            self.assertEqual(list(found), list(wanted))
            for name, tensor in found.items():
                self.assertTrue(type(tensor) is torch.Tensor and torch.equal(tensor, wanted[name]), name)

    def test_a_state_of_any_form_is_gathered_as_torch_does(self):
        """Nested, with numbers, plain tensors and whole ones; on some ranks of a group; a few bytes at a time."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        half = dist.new_group(
            [rank for rank in range(WORLD) if rank % 2 == self.rank % 2], use_local_synchronization=True
        )

        def tensor(n, *placements):
            return distribute_tensor(torch.arange(6.0 * n).reshape(n, 6), mesh, placements, src_data_rank=None)

        whole = DTensor.from_local(torch.ones(2), mesh, run_check=False)
        state = {
            "a": [tensor(5, Shard(0), Shard(1)), 3, (tensor(4, Shard(1), Shard(1)), "text")],
            "b": {"plain": torch.ones(2), "whole": whole, "c": tensor(9, Shard(0), Shard(0)), "none": None},
        }
        for options in ({}, {"cpu_offload": True}, {"ranks_only": (1, 3), "pg": half}, {"ranks_only": (5,)}):
            for budget in (1 << 20, 200):
                before, full_state.WHOLE = full_state.WHOLE, budget
                try:
                    found = full_state.gather_state_dict(state, **options)
                finally:
                    full_state.WHOLE = before
                self.assertEqual(found, full_state.one_by_one(state, **options))

    def test_ranks_that_gather_nothing_together_may_hold_other_tensors(self):
        """On stock each tensor asks those along its own axes only; in one exchange over both, the columns differ."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        b = distribute_tensor(torch.arange(6.0), mesh, [Replicate(), Shard(0)], src_data_rank=None)
        state = {"b": b}
        if mesh.get_local_rank("tp") == 0:
            state["a"] = distribute_tensor(torch.arange(9.0), mesh, [Shard(0), Replicate()], src_data_rank=None)
        found = full_state.gather_state_dict(state)
        self.assertEqual(found, {name: torch.arange(9.0 if name == "a" else 6.0) for name in state})

    def test_what_needs_no_gathering_stays_the_tensor_that_it_is(self):
        """As on stock: whoever writes into the full state of a model on one rank writes into the model."""
        alone = init_device_mesh(DEVICE, (WORLD, 1), mesh_dim_names=("dp", "tp"))["tp"]
        local = torch.ones(4)
        found = full_state.gather_state_dict({"w": DTensor.from_local(local, alone, [Shard(0)], run_check=False)})
        self.assertEqual(found["w"].data_ptr(), local.data_ptr())
