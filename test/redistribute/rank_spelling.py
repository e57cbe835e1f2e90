"""Gathers over one axis by real collectives, where torch's way to lay out what is sent matters."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mesh_harness import needs_overlay
from on_device import DEVICE
from twins_ranks import Case, MeshRecipe

WORLD = tuple(range(8))
GRID = MeshRecipe(WORLD, (2, 4))
LINE = MeshRecipe(WORLD, (8,))


class SpellingCases:
    """Cases for ``EightRanks``."""

    @needs_overlay
    def test_gathers_over_one_axis_of_uneven_shards(self):
        """Along each dim, beside another one that is cut unevenly, too; and types that travel as bytes."""
        shapes = ((5, 3, 2), (7, 9, 1), (1, 11, 3), (3, 1, 6))
        beside = [(("S", 1), ("S", 0)), (("S", 0), ("S", 1)), (("R",), ("S", 2)), (("P", "sum"), ("S", 1))]
        for shape in shapes:
            self.check(*(Case(GRID, source, (source[0], ("R",)), shape) for source in beside))
            self.check(*(Case(LINE, (("S", dim),), (("R",),), shape) for dim in range(3)))
        for dtype in ("bool", "int16", "complex64", "float8_e4m3fn"):
            self.check(*(Case(LINE, (("S", dim),), (("R",),), (9, 16), dtype) for dim in (0, 1)))

    def test_a_short_shard_is_padded_as_on_stock(self):
        """Of 19 columns each rank has three at most. The third has two: torch adds a column of zeros to them, and the
        others, whose shards are right, find everything in its place."""
        mesh = init_device_mesh(DEVICE, (8,), mesh_dim_names=("tp",))
        whole = torch.arange(3.0 * 19).view(3, 19)
        mine = torch.nn.functional.pad(whole, (0, 5)).chunk(8, 1)[self.rank]
        mine = mine[:, : max(0, min(3, 19 - 3 * self.rank))]
        mine = mine[:, :2] if self.rank == 2 else mine
        given = DTensor.from_local(mine, mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride())
        whole[:, 8] = 0
        self.assertEqual(given.redistribute(mesh, [Replicate()]).to_local(), whole)
