"""What groups real ranks get: whose, with which timeout, shared with whom, and how they end."""

import datetime

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mesh_harness import needs_overlay, open_groups
from mesh_ranks import WORLD, WORLD_TIMEOUT, all_views
from way import inherits_timeouts

CPU = torch.device("cpu")


def timeout_of(group) -> datetime.timedelta:
    return group._get_backend(CPU).options._timeout


def gathered(value) -> list:
    """The value of every rank."""
    values = [None] * WORLD
    dist.all_gather_object(values, value)
    return values


class GroupCases:
    """Cases for ``EightRanks``."""

    def test_every_mesh_group_has_the_timeout_of_the_world(self):
        """25 s everywhere; stock gives 1800 s to all but the world's."""
        inherited = inherits_timeouts()
        for name, (mesh, _) in all_views().items():
            for group in mesh.get_all_groups():
                if inherited or group is not dist.group.WORLD:
                    expected = WORLD_TIMEOUT if inherited else datetime.timedelta(seconds=1800)
                    self.assertEqual(timeout_of(group), expected, name)

    @needs_overlay
    def test_meshes_on_some_ranks_make_names_that_agree(self):
        """5 of 8 ranks, then all, then 3 others: rank-local history must not leak into names."""
        few = DeviceMesh("cpu", [0, 1, 2, 3, 4], mesh_dim_names=("few",))
        grid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        last = DeviceMesh("cpu", [5, 6, 7], mesh_dim_names=("last",))
        for mesh in (few, grid, last):
            for group in mesh.get_all_groups() if mesh.get_coordinate() else []:
                total = torch.ones(1)
                dist.all_reduce(total, group=group)
                self.assertEqual(total.item(), group.size())
                names = [None] * group.size()
                dist.all_gather_object(names, group.group_name, group=group)
                self.assertEqual(len(set(names)), 1)

    @needs_overlay
    def test_the_user_s_groups_stay_the_user_s(self):
        """new_group between two mesh builds: neither taken nor disturbed."""
        own = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])][self.rank // 4]
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        self.assertTrue(mesh.get_group("tp") is not own)
        again = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])][self.rank // 4]
        self.assertTrue(init_device_mesh("cpu", (2, 4)).get_group(1) not in (own, again))
        for group in (own, again, mesh.get_group("tp")):
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            self.assertEqual(total.item(), 4)

    @needs_overlay
    def test_abort_ends_a_mesh_s_groups_once(self):
        """Those of its views and redistributions, too; the world and a neighbour live, and a new mesh works."""
        mesh, neighbour = (init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")) for _ in range(2))
        mesh["tp",]._flatten("tp_again")
        mesh._flatten("all")
        before = len(open_groups())
        dist.barrier()
        mesh.abort()
        self.assertEqual(before - len(open_groups()), 4)
        self.assertTrue(dist.is_initialized())
        dist.barrier()
        new = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        for one in (new, neighbour):
            self.assertEqual(funcol.all_reduce(torch.ones(1), "sum", (one, 1)).item(), 4)
        self.assertEqual(len(gathered(True)), WORLD)
