"""Chunk lists on eight ranks."""

from torch.testing._internal.common_utils import run_tests

from mesh_ranks import EightRanks
from rank_chunks import ChunkCases
from way import needs_package


@needs_package
class TestChunksOnEightRanks(ChunkCases, EightRanks):
    """Each method runs on all eight ranks, in a world of its own."""


if __name__ == "__main__":
    run_tests()
