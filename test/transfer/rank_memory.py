"""Sources and targets that share memory on a rank, on real ranks: what sources held before the run is what comes."""

import gc
import math
import random
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_overlay
from mesh_ranks import WORLD, make_root
from on_device import DEVICE
from rank_pieces import Side
from rank_transfers import FLOATS
from rank_weights import any_bits, same
from torch_overlay.transfers import exchanges, run
from torch_overlay.transfers._planner.schedule import Large
from transfer_twin import draw
from width import NIGHTLY

piece = torch_overlay.piece
STORAGE = 1 << 16  # bytes, in which all tensors of a rank lie


class Storage:
    """One stretch of memory in which views are placed, those of one side without sharing a byte.

    slots: where the views of the first side lie: (bytes, offset, shape, strides, dtype).
    """

    def __init__(self, rng):
        self.rng, self.data, self.slots, self.at = rng, torch.zeros(STORAGE, dtype=torch.uint8, device=DEVICE), [], 0

    def second_side(self):
        """Begin again somewhere near the beginning; slots of the first side may be taken again, each once."""
        self.at, self.free = self.rng.choice((0, 0, 8, 24, 200)), list(self.slots)
        self.rng.shuffle(self.free)
        self.taken = []
        return self

    def view(self, like):
        """Memory for a tensor like this one."""
        size, shape = like.dtype.itemsize, tuple(like.shape)
        if hasattr(self, "free") and self.rng.random() < 0.5:
            for slot in self.free:
                offset, end, was, strides, dtype = slot
                if was == shape and dtype == like.dtype and not any(o < end and offset < e for o, e in self.taken):
                    self.free.remove(slot)
                    self.taken.append((offset, end))
                    return self.data.view(dtype).as_strided(shape, strides, offset // size)
        while True:
            self.at += -self.at % 8 + self.rng.choice((0, 0, 0, 8, 40))
            lengths = list(shape)
            if like.ndim and self.rng.random() < 0.3:  # room between its rows
                lengths[-1] += self.rng.choice((1, 2))
            strides = [math.prod(lengths[dim + 1 :]) for dim in range(like.ndim)]
            if like.ndim == 2 and self.rng.random() < 0.3:
                strides = [1, max(lengths[0], 1)]
            end = self.at + size * max(math.prod([max(n, 1) for n in lengths]), 1)
            if not any(o < end and self.at < e for o, e in getattr(self, "taken", ())):
                break
            self.at += 64
        offset, self.at = self.at, end
        if not hasattr(self, "free"):
            self.slots.append((offset, end, shape, tuple(strides), like.dtype))
        else:
            self.taken.append((offset, end))
        return self.data.view(like.dtype).as_strided(shape, strides, offset // size)

    def move(self, side, made, parts, boxes, shape):
        """What a rank gives, and its tensors, in this memory; with their values where `boxes` are those of a source."""
        views = [self.view(part).copy_(part) if boxes is not None else self.view(part) for part in parts]
        if side.kind == "mesh":
            made._local_tensor = views[0]
        elif side.kind == "plain":
            made = views[0]
        else:
            starts = [each.start for each in (made if isinstance(made, tuple) else (made,))]
            made = tuple(piece(view, shape, start) for view, start in zip(views, starts, strict=True))
        return made, views


class MemoryCases:
    """Cases for ``EightRanks``."""

    def check_shared_storage(self, seeds):
        """Whatever lies where: all values are right, or all ranks hear that the budget is too small for the copies."""
        copied = refused = 0
        for seed in seeds:
            rng = random.Random(seed)
            drawn = draw(500_000 + seed)
            ends = [drawn[0].source, drawn[0].target]
            meshes = [DeviceMesh(DEVICE, torch.tensor(e.ranks).reshape(e.sizes), _init_backend=False) for e in ends]
            source, target, checks, given = {}, {}, [], []
            own = random.Random(seed * WORLD + self.rank)
            storage = Storage(own)
            for number, tensor in enumerate(drawn):
                before = getattr(torch, rng.choice(FLOATS))
                after = before if rng.random() < 0.7 else getattr(torch, rng.choice(FLOATS))
                sides = []
                for place, (end, mesh) in enumerate(zip((tensor.source, tensor.target), meshes, strict=True)):
                    side = Side(rng, tensor.shape, end, mesh, not place)
                    if len(side.boxes) == 0:
                        side = Side(rng, tensor.shape, end, mesh, True)
                    sides.append(side)
                held, wanted = (side.elements(tensor.shape) for side in sides)
                if {e for parts in held.values() for part in parts for e in part} != {*range(math.prod(tensor.shape))}:
                    continue
                if not any(wanted.values()):
                    continue
                given.append((f"t{number}", sides, any_bits(tensor.shape, before, seed * 10 + number), after, wanted))
            if not given:
                continue
            for name, sides, whole, _, _ in given:
                made, parts = sides[0].make(whole, self.rank)
                if made is not None:
                    source[name], _ = storage.move(sides[0], made, parts, True, tuple(whole.shape))
            storage.second_side()
            for name, sides, whole, after, wanted in given:
                made, parts = sides[1].make(whole.to(after), self.rank, fill=0)
                views = []
                if made is not None:
                    target[name], views = storage.move(sides[1], made, parts, None, tuple(whole.shape))
                checks.append((name, views, wanted.get(self.rank, []), whole.to(after).flatten()))
            with mock.patch.object(
                exchanges, "LARGE_PIECES", (exchanges.LARGE_PIECES, Large(1, 40), Large(64, 1 << 20))[seed % 3]
            ):
                try:
                    transfer = torch_overlay.Transfer(source, target, budget=(1 << 20, 4000)[seed % 4 == 3])
                except ValueError as error:
                    self.assertIn("budget of", str(error))
                    refused += 1
                    transfer = torch_overlay.Transfer(source, target)
                with transfer:
                    work = transfer.run(async_op=seed % 5 == 1, snapshot=seed % 7 == 2)
                    if work is not None:
                        work.wait()
                    seen = transfer._state.seen
                    copied += bool(seen is not None and seen[2].overwritten)
            for name, views, parts, values in checks:
                for view, elements in zip(views, parts, strict=True):
                    want = values[torch.tensor(elements, dtype=torch.int64)].reshape(view.shape)
                    self.assertTrue(same(view, want), f"seed {seed}, {name}")
        return copied, refused

    def test_random_sources_and_targets_in_one_storage(self):
        copied, _ = self.check_shared_storage(range(2_000 if NIGHTLY else 40))
        self.assertTrue(copied > 5, copied)

    def test_experts_change_places_in_place(self):
        """Four a rank, permuted over all ranks; those that stay aren't copied, so that a small budget does for few."""
        every, rows = 4 * WORLD, 64
        full = any_bits((every, rows, 16), torch.float32, 1)
        for moved in (every, 2):
            order = [*range(every)]
            random.Random(moved).shuffle(order)
            if moved == 2:
                order = [*range(every)]
                order[0], order[5] = 5, 0
            first = 4 * self.rank
            w = full[first : first + 4].clone()
            source, target = (
                {"w": tuple(piece(w[i : i + 1], full.shape, (at, 0, 0)) for i, at in enumerate(places))}
                for places in (range(first, first + 4), order[first : first + 4])
            )
            with torch_overlay.Transfer(source, target, budget=w.nbytes * (4 if moved > 2 else 1)) as transfer:
                transfer.run()
            self.assertTrue(same(w, full[order[first : first + 4]]), f"{moved} moved")

    def test_a_storage_that_changes_its_cut(self):
        """From rows to columns where they are; the next run finds the tensors elsewhere, and shares nothing."""
        mesh = make_root(range(WORLD), (WORLD,), ("dp",))
        whole = any_bits((64, 64), torch.float32, 2)
        flat = whole[8 * self.rank : 8 * self.rank + 8].clone().flatten()
        source = DTensor.from_local(flat.view(8, 64), mesh, [Shard(0)], run_check=False)
        target = DTensor.from_local(flat.view(64, 8), mesh, [Shard(1)], run_check=False)
        want = whole[:, 8 * self.rank : 8 * self.rank + 8]
        with torch_overlay.Transfer([source], [target]) as transfer:
            transfer.run()
            self.assertTrue(same(flat.view(64, 8), want))
            source._local_tensor = whole[8 * self.rank : 8 * self.rank + 8].clone()
            flat.zero_()
            transfer.run()
            self.assertEqual(transfer._state.seen[2].overwritten, {})
            self.assertTrue(same(flat.view(64, 8), want))
            source._local_tensor = flat.view(8, 64).copy_(whole[8 * self.rank : 8 * self.rank + 8])
            transfer.run()
            self.assertTrue(same(flat.view(64, 8), want))

    def test_a_gather_in_place_copies_nothing(self):
        """Each rank's shard is the part of the whole tensor that it has: nothing of it is written."""
        mesh = make_root(range(WORLD), (WORLD,), ("dp",))
        want = any_bits((24, 6), torch.bfloat16, 3)
        whole = torch.zeros_like(want)
        own = whole[3 * self.rank : 3 * self.rank + 3].copy_(want[3 * self.rank : 3 * self.rank + 3])
        source = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        with torch_overlay.Transfer([source], [DTensor.from_local(whole, mesh, [Replicate()], run_check=False)]) as one:
            one.run()
            self.assertEqual(one._state.seen[2].overwritten, {})
        self.assertTrue(same(whole, want))

    def test_copies_that_no_budget_has_room_for(self):
        """Where that is so when it is made; and after a bind, before anything is sent. The same words on all ranks."""
        mine = torch.full((64, 64), float(self.rank))
        names = [f"w{(self.rank + step) % WORLD}" for step in range(2)]
        said = r"copies 16384 bytes before it writes; the budget of 16384 bytes has no room|A budget of .* too small"
        with self.assertRaisesRegex(ValueError, said):
            torch_overlay.Transfer({names[0]: mine}, {names[1]: mine}, budget=mine.nbytes)
        with torch_overlay.Transfer({names[0]: mine}, {names[1]: mine.clone()}, budget=mine.nbytes) as transfer:
            if self.rank == 2:
                transfer.bind(target={names[1]: mine})
            words = f"rank 2: copying this rank's sources that its targets overwrite takes {mine.nbytes} bytes, and"
            with self.assertRaisesRegex(ValueError, words):
                transfer.run()

    def test_tied_targets(self):
        """One block with two names takes what is one value at the source, too, by whatever layout; else it is refused
        on all ranks. So is whatever shares memory in another way."""
        mesh = make_root(range(4), (4,), ("dp",))
        whole, other = any_bits((8, 6), torch.float32, 4), any_bits((8, 6), torch.float32, 5)
        block = torch.zeros(9, 6)

        def sides(head, head_target, placement=Shard(0)):
            if self.rank < 4:
                embed = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
                return {"embed": embed, "head": distribute_tensor(head, mesh, [placement], src_data_rank=None)}, None
            return None, {"embed": block[:8], "head": head_target}

        for changes in (False, True):
            with torch_overlay.Transfer(*sides(whole, block[:8]), changes=changes) as transfer:
                transfer.run()
                self.assertTrue(self.rank < 4 or same(block[:8], whole))
                source, _ = sides(other, block)
                if self.rank < 4:
                    transfer.bind(source=source)
                for check in (True, False):  # else the one that comes last would win
                    with self.assertRaisesRegex(ValueError, "'embed' and 'head' are one block.*different values"):
                        transfer.run(check=check)
                transfer.run(only=["embed"])
                if self.rank < 4:  # tied at the source, too: nothing to compare
                    transfer.bind(source={"embed": source["head"], "head": source["head"]})
                with mock.patch.object(run, "replica_problems_now", side_effect=AssertionError):
                    transfer.run()
                self.assertTrue(self.rank < 4 or same(block[:8], other))
        for given, said in (
            (sides(other, block[:8]), "'embed' and 'head' are one block of memory.*have different values"),
            (sides(other, block[:8], Shard(1)), "'embed' and 'head' are one block of memory.*have different values"),
            (sides(whole, block[1:]), "ranks 4-7: the targets 'embed' and 'head' share memory, and aren't one block"),
        ):
            with self.assertRaisesRegex(ValueError, said):
                torch_overlay.Transfer(*given)
        # Sources that are cut in different ways are compared by the boxes that both have.
        for cut, tree in ((Shard(1), None), (Replicate(), None), (None, piece(whole[2:6], (8, 6), (2, 0)))):
            source, target = sides(whole.clone(), block[:8], cut or Shard(0))
            if tree is not None and self.rank < 4:
                source["head"] = (tree, piece(whole[:2], (8, 6), (0, 0)), piece(whole[6:].clone(), (8, 6), (6, 0)))
            with torch_overlay.Transfer(source, target) as transfer:
                block.zero_()
                transfer.run()
                self.assertTrue(self.rank < 4 or same(block[:8], whole))
                if self.rank == 1:
                    local = source["head"][2]._local_tensor if tree is not None else source["head"].to_local()
                    local.view(-1).view(torch.int32)[-1] ^= 1
                with self.assertRaisesRegex(ValueError, "have different values|with one value on|has one value on"):
                    transfer.run(check=tree is not None)
        with torch_overlay.Transfer(*sides(whole, torch.zeros(8, 6))) as transfer:
            if self.rank == 5:
                with self.assertRaisesRegex(ValueError, "became one block of memory .* Nothing was bound"):
                    transfer.bind(target={"embed": block[:8], "head": block[:8]})
            transfer.run()

    def test_a_run_counts_as_a_change_of_its_targets(self):
        """Backward of what was computed before raises, as after copy_; what isn't written may be used on."""
        mesh = make_root(range(WORLD), (WORLD,), ("dp",))
        held = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
        held.append(torch.nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None)))
        with torch.inference_mode():
            fresh = torch.zeros(4, 4)
        names = ("plain", "viewed", "untouched", "sharded")
        source = dict.fromkeys(names[:2], torch.full((4, 4), 2.0)) if self.rank == 0 else {}
        source |= {"fresh": torch.full((4, 4), 3.0)} if self.rank == 0 else {}
        source |= {"untouched": held[2], "sharded": distribute_tensor(torch.full((8, 4), 2.0), mesh, [Replicate()])}
        target = dict(zip(names, (held[0], held[1][:], held[2], held[3]))) | {"fresh": fresh}
        with torch_overlay.Transfer(source, target) as transfer:
            outcome = [(each * each).sum() for each in held]
            before = [each._version for each in held]
            work = transfer.run(async_op=self.rank % 2 == 1)
            if work is not None:
                work.wait()
        self.assertEqual([each._version > was for each, was in zip(held, before)], [True, True, False, True])
        self.assertEqual(fresh, torch.full((4, 4), 3.0))
        for name, each in zip(names, outcome):
            if name == "untouched":
                each.backward()
            else:
                with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                    each.backward()

    def test_a_background_run_in_one_storage_doesnt_call_its_sources_changed(self):
        """All views of it share one counter."""
        fused = torch.zeros(2, 64, 8)
        for version in range(3):
            fused[0] = version + self.rank
            source = {"w": fused[0]} if self.rank == 0 else None
            with torch_overlay.Transfer(source, {"w": fused[1]}) as transfer:
                transfer.run(async_op=True).wait()
            self.assertTrue((fused[1] == version).all())

    def test_a_view_of_a_parameter_whose_data_is_another_one(self):
        """It would be written where nobody looks any more; a view of the new data, bound, is right."""
        weight = torch.nn.Parameter(torch.zeros(8, 4))
        source = {"w": torch.full((4, 4), 1.0)} if self.rank == 0 else None
        with torch_overlay.Transfer(source, {"w": weight[:4]}) as transfer:
            transfer.run()
            if self.rank == 3:
                weight.data = torch.zeros(8, 4)
                gc.collect()
            with self.assertRaisesRegex(ValueError, "rank 3: the target 'w' is a view of a tensor whose .data is an"):
                transfer.run()
            if self.rank == 3:
                transfer.bind(target={"w": weight[:4]})
            transfer.run()
            self.assertTrue((weight[:4] == 1).all())
            view = weight[:4]
            transfer.bind(target={"w": view})
            view.data = torch.zeros(4, 4)  # itself, and not what it is a view of
            transfer.run()
            self.assertTrue((view == 1).all())
