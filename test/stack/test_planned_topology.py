# Owner(s): ["oncall: distributed"]
"""How fast the axes are, a user says by name."""

from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed import config
from torch_overlay.distributed._settings import get_settings


class TestTopology(TestCase):
    def test_rows_are_taken(self) -> None:
        self.assertIsNone(get_settings().topology)
        with config.patch(mesh_topology=(("tp", 4e11, 1e-6),)):
            self.assertEqual(get_settings().topology, (("tp", 4e11, 1e-6),))


if __name__ == "__main__":
    run_tests()
