"""Transfers that send only what changed: to the bit what a whole run brings, whatever happens between two runs."""

import random
from unittest import mock

import torch
from benchmarks.allocations import allocated
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_overlay
from mesh_ranks import WORLD, make_root
from rank_pieces import covered_sides
from rank_weights import any_bits, same
from torch_overlay.transfers import changes, exchanges, hosts, relays
from torch_overlay.transfers._planner.schedule import Large
from transfer_twin import draw
from width import NIGHTLY

TURNS = 6


def written(locals_, parts, whole):
    """Give the source's tensors the values of the whole."""
    for local, elements in zip(locals_, parts, strict=True):
        local.copy_(whole.flatten()[torch.tensor(elements, dtype=torch.int64)].reshape(local.shape))


class OnlyChangedCases:
    """Cases for ``EightRanks``."""

    def check_random_changes(self, seeds):
        """Meshes and pieces, casts, parts of the names, refused runs, tensors bound or given up on one rank, in the
        background or not, passed on or not."""
        fewer = 0
        for seed in seeds:
            rng = random.Random(seed)
            source, target, given = {}, {}, {}
            for number, shape, types, sides, elements in covered_sides(rng, draw(700_000 + seed)):
                name, (before, after), (held, wanted) = f"t{number}", types, elements
                whole = any_bits(shape, before, seed * 10 + number)
                source[name], own = sides[0].make(whole, self.rank)
                target[name], locals_ = sides[1].make(whole.to(after), self.rank, fill=0)
                parts = [each.get(self.rank, []) for each in (held, wanted)]
                given[name] = [whole, own, parts[0], locals_, parts[1], after, sides[1], whole.clone(), whole.clone()]
            if not given:
                continue
            budget = (1 << 20, 12_000)[seed % 2]
            kinds, way = True if seed % 3 else "cpu", (None, False, True, None)[seed % 4]
            host = None if way is False else "abc"[(self.rank + seed) % 8 // 3]
            with (
                # Messages are short here, and would go whole.
                mock.patch.object(changes, "is_longer", changes.is_longer if seed % 5 == 0 else lambda *given: False),
                mock.patch.object(changes, "FEW", (1, 32)[seed % 2]),
                mock.patch.object(changes, "SAMPLED", (8, 1 << 20)[seed % 2]),
                mock.patch.object(
                    exchanges, "LARGE_PIECES", (exchanges.LARGE_PIECES, Large(1, 40), Large(64, 1 << 20))[seed % 3]
                ),
                mock.patch.object(relays, "ROUND", (8, 200, 8 << 20)[seed // 3 % 3]),
                mock.patch.object(hosts, "LEAST", 0),
                torch_overlay.Transfer(
                    source, target, budget=budget, changes=kinds, keep=seed % 3 == 0, relay=way, host=host
                ) as transfer,
            ):
                self._moved = set()
                for turn in range(TURNS):
                    fewer += self._one_turn(transfer, rng, given, turn, f"seed {seed}, turn {turn}")
        return fewer

    def _one_turn(self, transfer, rng, given, turn, said):
        for whole, own, held, *_, first in given.values():
            count = rng.choice((0, 0, 1, whole.numel() // 10, whole.numel()))
            if turn and rng.random() < 0.2:
                whole.copy_(first)  # what was sent before the last run
            elif count and turn:
                other = any_bits((count,), whole.dtype, rng.randrange(1 << 20))
                places = torch.randperm(whole.numel(), generator=torch.Generator().manual_seed(rng.randrange(1 << 20)))
                whole.view(-1)[places[:count]] = other
            written(own, held, whole)
        event, one, only = rng.randrange(9), rng.randrange(WORLD), None
        is_it = one == self.rank
        if event == 0:
            only = sorted(rng.sample(sorted(given), rng.randint(1, len(given))))
        elif event == 1 and one in transfer._state.ranks:
            if is_it:
                transfer.refuse("a test")
            elif transfer.traffic:
                with self.assertRaisesRegex(ValueError, "nothing was sent: .*a test"):
                    transfer.run()
        elif event == 2 and is_it:
            transfer.forget()
        elif event == 3 and is_it and turn:
            new = {}
            for name, each in given.items():
                whole, *_, after, side, _, _ = each
                new[name], each[3] = side.make(whole.to(after), self.rank, fill=3)
            transfer.bind(target=new)
        elif event == 4:
            if is_it:  # nobody is told
                for each in given.values():
                    for local in each[3]:
                        local.data.fill_(5)
            transfer.run(check=True)
        if turn % 2 and one % 2:
            transfer.run(only=only, async_op=True).wait()
        else:
            transfer.run(only=only)
        for name, each in given.items():
            whole, _, _, locals_, wanted, after, _, last, _ = each
            if only is None or name in only or event == 4:
                last.copy_(whole)
                self._moved.add(name)
            if name not in self._moved:
                continue
            values = last.to(after).flatten()
            for local, elements in zip(locals_, wanted, strict=True):
                want = values[torch.tensor(elements, dtype=torch.int64)].reshape(local.shape)
                self.assertTrue(same(local, want), f"{said}, event {event}, {name}")
        return int(transfer.changed[0] < transfer.changed[1])

    def test_bytes_follow_what_changed(self):
        """One element of ten thousand: 6 bytes for each of 2, where positions take 4; the same elements to replicas are
        kept once; what nobody asked for is not sent."""
        mesh, size = make_root(range(WORLD), (4, 2), ("dp", "tp")), 1 << 20
        whole = torch.arange(size, dtype=torch.int32).to(torch.bfloat16)
        source = distribute_tensor(whole.clone() if self.rank < WORLD else whole, mesh, [Shard(0), Shard(0)])
        target = distribute_tensor(torch.zeros_like(whole), mesh, [Replicate(), Replicate()])
        with torch_overlay.Transfer([source], [target], changes=True) as transfer:
            transfer.run()
            own = size // WORLD
            self.assertEqual(transfer.changed, (own * (WORLD - 1),) * 2)
            self.assertEqual(transfer.sent_bytes, 2 * own * (WORLD - 1))
            (plan,) = transfer._state.plans.by_names.values()
            kept = {sent.bytes.data_ptr(): len(sent.bytes) for sent in plan[1]._known.values()}
            self.assertEqual(sum(kept.values()), 2 * own, "once for seven ranks")
            transfer.run()
            self.assertEqual((transfer.changed[0], transfer.sent_bytes), (0, 0))
            source.to_local()[::10_000] = -1
            changed = len(source.to_local()[::10_000])
            transfer.run()
            self.assertEqual(transfer.changed, (changed * (WORLD - 1), own * (WORLD - 1)))
            self.assertTrue(6 * changed <= transfer.sent_bytes / (WORLD - 1) < 6 * changed + 32)
            self.assertEqual(target.to_local()[::10_000][:changed], torch.full((changed,), -1.0).bfloat16())
            want = target.to_local().clone()
            source.to_local().neg_()  # all bits of signs, that of zero, too
            transfer.run()
            self.assertEqual(transfer.changed, (own * (WORLD - 1),) * 2)
            with torch.no_grad():
                target.to_local()[self.rank].fill_(9)  # autograd counts it: this rank says that it lost something
            transfer.run()
            self.assertEqual(transfer.sent_bytes, 2 * own * (WORLD - 1))
            self.assertTrue(same(target.to_local(), -want))
        with torch.inference_mode():
            blind = torch.zeros(64)
        ones = {"w": torch.ones(64)} if self.rank == 3 else None
        with torch_overlay.Transfer(ones, {"w": blind}, changes=True) as transfer:
            for _ in range(2):
                transfer.run()
                self.assertEqual(blind, torch.ones(64))
                with torch.inference_mode():
                    blind.fill_(3)
        with self.assertRaisesRegex(ValueError, "the same changes=; got changes="):
            torch_overlay.Transfer([source], [target], changes=self.rank > 0)
        with self.assertRaisesRegex(ValueError, 'changes= takes True, False or "cpu"; got 3'):
            torch_overlay.Transfer([source], [target], changes=3)

    def test_what_was_sent_is_forgotten(self):
        """Its memory is free, and the next run sends everything from this rank."""
        source = {"w": torch.arange(1000.0)} if self.rank == 0 else None
        target = {"w": torch.zeros(1000)} if self.rank == 1 else None
        with torch_overlay.Transfer(source, target, changes=True) as transfer:
            transfer.run()
            if source:
                transfer.forget()
                (plan,) = transfer._state.plans.by_names.values()
                self.assertEqual([sent.bytes for sent in plan.exchanges._known.values()], [None])
            elif target:
                target["w"].data[5] = -1
            transfer.run()
            self.assertEqual(transfer.sent_bytes, 4000 if source else 0)
        if target:
            self.assertEqual(target["w"], torch.arange(1000.0))

    def test_another_tensor_of_the_same_memory(self):
        """What it counts may be what the last run left of the tensor before. The same one gets changes alone."""
        source, memory = {"w": torch.ones(1000)} if self.rank == 0 else None, torch.zeros(1000)
        mesh = make_root((1,), (1,), ("dp",))
        for made in (lambda: memory.data, lambda: DTensor.from_local(memory, mesh, [Replicate()], run_check=False)):
            target = made() if self.rank == 1 else None
            with torch_overlay.Transfer(source, {"w": target}, changes=True) as transfer:
                transfer.run()
                for again, sent in ((False, 4000), (True, 0)):
                    if target is not None:
                        target = target if again else made().zero_()
                        transfer.bind(target={"w": target})
                    transfer.run()
                    self.assertEqual(transfer.sent_bytes, sent if source else 0)
            if target is not None:
                self.assertEqual(memory, torch.ones(1000))

    def test_targets_of_one_block_in_turns(self):
        """Their tensors count writes apart, so that a run of one name goes unseen by the other."""
        weight, block = torch.ones(8), torch.zeros(8)
        source = {"a": weight, "b": weight} if self.rank == 0 else None
        target = {"a": block, "b": block.data} if self.rank == 1 else None
        with torch_overlay.Transfer(source, target, changes=True) as transfer:
            for value, name in ((1, "a"), (1, "b"), (2, "a"), (1, "b")):
                weight.fill_(value)
                transfer.run(only=[name])
                if target:
                    self.assertEqual(block, torch.full((8,), float(value)))

    def test_a_receiver_has_room_for_what_arrives_and_no_copy(self):
        """One element of a thousand: a receiver allocates 20 times less than its target takes."""
        train, serve = (make_root(ranks, (4,), ("dp",)) for ranks in (range(4), range(4, 8)))
        whole = torch.arange(1 << 18).to(torch.bfloat16)
        own = distribute_tensor(whole, train if self.rank < 4 else serve, [Shard(0)], src_data_rank=None)
        target = distribute_tensor(torch.zeros_like(whole), serve, [Replicate()], src_data_rank=None)
        given = ([own], None) if self.rank < 4 else (None, [target])
        for changes_only, most in ((True, whole.nbytes // 20), (False, None)):
            with torch_overlay.Transfer(*given, changes=changes_only, budget=64 << 20) as transfer:
                transfer.run()

                def step():
                    own.to_local()[::1000] += 1
                    transfer.run()

                (memory,) = allocated([step])
                if self.rank > 3:
                    self.assertTrue(0 < memory.peak < most if most else memory.peak > whole.nbytes // 20, memory)


# Two thousand at night.
for first in range(0, 2000, 50) if NIGHTLY else (0,):

    def check(self, seeds=range(first, first + (50 if NIGHTLY else 15))):
        self.assertTrue(self.check_random_changes(seeds) or self.rank)

    setattr(OnlyChangedCases, f"test_random_runs_of_what_changed_{first:04}", check)
