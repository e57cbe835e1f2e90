"""Eight gloo ranks that stay up for a whole class of tests; each test gets a world of its own."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import unittest

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.common_distributed import MultiProcContinuousTest

import forks
import on_device
from mesh_harness import make_root, permuted
from torch_overlay.testing import OverlayContinuous
from twins import MeshTwin
from way import InThisWay

WORLD = 8
WORLD_TIMEOUT = datetime.timedelta(seconds=25)
START_TIMEOUT = datetime.timedelta(seconds=240)  # for ranks that still import torch; one that dies hangs the class
SHUFFLED = (3, 1, 2, 0, 7, 5, 6, 4)


class EightRanks(InThisWay, OverlayContinuous, MultiProcContinuousTest):
    """Spawns once. A test that fails on some ranks doesn't take the others with it: the next one has a new world."""

    overlay_options = {"check_mesh": True}
    world_size = WORLD
    _worlds = 0

    @classmethod
    def backend_str(cls) -> str:
        return on_device.BACKEND

    @classmethod
    def device_type(cls) -> str:
        return on_device.DEVICE

    def assertRaisesRegex(self, *args, **kwargs):
        """torch's own lets any message pass, since `device_type` is a method here and no name of a device."""
        return unittest.TestCase.assertRaisesRegex(self, *args, **kwargs)

    def setUp(self) -> None:
        type(self).poison_pill = False
        gone = {rank: one.exitcode for rank, one in enumerate(getattr(self, "processes", [])) if not one.is_alive()}
        if gone:  # torch waits more than a minute for each further test of a rank that died
            self.fail(f"ranks that died in an earlier test, by their exit codes: {gone}")
        super().setUp()

    @classmethod
    def _spawn_processes(cls, world_size) -> None:
        """Forked from a server that has imported torch, where torch's own would have each rank import it."""
        before = torch.multiprocessing.get_start_method(allow_none=True)
        torch.multiprocessing.set_start_method(forks.context().get_start_method(), force=True)
        try:
            super()._spawn_processes(world_size)
        finally:
            torch.multiprocessing.set_start_method(before, force=True)

    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file) -> None:
        """In each rank, once: one store for all worlds, the first world."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        on_device.take(rank)
        gc.freeze()  # what torch brought: each full collection would go through it, and copy the pages of the fork
        cls._file = dist.FileStore(rdvz_file, world_size)
        if rank == 0:
            cls._store = dist.TCPStore("127.0.0.1", 0, None, True, START_TIMEOUT, wait_for_workers=False)
            cls._file.set("port", str(cls._store.port))
        else:
            cls._store = dist.TCPStore("127.0.0.1", int(cls._file.get("port")), None, False, START_TIMEOUT)
        cls._meet(cls._store, START_TIMEOUT)
        cls._open_world()

    @classmethod
    def _open_world(cls, timeout: datetime.timedelta = WORLD_TIMEOUT) -> None:
        """In each rank: open a world, or try again with all others. Under load gloo loses a connection now and then:
        one rank waits for it, and the others go on."""
        for left in (2, 1, 0):
            cls._worlds += 1
            store, lost = dist.PrefixStore(str(cls._worlds), cls._store), None
            try:
                dist.init_process_group(
                    on_device.BACKEND, rank=cls.rank, world_size=WORLD, store=store, timeout=timeout
                )
            except RuntimeError as error:
                lost = error
            if cls._meet(store, 2 * timeout, "lost" if lost else "open"):
                return
            if not left:
                raise RuntimeError("gloo connected not all ranks, three times") from lost
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
            distributed_c10d._world.group_count = 0  # of a world that didn't open it stays, and names groups

    @classmethod
    def _meet(cls, store: dist.Store, timeout: datetime.timedelta, says: str = "open") -> bool:
        """Wait until all ranks are here; whether all say "open"."""
        keys = [f"rank {rank} says" for rank in range(WORLD)]
        store.set(keys[cls.rank], says)
        store.wait(keys, timeout)
        return all(store.get(key) == b"open" for key in keys)

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs) -> None:
        with cls.overlay():  # the worlds, too, open and close under it, as a user's do
            with contextlib.suppress(Exception):  # a world that failed in the test before
                dist.destroy_process_group()
            cls._worlds += 100  # ranks that left a failed test early count alike again
            cls._worlds -= cls._worlds % 100
            cls._open_world()
            super()._run_test_given_id(test_id, **kwargs)

    def reopen_world(self) -> None:
        """Destroy the world and make another, as elastic jobs do. Not while a rank still connects to the others."""
        dist.barrier()
        dist.destroy_process_group()
        self._open_world()


def all_views() -> dict[str, tuple]:
    """Meshes over the 8 ranks made in every way, each with its twin of lists."""
    ranks, names = range(WORLD), ("a", "b", "c")
    root, twin = make_root(ranks, (2, 2, 2), names), MeshTwin.of(ranks, (2, 2, 2), names)
    world, world_twin = make_root(ranks, (WORLD,), ("w",)), MeshTwin.of(ranks, (WORLD,), ("w",))
    other, other_twin = make_root(SHUFFLED, (2, 4), ("x", "y")), MeshTwin.of(SHUFFLED, (2, 4), ("x", "y"))
    line, line_twin = make_root(SHUFFLED, (WORLD,), ("s",)), MeshTwin.of(SHUFFLED, (WORLD,), ("s",))
    turned, turned_twin = permuted(root, ("c", "a", "b")), twin.slice(("c", "a", "b"))
    return {
        "root": (root, twin),
        "slice": (root["a", "c"], twin.slice(("a", "c"))),
        "flattened": (root["a", "c"]._flatten("ac"), twin.slice(("a", "c")).flatten("ac")),
        "unflattened": (world._unflatten(0, (2, 4), ("d", "t")), world_twin.unflatten(0, (2, 4), ("d", "t"))),
        "whole": (root._flatten("abc"), twin.flatten("abc")),
        "permuted": (turned, turned_twin),
        "permuted, flattened": (turned._flatten("cab"), turned_twin.flatten("cab")),
        "pair": (pair(root), twin.slice(("c", "a"))),
        "shuffled": (other, other_twin),
        "shuffled line": (line, line_twin),
        "shuffled, flattened": (other._flatten("xy"), other_twin.flatten("xy")),
        "shuffled, unflattened": (
            other._unflatten("y", (2, 2), ("u", "v")),
            other_twin.unflatten(1, (2, 2), ("u", "v")),
        ),
    }


def pair(root):
    """Two axes in the other order: what FSDP2 concatenates."""
    return type(root)._concatenate([root["c"], root["a"]])
