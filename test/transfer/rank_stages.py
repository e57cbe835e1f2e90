"""Targets that come in stages, on real ranks: beside targets that don't, from any layout into any, held against what
each target has by its sharding."""

import random
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

import torch_overlay
from mesh_ranks import WORLD
from on_device import DEVICE
from rank_pieces import covered_sides
from rank_weights import any_bits, same
from torch_overlay.transfers import relays, stages
from transfer_twin import draw
from width import NIGHTLY

piece = torch_overlay.piece


def on_meta(rng, leaf):
    """The same target without memory; pieces as views of one tensor, or of one each."""
    if isinstance(leaf, tuple):
        if rng.random() < 0.5:
            return tuple(on_meta(rng, part) for part in leaf)
        flat = torch.empty(sum(part.local.numel() for part in leaf), dtype=leaf[0].local.dtype, device="meta")
        parts = flat.split([part.local.numel() for part in leaf])
        return tuple(piece(own.view(p.local.shape), p.shape, p.start) for own, p in zip(parts, leaf, strict=True))
    if isinstance(leaf, DTensor):
        local = leaf.to_local().to("meta")
        return DTensor.from_local(
            local, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
        )
    if isinstance(leaf, torch.Tensor):
        return leaf.to("meta")
    return piece(leaf.local.to("meta"), leaf.shape, leaf.start)


def locals_of(given):
    """The tensors that a function got for one name."""
    parts = given if isinstance(given, tuple) else (given,)
    return [part.to_local() if isinstance(part, DTensor) else part for part in parts]


def parts_of(given):
    """The same of what the target has."""
    parts = given if isinstance(given, tuple) else (given,)
    return [getattr(part, "_local_tensor", part) for part in parts]


