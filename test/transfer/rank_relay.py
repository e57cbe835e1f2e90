"""Transfers with relay: the same values as without, and each element leaves the sources once."""

import random
from unittest import mock

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_overlay
from mesh_ranks import WORLD, make_root
from rank_pieces import covered_sides, slices
from rank_weights import any_bits, same
from torch_overlay.transfers import changes, exchanges, relays
from torch_overlay.transfers import hosts as own_hosts
from torch_overlay.transfers._planner import boxes, relay
from torch_overlay.transfers._planner.schedule import Large
from transfer_twin import draw
from width import NIGHTLY

piece = torch_overlay.piece


def hosts_of(rng):
    """What each rank says of its host: nothing, one of some names, or some ranks nothing."""
    kind = rng.randrange(3)
    names = [f"host {rng.randrange(3)}" for _ in range(WORLD)]
    return [None if kind == 0 or (kind == 1 and rng.random() < 0.3) else name for name in names]


class RelayCases:
    """Cases for ``EightRanks``."""

    def check_random_relays(self, seeds):
        """Meshes, plain tensors and pieces on both sides, casts, budgets, hosts, changes, parts of the names: every
        target has its elements, and each comes once to a rank that lacks it. Where the plan decides, runs with changes
        go by both ways."""
        for seed in seeds:
            rng = random.Random(seed)
            source, target, checks, bytes_in, twice = {}, {}, [], [0] * WORLD, False
            for number, shape, types, sides, elements in covered_sides(rng, draw(900_000 + seed)):
                name, (before, after), (held, wanted) = f"t{number}", types, elements
                whole = any_bits(shape, before, seed * 10 + number)
                source[name], _ = sides[0].make(whole, self.rank)
                target[name], locals_ = sides[1].make(whole.to(after), self.rank, fill=0)
                checks.append((name, locals_, wanted.get(self.rank, []), whole.to(after).flatten()))
                for rank, parts in wanted.items():
                    mine = {e for part in held.get(rank, []) for e in part}
                    lacking = [e for part in parts for e in part if e not in mine]
                    twice |= len(lacking) != len({*lacking})
                    bytes_in[rank] += len(lacking) * min(before.itemsize, after.itemsize)
            if not checks:
                continue
            host = hosts_of(rng)[self.rank]
            budget, kinds = (1 << 20, 12_000)[seed % 2], rng.choice((False, True, "cpu"))
            decides = None if seed % 3 == 0 else True
            said = f"seed {seed}"
            with (
                mock.patch.object(relay, "STRIPE", rng.choice((1, 8, 100))),
                mock.patch.object(boxes, "EVEN", rng.choice((1, 16))),
                mock.patch.object(relays, "ROUND", rng.choice((8, 200, 8 << 20))),
                mock.patch.object(
                    exchanges, "LARGE_PIECES", (exchanges.LARGE_PIECES, Large(1, 40), Large(64, 1 << 20))[seed % 3]
                ),
                # Messages are short here, and would go whole.
                mock.patch.object(changes, "is_longer", lambda *given: False),
                mock.patch.object(own_hosts, "LEAST", 0),
                torch_overlay.Transfer(
                    source, target, budget=budget, changes=kinds, relay=decides, host=host, keep=seed % 4 == 0
                ) as transfer,
            ):
                some = [name for name, *_ in checks[::2]]
                for only in (some, None, None) if seed % 5 == 0 else (None, None):
                    for _, locals_, *_ in checks if kinds is False else ():
                        for local in locals_:
                            local.fill_(5)
                    if work := transfer.run(only=only, async_op=seed % 7 == 0):
                        work.wait()
                    for name, locals_, parts, values in checks:
                        if only is not None and name not in only:
                            continue
                        for local, elements in zip(locals_, parts, strict=True):
                            want = values[torch.tensor(elements, dtype=torch.int64)].reshape(local.shape)
                            self.assertTrue(same(local, want), f"{said}, {name}")
                if transfer.traffic:
                    came, lacking = transfer.traffic[self.rank][1], bytes_in[self.rank]
                    # What a rank has in two pieces of its own it copies from one to the other.
                    self.assertTrue(came <= lacking if twice else came == lacking, f"{said}: {came}, {lacking}")
                self.assertTrue(transfer.staging <= transfer.budget)

    def test_bytes_out_of_the_sources(self):
        """For 1, 2 and 3 replicas of two ranks each, two trainers send what is wanted once; nobody much more than the
        others on his side."""
        whole = torch.arange(6 * 48 * 4096, dtype=torch.int32).view(6, 48, 4096)
        for replicas in (1, 2, 3):
            train = make_root(range(2), (2,), ("dp",))
            serve = make_root(range(2, 2 + 2 * replicas), (replicas, 2), ("replica", "tp"))
            source = {
                str(n): distribute_tensor(each.clone(), train, [Shard(0)], src_data_rank=None)
                for n, each in enumerate(whole)
            }
            target = {
                str(n): distribute_tensor(
                    torch.zeros_like(each), serve, [Replicate(), Shard(n % 2)], src_data_rank=None
                )
                for n, each in enumerate(whole)
            }
            with torch_overlay.Transfer(source, target, relay=True) as transfer:
                transfer.run()
                traffic = transfer.traffic
            if not traffic:
                continue
            if self.rank > 1:
                for n, one in enumerate(target.values()):
                    at = (self.rank - 2) % 2
                    self.assertEqual(one.to_local(), whole[n].chunk(2, n % 2)[at])
            out = [traffic[rank][0] for rank in range(2 + 2 * replicas)]
            self.assertEqual(sum(out[:2]), whole.nbytes)
            self.assertEqual(sum(out[2:]), (replicas - 1) * whole.nbytes)
            for side in (out[:2], out[2:]):
                self.assertTrue(max(side) <= 1.15 * sum(side) / len(side), out)

    def test_one_copy_crosses_to_a_host(self):
        """Two hosts of three replicas: each gets from elsewhere what it wants once."""
        host = f"host {(self.rank - 2) // 3}" if self.rank > 1 else None
        whole = torch.arange(48 * 4096, dtype=torch.int32).view(48, 4096)
        source = (
            piece(whole[self.rank * 24 :][:24].clone(), whole.shape, (self.rank * 24, 0)) if self.rank < 2 else None
        )
        target = torch.zeros_like(whole) if self.rank > 1 else None
        with torch_overlay.Transfer([source], [target], relay=True, host=host) as transfer:
            transfer.run()
            sent = transfer._flow().sent
            for ranks in (range(2, 5), range(5, 8)):
                crossed = sum(size for (one, other), size in sent.items() if other in ranks and one not in ranks)
                self.assertEqual(crossed, whole.nbytes)
            self.assertEqual(sum(transfer.traffic[rank][0] for rank in range(2)), whole.nbytes)
        if self.rank > 1:
            self.assertEqual(target, whole)

    def test_small_tensors_take_turns(self):
        """24 tensors of less than two stripes: each of six replicas passes on four of them."""
        source = target = None
        if self.rank < 2:
            source = [torch.full((1000,), float(n)) for n in range(24)]
        else:
            target = [torch.zeros(1000) for _ in range(24)]
        with torch_overlay.Transfer(source, target, relay=True) as transfer:
            before = [each._version for each in target or ()]
            transfer.run()
            # For autograd each target was written, by whichever hop.
            self.assertTrue(all(each._version > old for each, old in zip(target or (), before)))
            out = [transfer.traffic[rank][0] for rank in range(WORLD)]
        self.assertEqual(out, [12 * 4000] * 2 + [4 * 5 * 4000] * 6)
        if target is not None:
            self.assertEqual([int(each[-1]) for each in target], [*range(24)])

    def test_two_worlds(self):
        """Trainers of one world, servers of another, one of which is in none; each run passes on what changed."""
        source, whole = None, torch.arange(64 * 1024.0).view(64, 1024)
        target = torch.zeros_like(whole)
        with self.worlds(3, 4) as (world, rank, address):
            if world == 0:
                at = slice(rank * 22, rank * 22 + 22)
                source, target = piece(whole[at], whole.shape, (at.start, 0)), None
            with self.meet(address, self.rank) as place:
                with torch_overlay.Transfer([source], [target], group=place, relay=True, changes=True) as transfer:
                    for step in range(3):
                        transfer.run(version=step if world == 0 else None)
                        self.assertTrue(transfer.version == step)
                        self.assertTrue(target is None or torch.equal(target, whole), f"step {step}")
                        whole.view(-1)[step::1000] += 1
                    sent = sum(size for (one, _), size in transfer._flow().sent.items() if one < 3)
        self.assertEqual(sent, whole.nbytes)

    def test_the_plan_decides(self):
        """By the bytes of each host's link. With `changes` by those of each run. On one host nothing is passed on."""
        whole = torch.arange(8 * 4096.0).view(8, 4096)
        train = make_root(range(2), (2,), ("dp",))
        for hosts, changed, passed in (
            ("aabbccdd", False, True),
            ("aaaaaaaa", False, False),
            ("aabbccdd", True, True),
            ("aaabcdef", False, True),  # each replica on a host of its own
        ):
            source, target = distribute_tensor(whole.clone(), train, [Shard(0)], src_data_rank=None), None
            if self.rank > 1:
                halves = torch.zeros(8, 2048), torch.zeros(8, 2048)
                target = {
                    "w": tuple(piece(half, (8, 4096), (0, 2048 * at)) for at, half in enumerate(halves)),
                }
            seen = []
            with (
                mock.patch.object(own_hosts, "LEAST", 0),
                mock.patch.object(relay, "STRIPE", 64),
                mock.patch.object(relays, "ROUND", 1 << 14),
                torch_overlay.Transfer(
                    {"w": source} if self.rank < 2 else None,
                    target,
                    budget=1 << 17,  # several exchanges without passing on
                    host=hosts[self.rank],
                    changes=changed,
                    progress=lambda done, whole, seen=seen: seen.append((done, whole)),
                ) as sync,
            ):
                sync.run(version=7)
                stats = sync.stats
                self.assertEqual((stats.version, stats.exchanges), (7, sync.exchanges))
                self.assertEqual((stats.sent_bytes, stats.received_bytes), sync.traffic[self.rank][:2])
                self.assertTrue({"check", "agree", "plan", "pack", "send", "wait", "unpack"} <= stats.seconds.keys())
                self.assertIn("\nlast run: ", str(sync))
                out = sum(sync.traffic[rank][0] for rank in (0, 1))
                said = str(sync).splitlines()[1]
                if len({*hosts}) > 1:
                    link = torch_overlay.explain(sync).links()[0]["a"]
                    self.assertTrue(link < 2 * whole.nbytes if passed else link == 6 * whole.nbytes, f"{link}")
                if changed:
                    seen = [*seen]  # of the first run
                    for step in (1000, 1, 1000):
                        for part in (whole,) if self.rank > 1 else (whole, source.to_local()):
                            part[:, ::step].neg_()
                        sync.run()
                        if self.rank < 2:
                            self.assertEqual(sync.sent_bytes < sync.traffic[self.rank][0] // 20, step > 1)
                        self.assertTrue(self.rank < 2 or torch.equal(torch.cat(halves, 1), whole))
            all_bytes = sum(sync.traffic[self.rank][:2])
            self.assertEqual(seen[-1], (all_bytes, all_bytes))
            self.assertEqual(seen, sorted(seen))
            self.assertEqual(out, whole.nbytes * (1 if passed else 6), hosts)
            self.assertEqual("are passed on, so that the busiest host's link has" in said, passed, said)
            if self.rank > 1:
                self.assertEqual(torch.cat(halves, 1), whole)

    def test_a_bar_that_breaks(self):
        """It is logged, and the run goes on on all ranks."""

        def breaks(done, whole):
            raise KeyError("no terminal")

        source, target = torch.arange(4.0), torch.zeros(4)
        with (
            torch_overlay.Transfer(
                [source] if self.rank == 0 else None,
                [target] if self.rank else None,
                progress=breaks if self.rank == 1 else None,
            ) as sync,
            self.assertLogs("torch_overlay.transfers") as logged,
        ):
            sync.run()
        self.assertEqual("progress= of a Transfer raised" in " ".join(logged.output), self.rank == 1)
        self.assertEqual(target, torch.arange(4.0) if self.rank else torch.zeros(4))
        with self.assertRaisesRegex(TypeError, "progress= takes a function"):
            torch_overlay.Transfer([source], [target], progress=3)

    def test_pieces_that_overlap_in_part(self):
        """What a rank passes on of its second piece lands in the first piece of another one."""
        whole = torch.arange(16.0 * 12 * 16).view(16, 12, 16)
        cols = {4: slice(0, 6), 1: slice(6, 12), 3: slice(12, 16)}.get(self.rank)
        source = None if cols is None else [piece(whole[:, :, cols].clone(), whole.shape, (0, 0, cols.start))]
        both, one = (((2, 1, 5), (4, 3, 11)), ((14, 0, 5), (2, 9, 5))), (((14, 7, 0), (2, 3, 16)),)
        boxes = {2: one, 3: both, 4: one}.get(self.rank, ())
        parts = [torch.zeros(length) for _, length in boxes]
        target = [tuple([piece(part, whole.shape, start) for part, (start, _) in zip(parts, boxes, strict=True)])]
        with torch_overlay.Transfer(
            source, target if parts else None, relay=True, host="bbcaaddd"[self.rank]
        ) as transfer:
            transfer.run()
        for part, box in zip(parts, boxes, strict=True):
            self.assertEqual(part, whole[slices(box)])

    def test_rounds_in_which_nothing_is_passed_on(self):
        """A rank without a part in one of them counts it all the same."""
        whole, own = torch.arange(64.0), torch.zeros(64)
        source = {name: piece(whole, (64,), (0,)) for name in "ab"} if self.rank == 0 else None
        target = {"ab"[self.rank - 1]: piece(own, (64,), (0,))} if self.rank in (1, 2) else None
        with mock.patch.object(relays, "ROUND", 256), torch_overlay.Transfer(source, target, relay=True) as transfer:
            transfer.run()
        self.assertEqual(own, whole if target else torch.zeros(64))

    def test_bad_options(self):
        """Ranks differ in relay=; a host with relay=False, or one that is no name."""
        source, target = torch.zeros(4), torch.ones(4)
        with self.assertRaisesRegex(ValueError, "the same relay=; got relay="):
            torch_overlay.Transfer([source], [target], relay=self.rank > 0)
        for relay_, host in ((False, "a"), (True, 3)):
            with self.assertRaisesRegex(ValueError, f"host= takes a name, and relay=False needs none; got {host!r}"):
                torch_overlay.Transfer([source], [target], relay=relay_, host=host)


# Two thousand at night.
for first in range(0, 2000, 50) if NIGHTLY else (0,):

    def check(self, seeds=range(first, first + (50 if NIGHTLY else 25))):
        self.check_random_relays(seeds)

    setattr(RelayCases, f"test_random_relays_{first:04}", check)
