"""What collectives and DTensors move over every kind of view, on real ranks, against whole tensors."""

import itertools

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mesh_harness import STOCK, needs_overlay
from mesh_ranks import WORLD, all_views, make_root

UNSORTED = ("permuted", "pair", "shuffled")  # where stock's groups, being sorted, put data in other places


def sorted_views():
    """The views that stock is right on."""
    return {name: view for name, view in all_views().items() if not STOCK or not name.startswith(UNSORTED)}


class CollectiveCases:
    """Cases for ``EightRanks``."""

    def test_an_all_gather_comes_in_mesh_order(self):
        """On every axis of every view: the rank at coordinate i gives the i-th piece."""
        for name, (mesh, twin) in sorted_views().items():
            for axis in range(mesh.ndim):
                mine = torch.tensor([self.rank], dtype=torch.int64)
                got = funcol.all_gather_tensor(mine, 0, (mesh, axis)).tolist()
                self.assertEqual(got, list(twin.line(self.rank, axis)), f"{name}, axis {axis}")

    def test_reduce_scatter_and_all_to_all_go_by_coordinate(self):
        """Piece i goes to the rank at coordinate i."""
        for name, (mesh, twin) in sorted_views().items():
            for axis in range(mesh.ndim):
                line, where = twin.line(self.rank, axis), twin.coordinate(self.rank)[axis]
                pieces = torch.arange(len(line)) + 10 * self.rank
                summed = funcol.reduce_scatter_tensor(pieces, "sum", 0, (mesh, axis)).tolist()
                self.assertEqual(summed, [sum(10 * rank + where for rank in line)], f"{name}, axis {axis}")
                one = [1] * len(line)
                swapped = funcol.all_to_all_single(pieces, one, one, (mesh, axis)).tolist()
                self.assertEqual(swapped, [10 * rank + where for rank in line], f"{name}, axis {axis}")

    def test_dtensors_shard_and_gather_on_every_view(self):
        """distribute, replicate again, shard again: shards by coordinate, the whole tensor back."""
        whole = torch.arange(16 * 24, dtype=torch.float64).reshape(16, 24)
        for name, (mesh, twin) in sorted_views().items():
            for placements in itertools.islice(
                itertools.product([Shard(0), Shard(1), Replicate()], repeat=mesh.ndim), 9
            ):
                sharded = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                mine = shard_of(whole, placements, twin, self.rank)
                label = f"{name}, {placements}"
                self.assertEqual(sharded.to_local(), mine, label)
                self.assertEqual(sharded.full_tensor(), whole, label)
                again = sharded.redistribute(placements=placements[::-1]).redistribute(placements=placements)
                self.assertEqual(again.to_local(), mine, label)

    def test_a_broadcast_starts_at_the_rank_that_was_named(self):
        """distribute_tensor from the first rank of the mesh: its data is everyone's."""
        for name, (mesh, twin) in sorted_views().items():
            mine = torch.full((8,), float(self.rank))
            got = distribute_tensor(mine, mesh, [Replicate()] * mesh.ndim)
            self.assertEqual(got.to_local(), torch.full((8,), float(twin.tile(self.rank)[0])), name)

    @needs_overlay
    def test_meshes_live_through_enable_and_disable(self):
        """Made before, used after, and the other way round: groups, slices, redistribution."""
        import torch_overlay

        for before, after in (
            (torch_overlay.disable, torch_overlay.enable),
            (torch_overlay.enable, torch_overlay.disable),
        ):
            before()
            mesh = make_root(range(WORLD), (2, 4), ("dp", "tp"))
            flat, piece = mesh._flatten("flat"), mesh["tp"]
            whole = torch.arange(64.0).reshape(8, 8)
            tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
            groups = [mesh.get_group("dp"), piece.get_group(), flat.get_group()]
            after()
            self.use_after_toggle(mesh, flat, piece, tensor, whole, groups)
        torch_overlay.enable(check_mesh=True)

    def use_after_toggle(self, mesh, flat, piece, tensor, whole, groups):
        """All that a mesh can do, on one that was made with the overlay in the other state."""
        self.assertTrue(groups[0] is mesh.get_group("dp") and groups[1] is piece.get_group())
        self.assertTrue(groups[2] is flat.get_group() and mesh["tp"] == piece and hash(mesh["tp"]) == hash(piece))
        self.assertEqual(mesh.mesh, torch.arange(8).reshape(2, 4).int())
        self.assertEqual(tensor.full_tensor(), whole)
        self.assertEqual(tensor.redistribute(placements=[Replicate(), Shard(0)]).full_tensor(), whole)
        self.assertEqual((tensor + tensor).sum().full_tensor(), (whole + whole).sum())
        new = mesh._unflatten(1, (2, 2), ("x", "y"))  # by name, torch refuses it before 2.12
        self.assertEqual(distribute_tensor(whole, new, [Shard(0)] * 3).full_tensor(), whole)
        self.assertEqual(new["dp", "x"]._flatten().mesh.numel(), 4)
        self.assertEqual(funcol.all_reduce(torch.ones(1), "sum", (mesh, 1)).item(), 4)


def shard_of(whole: torch.Tensor, placements, twin, rank: int) -> torch.Tensor:
    """A rank's piece: chunked along one axis after the other, at the rank's coordinate."""
    for placement, size, where in zip(placements, twin.sizes, twin.coordinate(rank), strict=True):
        if placement.is_shard():
            whole = whole.chunk(size, placement.dim)[where]
    return whole
