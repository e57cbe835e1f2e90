"""Compiled code that meets other sizes: each rank sees its local shapes alone, and all must compile anew together."""

import datetime
import itertools
import random

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mesh_harness import needs_overlay
from mesh_ranks import WORLD, make_root
from width import NIGHTLY

SEQUENCES = 16 if NIGHTLY else 1  # on each of the meshes that run beside one another, some 5 s each


def fitting(length, parts, most):
    """Another length, mostly one of those beside which some ranks hold as much as before, and others don't."""
    return random.choice((length - 1, length + 1, length - parts, length + parts, random.randint(1, most))) % most


class Calls:
    """What is compiled, and the shapes with which it is called in turn."""

    def __init__(self, seed, sizes):
        random.seed(seed)
        kinds = (Shard(0), Shard(1), Replicate())
        self.source = [random.choice(kinds[:2]), *random.choices(kinds, k=len(sizes) - 1)]
        random.shuffle(self.source)
        self.target = random.choices(kinds, k=len(sizes))
        self.whole = random.random() < 0.25
        self.dynamic = random.choice((None, None, True, False))
        self.learns = random.random() < 0.3
        self.shapes, parts = [[8, 4 if random.random() < 0.5 else 8]], torch.Size(sizes).numel()
        for _ in range(random.randint(1, 4)):
            rows, columns = self.shapes[-1]
            if random.random() < 0.8:
                rows = fitting(rows, parts, 17)
            if random.random() < 0.3:
                columns = fitting(columns, parts, 9)
            self.shapes.append([rows, columns])

    def __repr__(self):
        end = "full_tensor" if self.whole else self.target
        return f"{self.source} to {end}, {self.shapes}, dynamic={self.dynamic}, gradients: {self.learns}"

    def function(self):
        torch._dynamo.reset()

        def moved(given):
            return (given * 2).full_tensor() if self.whole else (given * 2).redistribute(placements=self.target)

        return torch.compile(moved, backend="aot_eager", dynamic=self.dynamic, fullgraph=True)

    def problem(self, mesh):
        """What differs from the whole tensor, cut by torch; None if nothing does."""
        fast = self.function()
        for shape in self.shapes:
            whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
            given = distribute_tensor(whole, mesh, self.source, src_data_rank=None).requires_grad_(self.learns)
            found, target = fast(given), [Replicate()] * mesh.ndim if self.whole else self.target
            if found.shape != whole.shape:
                return f"{tuple(found.shape)} of {shape} in {self}"
            want = distribute_tensor(whole * 2, mesh, target, src_data_rank=None).to_local()
            local = found.to_local() if isinstance(found, DTensor) else found
            if not torch.equal(local, want):
                return f"{local.tolist()} and not {want.tolist()} of {shape} in {self}"
            if self.learns:
                found.backward(torch.ones_like(found))
                if not torch.equal(given.grad.to_local(), torch.full_like(given.to_local(), 2.0)):
                    return f"a gradient of {given.grad.to_local().tolist()} of {shape} in {self}"
        return None


class ResizedCases:
    """Cases for ``EightRanks``."""

    def check_calls(self, root, axes):
        """Each copy of these axes runs sequences of its own, beside the others."""
        mesh, all_ranks = root[axes], dist.new_group(timeout=datetime.timedelta(seconds=200))
        here = int(mesh.mesh.min())  # alike on the ranks of a copy, and nowhere else
        for number in range(SEQUENCES):
            self.assertIsNone(Calls(f"{here} {axes} {number}", mesh.shape).problem(mesh))
            dist.barrier(all_ranks)  # a copy that is far ahead would wait for the others at the end until its timeout

    @needs_overlay  # stock hangs, or gives the rows that there were before
    def test_a_shorter_last_batch(self):
        """8 rows over two ranks, then 7: rank 0 holds 4 both times, and would run what it compiled for 8."""
        root = make_root(range(WORLD), (4, 2), ("apart", "a"))
        rows, ends = ((8, 7), (8, 12, 9)), (Shard(1), "full_tensor")
        lengths, end = list(itertools.product(rows, ends))[root.get_local_rank("apart")]  # one for each pair
        calls = Calls(0, (2,))
        calls.source, calls.target, calls.whole = [Shard(0)], [end], end == "full_tensor"
        calls.dynamic, calls.learns, calls.shapes = None, False, [[length, 4] for length in lengths]
        self.assertIsNone(calls.problem(root["a"]))

    @needs_overlay
    def test_sizes_that_change_between_calls(self):
        """Over two axes of two; at night also over one of two, and over one of four."""
        if NIGHTLY:
            self.check_calls(make_root(range(WORLD), (4, 2), ("apart", "a")), ("a",))
            self.check_calls(make_root(range(WORLD), (2, 4), ("apart", "a")), ("a",))
        self.check_calls(make_root(range(WORLD), (2, 2, 2), ("apart", "a", "b")), ("a", "b"))
