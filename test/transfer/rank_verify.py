"""`verify`: each flipped bit is found and named, and nothing else is."""

import random
import re
from unittest import mock

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_overlay
from mesh_ranks import WORLD, make_root
from rank_pieces import covered_sides
from rank_weights import any_bits
from torch_overlay.transfers import changes, verification
from torch_overlay.transfers._planner import relay
from transfer_twin import draw
from width import NIGHTLY

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(local, place, bit):
    """Flip one bit of the element at a place, counted row-major, without a trace in its version counter."""
    data = local.data
    bits = data.reshape(-1)[place : place + 1].clone().view(INTEGERS[data.itemsize])
    bits ^= torch.tensor(1 << bit if bit < 8 * data.itemsize - 1 else -1 << bit, dtype=bits.dtype)
    at, index = place, []
    for length in reversed(data.shape):
        at, here = divmod(at, length)
        index.insert(0, here)
    data[tuple(index)] = bits.view(data.dtype)[0]


class VerifyCases:
    """Cases for ``EightRanks``."""

    def check_flipped_bits(self, seeds):
        """Meshes, plain tensors and pieces, casts, changes, relay, parts of the names: after a run all is equal; one
        flipped bit of a target, or of a source that has a replica, is found, and the error names tensor and rank."""
        flipped = 0
        for seed in seeds:
            rng = random.Random(seed)
            source, target, given = {}, {}, []
            for number, shape, types, sides, elements in covered_sides(rng, draw(1_100_000 + seed)):
                name = f"t{number}"
                whole = any_bits(shape, types[0], seed * 10 + number)  # NaN and -0.0 among them
                source[name], own = sides[0].make(whole, self.rank)
                target[name], locals_ = sides[1].make(whole.to(types[1]), self.rank, fill=0)
                given.append((name, whole.to(types[1]).flatten(), types, sides[0].kind, (own, locals_), elements))
            if not given:
                continue
            with (
                mock.patch.object(relay, "STRIPE", rng.choice((1, 8, 100))),
                mock.patch.object(changes, "is_longer", lambda *given: False),
                mock.patch.object(verification, "CHUNK", rng.choice((2, 5, 1 << 18))),
                torch_overlay.Transfer(
                    source, target, changes=seed % 3 == 0, relay=seed % 2 == 0, keep=seed % 5 == 0
                ) as transfer,
            ):
                transfer.run()
                transfer.verify()
                side = rng.random() < 0.7
                chosen = self._place(rng, given, int(side))
                if chosen is None or not transfer.traffic:
                    continue
                name, rank, piece, at, bit = chosen
                locals_ = next(each[4][side] for each in given if each[0] == name)
                if rank == self.rank:
                    flip(locals_[piece], at, bit)
                said = f"seed {seed}: {chosen} of {'target' if side else 'source'}"
                with self.assertRaises(ValueError, msg=said) as raised:
                    transfer.verify(only=[name] if rng.random() < 0.3 else None)
                self.assertRegex(str(raised.exception), f"'{name}'", msg=said)
                # Of a source it names all replicas, or the target that got another one's elements.
                if side:
                    self.assertRegex(str(raised.exception), rf"of rank {rank}\b", msg=said)
                others = [each[0] for each in given if each[0] != name]
                if others:
                    transfer.verify(only=others)
                if rank == self.rank:
                    flip(locals_[piece], at, bit)
                transfer.verify()
                flipped += 1
        return flipped

    def _place(self, rng, given, side):
        """Choose an element in which a flipped bit must be seen: the tensor, the rank, its piece, and where."""
        places = []
        for name, values, types, kind, _, elements in given:
            holders = {}
            for rank, parts in sorted(elements[side].items()):
                for piece, part in enumerate(parts):
                    for at, element in enumerate(part):
                        holders.setdefault(element, []).append((name, rank, piece, at))
            for element, where in holders.items():
                # After a cast all NaN are one. Of a source alone a cast may lose the bit, and then nothing is wrong.
                if side and not (types[0] != types[1] and values[element].isnan()):
                    places += where
                if not side and kind == "mesh" and len({rank for _, rank, *_ in where}) > 1:
                    places += where
        if not places:
            return None
        return (*rng.choice(places), rng.randrange(4))  # a low bit makes no NaN

    def test_flipped_bits(self):
        self.assertTrue(self.check_flipped_bits(range(300 if NIGHTLY else 24)) > 8)

    def _sides(self, relay=False):
        train = make_root(range(2), (2,), ("dp",))
        serve = make_root(range(2, 8), (3, 2), ("replica", "tp"))
        whole = torch.arange(64 * 32, dtype=torch.float32).view(64, 32)
        source = distribute_tensor(whole.clone(), train, [Shard(0)], src_data_rank=None)
        target = distribute_tensor(torch.zeros(64, 32), serve, [Replicate(), Shard(1)], src_data_rank=None)
        return source, target

    def test_a_target_that_somebody_overwrote(self):
        """Under `changes`, behind the version counter: a run doesn't mend it, `verify` finds it, `check=True` mends."""
        source, target = self._sides()
        with torch_overlay.Transfer([source], [target], changes=True) as transfer:
            transfer.run()
            if self.rank == 5:
                target.to_local().data[3:5, 2] = 7
            transfer.run()
            with self.assertRaisesRegex(ValueError, "A Transfer over ranks 0-7: targets don't hold ") as raised:
                transfer.verify()
            wanted = (
                "target '0' of rank 5 differs from the source of rank 0 in its box of shape (32, 16) that starts at (0"
            )
            self.assertIn(wanted, str(raised.exception))
            transfer.run(check=True)
            transfer.verify()

    def test_with_a_relay_each_is_compared_with_the_source(self):
        """A rank that passes on something wrong: all that got it from there differ, not only that rank."""
        source, target = self._sides()
        with torch_overlay.Transfer([source], [target], relay=True) as transfer:
            transfer.run()
            if self.rank in (2, 4, 6):  # one column of shards, all wrong alike
                target.to_local().data[0, 0] = 9
            with self.assertRaises(ValueError) as raised:
                transfer.verify()
            for rank in (2, 4, 6):
                self.assertIn(f"of rank {rank} differs from the source of rank 0", str(raised.exception))

    def test_what_stays_on_a_rank(self):
        mesh = make_root(range(WORLD), (WORLD,), ("dp",))
        whole = torch.arange(16.0)
        source = distribute_tensor(whole.clone(), mesh, [Shard(0)])
        target = distribute_tensor(torch.zeros(16), mesh, [Shard(0)])
        with torch_overlay.Transfer([source], [target]) as transfer:
            transfer.run()
            transfer.verify()
            if self.rank == 3:
                target.to_local().data[1] = -1
            wanted = "rank 3 differs from its own source in its box of shape (2,) that starts at (6,), 1 of 2 elements"
            with self.assertRaisesRegex(ValueError, re.escape(wanted)):
                transfer.verify()

    def test_complex_numbers_that_stay_on_a_rank(self):
        """As numbers, -0.0 equals 0.0, and NaN nothing."""
        source = torch.tensor([complex(torch.nan, 1), complex(1, -0.0)], dtype=torch.complex128)
        target = torch.zeros_like(source)
        with torch_overlay.Transfer([source], [target], group=[self.rank]) as transfer:
            transfer.run()
            transfer.verify()
            target.data[1] = complex(1, 0)
            with self.assertRaisesRegex(ValueError, "1 of 2 elements"):
                transfer.verify()

    def test_casts_of_nan(self):
        """Where torch casts by vectors, NaN gets other bits in bfloat16 than where it casts one element at a time."""
        train, serve = make_root(range(2), (2,), ("dp",)), make_root(range(2, 8), (6,), ("tp",))
        whole = torch.full((37, 64), torch.nan).t()
        whole[::3] = -0.0
        source = DTensor.from_local(whole, train, [Replicate()], run_check=False)
        target = distribute_tensor(torch.zeros(64, 37).bfloat16(), serve, [Shard(1)], src_data_rank=None)
        with torch_overlay.Transfer([source], [target]) as transfer:
            transfer.run()
            transfer.verify()

    def test_ranks_that_verify_and_ranks_that_run(self):
        source, target = self._sides()
        with torch_overlay.Transfer([source], [target]) as transfer:
            transfer.run()
            before = target.to_local().clone()
            with self.assertRaisesRegex(ValueError, "nothing was sent: .*rank 0: verifies"):
                transfer.verify() if self.rank == 0 else transfer.run()
            with self.assertRaisesRegex(ValueError, "only names 'no such'"):
                transfer.verify(only=["no such"])
            self.assertEqual(target.to_local(), before)
            transfer.verify()

    def test_targets_in_the_memory_of_sources(self):
        mesh = make_root(range(WORLD), (WORLD,), ("dp",))
        source = distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(0)])
        target = distribute_tensor(torch.zeros(8, 8), mesh, [Shard(1)])
        target._local_tensor = source.to_local().view(8, 1)
        with torch_overlay.Transfer([source], [target]) as transfer:
            transfer.run()
            with self.assertRaisesRegex(ValueError, "targets lie in the memory of sources, which a run overwrites"):
                transfer.verify()
