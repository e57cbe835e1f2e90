"""Slow twins: what the fast code must agree with, written so that nobody can doubt them.

``MeshTwin`` is a device mesh as plain lists of ranks. It knows no layouts, strides or tensors: a mesh is, for every
rank of the root, the list of ranks that this rank's own copy of the mesh holds (its tile), in row-major order. Every
mesh operation is then a rearrangement of short lists.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math


@dataclasses.dataclass(frozen=True)
class MeshTwin:
    """One mesh, on all ranks at once.

    root: the ranks of the root mesh, row-major (its rank map). names, sizes: of this mesh's axes.
    tiles: for the rank at each position of ``root``, the ranks of its tile, row-major over ``sizes``.
    """

    root: tuple[int, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    tiles: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def _place(self) -> dict[int, int]:
        return {rank: i for i, rank in enumerate(self.root)}

    @classmethod
    def of(cls, ranks, sizes, names) -> MeshTwin:
        """The root mesh: every rank's tile is the whole of it."""
        ranks = tuple(ranks)
        assert math.prod(sizes) == len(ranks) == len(set(ranks))
        return cls(ranks, tuple(names), tuple(sizes), (ranks,) * len(ranks))

    def tile(self, rank: int) -> tuple[int, ...] | None:
        """The ranks of this rank's own copy of the mesh, row-major; None outside the mesh."""
        return self.tiles[self._place[rank]] if rank in self._place else None

    def coordinates(self):
        """All coordinates of the mesh, row-major."""
        return itertools.product(*map(range, self.sizes))

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Where the rank stands in its own tile; None outside the mesh."""
        if rank not in self.root:
            return None
        return list(self.coordinates())[self.tile(rank).index(rank)]

    def at(self, rank: int, coordinate) -> int:
        """The rank at a coordinate of this rank's tile."""
        position = 0
        for size, i in zip(self.sizes, coordinate, strict=True):
            position = position * size + i
        return self.tile(rank)[position]

    def line(self, rank: int, axis: int) -> tuple[int, ...]:
        """The ranks that differ from this one in one axis only, in mesh order: its group on that axis."""
        here = self.coordinate(rank)
        return tuple(self.at(rank, here[:axis] + (i,) + here[axis + 1 :]) for i in range(self.sizes[axis]))

    def nested(self, rank: int):
        """The tile as nested lists, as ``mesh.mesh.tolist()`` gives it."""
        flat = list(self.tile(rank))
        for size in reversed(self.sizes[1:]):
            flat = [flat[i : i + size] for i in range(0, len(flat), size)]
        return flat if self.sizes else flat[0]

    def slice(self, names) -> MeshTwin:
        """The axes of these names, in that order; the others stay at each rank's own coordinate."""
        axes = [self.names.index(name) for name in names]
        sizes = tuple(self.sizes[axis] for axis in axes)

        def tile(rank):
            here = list(self.coordinate(rank))
            for moved in itertools.product(*map(range, sizes)):
                for axis, i in zip(axes, moved, strict=True):
                    here[axis] = i
                yield self.at(rank, here)

        return dataclasses.replace(
            self, names=tuple(names), sizes=sizes, tiles=tuple(tuple(tile(rank)) for rank in self.root)
        )

    def flatten(self, name: str) -> MeshTwin:
        """One axis that runs through the tile in row-major order."""
        return dataclasses.replace(self, names=(name,), sizes=(math.prod(self.sizes),))

    def unflatten(self, axis: int, sizes, names) -> MeshTwin:
        """One axis read as several, row-major."""
        assert math.prod(sizes) == self.sizes[axis]
        return dataclasses.replace(
            self,
            names=(*self.names[:axis], *names, *self.names[axis + 1 :]),
            sizes=(*self.sizes[:axis], *sizes, *self.sizes[axis + 1 :]),
        )

    @staticmethod
    def concatenate(meshes) -> MeshTwin:
        """The axes of several views one after the other: walk along the first, from there along the next, and so on."""
        first = meshes[0]

        def tile(rank):
            for steps in itertools.product(*(list(mesh.coordinates()) for mesh in meshes)):
                here = rank
                for mesh, step in zip(meshes, steps, strict=True):
                    here = mesh.at(here, step)
                yield here

        return dataclasses.replace(
            first,
            names=sum((mesh.names for mesh in meshes), ()),
            sizes=sum((mesh.sizes for mesh in meshes), ()),
            tiles=tuple(tuple(tile(rank)) for rank in first.root),
        )

    def indices(self, rank: int) -> tuple[int, ...]:
        """The positions in the rank map of the tile, row-major."""
        return tuple(self.root.index(other) for other in self.tile(rank))

    def ascends(self) -> bool:
        """Whether the axes stand in the root's order: what slicing asks for."""
        indices = self.indices(self.root[0])
        return list(indices) == sorted(indices)

    def overlaps(self) -> bool:
        """Whether some rank stands at two coordinates of one tile: then it is no mesh."""
        return any(len(set(tile)) < len(tile) for tile in self.tiles)

    def is_grid(self) -> bool:
        """Whether each axis moves by the same index steps wherever the others stand: else it is no mesh either."""
        if math.prod(self.sizes) == 1:
            return True
        position = dict(zip(self.coordinates(), self.indices(self.root[0]), strict=True))
        origin = position[(0,) * len(self.sizes)]
        for coordinate, index in position.items():
            alone = [(0,) * axis + (i,) + (0,) * (len(self.sizes) - axis - 1) for axis, i in enumerate(coordinate)]
            if index - origin != sum(position[one] - origin for one in alone):
                return False
        return True
