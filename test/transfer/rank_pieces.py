"""Pieces on real ranks: boxes of any kind on both sides, beside meshes and plain tensors, cast or not."""

import math
import random
import sys
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import torch_overlay
from mesh_ranks import WORLD, make_root
from on_device import DEVICE
from rank_transfers import FLOATS, placed
from rank_weights import any_bits, same
from torch_overlay.transfers import exchanges
from torch_overlay.transfers._planner.schedule import Large
from transfer_twin import draw
from twins_tensor import rows
from width import NIGHTLY

piece = torch_overlay.piece


def cut(rng, shape, many):
    """The whole as boxes, cut at random; boxes as pairs of start and length."""
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(many if shape else 0):
        start, length = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        at = rng.randint(0, length[dim])
        for low, high in ((0, at), (at, length[dim])):
            boxes.append(
                ((*start[:dim], start[dim] + low, *start[dim + 1 :]), (*length[:dim], high - low, *length[dim + 1 :]))
            )
    return boxes


def calls(function):
    """How many functions, in Python and in C, this thread calls in it."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def any_box(rng, shape):
    ends = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in shape]
    return tuple(low for low, _ in ends), tuple(high - low for low, high in ends)


def slices(box):
    return tuple(slice(start, start + length) for start, length in zip(*box, strict=True))


class Side:
    """One side of one tensor on all ranks.

    boxes: by rank, where the elements of each of its pieces lie; of a mesh or a plain tensor there is one.
    make: from a whole tensor and a rank to what the rank gives.
    read: from what it gave to tensors, as many as it has boxes.
    """

    def __init__(self, rng, shape, end, mesh, whole_needed):
        kind = rng.choice(("mesh", "plain", "pieces", "pieces", "tuples"))
        ranks = rng.sample(range(WORLD), rng.randint(1, WORLD))
        self.kind, self.end, self.mesh = kind, end, mesh
        self.boxes = {}
        if kind == "mesh":
            for rank in end.ranks:
                self.boxes[rank] = [rows(end.placements, shape, end.sizes, end.coordinate(rank))]
        elif kind == "plain":
            self.boxes = {rank: [((0,) * len(shape), shape)] for rank in ranks}
        else:
            given = cut(rng, shape, rng.randint(0, 6)) if whole_needed else []
            given += [any_box(rng, shape) for _ in range(rng.randint(0 if given else 1, 4))]
            for box in given:
                for rank in rng.sample(ranks, rng.randint(1, min(len(ranks), 3))):
                    self.boxes.setdefault(rank, []).append(box)
            if kind == "pieces":  # one each
                self.boxes = {rank: boxes[:1] for rank, boxes in self.boxes.items()}

    def elements(self, shape):
        """By rank, for each of its pieces the numbers of the elements."""
        whole = torch.arange(math.prod(shape)).reshape(shape)
        found = {}
        for rank, boxes in self.boxes.items():
            parts = [whole[slices(box)] if self.kind != "mesh" else _of_rows(whole, box) for box in boxes]
            found[rank] = [part.flatten().tolist() for part in parts]
        return found

    def make(self, whole, rank, fill=None):
        """What a rank gives, and its tensors."""
        if self.kind == "mesh":
            made = placed(self.end, self.mesh, whole, rank, **({} if fill is None else {"fill": fill}))
            return (made, [made.to_local()]) if rank in self.end.ranks else (None, [])
        parts = []
        for number, box in enumerate(self.boxes.get(rank, ())):
            part = whole[slices(box)].clone() if fill is None else torch.full_like(whole[slices(box)], fill)
            if number % 2 and part.ndim > 1:  # not one block of memory
                part = part.transpose(0, -1).contiguous().transpose(0, -1)
            parts.append(part)
        if not parts:
            return None, []
        if self.kind == "plain":
            return parts[0], parts
        pieces = tuple(piece(part, whole.shape, box[0]) for part, box in zip(parts, self.boxes[rank], strict=True))
        return (pieces[0] if len(pieces) == 1 else pieces), parts


def _of_rows(whole, indices):
    for dim, rows_of_dim in enumerate(indices):
        whole = whole.index_select(dim, torch.tensor(rows_of_dim, dtype=torch.int64))
    return whole


def covered_sides(rng, drawn):
    """Of drawn tensors those that some rank wants and whose source is whole, each as random sides of random types.
    Yields the number of the tensor, its shape, both types, both sides, and what `Side.elements` says of both."""
    ends = drawn[0].source, drawn[0].target
    meshes = [DeviceMesh(DEVICE, torch.tensor(e.ranks).reshape(e.sizes), _init_backend=False) for e in ends]
    for number, tensor in enumerate(drawn):
        types = [getattr(torch, rng.choice(FLOATS)) for _ in range(2)]
        sides = [
            Side(rng, tensor.shape, end, mesh, not place)
            for place, (end, mesh) in enumerate(zip((tensor.source, tensor.target), meshes, strict=True))
        ]
        held, wanted = (side.elements(tensor.shape) for side in sides)
        there = {e for parts in held.values() for part in parts for e in part}
        if len(there) == math.prod(tensor.shape) and wanted:
            yield number, tensor.shape, types, sides, (held, wanted)


def server_pieces(server, tp, shapes):
    """Where the tensors of a checkpoint lie in what one of two ranks serves with."""

    def rows(name, fused, at):
        """Half of the rows of a tensor, from a row of a fused one on."""
        length = shapes[name][0] // 2
        return piece(fused[at : at + length], shapes[name], (tp * length, 0))

    found = {name: rows(name, server["qkv"], 4 * number) for number, name in enumerate("qkv")}
    found |= {name: rows(name, server["gate_up"], 5 * number) for number, name in enumerate(("gate", "up"))}
    for number, expert in enumerate(range(2 * tp, 2 * tp + 2)):
        for place, name in enumerate(("w1", "w3")):
            whole = server["w13"][number, 4 * place : 4 * place + 4]
            found[f"expert{expert}.{name}"] = piece(whole, whole.shape, (0, 0))
    there = min(32, 50 - 32 * tp)  # of the padded vocabulary
    return found | {name: piece(server[name][:there], shapes["embed"], (32 * tp, 0)) for name in ("embed", "head")}


class PieceCases:
    """Cases for ``EightRanks``."""

    def check_random_pieces(self, seeds):
        """All there is at once: every target has its elements, each comes once to a rank that lacks it; or all ranks
        raise, and name the tensors of which some element is nowhere."""
        for seed in seeds:
            rng = random.Random(seed)
            drawn = draw(300_000 + seed)
            ends = [drawn[0].source, drawn[0].target]
            meshes = [
                DeviceMesh(DEVICE, torch.tensor(end.ranks).reshape(end.sizes), _init_backend=False) for end in ends
            ]
            source, target, checks, torn, bytes_in = {}, {}, [], [], [0] * WORLD
            for number, tensor in enumerate(drawn):
                name, shape = f"t{number}", tensor.shape
                before, after = (getattr(torch, rng.choice(FLOATS)) for _ in range(2))
                sides = [
                    Side(rng, shape, end, mesh, not place and rng.random() < 0.9)
                    for place, (end, mesh) in enumerate(zip((tensor.source, tensor.target), meshes, strict=True))
                ]
                whole = any_bits(shape, before, seed * 10 + number)
                source[name], _ = sides[0].make(whole, self.rank)
                target[name], locals_ = sides[1].make(whole.to(after), self.rank, fill=0)
                alone = rng.random()
                if alone < 0.1:
                    del target[name]
                elif alone < 0.2:
                    del source[name]
                else:
                    held, wanted = (side.elements(shape) for side in sides)
                    there = {e for parts in held.values() for part in parts for e in part}
                    if len(there) < math.prod(shape):
                        torn.append(name)
                    checks.append((name, locals_, wanted.get(self.rank, []), whole.to(after).flatten()))
                    for rank, parts in wanted.items():
                        own = {e for part in held.get(rank, []) for e in part}
                        lacking = sum(e not in own for part in parts for e in part)
                        bytes_in[rank] += lacking * min(before.itemsize, after.itemsize)
            if not checks:
                continue
            large = (exchanges.LARGE_PIECES, Large(1, 40), Large(64, 1 << 20))[seed % 3]
            with mock.patch.object(exchanges, "LARGE_PIECES", large):
                if torn:
                    with self.assertRaisesRegex(ValueError, f"isn't whole: the pieces of '{torn[0]}'"):
                        torch_overlay.Transfer(source, target, strict=False)
                    continue
                with torch_overlay.Transfer(source, target, strict=False, budget=(1 << 20, 2600)[seed % 2]) as transfer:
                    transfer.run(only=[name for name, *_ in checks[::2]] if seed % 5 == 0 else None)
                    transfer.run()
                    if transfer.traffic:
                        self.assertEqual(transfer.traffic[self.rank][1], bytes_in[self.rank], f"seed {seed}")
                    self.assertTrue(transfer.staging <= transfer.budget)
            for name, locals_, parts, values in checks:
                for local, elements in zip(locals_, parts, strict=True):
                    want = values[torch.tensor(elements, dtype=torch.int64)].reshape(local.shape)
                    self.assertTrue(same(local, want), f"seed {seed}, {name}")

    def test_a_server_of_plain_tensors(self):
        """FSDP x TP to two ranks that serve in bfloat16: q, k and v in one weight, gate and up in another, w1 and w3 of
        each rank's experts in a third, a vocabulary padded from 50 to 64 rows, a tied head, no value head."""
        train = make_root(range(4), (2, 2), ("fsdp", "tp"))
        shapes = dict.fromkeys(("q", "k", "v"), (8, 6)) | {"gate": (10, 6), "up": (10, 6), "embed": (50, 6)}
        shapes |= {f"expert{e}.{w}": (4, 6) for e in range(4) for w in ("w1", "w3")} | {"value_head": (1, 6)}
        whole = {name: any_bits(shape, torch.float32, seed) for seed, (name, shape) in enumerate(shapes.items())}
        source = target = None
        if self.rank < 4:
            source = {
                name: distribute_tensor(each, train, [Shard(0), Shard(1)], src_data_rank=None)
                for name, each in whole.items()
            }
        mine = self.rank - 4
        server = {
            name: torch.full(shape, 7.0, dtype=torch.bfloat16)
            for name, shape in dict(qkv=(12, 6), gate_up=(10, 6), w13=(2, 8, 6), embed=(32, 6), head=(32, 6)).items()
        }
        if mine in (0, 1):
            target = server_pieces(server, mine, shapes)
        names = {"embed": ("embed", "head")}
        with torch_overlay.Transfer(source, target, names=names, strict=False) as transfer:
            self.assertEqual(transfer.left_out, {"source": ("value_head",), "target": ()})
            transfer.run()
            sent = sum(out for out, _, _ in transfer.traffic.values())
        if self.rank > 5:
            return
        # Each number once to each server rank that holds it, two bytes each; none of the padding.
        self.assertEqual(sent, 2 * 6 * (3 * 8 + 2 * 10 + 2 * 50 + 8 * 4))
        if target is None:
            return
        half = {name: each.bfloat16().chunk(2)[mine] for name, each in whole.items() if name != "value_head"}
        vocabulary = torch.full((64, 6), 7.0).bfloat16()
        vocabulary[:50] = whole["embed"].bfloat16()
        wanted = {
            "qkv": torch.cat([half["q"], half["k"], half["v"]]),
            "gate_up": torch.cat([half["gate"], half["up"]]),
            "w13": torch.stack(
                [
                    torch.cat([whole[f"expert{e}.w1"], whole[f"expert{e}.w3"]]).bfloat16()
                    for e in range(2 * mine, 2 * mine + 2)
                ]
            ),
            "embed": vocabulary.chunk(2)[mine],
            "head": vocabulary.chunk(2)[mine],
        }
        for name, each in wanted.items():
            self.assertTrue(same(server[name], each), name)

    def test_replicas_of_a_piece_share_the_sending(self):
        start, half = 8 * (self.rank % 2), torch.arange(16.0).chunk(2)[self.rank % 2]
        source = piece(half, (16,), (start,)) if self.rank < 6 else None  # three have each half
        target = piece(torch.zeros(12), (16,), (2,)) if self.rank > 5 else None
        with torch_overlay.Transfer([source], [target]) as transfer:
            transfer.run()
            sent = [transfer.traffic[rank][0] for rank in range(8)]
        self.assertEqual(sum(sent), 2 * 12 * 4)
        self.assertEqual(sent[6:], [0, 0])
        self.assertTrue(max(sent[:6]) == min(sent[:6]) == 16)
        if target is not None:
            self.assertEqual(target._local_tensor, torch.arange(2.0, 14.0))

    def test_what_is_wrong_with_pieces_is_said_on_all_ranks(self):
        mine = torch.ones(2)
        mesh = make_root(range(WORLD), (8,), ("dp",))
        pending = distribute_tensor(torch.ones(4), mesh, [Replicate()], src_data_rank=None)
        pending = type(pending).from_local(pending.to_local(), mesh, [Partial()], run_check=False)
        odd, freed = self.rank == 5, torch.ones(2)
        freed.untyped_storage().resize_(0)
        for source, target, message in (
            (
                piece(mine, (20,), (2 * self.rank,)),
                torch.zeros(20),
                "isn't whole: the pieces of '0', of shape .20,., leave out what starts at .16,. and has shape .4,.",
            ),
            (
                piece(mine, (16 + odd,), (2 * self.rank,)),
                torch.zeros(16),
                "source .0. is float32 of shape .16,., in pieces, on ranks 0, .*, 6, 7, and float32 of shape .17,., in "
                "pieces, on rank 5.",
            ),
            (mine if odd else piece(mine, (2,), (0,)), torch.zeros(2), "in pieces, .*, a plain tensor, on rank 5"),
            (freed if odd else mine, torch.zeros(2), "rank 5: the source '0' needs 8 bytes of storage, and has 0"),
            (pending, piece(mine, (4,), (0,)), "the source '0' has a pending reduction"),
            (
                (piece(mine, (4,), (0,)), piece(mine[:1].double() if odd else mine[:1], (4,), (2,))),
                torch.zeros(4),
                "rank 5: The pieces of the source '0' belong to different tensors: of a float",
            ),
        ):
            with self.assertRaisesRegex(ValueError, message):
                torch_overlay.Transfer([source], [target])
        halves = piece(torch.arange(8.0).chunk(2)[self.rank % 2], (8,), (4 * (self.rank % 2),))
        with torch_overlay.Transfer([halves], [torch.zeros(8)]) as transfer:
            with self.assertRaisesRegex(ValueError, r"is piece\(.*\) and was piece\(.*\) when the Transfer was made"):
                transfer.bind([piece(torch.zeros(4), (8,), (4 * (1 - self.rank % 2),))])
            with self.assertRaisesRegex(ValueError, "is a whole and was piece"):
                transfer.bind([torch.zeros(4)])
            transfer.run()

    def test_a_run_takes_no_longer_for_pieces_of_other_ranks(self):
        """Counted in calls: ranks 0 and 1 move three tensors, while the others move three or sixty."""
        pair, counts = self.rank // 2, []
        for other_tensors in (3, 60):
            names = [f"{pair}.{number}" for number in range(3 if pair == 0 else other_tensors)]
            pieces = {name: piece(torch.full((4,), 1.0 - self.rank % 2), (4,), (0,)) for name in names}
            given = (pieces, None) if self.rank % 2 == 0 else (None, pieces)
            with torch_overlay.Transfer(*given) as transfer:
                for only in (None, [f"{other}.{number}" for other in range(4) for number in (0, 2)]):
                    transfer.run(only=only)  # plans
                    counts.append(calls(lambda: transfer.run(only=only)))  # noqa: B023
            self.assertTrue(all(bool((each._local_tensor == 1).all()) for each in pieces.values()))
        few, many = counts[:2], counts[2:]
        self.assertTrue(few == many if pair == 0 else sum(many) > sum(few), counts)

    def test_pieces_of_others(self):
        """A rank without a part hears of errors, too, `only` takes names of others, replicas are compared, tied targets
        as well, and a run that checks names what this rank doesn't have."""
        rows, wholes = torch.arange(16.0).chunk(4), torch.zeros(3, 16)
        source = target = None
        if self.rank < 4:
            source = {f"w{n}": piece(rows[self.rank] + n, (16,), (4 * self.rank,)) for n in range(3)}
            source["twice"] = (piece(rows[0].clone(), (4,), (0,)), piece(rows[0].clone()[:2], (4,), (0,)))
        elif self.rank < 6:
            target = {f"w{n}": piece(wholes[n], (16,), (0,)) for n in range(3) if n % 2 == self.rank % 2}
            target["twice"] = torch.zeros(4)
        differ = "'twice' has pieces of shape .4,. that start at .0,., with one value on ranks 0, 1, 3, another on"
        with torch_overlay.Transfer(source, target) as transfer:
            self.assertTrue(str(transfer).startswith("4 tensors from ranks 0-3 to ranks 4, 5,"))
            self.assertEqual(bool(transfer.traffic), self.rank < 6)
            transfer.run(only=["w1"])
            if self.rank == 5:
                self.assertEqual(wholes[1], torch.arange(16.0) + 1)
            transfer.run(check=True)
            if self.rank == 4:
                self.assertEqual(wholes[2], torch.arange(16.0) + 2)
            if transfer.traffic:
                with self.assertRaisesRegex(ValueError, "ranks 0-5: only names 'w3'"):
                    transfer.run(only=["w1", "w3"])
            if source is not None and self.rank == 2:
                source["twice"][0]._local_tensor[1] = 7
            if transfer.traffic:
                with self.assertRaisesRegex(ValueError, differ):
                    transfer.run(check=True)
            self.assertEqual(sum(transfer._flow().sent.values()), 3 * 64 + 2 * 16)
        with self.assertRaisesRegex(ValueError, differ):
            torch_overlay.Transfer(source, target)  # on ranks 6 and 7, too
        if source is not None:
            source["twice"][0]._local_tensor[1] = 1
        with torch_overlay.Transfer(source and {**source, "more": source["w0"]}, target, strict=False) as transfer:
            self.assertEqual(transfer.left_out, {"source": ("more",), "target": ()})
        if target is not None and "w1" in target:
            target["tied"] = target["w1"]
        if source is not None:
            source["tied"] = piece(source["w1"]._local_tensor + 1, (16,), (4 * self.rank,))
        with self.assertRaisesRegex(ValueError, "targets 'tied' and 'w1' are one block of memory.* different"):
            torch_overlay.Transfer(source, target)

    def test_pieces_of_ranks_that_left(self):
        """What others have, too, comes from them; else it is an error, as without pieces."""
        if self.rank == 7:
            return
        whole, target = torch.arange(16.0), torch.zeros(16)
        own = piece(whole[2 * self.rank : 2 * self.rank + 4], (16,), (2 * self.rank,))
        with torch_overlay.Transfer([own], [target], gone=[7]) as transfer:
            transfer.run()
        self.assertEqual(target, whole)
        own = piece(whole[2 * self.rank : 2 * self.rank + 2], (16,), (2 * self.rank,))
        with self.assertRaisesRegex(ValueError, r"leave out what starts at \(14,\) and has shape \(2,\)"):
            torch_overlay.Transfer([own], [target], gone=[7])


# Two thousand at night.
for first in range(0, 2000, 50) if NIGHTLY else (0,):

    def check(self, seeds=range(first, first + (50 if NIGHTLY else 15))):
        self.check_random_pieces(seeds)

    setattr(PieceCases, f"test_random_pieces_{first:04}", check)