class StageCases:
    """Cases for ``EightRanks``."""

    def check_random_stages(self, seeds):
        """Each function is called once a run, in order, with all that its targets have; only then have these memory."""
        for seed in seeds:
            rng, own = random.Random(seed), random.Random(f"{seed} {self.rank}")
            options = {
                "relay": rng.choice((None, True)),
                "changes": rng.choice((False, True)),
                "keep": rng.choice((False, True)),
                "budget": rng.choice((1 << 20, 4000)),
            }
            source, target, checks = {}, {DEVICE: None}, {}
            for number, shape, (before, after), sides, (_, wanted) in covered_sides(rng, draw(700_000 + seed)):
                name, whole = f"t{number}", any_bits(shape, before, seed * 10 + number)
                later = torch.where(any_bits(shape, torch.uint8, seed) > 99, whole, any_bits(shape, before, seed + 5))
                source[name], parts = sides[0].make(whole, self.rank)
                sent = [(parts, sides[0].make(each, self.rank)[1]) for each in (whole, later)]
                target[name], locals_ = sides[1].make(whole.to(after), self.rank, fill=0)
                values = [each.to(after).flatten() for each in (whole, later)]
                checks[name] = values, wanted.get(self.rank, []), locals_, sent
            if not checks:
                continue
            mine = [name for name in checks if target[name] is not None and own.random() < 0.8]
            own.shuffle(mine) if rng.random() < 0.3 else mine.sort()
            groups = [mine[at : at + 2] for at in range(0, len(mine), 2)]
            came = []

            def finish(tensors, came=came, target=target):
                came.append({name: [part.clone() for part in locals_of(each)] for name, each in tensors.items()})
                for name, each in tensors.items():
                    for given, part in zip(parts_of(target[name]), locals_of(each), strict=True):
                        if given.is_meta:
                            part.zero_()  # as a function may that computes in place

            target |= {name: on_meta(own, target[name]) for name in mine}
            for name in mine:  # a part of some has memory, and is written in place
                if isinstance(target[name], tuple) and own.random() < 0.3:
                    first = piece(torch.zeros_like(checks[name][2][0]), target[name][0].shape, target[name][0].start)
                    target[name] = (first, *target[name][1:])
            del target[DEVICE]
            with mock.patch.object(relays, "ROUND", rng.choice((200, 8 << 20))):
                transfer = torch_overlay.Transfer(
                    source, target, stages=[(names, finish) for names in groups], **options
                )
            with transfer:
                for version in range(2):
                    came.clear()
                    for name, (_, _, locals_, sent) in checks.items():
                        for part, now in zip(*sent[version], strict=True):
                            part.copy_(now)
                        for local in locals_ if name not in mine else ():
                            local.zero_()
                    transfer.run(version=version, only=[*checks] if seed % 3 == 0 else None)
                    self.assertEqual([[*each] for each in came], groups, f"seed {seed}")
                    for name, (values, parts, locals_, _) in checks.items():
                        got = next((each[name] for each in came if name in each), locals_)
                        for local, elements in zip(got, parts, strict=True):
                            want = values[version][torch.tensor(elements, dtype=torch.int64)].reshape(local.shape)
                            self.assertTrue(same(local, want), f"seed {seed}, {name}, {options}")
                    if transfer._state.stages is not None and not options["changes"]:
                        self.assertFalse(any(stage._memory for stage in transfer._state.stages.every))
                staged = {*transfer.staged}
                self.assertTrue({*mine} <= staged)
                if transfer.traffic:
                    transfer.verify()

    def test_two_groups_have_memory_at_one_time(self):
        """While a function works, the next group is under way, and no other one has memory."""
        sizes, trace = [100_000, 50, 100_000, 7], []
        source = {f"w{n}": torch.arange(float(size)) + n for n, size in enumerate(sizes)} if self.rank < 3 else None
        target = {f"w{n}": torch.empty(size, device="meta") for n, size in enumerate(sizes)} if self.rank > 4 else None
        live, real, freed = set(), stages.Stage.real, stages.Stage.free

        def begin(stage, tensor, device):
            if not stage._memory:
                live.add(stage.names)
                trace.append(len(live))
            return real(stage, tensor, device)

        def free(stage):
            live.discard(stage.names)
            freed(stage)

        def finish(tensors):
            ((name, tensor),) = tensors.items()
            self.assertIn(f"function for the stage of {name!r}", transfer._state.group.watch.position.text)
            trace.append((name, len(live), bool((tensor == torch.arange(float(len(tensor))) + int(name[1:])).all())))

        groups = [([f"w{n}"], finish) for n in range(len(sizes))] if target else []
        with torch_overlay.Transfer(source, target, stages=groups, relay=False) as transfer:
            with mock.patch.object(stages.Stage, "real", begin), mock.patch.object(stages.Stage, "free", free):
                transfer.run()
            took = {} if transfer.stats is None else transfer.stats.seconds
        if target is None:
            self.assertEqual(trace, [])
            return
        self.assertEqual(trace, [1, 2, ("w0", 2, True), 2, ("w1", 2, True), 2, ("w2", 2, True), ("w3", 1, True)])
        self.assertTrue(took["stages"] > 0)

    def test_a_function_that_fails(self):
        """All ranks raise, and name it; later functions there aren't called, other targets are written, and the next
        run is right."""
        source = {f"w{n}": torch.full((5,), float(n)) for n in range(4)} if self.rank == 0 else None
        fails, served, plain = [True], {}, torch.zeros(5)
        target = stages_ = None
        if self.rank > 5:
            target = {f"w{n}": torch.empty(5, device="meta") for n in range(3)} | {"w3": plain}

            def finish(tensors):
                for name, tensor in tensors.items():
                    if fails and self.rank == 6 and name == "w1":
                        raise KeyError("what it needs")
                    served[name] = tensor  # kept, which is allowed

            stages_ = [([f"w{n}"], finish) for n in range(3)]
        with torch_overlay.Transfer(source, target, stages=stages_ or ()) as transfer:
            for background in (False, True):
                fails[:], served = [True], served
                served.clear()
                plain.zero_()
                if transfer.traffic:
                    with self.assertRaisesRegex(
                        ValueError, "rank 6: its function for the stage of 'w1' raised KeyError"
                    ):
                        running = transfer.run(async_op=background)
                        if running is not None:
                            running.wait()
                if target is not None:
                    self.assertEqual([*served], ["w0"] if self.rank == 6 else ["w0", "w1", "w2"])
                    self.assertEqual(plain, torch.full((5,), 3.0))
                fails.clear()
                transfer.run()
                if target is not None:
                    self.assertEqual(served, {f"w{n}": torch.full((5,), float(n)) for n in range(3)})

    def test_stages_of_targets_that_share_memory(self):
        """Targets of a stage that have memory, or are views of one tensor on meta, are checked as all targets are; and
        what a function writes into such targets isn't there in the next run of changes."""
        mine = {"a": torch.arange(8.0), "b": torch.arange(8.0) + 8}
        source, is_one, got = mine if self.rank == 0 else None, self.rank == WORLD - 1, []

        def finish(tensors):
            got.append({name: tensor.clone() for name, tensor in tensors.items()})
            for tensor in tensors.values():
                tensor.zero_()

        def make(target, **options):
            given = (target, [(["a", "b"], finish)]) if is_one else (None, ())
            return torch_overlay.Transfer(source, given[0], stages=given[1], **options)

        for device in ("meta", "cpu"):
            block = torch.empty(12, device=device)
            for target, message in (
                ({"a": block[:8], "b": block[4:]}, "'a' and 'b' share memory"),
                ({"a": block[:8], "b": block[:8]}, "their sources have different values"),
            ):
                with self.assertRaisesRegex(ValueError, message), make(target) as transfer:
                    transfer.run()
                    self.assertFalse(transfer.traffic)
                    raise ValueError(message)  # a rank without a part in it
        for kinds in (("cpu", "cpu"), ("meta", "cpu")):
            target = {name: torch.zeros(8, device=kind) for name, kind in zip("ab", kinds, strict=True)}
            with make(target, changes=True) as transfer:
                for value in (50.0, 60.0):
                    mine["b"][3] = value
                    got.clear()
                    transfer.run()
                    self.assertEqual(got, [mine] * is_one)
        base = torch.arange(16.0)
        sides = [{"a": base[at : at + 8], "b": base[8 - at : 16 - at]} for at in (0, 8)]
        got.clear()
        with torch_overlay.Transfer(*sides, group=[self.rank], stages=[(["a", "b"], finish)]) as transfer:
            transfer.run()
        self.assertEqual(got, [{"a": torch.arange(8.0), "b": torch.arange(8.0) + 8}])

    def test_a_function_cant_close_its_transfer(self):
        """It would wait for the run, and the run for it."""
        source = {"a": torch.ones(3)} if self.rank == 0 else None
        target = {"a": torch.empty(3, device="meta")} if self.rank == 7 else None
        for name in ("close", "bind", "forget"):
            finish = lambda _, name=name: getattr(transfer, name)()
            with torch_overlay.Transfer(source, target, stages=[(["a"], finish)] if target else ()) as transfer:
                for background in (False, True) if transfer.traffic else ():
                    with self.assertRaisesRegex(ValueError, "rank 7: .*raised RuntimeError: .* its own Transfer"):
                        running = transfer.run(async_op=background)
                        if running is not None:
                            running.wait()

    def test_what_stages_refuses(self):
        mine = {"a": torch.ones(3), "b": torch.ones(2)}
        on = {name: each.to("meta") for name, each in mine.items()}
        is_one = self.rank == WORLD - 1
        source = None if is_one else mine

        def make(target, groups, **options):
            given = (target, groups) if is_one else (None, ())
            return torch_overlay.Transfer(source, given[0], stages=given[1], **options)

        for target, groups, message in (
            (on, [(["a", "c"], print), (["b"], print)], "rank 7: stages= has 'c', and the target on this rank doesn't"),
            (on, [(["a"], print)], "rank 7: .*'b' is on meta"),
            ({**on, "more": on["a"]}, [(["a", "more"], print), (["b"], print)], "'a' without 'more', and both"),
        ):
            with self.assertRaisesRegex((ValueError, TypeError), message):
                make(target, groups, strict=False)
        for groups, kind in (
            ([("ab", print)], TypeError),
            ([(["a"], 3)], TypeError),
            ([(3, print)], TypeError),
            ([(["a", "a"], print)], ValueError),
        ):
            with self.assertRaisesRegex(kind, "stages= takes"):
                torch_overlay.Transfer(None, on, stages=groups)
        got = []
        take = lambda tensors: got.append([each.sum() for each in tensors.values()])
        with make(on, [(["a", "b"], take)], changes=True) as transfer:
            with self.assertRaisesRegex(
                ValueError, "rank 7: gets 'a' without 'b', and both are in one group of stages="
            ):
                transfer.run(only=["a"])
            with self.assertRaisesRegex(ValueError, r"verify\(\) can't compare 'a': it comes in stages"):
                transfer.verify(only=["a"])
            transfer.run()
            if is_one:
                transfer.bind(target={"a": torch.empty(9, device="meta")[::3], "b": on["b"]})
                with self.assertRaisesRegex(ValueError, "lacks|stages= has 'b'"):
                    transfer.bind(target={"a": on["a"]})
            transfer.run()
            self.assertEqual(got, [[torch.tensor(3.0), torch.tensor(2.0)]] * 2 * is_one)


# A thousand at night.
for first in range(0, 1000, 50) if NIGHTLY else (0,):

    def check(self, seeds=range(first, first + (50 if NIGHTLY else 12))):
        self.check_random_stages(seeds)

    setattr(StageCases, f"test_random_stages_{first:04}", check)
