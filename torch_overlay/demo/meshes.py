"""The demo's meshes: four views of one world, made the way torchtitan makes them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_overlay.demo.config import Config


@dataclass(frozen=True)
class Meshes:
    """Views of the same ranks by what they are for.

    data: (batch, tp), who reads which sequences. loss: the batch axis, over which the loss is averaged.
    dense: (dp_replicate, fsdp, tp), where every weight but the experts' lives.
    sparse: (dp_replicate, efsdp, ep), where the experts live.
    """

    world: DeviceMesh
    data: DeviceMesh
    loss: DeviceMesh
    dense: DeviceMesh
    sparse: DeviceMesh

    @property
    def dense_shards(self) -> DeviceMesh:
        """What FSDP2 shards dense weights over; two axes if there are replicas (HSDP)."""
        return _with_replicas(self.dense, "fsdp")

    @property
    def sparse_shards(self) -> DeviceMesh:
        """What FSDP2 shards an expert's weights over."""
        return _with_replicas(self.sparse, "efsdp")


def build_meshes(config: Config) -> Meshes:
    """Make the world mesh and its views. Only calls that stock torch has, so that both runs execute the same lines."""
    world = init_device_mesh("cpu", (config.ranks,), mesh_dim_names=("world",))
    data = world._unflatten(0, (config.dp, config.tp), ("batch", "tp"))
    loss = data["batch"]._flatten("loss")
    dense = world._unflatten(0, (config.dp_replicate, config.dp_shard, config.tp), ("dp_replicate", "fsdp", "tp"))
    sparse = world._unflatten(0, (config.dp_replicate, config.efsdp, config.ep), ("dp_replicate", "efsdp", "ep"))
    return Meshes(world, data, loss, dense, sparse)


def _with_replicas(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    if mesh["dp_replicate"].size() == 1:
        return mesh[axis]
    return mesh["dp_replicate", axis]
