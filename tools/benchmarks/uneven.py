"""How many lengths of a vector come back wrong from a flattened 2 x 2 mesh: shards of uneven size, on 4 gloo ranks."""

from __future__ import annotations

from .sides import SIDES, on


def wrong(rank: int, size: int, port: int, longest: int) -> dict[str, int]:
    """By side, of the lengths 1 to `longest`, those whose shards over both axes don't make up the vector again.

    A length counts if any rank has it wrong.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = dist.TCPStore("localhost", port, is_master=False)
    found = {}
    for side in SIDES:
        dist.init_process_group("gloo", store=dist.PrefixStore(side, store), rank=rank, world_size=size)
        with on(side):
            mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=(f"rows {side}", f"columns {side}"))
            mesh._flatten(f"all {side}")
            missed = torch.zeros(longest)
            for length in range(1, longest + 1):
                whole = torch.arange(float(length))
                back = distribute_tensor(whole, mesh, [Shard(0), Shard(0)]).full_tensor()
                missed[length - 1] = not torch.equal(back, whole)
            dist.all_reduce(missed, dist.ReduceOp.MAX)
            found[side] = int(missed.sum())
        dist.destroy_process_group()
    return found
