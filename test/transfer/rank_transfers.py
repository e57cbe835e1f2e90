"""Transfers on real ranks: every byte right, in few exchanges, in place; and what is said when something is wrong."""

import itertools
import math
import pathlib
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

import torch_overlay
from mesh_ranks import SHUFFLED, WORLD, make_root
from on_device import DEVICE, from_host
from torch_overlay.errors import TransferFailed
from torch_overlay.rendezvous import watch
from torch_overlay.rendezvous.team import kept_group
from torch_overlay.transfers import exchanges, transfer_plan
from torch_overlay.transfers._planner.schedule import Large, Schedule
from torch_overlay.transfers.blocks import Buffers
from torch_overlay.transfers.exchanges import Exchanges
from transfer_twin import draw
from twins_tensor import rows
from width import NIGHTLY

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))

from benchmarks.allocations import allocated

R, S = Replicate(), Shard
TYPES = {
    1: ("uint8", "int8", "bool", "float8_e4m3fn"),
    2: ("bfloat16", "float16", "int16"),
    4: ("float32", "int32"),
    8: ("float64", "int64", "complex64"),
    16: ("complex128",),
}
FLOATS = ("bfloat16", "float32", "float16", "float64")
COMPLEX = ("complex64", "complex128")
WHOLE = ("uint8", "int32", "int8", "int64", "bool")
REDUCED = {"sum": (*FLOATS, *COMPLEX, *WHOLE), "avg": (*FLOATS, *COMPLEX), "max": (*FLOATS, *WHOLE)}  # with gloo


@from_host
def whole_of(tensor, number):
    """The whole tensor of a drawn one: any bits that its type has."""
    names = TYPES[tensor.itemsize]
    dtype = getattr(torch, names[number % len(names)])
    bits = torch.Generator().manual_seed(number * 1000 + math.prod(tensor.shape))
    data = torch.randint(
        0, 2 if dtype == torch.bool else 256, (math.prod(tensor.shape) * tensor.itemsize,), generator=bits
    )
    return data.to(torch.uint8).view(dtype).reshape(tensor.shape)


def with_pending(tensor, seed):
    """The same with a reduction pending on the source's axes that cut nothing, and a type that torch so reduces."""
    op = ("sum", "avg", "max")[seed % 3]
    placements = tuple(("P", op) if placement == ("R",) else placement for placement in tensor.source.placements)
    names = REDUCED[op]
    pending = replace(tensor, source=replace(tensor.source, placements=placements))
    return pending, getattr(torch, names[seed // 3 % len(names)])


def term_of(whole, number, dtype):
    """The whole numbers that are exact in all types, also when they are added up; of a sum of truths, some are none."""
    if dtype == torch.bool:
        return (whole >> number & 1).bool()
    found = (whole % 7 if dtype.itemsize < 4 else whole).add(number).to(dtype)
    return found * (1 + 2j) if dtype.is_complex else found


def terms_of(end, rank, whole, dtype):
    """This rank's term of a whole tensor, by its coordinates on the pending axes; and what the reduction makes."""
    pending = [axis for axis, placement in enumerate(end.placements) if placement[0] == "P"]
    own = sum(end.coordinate(rank)[axis] for axis in pending) if rank in end.ranks else 0
    every = [sum(at) for at in itertools.product(*[range(end.sizes[axis]) for axis in pending])]
    terms = torch.stack([term_of(whole, number, dtype) for number in every])
    op = next((placement[1] for placement in end.placements if placement[0] == "P"), "max")
    if not pending:
        total = terms[0]
    elif op == "max":
        total = terms.amax(0)
    else:
        total = terms.sum(0).to(dtype) if op == "sum" else terms.sum(0) / len(every)
    return term_of(whole, own, dtype), total


def placed(end, mesh, whole, rank, fill=None):
    """A DTensor that lies like this, cut by hand; with `fill`, of that instead, in the middle of something bigger."""
    local = whole.new_empty(0)
    if rank in end.ranks:
        local = whole
        for dim, indices in enumerate(rows(end.placements, whole.shape, end.sizes, end.coordinate(rank))):
            local = local.index_select(dim, torch.tensor(indices, dtype=torch.int64)) if whole.ndim else local
        local = local.clone()
        if fill is not None:
            bigger = whole.new_zeros([length + 2 for length in local.shape])
            for dim, length in enumerate(local.shape):
                bigger = bigger.narrow(dim, 1, length)
            local = bigger
    kinds = {
        "R": Replicate,
        "P": Partial,
        "S": Shard,
        "FS": lambda dim, factor: _StridedShard(dim, split_factor=factor),
        "SS": lambda dim, factor: _StridedShard(dim, split_factor=factor),
    }
    placements = [kinds[kind](*rest) for kind, *rest in end.placements]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )


def same_bits(one, other):
    return one.shape == other.shape and torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))


