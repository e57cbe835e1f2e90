"""Runs torch's own test classes under the overlay, and checks that each leaves torch as it was. For any test suite.

    from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase
    from torch_overlay.testing import OverlayProcesses

    class TestMine(OverlayProcesses, DTensorTestBase):
        overlay_options = {"check_mesh": True}

The mixin comes before torch's class. ``-p torch_overlay.testing.plugin --torch-overlay`` does the same for a whole
suite, without a change to it.
"""

from .ranks import OverlayContinuous, OverlayProcesses, OverlayThreads
from .trace import Trace, left_as_found

__all__ = ["OverlayContinuous", "OverlayProcesses", "OverlayThreads", "Trace", "left_as_found"]
