"""torchtitan on spmd_types: an axis is the layout of a group's ranks, and its name what the group is called.

The axes of every mesh are kept with their names, and a forward and backward whose types are checked by them.
"""

from __future__ import annotations

from collections.abc import Iterator

import spmd_types as spmd
import torch
import torch.distributed as dist
from clients.inside import Session
from spmd_types.checker import typecheck
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims, parallel_dims

DEGREES = dict(dp_replicate=2, dp_shard=2, cp=1, tp=4, pp=1, ep=4)


def main() -> None:
    session = Session()
    dist.init_process_group("gloo")
    parallel_dims.device_type = "cpu"  # it takes CUDA where there is no accelerator
    dims = ParallelDims(**DEGREES, world_size=session.size, spmd_backend="spmd_types")
    session.phase("build_mesh", dims.build_mesh)
    meshes = [*dims.spmd_meshes(), dims.spmd_dense_mesh(), *dims.get_all_one_dimensional_meshes().values()]
    axes = {f"{place} {name}": axis for place, mesh in enumerate(meshes) for name, axis in read(mesh)}
    session.keep("axes and their names", axes)
    session.keep("outputs and gradients", session.phase("forward and backward", lambda: step(dims.spmd_dense_mesh())))
    session.close()


def read(mesh: DeviceMesh) -> Iterator[tuple[str, torch.Tensor]]:
    """Each axis as spmd_types prints it, as a tensor of its letters."""
    for name in mesh.mesh_dim_names:
        axis = spmd.MeshAxis.of(mesh.get_group(name))
        yield name, torch.tensor(list(f"{axis} {axis.layout} {sorted(axis.names)}".encode()))


def step(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Two matrices cut over tp, on another batch for each index of dp. A type that doesn't fit is an error."""
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    torch.manual_seed(mesh.get_local_rank("dp"))
    x = torch.randn(4, 8)
    torch.manual_seed(mesh.get_local_rank("tp"))
    first, second = (torch.randn(*size, requires_grad=True) for size in ((8, 4), (4, 8)))
    with spmd.set_current_mesh(mesh), typecheck():
        spmd.assert_type(x, {"dp": spmd.V, "tp": spmd.R})
        for weight in (first, second):
            spmd.assert_type(weight, {"dp": spmd.R, "tp": spmd.V})
        out = summed(torch.relu(x @ first) @ second, tp)
        loss = summed(out.square().mean(), dp)
        spmd.assert_type(loss, {"dp": spmd.I, "tp": spmd.I})
        loss.backward()
    return {"out": out, "loss": loss, "first": first.grad, "second": second.grad}


def summed(terms: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What varies over the axis of a group is a term there; the sum is the same on all its ranks."""
    return spmd.all_reduce(spmd.reinterpret(terms, group, src=spmd.V, dst=spmd.P), group, src=spmd.P, dst=spmd.I)


if __name__ == "__main__":
    main()
