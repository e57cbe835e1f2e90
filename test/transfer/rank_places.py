"""Places: two worlds of a job, numbered in any order, and a process in none; what is said when somebody is missing."""

import contextlib
import random
import subprocess
import tempfile
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import forks
import torch_overlay
from mesh_ranks import WORLD, WORLD_TIMEOUT
from on_device import BACKEND, DEVICE
from rank_transfers import FLOATS, placed
from rank_weights import any_bits, same
from torch_overlay.rendezvous.meeting import Meeting
from torch_overlay.rendezvous.seal import Seal
from transfer_twin import draw
from width import NIGHTLY

piece = torch_overlay.piece


class PlaceCases:
    """Cases for ``EightRanks``."""

    @contextlib.contextmanager
    def worlds(self, *sizes):
        """Instead of the world of all ranks, worlds of the first, the next and so on; the rest is in none. Gives the
        number of the own one, this rank in it, and an address to meet at."""
        said = [None] * WORLD
        dist.all_gather_object(said, (forks.free_port(), tempfile.mktemp()))
        dist.barrier()
        dist.destroy_process_group()
        number, first = 0, 0
        while number < len(sizes) and self.rank >= first + sizes[number]:
            first, number = first + sizes[number], number + 1
        inside = number < len(sizes)
        if inside:
            store = dist.FileStore(said[number][1], sizes[number])
            dist.init_process_group(BACKEND, rank=self.rank - first, world_size=sizes[number], store=store)
        try:
            yield (number if inside else None), self.rank - first, f"tcp://127.0.0.1:{said[0][0]}"
        finally:
            if inside:
                dist.destroy_process_group()
            self._open_world(WORLD_TIMEOUT)

    def meet(self, address, rank, world_size=WORLD, **more):
        return torch_overlay.meet(address, rank=rank, world_size=world_size, **{"timeout": 20, **more})

    def test_a_trainer_of_one_world_feeds_servers_of_another(self):
        """FSDP x TP in float32 to plain bfloat16 tensors, a fused one among them; a replica; a rank in none."""
        self.check_a_trainer_feeds_servers()
        self.check_a_trainer_feeds_servers(key="key")  # and what goes by the store is signed

    def check_a_trainer_feeds_servers(self, key=None):
        whole = {name: any_bits((8, 6), torch.float32, seed) for seed, name in enumerate(("q", "k", "head"))}
        with self.worlds(4, 3) as (world, _, address):
            source = target = None
            if world == 0:
                mesh = DeviceMesh(DEVICE, torch.arange(4).reshape(2, 2))
                cut = [Shard(0), Shard(1)]
                source = {name: distribute_tensor(t, mesh, cut, src_data_rank=None) for name, t in whole.items()}
                source["same"] = type(source["q"]).from_local(torch.full((3,), 4.0), mesh, [Replicate()] * 2)
            fused = torch.zeros(16, 6, dtype=torch.bfloat16)
            if world == 1:
                target = {"q": piece(fused[:8], (8, 6), (0, 0)), "k": piece(fused[8:], (8, 6), (0, 0))}
                target |= {"head": torch.zeros(8, 6, dtype=torch.bfloat16), "same": torch.zeros(3)}
            if world is None:  # in no world: a file with the head alone
                target = {"head": torch.zeros(8, 6)}
            with self.meet(address, (self.rank + 3) % WORLD, key=key) as place:
                first, many = {0: (0, 4), 1: (4, 3), None: (7, 0)}[world]
                self.assertEqual(place.numbers, {r: (first + r + 3) % WORLD for r in range(many)})
                with self.assertRaisesRegex(ValueError, "'head' is bfloat16 .* on ranks .*, and float32 .* on rank 2"):
                    torch_overlay.Transfer(source, target, group=place)
                if world is None:
                    target = None
                with torch_overlay.Transfer(source, target, group=place) as sync:
                    if sync._state.group is not None:
                        self.assertEqual(sync._state.group.team.group.group_desc, "torch_overlay_transfer")
                    for version in (1, 2):
                        sync.run(version=version if source else None)
                        if sync.traffic:
                            self.assertEqual(sync.version, version)
            if world == 1:
                self.assertTrue(same(fused, torch.cat([whole["q"], whole["k"]]).bfloat16()))
                self.assertTrue(same(target["head"], whole["head"].bfloat16()))
                self.assertEqual(target["same"], torch.full((3,), 4.0))

    def check_between_worlds(self, seeds):
        """Random transfers from a mesh of one world to one of another, ranks of both numbered in any order."""
        with self.worlds(4, 4) as (world, own, address):
            order = random.Random(seeds[0]).sample(range(WORLD), WORLD)
            with self.meet(address, order[self.rank]) as place:
                for seed in seeds:
                    rng = random.Random(seed)
                    drawn = draw(500_000 + seed, world=4)
                    ends = drawn[0].source, drawn[0].target
                    ranks = torch.tensor(ends[world].ranks).reshape(ends[world].sizes)
                    mesh = DeviceMesh(DEVICE, ranks, _init_backend=False)
                    given, wanted = [], []
                    for number, tensor in enumerate(drawn):
                        before, after = (getattr(torch, rng.choice(FLOATS)) for _ in range(2))
                        whole = any_bits(tensor.shape, before, seed * 10 + number)
                        if world == 0:
                            given.append(placed(tensor.source, mesh, whole, own))
                        else:
                            given.append(placed(tensor.target, mesh, whole.to(after), own, fill=0))
                            wanted.append(placed(tensor.target, mesh, whole.to(after), own).to_local())
                    here = given if own in ends[world].ranks else None
                    sides = (here, None) if world == 0 else (None, here)
                    with torch_overlay.Transfer(*sides, group=place, budget=(1 << 20, 2600)[seed % 2]) as sync:
                        sync.run()
                    for found, want in zip(given if here and world else (), wanted):
                        self.assertTrue(same(found.to_local(), want), f"seed {seed}")

    def test_who_is_missing_or_a_stranger_is_named(self):
        with self.worlds(4, 3) as (_, _, address):
            begun = time.monotonic()
            if self.rank != 5:
                with self.assertRaisesRegex(RuntimeError, "A meeting of 8 at .* rank 5 didn't come within 3 s. Each"):
                    self.meet(address, self.rank, timeout=3)
            self.together("missing")
            self.assertTrue(time.monotonic() - begun < 30)
            with self.assertRaisesRegex(ValueError, "said isn't signed with the key that rank . has"):
                self.meet(address, self.rank, key="another" if self.rank == 5 else "key")
            self.together("stranger")
            with self.assertRaisesRegex(ValueError, "signed with a key, and rank . has none|isn't signed with the key"):
                self.meet(address, self.rank, key=None if self.rank == 5 else "key")
            self.together("no key")
            with self.assertRaisesRegex((ValueError, RuntimeError), "others give world_size [89]|didn't come within"):
                self.meet(address, self.rank, world_size=9 if self.rank == 5 else 8, timeout=3)

    def test_words_of_before_are_no_words_of_now(self):
        """A rank whose nonce somebody else set, and a word that was copied from an earlier meeting."""
        with self.worlds() as (_, _, address):
            if self.rank:
                return self.together("words")
            say = Meeting.say

            def overheard(meeting, what):
                said = say(meeting, what)
                return {0: "0" * 32} if isinstance(what, str) else said

            with mock.patch.object(Meeting, "say", overheard), self.assertRaisesRegex(ValueError, "spoke as rank 0"):
                self.meet(address, 0, world_size=1, key="key")
            with self.meet(address, 0, world_size=1, key="key") as place:
                first, second = place.meeting("A Transfer"), place.meeting("A Transfer")
                words = [each._seal.of("A Transfer", "rank 0", "digest") for each in (first, second)]
                self.assertTrue(words[0] != words[1])
                self.assertFalse(second._seal.fits(words[0], "A Transfer", "rank 0", "digest"))
            return self.together("words")

    def together(self, name):
        """Without a world that all are in."""
        self._meet(dist.PrefixStore(f"{self.id()} {name}", self._store), 2 * WORLD_TIMEOUT)

    def test_a_rank_that_is_there_already(self):
        with self.worlds() as (_, _, address):
            if self.rank > 2:
                return
            # Two of rank 1: the second to come is told so, and the others don't get further without rank 2.
            message = "has a rank 1 already, and it didn't leave within 4 s|rank 2 didn't come within 4 s"
            with self.assertRaisesRegex((ValueError, RuntimeError), message):
                self.meet(address, min(self.rank, 1), world_size=3, timeout=4)

    def test_rank_0_listens_at_its_address_alone(self):
        with self.worlds() as (_, _, address):
            with self.meet(address, self.rank):
                port = address.rpartition(":")[2]
                heard = subprocess.run(["ss", "-tlnH", f"sport = :{port}"], capture_output=True, text=True, check=False)
                if not heard.returncode:
                    self.assertEqual([line.split()[3] for line in heard.stdout.splitlines()], [f"127.0.0.1:{port}"])
                if self.rank == 0:
                    with self.assertRaisesRegex(RuntimeError, "can't listen there: .* Is another place open there"):
                        self.meet(address, 0, world_size=1)

    def test_a_mesh_with_ranks_that_did_not_come(self):
        with self.worlds(4, 4) as (world, _, address):
            if self.rank == 3:
                return self.together("met")
            rank = self.rank - (self.rank > 3)
            mesh = DeviceMesh(DEVICE, [0, 1, 2, 3], _init_backend=False)
            tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
            with (
                self.meet(address, rank, world_size=7) as place,
                self.assertRaisesRegex(ValueError, "ranks 0-2: rank 3 of its world didn't meet at tcp.*All ranks of"),
            ):
                sides = [tensor if world == 0 else None], [torch.ones(4) if world else None]
                torch_overlay.Transfer(*sides, group=place)
            return self.together("met")

    @contextlib.contextmanager
    def another_world(self, ranks):
        """Instead of the world of this process, one over these ranks of it, numbered in this order."""
        dist.destroy_process_group()
        if self.rank in ranks:
            own = ranks.index(self.rank)
            store = dist.PrefixStore(f"{self.id()} {ranks}", self._store)
            dist.init_process_group(BACKEND, rank=own, world_size=len(ranks), store=store)
        yield

    def test_a_place_of_a_world_that_is_gone_is_no_place_of_the_next(self):
        """Its numbers are of the world before: with ranks 0 and 1 swapped, each gave the other's half."""
        with self.worlds(2) as (world, _, address):
            if self.rank > 2:
                return self.together("swapped")
            with self.meet(address, self.rank, world_size=3) as place:
                if world is not None:
                    with self.another_world([1, 0]):
                        self._check_old_place(place, address)
                else:
                    self._check_old_place(place, address)
            # Met again, the values are right.
            with self.meet(address, self.rank, world_size=3) as place:
                source, target = self._halves()
                with torch_overlay.Transfer(source, target, group=place) as sync:
                    sync.run()
                if target is not None:
                    self.assertEqual(target[0], torch.tensor([0.0, 0.0, 1.0, 1.0]))
            return self.together("swapped")

    def _halves(self):
        """On two ranks the halves of a tensor, as their world numbers them; on the other one a target."""
        if not dist.is_initialized():
            return None, [torch.full((4,), 9.0)]
        mesh = DeviceMesh(DEVICE, [0, 1], _init_backend=False)
        half = torch.full((2,), float(dist.get_rank()))
        return [DTensor.from_local(half, mesh, [Shard(0)], run_check=False)], None

    def _check_old_place(self, place, address):
        with self.assertRaisesRegex(ValueError, "ranks 0, 1: .*this process met in another torch.* all meet again"):
            torch_overlay.Transfer(*self._halves(), group=place)

    def test_who_comes_early_with_another_size_waits_until_the_place_closes(self):
        """A server more is to come: the others close their place after a while, and meet anew with it."""
        with self.worlds() as (_, _, address):
            if self.rank > 2:
                return self.together("resized")
            if self.rank < 2:
                with self.meet(address, self.rank, world_size=2):
                    self._meet_some("two are there")
                    time.sleep(1)
            else:
                self._meet_some("two are there")
            with self.meet(address, self.rank, world_size=3, timeout=10) as place:
                target = torch.zeros(4)
                side = ([torch.ones(4)], None) if self.rank == 0 else (None, [target])
                torch_overlay.Transfer(*side, group=place).run()
                self.assertEqual(target, torch.full((4,), float(self.rank > 0)))
            return self.together("resized")

    def _meet_some(self, name):
        """Ranks 0 to 2, without a world."""
        keys = [f"{self.id()} {name} {rank}" for rank in range(3)]
        self._store.set(keys[self.rank], "")
        self._store.wait(keys, WORLD_TIMEOUT)

    def test_who_does_not_run_is_named_and_not_the_group_that_c10d_does_not_know(self):
        """c10d logs what fails in a collective with the backend of its group, which raises for a place's group."""
        with self.worlds(2) as (world, _, address):
            if self.rank > 2:
                return self.together("not run")
            with self.meet(address, self.rank, world_size=3, timeout=2) as place:
                sync = torch_overlay.Transfer(*self._halves(), group=place)
                if world is not None:
                    said = (
                        "no target was written: run 1, .*, waited for longer than 2 s: rank 2 didn't come: it is not in"
                    )
                    with self.assertRaisesRegex(RuntimeError, said):
                        sync.run()
                self._meet_some("not run")
            return self.together("not run")

    def test_a_transfer_closes_after_its_world(self):
        """Also at the end of a `with`; its group went with the world that was destroyed."""
        sides = [torch.ones(4)] if self.rank < 4 else None, [torch.zeros(4)] if self.rank >= 4 else None
        with torch_overlay.Transfer(*sides) as sync:
            sync.run()
            self.reopen_world()
        with self.assertRaisesRegex(RuntimeError, "is closed, and its process group with it"):
            sync.run()

    def test_a_seal_fits_its_words_its_session_and_its_key_alone(self):
        seal = Seal(b"key", "session")
        said = seal.of("A Transfer", "rank 3", "digest")
        self.assertTrue(seal.fits(said, "A Transfer", "rank 3", "digest"))
        for other, words in (
            (seal, ("A Transfer", "rank 2", "digest")),
            (seal, ("A Transfer", "rank 3", "other")),
            (seal, ("A Transferrank 3", "", "digest")),
            (Seal(b"key", "another"), ("A Transfer", "rank 3", "digest")),
            (Seal(b"yek", "session"), ("A Transfer", "rank 3", "digest")),
            (seal.within("another meeting"), ("A Transfer", "rank 3", "digest")),
        ):
            self.assertFalse(other.fits(said, *words))


# Three hundred at night.
for first in range(0, 300, 50) if NIGHTLY else (0,):

    def check(self, seeds=range(first, first + (50 if NIGHTLY else 12))):
        self.check_between_worlds(seeds)

    setattr(PlaceCases, f"test_random_transfers_between_worlds_{first:03}", check)
