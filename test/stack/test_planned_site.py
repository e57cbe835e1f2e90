# Owner(s): ["oncall: distributed"]
"""A mesh as one rank sees it, as a value."""

import copy

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._universe import private_groups
from torch_overlay.distributed.tensor._site import Site


class TestSite(TestCase):
    """On a 2 x 4 mesh, as rank 7 of 8 sees it; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))

    def test_a_copy_has_the_same(self) -> None:
        site = Site.of(self.mesh)
        self.assertEqual((site.names, site.coordinate), (("dp", "tp"), (1, 3)))
        self.assertEqual(site.groups, tuple(group.group_name for group in self.mesh.get_all_groups()))
        self.assertEqual({site, Site.of(copy.copy(self.mesh))}, {site})

    def test_what_a_plan_depends_on_makes_another(self) -> None:
        with config.patch(mesh_share_groups="names", mesh_joint_groups="existing"):
            site = Site.of(self.mesh)
            self.assertNotEqual(site, Site.of(self.mesh["tp"]))
            self.mesh._flatten("all")
            flattened = Site.of(self.mesh)
        self.assertNotEqual(site, flattened)
        with config.patch(mesh_share_groups="names", mesh_joint_groups="whole"):
            self.assertNotEqual(flattened, Site.of(self.mesh))

    def test_a_slice_of_a_private_view_is_another_site(self) -> None:
        """It has the groups of the same slice of the root mesh, but none over several of its axes."""
        with config.patch(mesh_share_groups="names", mesh_joint_groups="create"):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
            with private_groups():
                apart = mesh._unflatten(0, (2, 1), ("x", "y"))
            self.assertEqual(Site.of(apart["b", "c"]).groups, Site.of(mesh["b", "c"]).groups)
            self.assertNotEqual(Site.of(apart["b", "c"]), Site.of(mesh["b", "c"]))


if __name__ == "__main__":
    run_tests()
