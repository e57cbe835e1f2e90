"""What a transfer does for weights on their way to a server: casts, plain tensors, names, parts, versions."""

import random
import re
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_overlay
from mesh_ranks import WORLD, make_root
from on_device import DEVICE, from_host
from rank_transfers import FLOATS, placed, same_bits
from torch_overlay.transfers import exchanges
from torch_overlay.transfers._planner.schedule import Large
from transfer_twin import draw
from width import NIGHTLY


@from_host
def any_bits(shape, dtype, seed):
    """Numbers of all sizes, infinities and NaN among them."""
    bits = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel()
    data = torch.randn(size, generator=bits) * 10.0 ** torch.randint(-44, 39, (size,), generator=bits)
    for at, odd in enumerate((float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 65520.0, 1e-45)):
        data[at::11] = odd
    return data.to(dtype).reshape(shape)


def same(one, other):
    """Equal to the bit, but for which NaN it is."""
    return same_bits(one.nan_to_num(nan=7.0, posinf=None), other.nan_to_num(nan=7.0, posinf=None)) and torch.equal(
        one.isnan(), other.isnan()
    )


class WeightCases:
    """Cases for ``EightRanks``."""

    def check_random_casts(self, seeds):
        """As the random transfers, but each tensor from one of four types to another."""
        for seed in seeds:
            rng = random.Random(seed)
            tensors = draw(120_000 + seed)
            ends = tensors[0].source, tensors[0].target
            meshes = [DeviceMesh(DEVICE, torch.tensor(end.ranks).reshape(end.sizes)) for end in ends]
            source, target, wanted = [], [], []
            for number, tensor in enumerate(tensors):
                before, after = (getattr(torch, rng.choice(FLOATS)) for _ in range(2))
                whole = any_bits(tensor.shape, before, seed * 10 + number)
                source.append(placed(tensor.source, meshes[0], whole, self.rank))
                empty = torch.zeros_like(whole, dtype=after)
                target.append(placed(tensor.target, meshes[1], empty, self.rank, fill=0))
                cast = torch.empty_like(whole, dtype=after).copy_(whole)
                wanted.append(placed(tensor.target, meshes[1], cast, self.rank).to_local())
            parts = [side if self.rank in end.ranks else None for side, end in zip((source, target), ends, strict=True)]
            with (
                mock.patch.object(
                    exchanges, "LARGE_PIECES", (exchanges.LARGE_PIECES, Large(1, 40), Large(64, 1 << 20))[seed % 3]
                ),
                torch_overlay.Transfer(*parts, budget=(1 << 20, 2600)[seed % 2]) as transfer,
            ):
                for _ in range(2):
                    transfer.run()
                self.assertTrue(transfer.staging <= transfer.budget)
            if self.rank in ends[1].ranks:
                for number, (found, want) in enumerate(zip(target, wanted, strict=True)):
                    self.assertTrue(same(found.to_local(), want), f"seed {seed}, {number}: {tensors[number]}")

    def test_other_types_are_not_cast(self):
        for before, after in ((torch.float32, torch.int32), (torch.float8_e4m3fn, torch.bfloat16)):
            with self.assertRaisesRegex(ValueError, "only types among bfloat16, .* are cast: convert it before"):
                torch_overlay.Transfer([torch.zeros(2, dtype=before)], [torch.zeros(2, dtype=after)])

    def test_plain_tensors_are_replicas(self):
        """From DTensors to plain tensors of a server, and from one rank's to all ranks'; weights want gradients."""
        mesh = make_root(range(4), (4,), ("dp",))
        whole = torch.arange(30.0).reshape(10, 3)
        source = {"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)} if self.rank < 4 else None
        server = torch.nn.Linear(3, 10, bias=False, dtype=torch.float16)
        target = {"w": server.weight} if self.rank in (3, 6) else None
        with torch_overlay.Transfer(source, target) as transfer:
            transfer.run()
        if target:
            self.assertEqual(server.weight, whole.half())
        mine = torch.full((3, 2), 5.0) if self.rank == 2 else None
        yours = torch.zeros(3, 2) if self.rank != 2 else None
        with torch_overlay.Transfer([mine], [yours]) as transfer:
            transfer.run()
            if mine is not None:
                mine.fill_(6.0)
            transfer.run()
        self.assertEqual(mine if yours is None else yours, torch.full((3, 2), 6.0))

    def test_replicas_that_differ_are_an_error_that_names_them(self):
        mine = torch.ones(5)
        mine[4] += self.rank > 5
        with self.assertRaisesRegex(
            ValueError,
            "source 'w' is a plain .* one value on ranks 0-5, another on ranks 6, 7: give it on one rank alone, ",
        ):
            torch_overlay.Transfer({"w": mine}, {"w": torch.zeros(5)})
        with self.assertRaisesRegex(ValueError, r"'w' is float32 of shape \(5,\), a plain tensor, on ranks 0-5, and "):
            torch_overlay.Transfer({"w": mine[: 5 - (self.rank > 5)]}, {"w": torch.zeros(5)})

    def test_replicas_are_compared_before_a_run_if_asked(self):
        half = torch.arange(8.0)[4 * (self.rank % 2) :][:4].clone()
        mine, parts = torch.ones(5), torch_overlay.piece(half, (8,), (4 * (self.rank % 2),))
        target = {"w": torch.zeros(5), "p": torch.zeros(8)}
        with torch_overlay.Transfer({"w": mine, "p": parts}, target) as transfer:
            transfer.run(check=True)
            mine[4] += self.rank > 5
            half[2] += self.rank == 3
            with self.assertRaisesRegex(
                ValueError,
                "nothing was sent: .*'p' has pieces of shape .4,. that start at .4,., with one value on ranks 1, 5, 7, "
                "another on rank 3; .*'w' is a plain .* one value on ranks 0-5, another on ranks 6, 7",
            ):
                transfer.run(check=True)
            self.assertEqual((target["w"], target["p"]), (torch.ones(5), torch.arange(8.0)))
            transfer.run()

    def test_replicas_of_dtensors_are_compared_before_a_run_if_asked(self):
        """Of two replicas that have drifted apart, a server gets rows of one and rows of the other."""
        mesh = make_root(range(WORLD), (2, 2, 2), ("dp", "fsdp", "tp"))
        source = {
            name: DTensor.from_local(torch.full(shape, 1.0), mesh, placements, run_check=False)
            for name, shape, placements in (
                ("norm", (6,), [Replicate(), Replicate(), Replicate()]),
                ("short", (1, 3), [Replicate(), Shard(0), Replicate()]),
                ("up", (4, 3), [Replicate(), Shard(0), Shard(1)]),
                ("whole", (4, 3), [Shard(0), Shard(0), Shard(1)]),
            )
        }
        target = {name: torch.zeros(tensor.shape) for name, tensor in source.items()}
        source["whole"].to_local().fill_(float(self.rank))  # cut along all axes: no rank has a replica
        with torch_overlay.Transfer(source, target) as transfer:
            transfer.run(check=True)
            for tensor in target.values():
                tensor.fill_(-1.0)
            for drifted, words in (
                (
                    ("up",),
                    r"'up' is replicated on its mesh, and its part of shape .4, 3. that starts at .4, 0. has one "
                    "value on rank 2, another on rank 6: the replicas have drifted apart",
                ),
                (
                    ("norm", "short"),
                    "'norm' is replicated .* one value on ranks 0, 1, 2, 3, 4, 5, 7, another on rank 6: .* 'short' is "
                    r"replicated .* its part of shape .1, 3. that starts at .1, 0. has one value on ranks 2, 3, 7, "
                    "another on rank 6",
                ),
            ):
                if self.rank == 6:
                    for name in drifted:
                        source[name].to_local().view(-1)[-1] += 1
                with self.assertRaisesRegex(ValueError, f"nothing was sent: the source {words}"):
                    transfer.run(check=True)
                self.assertTrue(all(bool((tensor == -1).all()) for tensor in target.values()))
                if self.rank == 6:
                    for name in drifted:
                        source[name].to_local().view(-1)[-1] -= 1
            transfer.run(check=True)
        for name in ("norm", "short", "up"):
            self.assertEqual(target[name], torch.ones(source[name].shape))

    def test_one_source_goes_to_several_targets(self):
        mesh = make_root(range(WORLD), (8,), ("dp",))
        whole = torch.arange(16.0)
        source = {"embed.w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}
        for names in (
            {"embed.w": ("embed.weight", "lm_head.weight")},
            lambda path: ("embed.weight", "lm_head.weight"),
        ):
            target = {name: torch.zeros(16) for name in ("embed.weight", "lm_head.weight")}
            with torch_overlay.Transfer(source, target, names=names) as transfer:
                transfer.run()
            self.assertEqual([*target.values()], [whole, whole])

    def test_what_only_one_side_has_is_left_out_if_asked(self):
        source = {name: torch.full((2,), 3.0) for name in ("a", "b")}
        target = {name: torch.zeros(2) for name in ("b", "c", "d")}
        with self.assertRaisesRegex(ValueError, "the source has 'a', and the target doesn't"):
            torch_overlay.Transfer(source, target)
        with torch_overlay.Transfer(source, target, strict=False) as transfer:
            self.assertEqual(transfer.left_out, {"source": ("a",), "target": ("c", "d")})
            transfer.run()
        self.assertEqual([each[0].item() for each in target.values()], [3, 0, 0])
        with self.assertRaisesRegex(ValueError, "they have no name in common; the source has 'a'"):
            torch_overlay.Transfer({"a": source["a"]}, {"c": target["c"]}, strict=False)

    def test_what_keeps_names_apart_is_said(self):
        given = {name: torch.ones(2) for name in ("model.up", "model._orig_mod.norm", "head")}
        for names, words in (
            ({"up", "_orig_mod.norm", "head"}, " (without 'model.' they fit)"),
            ({"model.up", "model.norm"}, " (without '_orig_mod.' they fit)"),
            ({"t." + name for name in given}, r" (with 't.' before them they fit)"),
            ({"head", "lm.up"}, ""),  # no one prefix
        ):
            with self.assertRaisesRegex(ValueError, re.escape(f"names= maps the source's names{words}; strict=False")):
                torch_overlay.Transfer(given, {name: torch.zeros(2) for name in names})

    def test_a_part_is_moved_alone(self):
        """Any part in any order, at a budget that takes several exchanges; the others stay."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        source, target = {}, {}
        for number, placements in enumerate(([Shard(0), Shard(1)], [Replicate(), Shard(1)], [Replicate(), Shard(0)])):
            local = torch.full((32, 2) if number == 1 else (4, 8), float(number))
            source[f"{number}"] = DTensor.from_local(local, mesh, placements, run_check=False)
            target[f"{number}"] = torch.zeros(source[f"{number}"].shape)
        with torch_overlay.Transfer(source, target, budget=6000) as transfer:
            for only in (["1"], ("2", "0"), {"0": 0}, [], None):
                before = {name: each.fill_(-1.0) for name, each in target.items()}
                for _ in range(2):
                    transfer.run(only=only)
                for name, each in before.items():
                    moved = only is None or name in only
                    want = float(name) if moved else -1.0
                    self.assertTrue(bool((each == want).all()), f"{only}: {name}")

    def test_other_tensors_are_bound_in_the_place_of_those_before(self):
        mesh = make_root(range(WORLD), (8,), ("dp",))

        def side(value, **changed):
            made = DTensor.from_local(torch.full((2, 3), value), mesh, [Shard(0)], run_check=False)
            return {"model.a": made, "b": torch.full((5,), value), **changed}

        source, target = side(1.0), {"a": torch.zeros(16, 3), "b": torch.zeros(5)}
        with torch_overlay.Transfer(source, target, names={"model.a": "a"}) as transfer:
            transfer.run()
            fresh = {"a": torch.zeros(16, 3), "b": torch.zeros(5)}
            if self.rank % 2:
                transfer.bind(target=fresh)
            transfer.bind(side(7.0, unused=torch.zeros(1)))
            transfer.run()
            old = 1.0 if self.rank % 2 else 7.0
            for name, now in fresh.items():
                self.assertTrue(bool((target[name] == old).all()))
                self.assertTrue(bool((now == (7.0 if self.rank % 2 else 0.0)).all()))
            for trees, message in (
                (
                    (None, {"a": fresh["a"]}),
                    "The target to bind lacks 'b', which this Transfer moves. Nothing was bound",
                ),
                ((None, {**fresh, "b": torch.zeros(6)}), "has 'b', which has shape .6,. and had .5,. when"),
                ((None, {**fresh, "b": torch.zeros(5).half()}), "has 'b', which is float16 and was float32 when"),
                (
                    (side(0.0, b=source["model.a"]), None),
                    "The source to bind has 'b', which is a DTensor and was",
                ),
            ):
                with self.assertRaisesRegex(ValueError, message):
                    transfer.bind(*trees)
            transfer.run()
        with self.assertRaisesRegex(RuntimeError, "closed"):
            transfer.bind(source)

    def test_ranks_that_mean_other_parts_or_versions_all_raise(self):
        source, target = [{name: torch.full((2,), fill) for name in "ab"} for fill in (1.0, 0.0)]
        with torch_overlay.Transfer(source, target) as transfer:
            odd = self.rank == 5
            for only, version, message in (
                (["a"] if odd else ["b"], None, "ranks 0, 1, 2, 3, 4, 6, 7: runs only 'b'; rank 5: runs only 'a'"),
                (["a"] if odd else None, None, "ranks 0, 1, 2, 3, 4, 6, 7: runs all of it; rank 5: runs only 'a'"),
                (["x"] if odd else ["b"], None, "rank 5: only names 'x', which this Transfer doesn't move; runs only"),
                (None, 3 if odd else 4, "says version 4; rank 5: says version 3"),
                (["a"], 3, "runs with check=False; rank 5: runs with check=True"),
                (None, 1.5 if odd else 1, "rank 5: version= takes a whole number of less than 63 bits, and got 1.5"),
                (None, 1 << 63 if odd else 1, "rank 5: version= takes a whole number of less than 63 bits"),
                ([1, "a"] if odd else ["a"], None, "rank 5: only= takes several names, and got .1, 'a'."),
                ("ab" if odd else ["a", "b"], None, "rank 5: only= takes several names, and got 'ab'"),
            ):
                with self.assertRaisesRegex(ValueError, f"nothing was sent: .*{message}"):
                    transfer.run(only=only, version=version, check=odd and version == 3 and only is not None)
            self.assertEqual(target, {name: torch.zeros(2) for name in "ab"})
            for version in (-7, 0, None, 1 << 40):
                transfer.run(version=version if self.rank in (1, 6) else None)
                self.assertEqual(transfer.version, version)
            self.assertEqual(target, source)


# Two thousand at night.
for first in range(0, 2000, 50) if NIGHTLY else (0,):

    def check(self, seeds=range(first, first + (50 if NIGHTLY else 12))):
        self.check_random_casts(seeds)

    setattr(WeightCases, f"test_random_casts_{first:04}", check)
