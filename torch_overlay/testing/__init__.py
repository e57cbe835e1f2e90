"""For tests of other suites and of ours: torch's own test classes under the overlay, and torch as it was found after.

    from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase
    from torch_overlay.testing import OverlayProcesses

    class TestMine(OverlayProcesses, DTensorTestBase):
        overlay_options = {"check_mesh": True}

The mixin stands in front of torch's class. ``-p torch_overlay.testing.plugin --torch-overlay`` does it for a whole
suite that knows nothing of this.
"""

from .ranks import OverlayContinuous, OverlayProcesses, OverlayThreads
from .trace import Trace, left_as_found

__all__ = ["OverlayContinuous", "OverlayProcesses", "OverlayThreads", "Trace", "left_as_found"]
