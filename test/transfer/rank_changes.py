"""What a program does to its tensors between two runs of a `Transfer`: new values are sent, and what doesn't fit the
plan any more is named on all ranks, before anything is sent or written."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_overlay
from mesh_ranks import SHUFFLED, WORLD, make_root
from torch_overlay.transfers.exchanges import Exchanges
from width import NIGHTLY

R, S = Replicate(), Shard
SIDES = "source", "target"
TYPES = torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.uint8
LAYOUTS = (
    ((S(0), S(1)), (R,)),
    ((S(0), R), (S(1),)),
    ((R, S(1)), (S(0),)),
    ((S(1), S(0)), (S(0),)),
    ((R, R), (S(1),)),
    ((S(0), S(0)), (R,)),
)


def elsewhere(local, rng):
    """The same values in other memory: contiguous, with other strides, in the middle of something bigger."""
    kind = rng.choice(("contiguous", "strides", "offset"))
    if kind == "contiguous":
        return local.clone(memory_format=torch.contiguous_format)
    if kind == "strides":
        return torch.empty(local.shape[::-1], dtype=local.dtype).t().copy_(local)
    bigger = torch.empty([length + 3 for length in local.shape], dtype=local.dtype)
    return bigger[2 : 2 + local.shape[0], 1 : 1 + local.shape[1]].copy_(local)


def without_storage(local):
    emptied = local.clone()
    emptied.untyped_storage().resize_(0)
    return emptied


# What must be refused, and in which words.
REFUSED = (
    ("is float16 and was", lambda local: local.to(torch.float16)),
    ("has shape .* and had", lambda local: local.new_zeros(local.shape[0] + 1, local.shape[1])),
    ("has shape .* and had", lambda local: local.new_zeros(local.shape[0], local.shape[1] + 5)),
    ("has shape .* and had", lambda local: local[:, :-1]),
    ("has shape .* and had", lambda local: local.flatten()),
    ("is on meta and was on cpu", lambda local: local.to("meta")),
    ("needs .* bytes of storage, and has 0", without_storage),
)
EXPANDED = "overlaps itself", lambda local: torch.zeros(1, 1, dtype=local.dtype).expand_as(local)
CONJUGATE = "is a conjugate", lambda local: torch.zeros(local.shape, dtype=local.dtype).conj()


def cut(whole, mesh, placements):
    """A DTensor in memory of its own, which no view shares."""
    made = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    made._local_tensor = made._local_tensor.detach().clone()
    return made


class ChangeCases:
    """Cases for ``EightRanks``."""

    def two_sides(self, rng):
        """Some tensors on a mesh, and their targets on another one, by name."""
        mesh, other = make_root(range(WORLD), (4, 2), ("dp", "tp")), make_root(SHUFFLED, (8,), ("ep",))
        source, target = {}, {}
        for number in range(rng.randint(2, 4)):
            # Of 19 rows some ranks hold none.
            shape = (19, 16) if not number else (rng.choice((8, 22, 23)), rng.choice((8, 16, 22)))
            before, after = rng.choice(LAYOUTS)
            whole = self.whole(torch.empty(shape, dtype=TYPES[number]), 0)
            source[f"w{number}"] = cut(whole, mesh, before)
            target[f"w{number}"] = cut(whole, other, after)
        return source, target

    def whole(self, tensor, step):
        return (torch.arange(tensor.numel()).reshape(tensor.shape) % 50 + step).to(tensor.dtype)

    def set_values(self, tensors, step, rng):
        """New values on all ranks, in place or in other memory."""
        for tensor in tensors.values():
            new = cut(self.whole(tensor, step), tensor.device_mesh, tensor.placements)
            how = rng.choice(("in place", "data", "rebound"))
            if how == "in place":
                tensor._local_tensor.copy_(new._local_tensor)
            elif how == "data":
                tensor._local_tensor.data = elsewhere(new.to_local(), rng)
            else:
                tensor._local_tensor = elsewhere(new.to_local(), rng)

    def check_values(self, tensors, step, said):
        for name, tensor in tensors.items():
            mesh, placements = tensor.device_mesh, tensor.placements
            want = cut(self.whole(tensor, step), mesh, placements).to_local()
            self.assertTrue(torch.equal(tensor._local_tensor, want), f"{said}, {name}")

    def check_changes(self, seed):
        """Some runs; before some of them a tensor of one rank changes so that nothing may be sent."""
        rng, own = random.Random(seed), random.Random(seed * WORLD + self.rank)
        source, target = self.two_sides(rng)
        with torch_overlay.Transfer(source, target, budget=(1 << 20, 3000)[seed % 2], keep=seed % 4 > 1) as transfer:
            for step in range(1, 6):
                self.set_values(source, step, own)
                if rng.random() < 0.7:
                    where, side, name = rng.randrange(WORLD), rng.randrange(2), rng.choice([*source][1:])
                    tensor = (source, target)[side][name]
                    unwritable = [EXPANDED, CONJUGATE] if tensor.dtype.is_complex else [EXPANDED]
                    words, change = rng.choice([*REFUSED, *unwritable * side])
                    held = tensor._local_tensor
                    if self.rank == where:
                        tensor._local_tensor = change(held)
                    said = f"can't run, and nothing was sent: rank {where}: the {SIDES[side]} '{name}' {words}"
                    with self.assertRaisesRegex(ValueError, said):
                        transfer.run()
                    tensor._local_tensor = held
                    self.check_values(target, step - 1, f"seed {seed}, step {step}, refused")
                for each in target.values():
                    if own.random() < 0.3:  # what was there doesn't matter
                        each._local_tensor.data = elsewhere(each._local_tensor, own)
                transfer.run()
                self.check_values(target, step, f"seed {seed}, step {step}")

    def test_other_placements_of_equal_shapes_are_an_error(self):
        """Seven rows on four ranks are cut like eight, but for the last."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        whole = torch.arange(64.0).reshape(8, 8)
        source = cut(whole, mesh, [S(0), R])
        target = cut(whole * 0, mesh, [R, R])
        with torch_overlay.Transfer([source], [target]) as transfer:
            other = cut(whole, mesh, [S(0), R])
            torch.utils.swap_tensors(source, other)
            transfer.run()
            self.assertEqual(target.to_local(), whole)
            uneven = cut(torch.ones(7, 8), mesh, [S(0), R])
            torch.utils.swap_tensors(source, uneven)
            with self.assertRaisesRegex(
                ValueError, r"the source '0' is float32 of shape \(7, 8\).* and was float32 of"
            ):
                transfer.run()

    def test_a_second_run_at_the_same_time_is_an_error(self):
        """On each rank the other thread stands in the middle of a run; its values are right."""
        mesh = make_root(range(WORLD), (8,), ("dp",))
        whole = torch.arange(64.0).reshape(16, 4)
        source, target = [[cut(whole.clone(), mesh, [at])] for at in (S(0), R)]
        inside, go_on, original = threading.Event(), threading.Event(), Exchanges.run

        def waits(self, *given):
            inside.set()
            go_on.wait(20)
            original(self, *given)

        with torch_overlay.Transfer(source, target) as transfer, ThreadPoolExecutor(1) as pool:
            for step in range(3):
                inside.clear(), go_on.clear()
                source[0].to_local().copy_(source[0].to_local() * 2)
                with mock.patch.object(Exchanges, "run", waits):
                    first = pool.submit(transfer.run)
                    inside.wait(20)
                    for _ in range(2):
                        with self.assertRaisesRegex(RuntimeError, "is running, and runs go one at a time"):
                            transfer.run()
                    if step == 2:  # it waits for the run
                        threading.Timer(0.1, go_on.set).start()
                        transfer.close()
                    go_on.set()
                    first.result()
                self.assertEqual(target[0].to_local(), whole * 2 ** (step + 1))
            with self.assertRaisesRegex(RuntimeError, "closed"):
                transfer.run()


# Four hundred at night.
for first in range(0, 400, 20) if NIGHTLY else (0,):

    def check(self, seeds=range(first, first + (20 if NIGHTLY else 4))):
        for seed in seeds:
            self.check_changes(seed)

    setattr(ChangeCases, f"test_random_changes_{first:03}", check)
