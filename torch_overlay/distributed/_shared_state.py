"""What all meshes of one universe have in common: the root, its slices, its flattened and unflattened views.

A view keeps a reference to the state and nothing else that grows with the world. What others read off a mesh, the rank
map as a tensor and as a tuple, is made here on the first request, once.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ._mesh_layout import _MeshLayout
    from ._rank_map import RankMap
    from ._universe import Universe


# Of the meshes that live: what `status()` counts, and what `forget_answers` clears.
states: weakref.WeakSet[SharedState] = weakref.WeakSet()  # overlay only


class TracedViews:
    """The views that compiled code made, each an attribute, which dynamo looks up each time it is read; of a dict it
    would take what is in it at the first read in a graph."""


@dataclass
class Remembered:
    """What redistributions over the meshes of a universe found out.

    Attributes:
        at_hand: the groups at hand of each site, see tensor/_joint_groups.py.
        answers: to questions, each made once, see tensor/_answers.py.
        specs: the attributes of the specs in which redistributions end, but for the mesh.
    """

    at_hand: dict[Any, Any] = field(default_factory=dict)
    answers: dict[Any, Any] = field(default_factory=dict)
    specs: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)


class SharedState:
    """One for a root mesh and all its views, a mesh universe.

    Attributes:
        rank_map: index to rank and back.
        flattened: the flattened views by name, the mesh's ``_flatten_mapping``; others may write it.
        registry: the groups by name, the mesh's ``_pg_registry``.
        private: what tells a private universe from its equals, a part of its meshes' value; None if it isn't private.
        universe: its groups in this world; None before the first request, see `universe_of`.
        traced: the views that compiled code made.
        saved_number: of a loaded mesh, which universe over these ranks it was saved from.
        remembered: what redistributions over its meshes found out; freed with the last mesh of the universe.
    """

    def __init__(self, rank_map: RankMap, private: str | None = None) -> None:
        self.rank_map = rank_map
        self.flattened: dict[str, DeviceMesh] = {}
        self.registry: dict[str, ProcessGroup] = {}
        self.private = private
        self.universe: Universe | None = None
        self.saved_number: int | None = None
        self.remembered = Remembered()
        states.add(self)  # overlay only
        self.traced = TracedViews()
        self._tensor: torch.Tensor | None = None
        self._ranks: tuple[int, ...] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The rank map as ``_rank_map`` has it: one dimension, int32, on the CPU."""
        if self._tensor is None:
            # A real tensor, whatever mode (fake, meta, proxy, inference) is active around the caller.
            with _disable_current_modes(), torch.inference_mode(False):
                if self.rank_map.is_identity:
                    self._tensor = torch.arange(self.rank_map.numel, dtype=torch.int, device="cpu")
                else:
                    self._tensor = torch.tensor(self.rank_map.ranks(), dtype=torch.int, device="cpu")
        return self._tensor

    def shown(self, layout: _MeshLayout, start: int) -> torch.Tensor:
        """The ranks of the copy of ``layout`` that starts at index ``start``, in its shape.

        A view, and so as quick for a million ranks as for eight, unless an axis has several modes, which no single
        stride can express; then `reshape` copies.
        """
        shape = [size for axis in layout.axes for size in axis.shape]
        stride = [step for axis in layout.axes for step in axis.stride]
        return self.tensor.as_strided(shape, stride, start).reshape(layout.top_level_sizes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank map as ``_flatten_rank_map`` has it."""
        if self._ranks is None:
            self._ranks = tuple(self.rank_map.ranks())
        return self._ranks
