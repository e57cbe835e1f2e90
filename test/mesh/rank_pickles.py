"""Meshes and DTensors through files: stock to overlay, overlay to stock, and into processes that made other groups."""

import contextlib
import io
import pickle
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mesh_harness import group_ranks, needs_overlay
from mesh_ranks import WORLD, all_views, make_root
from torch_overlay.distributed._torch import from_torch, to_torch
from way import WAY


def toggle() -> None:
    """The overlay off if it is on, and on if it is off; where torch isn't overlaid there's nothing to toggle."""
    if WAY != "overlay":
        return
    import torch_overlay

    if torch_overlay.is_enabled():
        torch_overlay.disable()
    else:
        torch_overlay.enable(check_mesh=True)


@contextlib.contextmanager
def toggled():
    toggle()
    try:
        yield
    finally:
        toggle()


def saved(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(data: bytes, weights_only: bool):
    return torch.load(io.BytesIO(data), weights_only=weights_only)


READERS = {
    "pickle": (pickle.dumps, pickle.loads),
    "weights_only": (saved, lambda data: loaded(data, True)),
    "everything": (saved, lambda data: loaded(data, False)),
}


class PickleCases:
    """Cases for ``EightRanks``."""

    def same(self, one: DeviceMesh, other: DeviceMesh, label: str) -> None:
        self.assertEqual((one, one.shape), (other, other.shape), label)
        if to_torch(from_torch(one._layout)) == one._layout:  # else stock knows a flattened view from its equals
            self.assertEqual(hash(one), hash(other), label)
        self.assertEqual(one.mesh, other.mesh, label)
        self.assertEqual(one.get_coordinate(), other.get_coordinate(), label)
        for axis in range(one.ndim):
            self.assertEqual(sorted(group_ranks(one, axis)), sorted(group_ranks(other, axis)), label)

    def test_meshes_cross_files_both_ways(self):
        """Every view, written in one state and read in the other, in every form: the same mesh, its own groups."""
        for label, (dump, load) in READERS.items():
            meshes = {name: mesh for name, (mesh, _) in all_views().items()}
            saved_here, saved_there = {name: dump(mesh) for name, mesh in meshes.items()}, {}
            for name, mesh in meshes.items():
                self.same(load(saved_here[name]), mesh, f"{label}, {name}, same state")
            with toggled():  # once for all views: it takes as long as fifty of them
                for name, mesh in meshes.items():
                    there = load(saved_here[name])
                    self.same(there, mesh, f"{label}, {name}, to stock")
                    saved_there[name] = dump(there)
            for name, mesh in meshes.items():
                self.same(load(saved_there[name]), mesh, f"{label}, {name}, there and back")

    def test_dtensors_cross_files_both_ways(self):
        """Values, placements and the use of the loaded tensor."""
        whole = torch.arange(64.0).reshape(8, 8)
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        ends = ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Shard(0)])
        files = [
            (label, load, placements, dump({"w": distribute_tensor(whole, mesh, placements)}))
            for label, (dump, load) in READERS.items()
            for placements in ends
        ]
        for state in (contextlib.nullcontext, toggled):
            with state():
                for label, load, placements, data in files:
                    tensor = load(data)["w"]
                    self.assertEqual(tensor.placements, tuple(placements), label)
                    self.assertEqual(tensor.full_tensor(), whole, label)
                    self.assertEqual((tensor @ tensor).full_tensor(), whole @ whole, label)

    @needs_overlay
    def test_a_loaded_mesh_binds_by_ranks_not_by_names(self):
        """Saved in a world that made its groups in one order, read where the names mean others (stock: wrong ranks)."""
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        flat = make_root(range(WORLD), (2, 2, 2), ("a", "b", "c"))["a", "c"]._flatten("ac")
        kept = [(one, dump(one), load) for one in (mesh, flat) for dump, load in READERS.values()]
        lines = {one: [group_ranks(one, axis) for axis in range(one.ndim)] for one in (mesh, flat)}
        self.reopen_world()
        make_root(range(WORLD), (4, 2), ("x", "y"))
        make_root(range(WORLD), (2, 2, 2), ("a", "b", "c"))["a", "c"]._flatten("ac")
        init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        for one, data, load in kept:
            there = load(data)
            for axis, line in enumerate(lines[one]):
                self.assertEqual(group_ranks(there, axis), line)
                total = torch.ones(1)
                dist.all_reduce(total, group=there.get_group(axis))
                self.assertEqual(total.item(), len(line))

    def test_checkpoints_load_on_other_meshes_and_in_the_other_state(self):
        """DCP: saved from a 2 x 4 mesh, loaded on a flattened one and on another shape; stock and overlay mixed."""
        whole = torch.arange(96.0).reshape(12, 8)
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        folder = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folder, src=0)
        dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0), Shard(1)])}, checkpoint_id=folder[0])
        for state in (contextlib.nullcontext, toggled):
            with state():
                other = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
                flat = other["a", "c"]._flatten("ac")
                for where, placements in ((other, [Shard(1), Replicate(), Shard(0)]), (flat, [Shard(0)])):
                    empty = distribute_tensor(torch.zeros_like(whole), where, placements)
                    dcp.load({"w": empty}, checkpoint_id=folder[0])
                    self.assertEqual(empty.full_tensor(), whole)
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folder[0])
