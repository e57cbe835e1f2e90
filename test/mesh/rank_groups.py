"""What groups real ranks get: whose, with which timeout, shared with whom, and how they end."""

import datetime
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mesh_harness import needs_overlay, open_groups
from mesh_ranks import WORLD, WORLD_TIMEOUT, all_views, make_root
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

    def test_the_timeout_of_an_axis_wins(self):
        """What the user says of one axis holds for that axis."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout = datetime.timedelta(seconds=77)
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), backend_override={"tp": ("gloo", options)})
        self.assertEqual(timeout_of(mesh.get_group("tp")), datetime.timedelta(seconds=77))
        self.assertEqual(timeout_of(mesh.get_group("dp")).total_seconds(), 25 if inherits_timeouts() else 1800)

    @needs_overlay
    def test_equal_axes_share_on_every_rank_and_the_names_agree(self):
        """The same object on each rank, and one name for it on all its ranks."""
        root = make_root(range(WORLD), (WORLD,), ("w",))
        one = root._unflatten(0, (2, 4), ("dp", "tp"))
        other = root._unflatten(0, (2, 4, 1), ("dp", "tp", "pp"))
        self.assertTrue(one.get_group("tp") is other.get_group("tp"))
        self.assertTrue(one.get_group("dp") is other.get_group("dp"))
        for axis in ("dp", "tp"):
            group = one.get_group(axis)
            names = [None] * group.size()
            dist.all_gather_object(names, group.group_name, group=group)
            self.assertEqual(len(set(names)), 1)

    @needs_overlay
    def test_private_groups_work_beside_shared_ones(self):
        """Two groups on the same ranks, both used at once, in different orders on different ranks."""
        import torch_overlay

        shared = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        with torch_overlay.private_groups():
            private = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        groups = [shared.get_group("tp"), private.get_group("tp")]
        self.assertTrue(groups[0] is not groups[1])
        tensors = [torch.ones(2), torch.ones(2)]
        order = (0, 1) if self.rank % 2 else (1, 0)
        for work in [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]:
            work.wait()
        self.assertEqual(tensors, [torch.full((2,), 4.0)] * 2)

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
    def test_ranks_outside_a_mesh_get_answers_about_it(self):
        """Sizes, names, the ranks, slices and flattened views everywhere; groups only inside, with a clear word."""
        mesh = DeviceMesh("cpu", [[0, 2], [4, 6]], mesh_dim_names=("x", "y"))
        inside = self.rank in (0, 2, 4, 6)
        piece, flat = mesh["x"], mesh._flatten("xy")
        self.assertEqual((mesh.shape, piece.shape, flat.shape, mesh.size()), ((2, 2), (2,), (4,), 4))
        self.assertEqual(mesh.mesh.tolist(), [[0, 2], [4, 6]])
        self.assertEqual(piece.mesh.tolist(), [0, 4] if self.rank not in (2, 6) else [2, 6])
        self.assertEqual(repr(piece), "DeviceMesh((x=2), 'cpu', stride=(2,))")
        self.assertEqual(mesh.get_coordinate() is None, not inside)
        self.assertEqual(mesh._unflatten("y", (2, 1), ("p", "q")).shape, (2, 2, 1))
        for ask in (lambda: mesh.get_group("x"), piece.get_group, flat.get_local_rank, lambda: mesh.get_group("xy")):
            if inside:
                ask()
            else:
                with self.assertRaisesRegex(Exception, f"(?i)rank {self.rank} .*(n't|not) (in|part of)"):
                    ask()

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

    def test_a_world_that_one_rank_has_lost_is_opened_anew_by_all(self):
        """As the harness opens worlds, for gloo loses a connection now and then."""
        opened = []

        def open_and_lose(*args, **kwargs):
            opened.append(init_process_group(*args, **kwargs))
            if self.rank == 3 and len(opened) == 1:
                raise RuntimeError("lost")

        init_process_group = dist.init_process_group
        with mock.patch.object(dist, "init_process_group", open_and_lose):
            self.reopen_world()
        self.assertEqual(len(opened), 2)
        total = torch.ones(1)
        dist.all_reduce(total)
        self.assertEqual(total.item(), WORLD)

    @needs_overlay
    def test_no_group_outlives_its_world(self):
        """Destroy, make another world with other groups: an old mesh never gets a new group that isn't its own."""
        old = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        lines = {axis: dist.get_process_group_ranks(old.get_group(axis)) for axis in ("dp", "tp")}
        self.reopen_world()
        new = init_device_mesh("cpu", (4, 2), mesh_dim_names=("a", "b"))
        make_root(range(WORLD), (2, 2, 2), ("p", "q", "r"))
        for axis, line in lines.items():
            try:
                group = old.get_group(axis)
            except (RuntimeError, KeyError, ValueError):
                continue
            self.assertEqual(dist.get_process_group_ranks(group), line)
            self.assertIn(group, open_groups())
        total = funcol.all_reduce(torch.ones(1), "sum", (new, 0))
        self.assertEqual(total.item(), 4)
        dist.barrier()

    @needs_overlay
    def test_preserve_rank_order_gives_what_2_15_gives(self):
        """The flag is taken on every release, and the group has the mesh's order."""
        mesh = DeviceMesh("cpu", [3, 1, 2, 0, 7, 5, 6, 4], preserve_rank_order=True)
        self.assertEqual(dist.get_process_group_ranks(mesh.get_group()), mesh.mesh.tolist())
        self.assertEqual(mesh.get_local_rank(), mesh.get_coordinate()[0])

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
