"""The demo's meshes: the views of one world that a mixture of experts trains on, from degrees."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from torch_overlay.demo.config import Config
from torch_overlay.parallel_dims import ParallelDims, ParallelMeshes


@dataclass(frozen=True)
class Meshes:
    """What the demo takes of `ParallelMeshes`.

    loss: who reads which sequences, and over whom the loss is averaged.
    dense: (pp, dp_replicate, fsdp, tp), where every weight but the experts' lives.
    sparse: (pp, dp_replicate, efsdp, ep, etp), where the experts live.
    """

    dims: ParallelMeshes

    @property
    def loss(self) -> DeviceMesh:
        return self.dims.loss

    @property
    def dense(self) -> DeviceMesh:
        return self.dims.dense

    @property
    def sparse(self) -> DeviceMesh:
        return self.dims.sparse

    @property
    def dense_shards(self) -> DeviceMesh:
        """What FSDP2 shards dense weights over; two axes if there are replicas (HSDP)."""
        return self._with_replicas("fsdp")

    @property
    def sparse_shards(self) -> DeviceMesh:
        """What FSDP2 shards an expert's weights over."""
        return self._with_replicas("efsdp")

    def _with_replicas(self, axis: str) -> DeviceMesh:
        return self.dims["dp_replicate", axis] if "dp_replicate" in self.dims.enabled else self.dims[axis]


def build_meshes(config: Config) -> Meshes:
    """Make the meshes. Both runs execute the same lines: `ParallelDims` runs on stock torch as it does on ours.

    With `config.flatten`, the axes that weights are cut along get a group together: merged collectives can use it.
    """
    dims = ParallelDims(dp_replicate=config.dp_replicate, dp_shard=config.dp_shard, tp=config.tp, ep=config.ep)
    meshes = Meshes(dims.build(config.device))
    if config.flatten:
        for axes in config.joined:
            meshes.dims[axes]._flatten("_".join(axes))  # stock's name for `flatten`, and the overlay's too
    return meshes