class Counted(TorchDispatchMode):
    """Counts the operations of a block, by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class TransferCases:
    """Cases for ``EightRanks``."""

    def check_random_transfers(self, seeds):
        """Disjoint, overlapping and equal ranks in any order; uneven, empty and strided shards; twelve types; packed or
        by themselves."""
        for seed in seeds:
            tensors = draw(70_000 + seed, lone=seed % 2 == 1)
            # A Transfer needs no groups of the meshes, and each would keep its threads.
            meshes = [
                DeviceMesh(DEVICE, torch.tensor(end.ranks).reshape(end.sizes), _init_backend=False)
                for end in (tensors[0].source, tensors[0].target)
            ]
            wholes = [whole_of(tensor, number) for number, tensor in enumerate(tensors)]
            pairs = list(zip(tensors, wholes, strict=True))
            source = [placed(t.source, meshes[0], whole, self.rank) for t, whole in pairs]
            target = [placed(t.target, meshes[1], whole, self.rank, fill=0) for t, whole in pairs]
            wanted = [placed(t.target, meshes[1], whole, self.rank).to_local() for t, whole in pairs]
            parts = [
                side if self.rank in end.ranks else None
                for side, end in ((source, tensors[0].source), (target, tensors[0].target))
            ]
            with (
                mock.patch.object(
                    exchanges, "LARGE_PIECES", (exchanges.LARGE_PIECES, Large(1, 40), Large(64, 1 << 20))[seed % 3]
                ),
                torch_overlay.Transfer(*parts, budget=(1 << 20, 2000)[seed % 2], keep=seed % 5 < 2) as transfer,
            ):
                for turn in range(1 + 2 * (seed % 5 < 2)):
                    for number, found in enumerate(target):
                        found.to_local().zero_()
                        if turn and (number + turn) % 3 == 0:  # what was kept for these is another tensor's
                            found._local_tensor = found.to_local().clone(memory_format=torch.preserve_format)
                            source[number]._local_tensor = source[number].to_local().clone()
                    transfer.run()
                self.assertTrue(transfer.staging <= transfer.budget)
            if self.rank in tensors[0].target.ranks:
                for number, (found, want) in enumerate(zip(target, wanted, strict=True)):
                    self.assertTrue(
                        same_bits(found.to_local(), want), f"seed {seed}, tensor {number}: {tensors[number]}"
                    )

    def check_random_reductions(self, seeds):
        """Some axes of the source have a sum, an average or a maximum pending, of eleven types, in a tree."""
        for seed in seeds:
            drawn = [with_pending(tensor, seed + n) for n, tensor in enumerate(draw(90_000 + seed, uneven=False))]
            tensors = [tensor for tensor, _ in drawn]
            ends = tensors[0].source, tensors[0].target
            meshes = [DeviceMesh(DEVICE, torch.tensor(end.ranks).reshape(end.sizes)) for end in ends]
            source, wanted = [], []
            for tensor, dtype in drawn:
                whole = torch.arange(math.prod(tensor.shape)).reshape(tensor.shape)
                term, total = terms_of(tensor.source, self.rank, whole, dtype)
                source.append(placed(tensor.source, meshes[0], term, self.rank))
                wanted.append(placed(tensor.target, meshes[1], total, self.rank))
            self.same_as_redistributed(seed, tensors, source, meshes[1], wanted)

    def same_as_redistributed(self, seed, tensors, source, mesh, wanted):
        """To the other mesh or, if they are equal, on one."""
        if self.rank in (*tensors[0].source.ranks, *tensors[0].target.ranks):
            placements = {f"{n}": tensor.placements for n, tensor in enumerate(wanted)}
            # Outside of a mesh, `from_local` can't be told that a tensor has no dims.
            tree = {f"{n}": tensor for n, tensor in enumerate(source) if tensors[n].shape}
            found = torch_overlay.redistribute(tree, mesh, placements, budget=(1 << 20, 2600)[seed % 2])
            for name, tensor in found.items():
                want = wanted[int(name)].to_local()
                same = torch.equal(tensor.to_local().reshape(-1), want.reshape(-1))
                self.assertTrue(same, f"seed {seed}: {tensors[int(name)]}")

    def test_what_differs_is_named_on_every_rank(self):
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))

        def tensor(*shape, dtype=torch.float32, placements=(Shard(0), Replicate())):
            return distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, placements, src_data_rank=None)

        good = {"a": tensor(8, 4), "b": [tensor(8)]}
        one = self.rank == 3
        wrong = [
            (good, {"a": tensor(8, 4)}, "the source has 'b.0', and the target doesn't"),
            (
                good,
                {"a": tensor(8, 5), "b": [tensor(8)]},
                "'a' has shape .8, 4. in the source and .8, 5. in the target[.]",
            ),
            (good, {"a": tensor(8, 2), "b": [tensor(8)]}, "if that is a part of it, say which with piece"),
            (good, {"a": tensor(8, 4), "b": [tensor(8)] if not one else None}, "and rank 3 doesn't have it"),
            (
                good,
                {"a": tensor(8, 4, placements=[Shard(int(one)), Replicate()]), "b": [tensor(8)]},
                "'a' is .* on ranks 0, 1, 2, 4, 5, 6, 7, and .* on rank 3",
            ),
            (
                good,
                {"a": tensor(8, 4), "b": [0.5 if one else tensor(8)]},
                "rank 3: The target 'b.0' is a float",
            ),
        ]
        for source, target, message in wrong:
            with self.assertRaisesRegex(ValueError, message):
                torch_overlay.Transfer(source, target)
        with torch_overlay.Transfer(good, good) as transfer:
            transfer.run()

    def test_who_is_missing_is_named(self):
        """Within the group's timeout; and who comes too late is told so."""
        group = dist.new_group(timeout=timedelta(seconds=1))
        source = [
            distribute_tensor(torch.zeros(8), make_root(range(WORLD), (8,), ("dp",)), [Shard(0)], src_data_rank=None)
        ]
        store = dist.PrefixStore("test", distributed_c10d._get_default_store())
        if self.rank == 5:
            store.wait(["they gave up"])
        said = "needs ranks 0-7, and rank 5 didn't come within 1 s"
        if self.rank == 5:
            said = "needs ranks 0-7. The first of them waited 1 s for rank 5, and gave up before rank 5 came"
        with self.assertRaisesRegex(RuntimeError, said) as raised:
            torch_overlay.Transfer(source, source, group=group)
        self.assertIsNone(raised.exception.__cause__ or raised.exception.__context__)
        store.set("they gave up", "")

    def test_a_slice_of_a_sharded_dim_is_refused_since_it_is_a_copy(self):
        """On either side, with or without autograd; a part that shares the parameter's memory is taken."""
        mesh = make_root(range(WORLD), (8,), ("dp",))
        for side in ("source", "target"):
            weight = torch.nn.Parameter(distribute_tensor(torch.ones(16, 4), mesh, [S(0)], src_data_rank=None))
            for part in (weight[:8], weight.detach()[:8], weight.chunk(2)[1]):
                other = torch.zeros(8, 4)
                trees = ([part], [other]) if side == "source" else ([other], [part])
                with self.assertRaisesRegex(ValueError, f"The {side} '0' is a part of another DTensor, and has memory"):
                    torch_overlay.Transfer(*trees)
        columns = weight[:, :2]
        with torch_overlay.Transfer([torch.full((16, 2), 3.0)], [columns]) as transfer:
            transfer.run()
        want = torch.tensor([3.0, 3.0, 1.0, 1.0]).expand(2, 4)
        self.assertTrue(torch.equal(weight.to_local(), want))

    def test_a_rank_that_left_is_named_also_to_one_that_comes_later(self):
        """Whether it closed its Transfer or its program ended; and the later one hears that this run failed. From the
        next call on it is one that failed before."""
        mesh = make_root(range(WORLD), (8,), ("dp",))
        source = [distribute_tensor(torch.ones(8), mesh, [S(0)], src_data_rank=None)]
        target = [distribute_tensor(torch.zeros(8), mesh, [R], src_data_rank=None)]
        for leave, does, gone in (("close", "it closed this Transfer", ()), ("_end", "its program ended", (5,))):
            timeout = timedelta(seconds=4)
            transfer = torch_overlay.Transfer(source, target, timeout=timeout)
            transfer.run()
            dist.barrier()
            if self.rank == 5:
                getattr(transfer, leave)()
                dist.barrier()
                dist.barrier()
                continue
            if self.rank == 3:  # begins its run when the others have raised
                dist.barrier()
            advice = f"Close it, and make another one{f', with gone={gone}' if gone else ''}."
            said = f"run 2, .*: rank 5 didn't come: {does} after run 1. {re.escape(advice)}$"
            with self.assertRaisesRegex(TransferFailed, f"failed, and no target was written: {said}") as raised:
                transfer.run()
            self.assertEqual((raised.exception.gone, raised.exception.is_written), (gone, False))
            with self.assertRaisesRegex(TransferFailed, f"failed before, and can't run again: {said}") as raised:
                transfer.run()
            self.assertEqual(raised.exception.gone, gone)
            if self.rank != 3:
                dist.barrier()
            transfer.close()
            dist.barrier()

    def test_a_rank_that_plans_for_too_long_is_named(self):
        """When a Transfer is made, and in the first run of some of its names."""
        source, target = {"a": torch.ones(8)} if self.rank == 0 else None, {"a": torch.zeros(8)}
        plan, slow = Schedule.of, mock.Mock()
        slow.of = lambda *given: (time.sleep(6 if self.rank == 5 else 0), plan(*given))[1]
        made = torch_overlay.Transfer(source, target, timeout=timedelta(seconds=2))
        said = r"rank 5 didn't come: it is planning, for \d s"
        seconds = timedelta(seconds=2)  # for making it, more as a rule
        with mock.patch.object(transfer_plan, "Schedule", slow), mock.patch.object(watch, "CONNECT", seconds):
            with self.assertRaisesRegex(TransferFailed, f"can't be made: making it.*{said}"):
                torch_overlay.Transfer(source, target, timeout=timedelta(seconds=2))
            dist.barrier()
            with self.assertRaisesRegex(TransferFailed, f"no target was written: run 1, .*{said}"):
                made.run(only=["a"])
        made.close()

    def test_large_pieces_are_not_packed(self):
        """Whether they lie in one stretch of memory or not, on either side; in exchanges like the small ones, and on
        the device of the tensors, whatever the default is."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        wholes = [torch.arange(1 << 20).reshape(1 << n, -1) + n for n in (8, 10, 12)]
        for before, after in (((S(0), S(1)), (R, R)), ((S(0), R), (S(1), S(1))), ((R, S(1)), (S(0), S(0)))):
            source = [distribute_tensor(whole, mesh, before, src_data_rank=None) for whole in wholes]
            target = [distribute_tensor(whole * 0, mesh, after, src_data_rank=None) for whole in wholes]
            for budget in (1 << 28, 1 << 24):
                with torch_overlay.Transfer(source, target, budget=budget) as transfer, torch.device("meta"):
                    (memory,) = allocated([transfer.run])
                self.assertTrue(memory.peak < 1 << 24 and memory.kept == 0, (memory, transfer.staging))
                for found, whole in zip(target, wholes, strict=True):
                    want = distribute_tensor(whole, mesh, after, src_data_rank=None)
                    self.assertTrue(torch.equal(found.to_local(), want.to_local()))
                    found.to_local().zero_()

    def test_buffers_are_kept_if_asked(self):
        """All that a run of one exchange needs, within the budget; nothing after `close`."""
        mesh = make_root(range(WORLD), (8,), ("dp",))
        wholes = [torch.arange(1 << 17).reshape(1 << n, -1) + n for n in (7, 8, 9, 10)]
        source = [distribute_tensor(whole, mesh, [S(0)], src_data_rank=None) for whole in wholes]
        target = [distribute_tensor(whole * 0, mesh, [S(1)], src_data_rank=None) for whole in wholes]
        for budget, least in ((1 << 28, 1), (200_000, 5)):
            transfer = torch_overlay.Transfer(source, target, budget=budget, keep=True)
            self.assertTrue(transfer.exchanges >= least and transfer.staging <= budget)
            buffers, own, there = transfer._state.buffers, Buffers.take, []

            def take(self, size, own=own, there=there):
                found = own(self, size)
                there.append(self._used + self._idle)
                return found

            with mock.patch.object(Buffers, "take", take):
                (again,) = allocated([transfer.run])
            self.assertTrue(max(there) <= budget, (max(there), budget))
            if least == 1:  # else they differ in length, and what is kept makes room for what is new
                self.assertTrue(again.peak < transfer.staging // 2, (again, transfer.staging))
            kept = sum(map(len, buffers.kept))
            self.assertTrue(transfer.staging // 2 < kept <= budget, (kept, transfer.staging))
            self.assertEqual(buffers._used, 0)
            if budget > 1 << 20:  # the copies have the rest of the budget
                transfer.run(async_op=True, snapshot=True).wait()
                self.assertTrue(sum(map(len, buffers.kept)) <= transfer.staging)
            transfer.close()
            self.assertEqual(buffers.kept, [])
            for found, whole in zip(target, wholes, strict=True):
                self.assertTrue(torch.equal(found.to_local(), whole.chunk(WORLD, 1)[self.rank]))
                found.to_local().zero_()

    def test_a_run_copies_all_its_blocks_by_one_call_a_direction(self):
        """However many tensors there are, of whatever types and strides: what is sent, what comes, what is in place.
        With keep=True the next run makes no view."""
        mesh = make_root(range(WORLD), (8,), ("dp",))
        types = ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.int64, torch.int64))
        for count in (2, 9):
            source, target, wanted = [], [], []
            for number in range(count):
                before, after = types[number % 3]
                whole = (torch.arange(16 * 24).reshape(16, 24) + number).to(before)
                at, to = (S(0), S(0 if number % 2 else 1))
                source.append(distribute_tensor(whole, mesh, [at], src_data_rank=None))
                target.append(distribute_tensor(whole.to(after) * 0, mesh, [to], src_data_rank=None))
                wanted.append(distribute_tensor(whole.to(after), mesh, [to], src_data_rank=None))
            for keep in (False, True):
                with torch_overlay.Transfer(source, target, keep=keep) as transfer:
                    transfer.run()
                    for each in target:
                        each.to_local().zero_()
                    with Counted() as counted:
                        transfer.run()
                if DEVICE == "cpu":
                    self.assertEqual(counted.names["_foreach_copy_"], 3)
                    if keep:
                        views = {name: counted.names[name] for name in ("as_strided", "copy_", "view", "slice")}
                        self.assertTrue(sum(views.values()) < 20, (count, views))
                for found, want in zip(target, wanted, strict=True):
                    self.assertTrue(same_bits(found.to_local(), want.to_local()))

    def test_kept_views_follow_the_tensors(self):
        """Values that change in place, another tensor, memory that is let go and taken again; and what was replaced is
        free after the next run, or after forget()."""
        mesh = make_root(range(WORLD), (8,), ("dp",))
        whole = torch.arange(64.0).reshape(8, 8)
        source, kept = (distribute_tensor(whole, mesh, [S(0)], src_data_rank=None) for _ in range(2))
        target, other = (distribute_tensor(whole * 0, mesh, [S(1)], src_data_rank=None) for _ in range(2))
        with torch_overlay.Transfer([source, kept], [target, other], keep=True) as transfer:

            def run(change, expected):
                change()
                transfer.run()
                for found, want in zip((target, other), expected, strict=True):
                    self.assertTrue(torch.equal(found.to_local(), want.chunk(8, 1)[self.rank]), change)

            def replace():
                target._local_tensor = torch.zeros_like(target.to_local())
                source._local_tensor = source.to_local() + 1

            def offload():
                storage, host = source.to_local().untyped_storage(), source.to_local().clone()
                size = storage.nbytes()
                storage.resize_(0)
                between = torch.ones(size // 4)  # likely to get the memory
                storage.resize_(size)
                source.to_local().copy_(host)
                self.assertEqual(between.sum(), size // 4)

            run(lambda: None, (whole, whole))
            run(lambda: source.to_local().add_(1), (whole + 1, whole))
            before = [each.to_local().untyped_storage()._weak_ref() for each in (source, target)]
            run(replace, (whole + 2, whole))
            self.assertTrue(all(map(torch.UntypedStorage._expired, before)), "let go of at the next run")
            run(offload, (whole + 2, whole))
            with torch.no_grad(), torch.inference_mode():
                run(lambda: None, (whole + 2, whole))
            run(lambda: kept.to_local().mul_(2), (whole + 2, whole * 2))
            (before,) = [target.to_local().untyped_storage()._weak_ref()]
            replace()
            self.assertFalse(torch.UntypedStorage._expired(before), "the view of the last run")
            transfer.forget()
            self.assertTrue(torch.UntypedStorage._expired(before))
            run(lambda: None, (whole + 3, whole * 2))
        with self.assertRaisesRegex(
            ValueError,
            "the same keep=; got keep=True on ranks 1-7, and keep=False on rank 0|keep=False on rank 0, and keep=True",
        ):
            torch_overlay.Transfer([source], [target], keep=self.rank > 0)

    def test_a_rank_that_fails_in_the_middle(self):
        """The others hear of it within the timeout, and all of them whether targets were written: whole before, whole
        after, or said to be torn. A large piece of the first exchange may be written as soon as that begins."""
        mesh = make_root(range(WORLD), (8,), ("dp",))
        before, torn = "no target was written", "some targets are new and others not"
        for what, number, elements, budget, own, said in (
            ("_start", 0, 1 << 14, 1 << 15, before, before),
            ("_start", 2, 1 << 14, 1 << 15, torn, torn),
            ("_start", 0, 1 << 21, 1 << 28, before, torn),
            ("_land", -1, 1 << 14, 1 << 15, torn, None),
        ):
            source = [distribute_tensor(torch.ones(elements), mesh, [Shard(0)], src_data_rank=None)]
            group = dist.new_group(timeout=timedelta(seconds=1))
            target = [distribute_tensor(torch.zeros(elements), mesh, [Replicate()], src_data_rank=None)]
            transfer = torch_overlay.Transfer(source, target, budget=budget, group=group)
            self.assertEqual(transfer.exchanges > 3, elements == 1 << 14)
            original, calls = getattr(Exchanges, what), itertools.count()

            def fails(self, *given, number=number % transfer.exchanges, original=original, calls=calls):
                if next(calls) == number:
                    raise ValueError("a fault on this rank")
                return original(self, *given)

            own = f"over ranks 0-7 failed, and {own}.* a fault on this rank"
            if self.rank == 6:
                with mock.patch.object(Exchanges, what, fails), self.assertRaisesRegex(RuntimeError, own):
                    transfer.run()
            elif said is None:
                transfer.run()
                self.assertEqual(target[0].to_local(), torch.ones(elements))
            else:
                with self.assertRaisesRegex(RuntimeError, f"over ranks 0-7 failed, and {said}"):
                    transfer.run()
            if said is before:
                self.assertEqual(target[0].to_local(), torch.zeros(elements))
            dist.barrier()
            transfer.close()

    def test_a_rank_that_holds_something_else_is_named(self):
        """With its tensor, on every rank within the timeout: by a Transfer, by a tree on one mesh, and to another."""
        mesh, other = make_root(range(WORLD), (4, 2), ("dp", "tp")), make_root(SHUFFLED, (8,), ("ep",))
        rows = 3 if self.rank == 5 else 2
        good = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Replicate()], run_check=False)
        bad = DTensor.from_local(
            torch.ones(rows, 4), mesh, good.placements, run_check=False, shape=(8, 4), stride=(4, 1)
        )
        tree = {"good": good, "bad": {"w": bad}}
        said = r"'bad.w' has shape .3, 4. on rank 5, where .Shard.dim=0., Replicate... say .2, 4."
        with self.assertRaisesRegex(ValueError, f"don't fit: rank 5: {said}"):
            torch_overlay.Transfer(tree, tree)
        calls = (
            lambda: torch_overlay.redistribute(tree, placements=[Replicate(), Replicate()]),
            lambda: torch_overlay.redistribute(tree, other, Shard(0)),
        )
        for group in (mesh.get_group("dp"), kept_group(range(WORLD))):
            distributed_c10d._set_pg_timeout(timedelta(seconds=4), group)
        store = dist.PrefixStore("test", distributed_c10d._get_default_store())
        for number, call in enumerate(calls):
            # Ranks of the other tp coordinate aren't in its group on one mesh, and have what they want.
            if number == 0 and self.rank % 2 == 0:
                call()
            else:
                kind = ValueError if self.rank == 5 else RuntimeError
                with self.assertRaisesRegex(kind, f"Nothing was redistributed: {said}"):
                    call()
            store.set(f"{number} {self.rank}", "")
            store.wait([f"{number} {rank}" for rank in range(WORLD)], timedelta(seconds=20))

    def test_some_ranks_of_the_world_alone(self):
        """Without the others, who make one of their own meanwhile."""
        half = [rank for rank in range(WORLD) if rank // 4 == self.rank // 4]
        mesh = make_root(range(WORLD), (2, 4), ("a", "b"))["b"]
        source = [distribute_tensor(torch.arange(8.0) + half[0], mesh, [Shard(0)], src_data_rank=None)]
        target = [distribute_tensor(torch.zeros(8), mesh, [Replicate()], src_data_rank=None)]
        for group in (half, mesh.get_group()):
            with torch_overlay.Transfer(source, target, group=group) as transfer:
                transfer.run()
            self.assertEqual(target[0].to_local(), torch.arange(8.0) + half[0])
        with self.assertRaisesRegex(ValueError, f"can't be made by rank {self.rank}"):
            torch_overlay.Transfer(source, target, group=[rank for rank in range(WORLD) if rank not in half])

    def test_a_budget_that_is_too_small_is_an_error_everywhere(self):
        mesh = make_root(range(WORLD), (8,), ("dp",))
        source = [distribute_tensor(torch.zeros(800), mesh, [Shard(0)], src_data_rank=None)]
        target = [distribute_tensor(torch.zeros(800), mesh, [Replicate()], src_data_rank=None)]
        mine, own = torch.full((64,), float(self.rank)), f"w{self.rank}"
        overwritten = {own: mine}, {own: torch.zeros(64), **({"w4": mine} if self.rank == 3 else {})}
        for sides, changes, words in (
            ((source, target), False, "budget of 100 bytes is too small"),
            (
                (source, target),
                True,
                "changes= whole messages get two thirds of 100 bytes. A budget of 66 bytes is too",
            ),
            (
                overwritten,
                False,
                "copies 256 bytes before it writes; the budget of 100 bytes has no"
                if self.rank == 3
                else "for rank 3[. ]",
            ),
        ):
            with self.assertRaisesRegex(ValueError, words) as caught:
                torch_overlay.Transfer(*sides, budget=100, changes=changes, strict=False)
            enough = int(re.search(r"Give at least (\d+) bytes\.$", str(caught.exception))[1])
            with torch_overlay.Transfer(*sides, budget=enough, changes=changes, strict=False) as transfer:
                transfer.run()


# Four hundred at night, each part in a world of its own, since meshes keep their groups' threads as long as it lives.
for first in range(0, 400, 20) if NIGHTLY else (0,):

    def check(self, seeds=range(first, first + (20 if NIGHTLY else 8))):
        self.check_random_reductions(seeds)

    setattr(TransferCases, f"test_random_reductions_{first:03}", check)

# Two thousand at night, in parts that each stay within a test's time limit.
for first in range(0, 2000, 100) if NIGHTLY else (0,):

    def check(self, seeds=range(first, first + (100 if NIGHTLY else 12))):
        self.check_random_transfers(seeds)

    setattr(TransferCases, f"test_random_transfers_{first:04}", check)
