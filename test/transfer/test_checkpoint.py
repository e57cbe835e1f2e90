"""Checkpoints as sources: on eight ranks, and what is said of files that aren't what they have to be."""

from torch.testing._internal.common_utils import run_tests

from mesh_ranks import EightRanks
from rank_checkpoint import CheckpointCases
from way import needs_package


@needs_package
class TestCheckpointOnEightRanks(CheckpointCases, EightRanks):
    """Each method runs on all eight ranks, in a world of its own."""


if __name__ == "__main__":
    run_tests()
