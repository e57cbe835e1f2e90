"""Runs in the background: the program goes on, and its changes of the sources are seen. What a rank refuses."""

import gc
import threading
import time
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torch_overlay
from mesh_ranks import WORLD, make_root
from torch_overlay.transfers.exchanges import Exchanges


def held(event):
    """Runs that don't read their sources before an event."""
    run = Exchanges.run

    def waits(self, *given):
        assert event.wait(20)
        return run(self, *given)

    return mock.patch.object(Exchanges, "run", waits)


class BackgroundCases:
    """Cases for ``EightRanks``."""

    def sides(self):
        """A weight of a trainer on ranks 0 to 3, as an optimizer has it, and plain ones of servers on the others."""
        mesh = make_root(range(4), (4,), ("dp",))
        weight = distribute_tensor(torch.arange(24.0).reshape(8, 3), mesh, [Shard(0)], src_data_rank=None)
        weight = torch.nn.Parameter(weight)
        return weight, {"w": weight} if self.rank < 4 else None, {"w": torch.zeros(8, 3)} if self.rank > 3 else None

    def test_the_program_goes_on_by_the_groups_of_its_mesh(self):
        every = make_root(range(WORLD), (8,), ("all",))
        _, source, target = self.sides()
        go = threading.Event()
        with torch_overlay.Transfer(source, target) as sync:
            for version in (3, 4):
                with held(go):
                    work = sync.run(version=version if source else None, async_op=True)
                    self.assertFalse(work.is_completed() or work.sent())
                    with self.assertRaisesRegex(RuntimeError, "is running, and runs go one at a time"):
                        sync.run()
                    for _ in range(20):  # on the same ranks, meanwhile
                        ones = torch.ones(1000)
                        dist.all_reduce(ones, group=every.get_group())
                        self.assertEqual(ones[0].item(), WORLD)
                    go.set()
                    work.wait()
                self.assertTrue(work.is_completed() and work.sent())
                self.assertEqual(sync.version, version)
                go.clear()
            if target:
                self.assertEqual(target["w"], torch.arange(24.0).reshape(8, 3))

    def test_nothing_is_kept_of_a_run_that_ended(self):
        weight, source, target = self.sides()
        with torch_overlay.Transfer(source, target) as sync:
            work = sync.run(async_op=True, snapshot=True)
            work.wait()
        kept = [weakref.ref(each._local_tensor if source else each) for each in (source or target).values()]
        del weight, source, target
        gc.collect()
        self.assertEqual([each() for each in kept], [None])

    def test_sources_may_change_when_they_are_sent_before_the_end(self):
        """Servers that take their time to land hold no trainer's step up. A large piece goes from tensor to tensor."""
        mesh = make_root(range(4), (4,), ("dp",))
        weights = {
            name: distribute_tensor(torch.ones(rows, 256), mesh, [Shard(0)], src_data_rank=None)
            for name, rows in (("small", 8), ("large", 1024))
        }
        source, target = weights, {name: torch.zeros(tensor.shape) for name, tensor in weights.items()}
        source, target = (source, None) if self.rank < 4 else (None, target)
        go, land = threading.Event(), Exchanges._land

        def waits(exchanges, *given):
            assert go.wait(20)
            land(exchanges, *given)

        with torch_overlay.Transfer(source, target) as sync, mock.patch.object(Exchanges, "_land", waits):
            self.assertEqual(sync.exchanges, 1)
            work, until = sync.run(async_op=True), time.monotonic() + 20
            while source and not work.sent() and time.monotonic() < until:
                time.sleep(0.01)
            if source:
                self.assertTrue(work.sent() and not work.is_completed())
                for tensor in weights.values():
                    tensor.add_(1.0)
            dist.barrier()
            go.set()
            work.wait()
        for tensor in (target or {}).values():
            self.assertTrue(bool((tensor == 1).all()))

    def test_a_rank_that_refuses_a_run_is_named_with_its_reason(self):
        _, source, target = self.sides()
        with torch_overlay.Transfer(source, target) as sync:
            for async_op in (False, True):
                if self.rank == 1:
                    sync.refuse("out of memory in step 7")
                else:
                    words = "nothing was sent: rank 1: out of memory in step 7\\.$"
                    with self.assertRaisesRegex(ValueError, words):
                        work = sync.run(version=7 if source else None, async_op=async_op)
                        if work is not None:
                            work.wait()
            sync.run()
        if target:
            self.assertEqual(target["w"], torch.arange(24.0).reshape(8, 3))
        with self.assertRaisesRegex(RuntimeError, "This Transfer is closed"):
            sync.refuse("late")

    def test_a_step_meanwhile_is_seen_on_all_ranks(self):
        weight, source, target = self.sides()
        go = threading.Event()
        with torch_overlay.Transfer(source, target) as sync, held(go):
            work = sync.run(async_op=True)
            if self.rank == 2:
                with torch.no_grad():
                    weight.add_(1.0)
            go.set()
            with self.assertRaisesRegex(
                ValueError, "of two moments: rank 2: the source 'w' was changed in place while it was sent"
            ):
                work.wait()
            sync.run(async_op=True).wait()  # nothing of it stays

    def test_memory_that_is_exchanged_meanwhile_is_seen_on_both_sides(self):
        """`p.data = other` raises no version counter. What arrives is what `p` held when the run began."""
        given = torch.nn.Parameter(torch.zeros(6, 3)) if self.rank in (1, 6) else None
        trees = [given if self.rank == 1 else None], [given if self.rank == 6 else None]
        swaps = {
            1: "rank 1: the source '0' was given other memory, as by .data, while it was sent",
            6: "rank 6: the target '0' was given other memory, as by .data, before wait",
        }
        for keep in (False, True):
            with torch_overlay.Transfer(*trees, keep=keep) as sync:
                for value, (rank, words) in enumerate(swaps.items(), 1):
                    if self.rank == 1:
                        given.data = torch.full((6, 3), float(value))
                    before, go = None if given is None else given.detach(), threading.Event()
                    with held(go):
                        work = sync.run(async_op=True)
                        if self.rank == rank:
                            given.data = torch.full((6, 3), -1.0)
                        go.set()
                        if given is None:
                            work.wait()
                            continue
                        with self.assertRaisesRegex(ValueError, f"of two moments: {words}"):
                            work.wait()
                    self.assertEqual(before, torch.full((6, 3), float(value)))
                sync.run()
                if given is not None:
                    self.assertEqual(given.detach(), torch.full((6, 3), 2.0))

    def test_a_snapshot_has_the_values_of_that_moment(self):
        weight, source, target = self.sides()
        optimizer = torch.optim.SGD([weight], lr=1.0)
        go = threading.Event()
        with torch_overlay.Transfer(source, target) as sync, held(go):
            work = sync.run(async_op=True, snapshot=True)
            self.assertTrue(work.sent())
            if source:
                (weight * weight).sum().backward()
                optimizer.step()
            go.set()
            work.wait()
            if target:
                self.assertEqual(target["w"], torch.arange(24.0).reshape(8, 3))
            sync.run()
            if target:
                self.assertEqual(target["w"], -torch.arange(24.0).reshape(8, 3))

    def test_a_snapshot_stays_within_the_budget(self):
        mesh = make_root(range(WORLD), (8,), ("dp",))
        source = DTensor.from_local(torch.ones(100, 10), mesh, [Shard(0)], run_check=False)
        with torch_overlay.Transfer([source], [torch.zeros(800, 10)], budget=3000) as sync:
            with self.assertRaisesRegex(ValueError, "nothing was sent: ranks 0-7: a snapshot takes 4000 bytes, and"):
                sync.run(async_op=True, snapshot=True).wait()
            sync.run(async_op=True).wait()

    def test_a_snapshot_and_the_buffers_of_few_names_fit_the_budget_together(self):
        """Few names take fewer exchanges, and so may have larger buffers. This run plans them, or one before."""
        mesh, accepted = make_root(range(WORLD), (8,), ("dp",)), 0
        source = {
            name: DTensor.from_local(torch.ones(64, 8), mesh, [Shard(0)], run_check=False) for name in ("a", "b", "c")
        }
        target = {name: torch.zeros(512, 8) for name in source}
        for budget in range(4000, 80_000, 9000):
            with torch_overlay.Transfer(source, target, budget=budget) as sync:
                for only in (["a"], ["a", "b"], ["a"]):
                    try:
                        sync.run(only=only, async_op=True, snapshot=True).wait()
                    except ValueError:
                        continue
                    by_names = sync._state.plans.by_names
                    (plan,) = [plan for names, plan in by_names.items() if names is not None and {*names} == {*only}]
                    copied = sum(source[name].to_local().nbytes for name in only)
                    self.assertLessEqual(plan.exchanges.staging + copied, budget)
                    accepted += 1
        self.assertGreater(accepted, 8)

    def test_closing_logs_an_error_that_nobody_waited_for(self):
        _, source, target = self.sides()
        sync = torch_overlay.Transfer(source, target)
        sync.run(only=["x"], async_op=True)._thread.join()
        with self.assertLogs("torch_overlay.transfers", "ERROR") as logged:
            sync.close()
        self.assertIn("only names 'x', which this Transfer doesn't move", logged.output[0])

    def test_an_error_that_nobody_waited_for_comes_with_the_next_run(self):
        _, source, target = self.sides()
        with torch_overlay.Transfer(source, target) as sync:
            sync.run(only=["w" if self.rank else "x"], async_op=True)._thread.join()
            with self.assertRaisesRegex(ValueError, "of the last run nobody waited for: .*rank 0: only names 'x'"):
                sync.run()
            sync.run()
            work = sync.run(only=["x"], async_op=True)
            work._thread.join()
            if self.rank:  # one rank heard of it, and all are told together
                with self.assertRaisesRegex(ValueError, "only names 'x'"):
                    work.wait()
            with self.assertRaisesRegex(ValueError, "nothing was sent: rank 0: of the last run nobody waited for"):
                sync.run()
            work = sync.run(async_op=True)
        work.wait()  # close() waited for it
        self.assertTrue(work.is_completed())
