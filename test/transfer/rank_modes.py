"""Transfers and trees in torch's modes: the same values in each, and in whatever order a program enters them."""

import contextlib
import random

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_overlay
from mesh_ranks import SHUFFLED, WORLD, make_root
from width import NIGHTLY

R, S = Replicate(), Shard


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "none": contextlib.nullcontext,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "half": lambda: default_dtype(torch.float16),
}
ENDS = (((S(0), S(1)), R), ((R, S(1)), S(0)), ((S(1), R), S(1)), ((S(0), R), S(1)), ((R, R), R))


class ModeCases:
    """Cases for ``EightRanks``."""

    def sides_of_a_model(self, rng):
        """Tensors on two meshes; some want a gradient, some are made in inference mode, some are large."""
        mesh, other = make_root(range(WORLD), (4, 2), ("dp", "tp")), make_root(SHUFFLED, (8,), ("ep",))
        source, target = [], []
        for number, (before, after) in enumerate(rng.choice((ENDS, ENDS[:3]))):
            shape = rng.choice(((16, 8), (9, 5), (512, 256)) if number < 2 else ((16, 8), (9, 5)))
            ends = []
            for on, placements in ((mesh, before), (other, [after])):
                with torch.inference_mode() if rng.random() < 0.4 else contextlib.nullcontext():
                    whole = torch.zeros(shape, requires_grad=rng.random() < 0.5).clone().detach()
                    local = distribute_tensor(whole, on, placements, src_data_rank=None)._local_tensor.clone()
                    wants = rng.random() < 0.5 and not torch.is_inference_mode_enabled()
                    stride = (shape[1], 1)
                    made = DTensor.from_local(local, on, placements, run_check=False, shape=shape, stride=stride)
                    ends.append(made.detach().requires_grad_(wants))
            source.append(ends[0])
            target.append(ends[1])
        return source, target

    def check_modes(self, seed):
        rng = random.Random(seed)
        source, target = self.sides_of_a_model(rng)
        first, *modes = rng.choices([*MODES, "inference", "inference", "none", "none"], k=6)
        with MODES[first]():
            transfer = torch_overlay.Transfer(source, target, budget=(1 << 28, 1 << 19)[seed % 2])
        other, after = target[0].device_mesh, [tensor.placements for tensor in target]
        with transfer:
            for step, mode in enumerate(modes, 1):
                with torch.inference_mode():
                    for tensor in source:
                        tensor._local_tensor.fill_(step)
                with MODES[mode]():
                    transfer.run()
                    found = torch_overlay.redistribute(source, other, after)
                said = f"seed {seed}: {mode} after {first}, {modes}"
                for before, one, moved in zip(source, target, found, strict=True):
                    axes = [axis for axis, each in enumerate(before.placements) if each.is_partial()]
                    terms = 1
                    for axis in axes:
                        terms *= before.device_mesh.size(axis)
                    for local in (one._local_tensor, moved._local_tensor):
                        self.assertTrue(bool((local == step * terms).all()), said)
                        self.assertEqual((local.dtype, local.device.type), (torch.float32, "cpu"), msg=said)

    def test_what_a_collective_still_brings_is_compared_in_inference_mode(self):
        """A source that several ranks give. torch makes no view of it there."""
        brought, target = all_reduce(torch.ones(4), "sum", dist.group.WORLD), torch.zeros(4)
        with torch.inference_mode(), torch_overlay.Transfer({"w": brought}, {"w": target}) as transfer:
            transfer.run()
        self.assertEqual(target, torch.full((4,), float(WORLD)))

    def test_float8_is_compared_in_autocast(self):
        """Which refuses to join these tensors, and a box that isn't one row of memory is joined."""
        whole = torch.arange(64.0).view(8, 8).to(torch.float8_e4m3fn)
        source = {"w": whole.t()} if self.rank == 0 else None
        with torch_overlay.Transfer(source, {"w": torch.zeros(8, 8).to(whole.dtype)}) as transfer:
            transfer.run()
            with torch.autocast("cpu", torch.bfloat16):
                transfer.verify()


# Two hundred at night.
for first in range(0, 200, 20) if NIGHTLY else (0,):

    def check(self, seeds=range(first, first + (20 if NIGHTLY else 4))):
        for seed in seeds:
            self.check_modes(seed)

    setattr(ModeCases, f"test_random_modes_{first:03}", check)
