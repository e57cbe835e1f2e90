# Owner(s): ["oncall: distributed"]
"""Each group of a mesh and its views is aborted once; the default group stays."""

from unittest import mock

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._group_table import find_group


class TestMeshAbort(TestCase):
    """In a world of 64 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=37, world_size=64)
        shared = config.patch(mesh_share_groups="names")
        shared.__enter__()
        self.addCleanup(shared.__exit__, None, None, None)
        self.mesh = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("pp", "dp", "tp"))

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def test_each_group_once(self) -> None:
        view = self.mesh["dp", "tp"]
        view._flatten("model")
        self.assertIs(view._unflatten(0, (4,), ("dp",)).get_group("dp"), self.mesh.get_group("dp"), msg="shared")
        groups = [self.mesh.get_group(name) for name in ("pp", "dp", "tp", "model")]
        aborted = []
        with mock.patch.object(dist.ProcessGroup, "abort", lambda group: aborted.append(group.group_name)):
            self.mesh.abort()
        named = {group.group_name for group in groups}
        self.assertEqual(len(aborted), len(set(aborted)))
        self.assertLessEqual(named, set(aborted))
        self.assertNotIn(dist.group.WORLD.group_name, aborted)
        self.assertNotIn(view._flatten("model").get_group().group_name, aborted, msg="made anew")

    def test_what_is_known_of_the_groups_goes_if_their_end_fails(self) -> None:
        """As it may where a peer died."""
        ends = mock.Mock(_group_end=mock.Mock(side_effect=RuntimeError("a peer died")))
        before = self.mesh.get_group("tp")
        with mock.patch.object(dist.ProcessGroup, "_get_backend", lambda group, device: ends):
            with self.assertRaisesRegex(RuntimeError, "a peer died"):
                self.mesh.abort()
        self.assertNotIn(before.group_name, self.mesh._pg_registry)
        self.assertIsNone(find_group(before.group_name))

    def test_a_submesh_is_refused(self) -> None:
        """One that shows other ranks, too: the groups that it has are those of the mesh that it is a part of."""
        for submesh in (self.mesh["tp"], *self.mesh._get_all_submeshes("tp")):
            with self.assertRaisesRegex(RuntimeError, "root mesh"):
                submesh.abort()


if __name__ == "__main__":
    run_tests()
