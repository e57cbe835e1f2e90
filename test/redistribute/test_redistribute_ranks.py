"""All cases that need real ranks, in one class: eight gloo processes are spawned once."""

from torch.testing._internal.common_utils import run_tests

from mesh_ranks import EightRanks
from rank_autograd import AutogradCases
from rank_backends import BackendCases
from rank_moves import MoveCases
from rank_resized import ResizedCases
from rank_shapes import ShapeCases
from rank_types import TypeCases
from rank_worlds import WorldCases


class TestRedistributeOnEightRanks(
    AutogradCases,
    BackendCases,
    MoveCases,
    ResizedCases,
    ShapeCases,
    TypeCases,
    WorldCases,
    EightRanks,
):
    """Each method runs on all eight ranks, in a world of its own."""


if __name__ == "__main__":
    run_tests()
