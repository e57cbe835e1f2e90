"""Before strided shards and explicit shard orders are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Regions(...):
    @staticmethod
    def of(
        dims: Sequence[int | None], ops: Sequence[str | None], shape: Iterable[int], sizes: Iterable[int]
    ) -> Regions:
        """Read a spec.

        Args:
            dims: for each axis, the dim that it shards, or None.
            ops: for each axis, the pending reduction, or None.
            shape: of the global tensor.
            sizes: of the mesh, by axis.

        Raises:
            ValueError: the spec is wrong: a length, a dim out of range, reductions of different kinds in one tensor.
            NotPlanned: the spec is right, but its reduction has no name that we know.
        """
        shape, sizes = tuple(shape), tuple(sizes)
        _check(dims, ops, len(shape), sizes)
        partial = tuple([op if size > 1 else None for op, size in zip(ops, sizes)])
        return Regions(shape, sizes, _orders(dims, len(shape), sizes), partial)


def _orders(dims: Sequence[int | None], ndim: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """For each dim, the axes that cut it."""
    cuts = [(axis, dim) for axis, dim in enumerate(dims) if sizes[axis] > 1]
    return tuple([tuple([axis for axis, cut in cuts if cut == dim]) for dim in range(ndim)])
