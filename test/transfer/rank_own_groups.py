"""The process group of a `Transfer`: whatever else its ranks made before, of ranks that exist, and gone after it."""

import contextlib
import ctypes
import gc
import os
import random
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torch_overlay
from mesh_ranks import SHUFFLED, WORLD, make_root
from on_device import DEVICE
from width import NIGHTLY

R, S, P = Replicate(), Shard, Partial()
M_MMAP_THRESHOLD = -3  # of mallopt
ROUNDS = 240 if NIGHTLY else 12


@contextlib.contextmanager
def stock(options):
    """Without the overlay for a while."""
    torch_overlay.disable()
    try:
        yield
    finally:
        torch_overlay.enable(**options)


def held(rounds):
    """What this process holds: groups, files, threads, and what is in the store beside the addresses that gloo leaves
    there, one for each rank of each group; and the MiB of its memory."""
    gc.collect()
    store = distributed_c10d._get_default_store()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    counts = {
        "groups": len(distributed_c10d._world.pg_map),
        "names": len(distributed_c10d._world.pg_names),
        "keys": store.num_keys() - rounds * WORLD if dist.get_rank() == 0 else 0,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }
    return counts, pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class GroupCases:
    """Cases for ``EightRanks``."""

    def test_all_of_it_without_the_overlay(self):
        """On every release: transfers and trees need no patch."""
        with stock(self.overlay_options):
            self.check_random_transfers(range(400, 403))
            self.check_random_casts(range(400, 403))
            self.check_random_pieces(range(400, 403))
            mesh, other = DeviceMesh(DEVICE, torch.arange(8).reshape(4, 2)), DeviceMesh(DEVICE, list(SHUFFLED))
            whole = torch.arange(63.0).reshape(9, 7)
            for before, after in (((S(0), S(1)), (R, R)), ((S(0), S(0)), (S(1), R)), ((P, S(0)), (S(0), S(0)))):
                tensor = distribute_tensor(whole, mesh, [R if p == P else p for p in before], src_data_rank=None)
                size = 4 if P in before else 1
                tensor = DTensor.from_local(tensor.to_local(), mesh, before, shape=(9, 7), stride=(7, 1))
                found = torch_overlay.redistribute({"w": tensor}, placements=after)["w"]
                want = distribute_tensor(whole * size, mesh, after, src_data_rank=None)
                self.assertEqual(found.to_local(), want.to_local())
                found = torch_overlay.redistribute([tensor], other, S(0))[0]
                parts = (whole * size).tensor_split((2, 4, 6, 8, 9, 9, 9))
                self.assertEqual(found.to_local(), parts[other.get_coordinate()[0]])

    def test_only_who_takes_part_makes_the_group_whatever_is_chosen(self):
        """Also where meshes are made by the whole world, and where that splits its communicator: the others aren't
        there, and those who are waited for them."""
        world = distributed_c10d._get_default_group()

        def split(*_):
            raise AssertionError("every rank of the world has to take part in a split")

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch_overlay.enabled(create="world"))
            train, serve = make_root(range(2), (2,), ("dp",)), make_root(range(2, 5), (3,), ("tp",))
            stack.enter_context(mock.patch.object(distributed_c10d, "_get_split_source", split))
            world.bound_device_id = torch.device("cuda", 0)
            stack.callback(setattr, world, "bound_device_id", None)
            if self.rank < 5:
                whole = torch.arange(12.0)
                source = DTensor.from_local(whole.chunk(2)[self.rank % 2].clone(), train, [S(0)], run_check=False)
                moved = source.redistribute(serve, [S(0)])
                target = torch.zeros(12)
                given = [[source] if self.rank < 2 else None, [target] if self.rank > 1 else None]
                with torch_overlay.Transfer(*given, group=range(5)) as transfer:
                    transfer.run()
                if self.rank > 1:
                    self.assertEqual(moved.to_local(), whole.chunk(3)[self.rank - 2])
                    self.assertEqual(target, whole)

    def check_histories(self, seeds, by_members):
        """Ranks make groups, with the others of the group or with all, and destroy some; then some make a Transfer."""
        made = []
        for seed in seeds:
            rng = random.Random(seed)
            for _ in range(rng.randint(1, 3)):
                ranks = sorted(rng.sample(range(WORLD), rng.randint(1, 4)))
                alone, destroys = by_members and rng.random() < 0.7, rng.random() < 0.3
                if self.rank in ranks or not alone:
                    group = dist.new_group(ranks, use_local_synchronization=alone)
                    made += [group] * (self.rank in ranks)
                if made and destroys and ranks[0] == self.rank:
                    dist.destroy_process_group(made.pop())
            members = rng.sample(range(WORLD), rng.randint(2, 6))
            ends = members[: len(members) // 2], members[len(members) // 2 :]
            whole, source, target = torch.arange(24.0) + seed, None, None
            if self.rank in members:
                meshes = [DeviceMesh(DEVICE, end, _init_backend=False) for end in ends]
                if self.rank in ends[0]:
                    source = [DTensor.from_local(whole.clone(), meshes[0], [R], run_check=False)]
                else:
                    target = [DTensor.from_local(whole * 0, meshes[1], [R], run_check=False)]
                with torch_overlay.Transfer(source, target, group=members) as transfer:
                    transfer.run()
                if target:
                    self.assertEqual(target[0].to_local(), whole, msg=f"seed {seed}")

    def test_a_group_has_a_name_that_no_history_changes(self):
        """c10d's own names depend on how many groups a rank is in, so that ranks wait for one another in vain."""
        seeds = range(60 if NIGHTLY else 12)
        self.check_histories(seeds, True)
        with stock(self.overlay_options):
            self.check_histories(seeds, False)  # c10d's own groups of members have no better names there

    def test_ranks_that_cannot_exist_are_an_error_at_once(self):
        mesh = make_root(range(WORLD), (8,), ("dp",))
        source = [distribute_tensor(torch.zeros(8), mesh, [S(0)], src_data_rank=None)]
        begun = time.monotonic()
        for how, error, said in (
            ({"group": range(10)}, ValueError, r"group has ranks that can't exist: \[8, 9\]. This world has ranks 0-7"),
            ({"group": [*range(8), -1]}, ValueError, r"group has ranks that can't exist: \[-1\]"),
            ({"group": [*range(8), 3]}, ValueError, "group has rank 3 twice"),
            ({"group": [(self.rank + 1) % WORLD]}, ValueError, f"can't be made by rank {self.rank}"),
            ({"gone": [7], "group": range(8)}, ValueError, r"Rank 7 left \(gone=\), and group has them"),
        ):
            with self.assertRaisesRegex(error, said):
                torch_overlay.Transfer(source, source, **how)
        self.assertTrue(time.monotonic() - begun < 10)

    def test_memory_is_flat_where_all_tensors_are_replaced(self, runs=1000 if NIGHTLY else 80):
        """With keep=True, changes=True and relay=True, each run with other tensors; what the last ones had is free."""
        length = 1 << 17  # half a MiB
        # Each of them in pages of its own. Else they lie between small blocks in the heap, which grows by what it lost
        # between those, with stock collectives, too.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
        give = self.rank < 2
        for options in ({"keep": True}, {"keep": True, "changes": True}, {"keep": True, "relay": True}):
            given = (torch.zeros(length) if give else None, None if give else torch.zeros(length))
            with torch_overlay.Transfer([given[0]], [given[1]], **options) as transfer:
                for run in range(runs):
                    tensor = torch.full((length,), float(run if give else -1))
                    transfer.bind(*(([tensor], None) if give else (None, [tensor])))
                    transfer.run()
                    self.assertEqual(tensor[-1].item(), run)
                    if run == runs // 4:
                        first = held(0)[1]
                # A tensor that is kept at each run would be half a MiB a run.
                self.assertTrue(held(0)[1] - first < 8, (options, held(0), first))

    def test_rounds_of_transfers_leave_nothing(self, rounds=ROUNDS):
        """Made, run, closed and dropped: groups, keys, files, threads and memory stay what they were."""
        mesh, other = make_root(range(WORLD), (4, 2), ("dp", "tp")), make_root(SHUFFLED, (8,), ("ep",))
        for number in range(rounds):
            whole = torch.ones(64, 4096)
            source = [distribute_tensor(whole, mesh, [S(0), S(1)], src_data_rank=None)]
            source.append(DTensor.from_local(whole.clone(), mesh, [R, R], run_check=False))
            target = [distribute_tensor(whole * 0, other, [at], src_data_rank=None) for at in (R, S(0))]
            transfer = torch_overlay.Transfer(source, target, budget=1 << 21)
            transfer.run()
            transfer.run()
            self.assertTrue(bool((target[1].to_local() == 1).all()))
            transfer.close()
            del source, target, transfer
            dist.barrier()
            if number == 5:
                first, memory = held(6)
            dist.barrier()
        last, grown = held(rounds)
        # Connections of earlier tests of this class, whose other ends have closed, may go meanwhile.
        self.assertTrue(last.pop("files") <= first.pop("files"), f"{first} {last}")
        self.assertEqual(last, first, msg=f"{first} {last} {memory} {grown}")
        # One shard that is kept at each round would be a MiB a round; malloc and the store of rank 0 keep some more.
        self.assertTrue(grown - memory < max(8, rounds / 8), (memory, grown))
